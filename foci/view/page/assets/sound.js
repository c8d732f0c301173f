// A recording as a spectrogram and a waveform, and the words that were heard. Pointing at a word lights up the time that
// it attends to; pointing at a time tints the words that attend to it. The frames may lie among the words; then the
// spectrogram may be all that is known.

import { button, cssColor, draw, make, oncePerFrame, onPress, prepareCanvas } from "./dom.js";
import { createScale, formatPercent, shade, textColor } from "./colors.js";
import { createAnswer } from "./answer.js";
import { focusCsv, svgSheet } from "./export.js";
import { getUnits } from "./focus.js";
import { DARK, lightUp } from "./gridmaps.js";
import { HeadMaps, drawSmallGrid } from "./headmaps.js";
import { LayerSlider } from "./sliders.js";

const [SIDE, TOP, AXIS, GAP] = [16, 8, 26, 6];
const MAX_HEIGHT = 420;
// The part of the height that the spectrogram takes.
const SPECTROGRAM_SHARE = 0.7;
const MAX_WORDS = 200;
const HEAD_MAP_SIZE = [96, 30];
// Distances between time marks, in seconds.
const TIME_STEPS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120];

export class SoundView {
  constructor({ store, state }) {
    Object.assign(this, { store, state });
    this.audio = make("audio", { controls: true, "aria-label": "The recording" });
    this.audio.addEventListener("timeupdate", () => this.redraw());
    this.note = make("span", { class: "count" });
    this.canvas = make("canvas", {
      class: "sound",
      tabindex: "0",
      role: "img",
      "aria-label": "Spectrogram: arrow keys move over its frames, Enter selects",
    });
    this.frame = make("div", { class: "soundframe" }, this.canvas);
    this.chips = make("div", { class: "chips" });
    this.tools = make("div", { class: "tools" }, this.audio, this.note, createAnswer(store));
    this.layerSlider = new LayerSlider(store, state, store.layers.filter((layer) => this.soundSide(layer)));
    this.sliders = make("div", { class: "sliders" }, this.layerSlider.row);
    const drawMap = (canvas, valueAt) => this.drawMap(canvas, valueAt);
    this.heads = new HeadMaps({ store, state, layerSlider: this.layerSlider, drawMap });
    this.element = make(
      "section",
      { class: "view soundview", "aria-label": "Sound" },
      this.tools,
      this.sliders,
      this.chips,
      this.frame,
      this.heads.element,
    );
    this.redraw = oncePerFrame(() => this.render());
    new ResizeObserver(this.redraw).observe(this.frame);
    this.canvas.addEventListener("pointermove", (event) => this.point(this.frameAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("click", (event) => this.pick(this.frameAt(event), event.shiftKey));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.cursor = 0;
    this.words = [];
  }

  soundSide(layer) {
    return ["keys", "queries"].find((side) => this.store.labels(layer, side).spectrogram);
  }

  // The axis of the layer that has a recording, its labels and the positions of its frames; null if there is none.
  sounding(layer) {
    const side = this.soundSide(layer);
    if (!side) return null;
    const labels = this.store.labels(layer, side);
    const frames = labels.frames?.[this.state.seq] ?? null;
    if (frames && !frames.length) return null;
    const count = frames ? frames.length : layer[side === "keys" ? "Tk" : "Tq"];
    return { side, labels, frames, count, at: (frame) => (frames ? frames[frame] : frame) };
  }

  direction() {
    const { layer } = this.focus;
    const { side, frames } = this.sounding(layer);
    if (layer.self) return frames ? "from" : this.state.direction;
    return side === "queries" ? "to" : "from";
  }

  point(position, direction = this.direction()) {
    if (position !== null && position !== this.state.hover) this.state.set({ hover: position, direction });
  }

  // When the pointer leaves, the selected positions are shown again, which may need another direction.
  leave() {
    const { chosen, direction } = this.state;
    this.state.set({ hover: null, direction: chosen.length ? this.chosenDirection ?? direction : direction });
  }

  pick(position, add, direction = this.direction()) {
    if (position === null) return;
    const chosen = direction === (this.chosenDirection ?? direction) ? this.state.chosen : [];
    const added = add ? [...chosen, position] : [position];
    const next = chosen.includes(position) ? chosen.filter((other) => other !== position) : added;
    this.chosenDirection = direction;
    this.state.set({ chosen: next, direction, hover: null });
  }

  key(event) {
    const { count, at } = this.sounding(this.focus.layer);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      this.cursor = Math.min(Math.max(this.cursor + step, 0), count - 1);
      this.point(at(this.cursor));
    } else if (event.key === "Enter" || event.key === " ") this.pick(at(this.cursor), event.shiftKey);
    else return;
    event.preventDefault();
  }

  frameAt(event) {
    const { count, at } = this.sounding(this.focus.layer);
    const box = this.canvas.getBoundingClientRect();
    const frame = Math.floor(((event.clientX - box.left - SIDE) / (box.width - 2 * SIDE)) * count);
    return frame >= 0 && frame < count ? at(frame) : null;
  }

  samples(labels) {
    const name = `sound.${this.store.header.labels.indexOf(labels)}`;
    return this.store.cached(`${name} ${this.state.seq}`, () => {
      const length = this.store.arrays.shape(name)[1];
      const [low, high] = this.store.arrays.raw(name).planes;
      const first = this.state.seq * length;
      return Int16Array.from({ length }, (_, i) => low[first + i] | (high[first + i] << 8));
    });
  }

  // The loudness at each frequency and time, grey on black.
  spectrogram(labels) {
    const name = `spectrogram.${this.store.header.labels.indexOf(labels)}`;
    return this.store.cached(`${name} ${this.state.seq}`, () => {
      const [, height, width] = this.store.arrays.shape(name);
      const bytes = this.store.arrays.raw(name).planes[0].subarray(this.state.seq * height * width);
      const canvas = Object.assign(document.createElement("canvas"), { width, height });
      const pen = canvas.getContext("2d");
      const image = pen.createImageData(width, height);
      for (let i = 0; i < width * height; i++) {
        // The lowest frequency comes first and is drawn last.
        const level = bytes[(height - 1 - Math.floor(i / width)) * width + (i % width)];
        image.data.set([level, level, level, 255], 4 * i);
      }
      pen.putImageData(image, 0, 0);
      return canvas;
    });
  }

  update(focus) {
    this.focus = focus;
    if (this.state.hover === null) this.chosenDirection = this.state.direction;
    const found = this.sounding(focus.layer);
    this.note.textContent = found ? "" : "This head does not attend to the recording: select one that does.";
    this.sliders.hidden = !this.layerSlider.update(focus);
    this.heads.update(focus, found !== null);
    this.updateWords(found && (!focus.layer.self || found.frames) ? found : null);
    const isPlayed = Boolean(found?.labels.sound);
    this.audio.hidden = !isPlayed;
    this.tools.hidden = !isPlayed && found && !this.store.header.answer;
    if (isPlayed && this.loaded !== this.state.seq) {
      this.loaded = this.state.seq;
      this.audio.src = URL.createObjectURL(encodeWav(this.samples(found.labels), found.labels.sound));
    }
    this.redraw();
  }

  // The tokens of the text beside the recording, or around its frames; they stay while the selection changes.
  updateWords(found) {
    const { store, state, focus } = this;
    const isMixed = Boolean(found && focus.layer.self);
    const side = found?.side === "keys" && !isMixed ? "queries" : "keys";
    const units = found ? getUnits(store, state, focus.layer, side) : { count: 0 };
    const key = [focus.layer.labels, found?.side, state.seq, units.count].join();
    if (key !== this.wordKey) {
      this.wordKey = key;
      const direction = found?.side === "keys" ? "to" : "from";
      const frames = new Set(isMixed ? found.frames : []);
      const shown = Array.from({ length: units.count }, (_, u) => u).filter((u) => !frames.has(units.start[u]));
      this.words = shown.slice(0, MAX_WORDS).map((u) => ({ u, element: this.chip(units, u, direction) }));
      this.chips.replaceChildren(...this.words.map(({ element }) => element));
    }
    const isTarget = (isMixed ? !focus.to : focus.other === side) && focus.picks.length > 0;
    const isSource = isMixed ? focus.to : focus.from === side;
    const known = this.words.map(({ u }) => (isTarget ? focus.units[u] : 0));
    const scale = createScale(state.scale, known, 0);
    this.words.forEach(({ u, element }, i) => {
      const [level, direction] = [0.8 * scale.of(known[i]), focus.to ? "to" : "from"];
      element.setAttribute("aria-pressed", String(isSource && focus.picks.includes(u)));
      element.style.backgroundColor = level ? shade(direction, level) : "";
      element.style.color = level ? textColor(direction, level) : "";
      element.title = isTarget ? formatPercent(known[i]) : "";
    });
  }

  chip(units, u, direction) {
    const position = units.start[u];
    return button(units.label(u), {
      class: "chip",
      ...onPress((event) => this.pick(position, event.shiftKey, direction)),
      onpointerenter: () => this.point(position, direction),
      onpointerleave: () => this.leave(),
    });
  }

  // Whether the frames are colored: the weights are theirs.
  isColored(found) {
    const { focus } = this;
    return Boolean(found && focus.picks.length && (focus.layer.self || found.side === focus.other));
  }

  scale() {
    const { focus, state } = this;
    const found = this.sounding(focus.layer);
    if (!this.isColored(found)) return null;
    const { units, targets, uniform } = focus;
    // Among words, the largest weight of a frame has the full color.
    return createScale(state.scale, found.frames ? found.frames.map((at) => units[targets.of[at]]) : units, uniform);
  }

  render() {
    const found = this.focus && this.sounding(this.focus.layer);
    const width = this.frame.clientWidth;
    if (!found || width < 50) return;
    const height = Math.min(MAX_HEIGHT, Math.max(120, this.frame.clientHeight - 24));
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = prepareCanvas(this.canvas, width, height);
    pen.clearRect(0, 0, width, height);
    const box = { x: SIDE, y: TOP, width: width - 2 * SIDE, height: height - TOP - AXIS };
    const upper = { ...box, height: Math.round(SPECTROGRAM_SHARE * (box.height - GAP)) };
    const lower = { ...box, y: box.y + upper.height + GAP, height: box.height - GAP - upper.height };
    const seconds = found.count * found.labels.seconds;
    this.drawSpectrogram(pen, upper, found.labels, seconds);
    this.forEachFrame(upper, found, (level, frame) => lightUp(pen, frame, level));
    drawFrequency(pen, upper, found.labels.sound, getComputedStyle(this.canvas).fontFamily);
    this.forEachFrame(lower, found, (level, frame) => {
      pen.fillStyle = shade(this.focus.to ? "to" : "from", 0.75 * level);
      pen.fillRect(...frame);
    });
    if (found.labels.sound) drawWave(pen, lower, this.samples(found.labels), seconds * found.labels.sound);
    this.drawChosen(pen, box, found);
    drawTimes(pen, box, seconds, getComputedStyle(this.canvas).fontFamily);
    this.drawPosition(pen, box, seconds);
    this.heads.render(this.isColored(found));
  }

  // A small map of the frames; where several share a pixel, it shows the largest weight.
  drawMap(canvas, valueAt) {
    const { count, at } = this.sounding(this.focus.layer);
    const columns = Math.min(count, HEAD_MAP_SIZE[0]);
    const values = new Float32Array(columns);
    for (let frame = 0; frame < count; frame++) {
      const column = Math.floor((frame * columns) / count);
      values[column] = Math.max(values[column], valueAt(at(frame)) || 0);
    }
    const scale = createScale(this.state.scale, values, this.focus.uniform);
    drawSmallGrid(canvas, { rows: 1, columns, values }, HEAD_MAP_SIZE, scale, this.focus.to ? "to" : "from");
  }

  // The recording may end before or after the last frame.
  drawSpectrogram(pen, { x, y, width, height }, labels, seconds) {
    const picture = this.spectrogram(labels);
    const heard = labels.sound ? this.samples(labels).length / labels.sound : seconds;
    pen.fillStyle = DARK;
    pen.fillRect(x, y, width, height);
    pen.imageSmoothingEnabled = true;
    const [shown, drawn] = [Math.min(1, seconds / heard), Math.min(1, heard / seconds)];
    pen.drawImage(picture, 0, 0, picture.width * shown, picture.height, x, y, width * drawn, height);
  }

  // Calls paint(level, box) for each frame, with its level from 0 to 1.
  forEachFrame(box, { count, at }, paint) {
    const scale = this.scale();
    if (!scale) return;
    const { units, targets } = this.focus;
    for (let j = 0; j < count; j++) {
      const [x0, x1] = [j, j + 1].map((edge) => Math.round(box.x + (edge / count) * box.width));
      paint(Math.min(1, scale.of(units[targets.of[at(j)]])), [x0, box.y, x1 - x0, box.height]);
    }
  }

  drawChosen(pen, box, { side, count, frames }) {
    if (!this.focus.layer.self && side !== this.focus.from) return;
    pen.lineWidth = 2;
    pen.strokeStyle = cssColor("--accent");
    for (const u of this.focus.picks) {
      const start = this.focus.sources.start[u];
      const frame = frames ? frames.indexOf(start) : start;
      if (frame >= 0) pen.strokeRect(box.x + (frame / count) * box.width, box.y + 1, Math.max(2, box.width / count), box.height - 2);
    }
    pen.lineWidth = 1;
  }

  drawPosition(pen, box, seconds) {
    if (!this.audio.currentTime) return;
    pen.fillStyle = cssColor("--ink");
    pen.fillRect(box.x + Math.min(1, this.audio.currentTime / seconds) * box.width - 1, box.y, 2, box.height);
  }

  legend() {
    const scale = this.scale();
    return scale ? { scale, direction: this.focus.to ? "to" : "from", title: "attention weight of each frame" } : null;
  }

  svg() {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const sheet = svgSheet(width, height);
    sheet.append(draw("image", { href: this.canvas.toDataURL(), width, height }));
    return sheet;
  }

  csv(focus) {
    return focusCsv(focus);
  }
}

// The lowest and the highest sample at each pixel; `length` is the number of samples along the box.
function drawWave(pen, { x, y, width, height }, samples, length) {
  const middle = y + height / 2;
  pen.fillStyle = cssColor("--ink");
  for (let column = 0; column < width; column++) {
    const part = samples.subarray(Math.floor((column / width) * length), Math.ceil(((column + 1) / width) * length));
    let [low, high] = [0, 0];
    for (const sample of part) [low, high] = [Math.min(low, sample), Math.max(high, sample)];
    const up = (high / 32768) * (height / 2);
    pen.fillRect(x + column, middle - up, 1, Math.max(1, up - (low / 32768) * (height / 2)));
  }
}

// The highest and the lowest frequency, at the left edge; the bands that a model reads have none in Hz.
function drawFrequency(pen, { x, y, height }, rate, family) {
  Object.assign(pen, { font: `11px ${family}`, fillStyle: "#e8e6df", textAlign: "left", textBaseline: "top" });
  pen.fillText(rate ? `${Number((rate / 2000).toPrecision(3))} kHz` : "highest band", x + 5, y + 5);
  pen.textBaseline = "bottom";
  pen.fillText(rate ? "0 Hz" : "lowest band", x + 5, y + height - 4);
}

function drawTimes(pen, { x, y, width, height }, seconds, family) {
  const step = TIME_STEPS.find((one) => (one / seconds) * width >= 56) ?? TIME_STEPS.at(-1);
  pen.font = `11px ${family}`;
  pen.fillStyle = cssColor("--soft");
  pen.textBaseline = "top";
  pen.textAlign = "center";
  for (let n = 0; n * step <= seconds; n++) {
    const at = x + ((n * step) / seconds) * width;
    pen.fillRect(at, y + height, 1, 5);
    pen.fillText(`${Number((n * step).toFixed(2))} s`, Math.max(at, x + 8), y + height + 8);
  }
}

// A WAV file of one channel of 16-bit samples.
function encodeWav(samples, rate) {
  const header = new DataView(new ArrayBuffer(44));
  const write = (at, text) => [...text].forEach((letter, i) => header.setUint8(at + i, letter.charCodeAt(0)));
  write(0, "RIFF");
  header.setUint32(4, 36 + samples.byteLength, true);
  write(8, "WAVEfmt ");
  [[16, 16, 4], [20, 1, 2], [22, 1, 2], [24, rate, 4], [28, 2 * rate, 4], [32, 2, 2], [34, 16, 2]].forEach(
    ([at, value, bytes]) => (bytes === 4 ? header.setUint32(at, value, true) : header.setUint16(at, value, true)),
  );
  write(36, "data");
  header.setUint32(40, samples.byteLength, true);
  return new Blob([header, samples], { type: "audio/wav" });
}
