// A recording as a waveform over time, colored by the attention weights of its frames, and playable.

import { button, cssColor, draw, make, onPress, oncePerFrame, prepareCanvas } from "./dom.js";
import { createScale, shade } from "./colors.js";
import { createAnswer } from "./answer.js";
import { focusCsv, svgSheet } from "./export.js";

const [SIDE, TOP, AXIS] = [16, 8, 26];
const MAX_HEIGHT = 320;
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
      "aria-label": "Waveform: arrow keys move over its frames, Enter selects",
    });
    this.frame = make("div", { class: "soundframe" }, this.canvas);
    this.chips = make("div", { class: "chips" });
    const tools = make("div", { class: "tools" }, this.audio, this.note, createAnswer(store));
    this.element = make("section", { class: "view soundview", "aria-label": "Sound" }, tools, this.chips, this.frame);
    this.redraw = oncePerFrame(() => this.render());
    new ResizeObserver(this.redraw).observe(this.frame);
    this.canvas.addEventListener("pointermove", (event) => this.point(this.frameAt(event)));
    this.canvas.addEventListener("pointerleave", () => state.set({ hover: null }));
    this.canvas.addEventListener("click", (event) => this.pick(this.frameAt(event), event.shiftKey));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.cursor = 0;
  }

  // The axis of the layer that is a recording, with its labels; null if there is none.
  sounding(layer) {
    const side = ["keys", "queries"].find((one) => this.store.labels(layer, one).sound);
    return side ? { side, labels: this.store.labels(layer, side), count: layer[side === "keys" ? "Tk" : "Tq"] } : null;
  }

  direction() {
    const { layer } = this.focus;
    return layer.self ? this.state.direction : this.sounding(layer).side === "queries" ? "to" : "from";
  }

  point(frame) {
    if (frame !== null && frame !== this.state.hover) this.state.set({ hover: frame, direction: this.direction() });
  }

  pick(frame, add) {
    if (frame === null) return;
    const direction = this.direction();
    const chosen = direction === this.state.direction ? this.state.chosen : [];
    const next = chosen.includes(frame) ? chosen.filter((other) => other !== frame) : add ? [...chosen, frame] : [frame];
    this.state.set({ chosen: next, direction, hover: null });
  }

  key(event) {
    const { count } = this.sounding(this.focus.layer);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) {
      this.cursor = Math.min(Math.max(this.cursor + step, 0), count - 1);
      this.point(this.cursor);
    } else if (event.key === "Enter" || event.key === " ") this.pick(this.cursor, event.shiftKey);
    else return;
    event.preventDefault();
  }

  frameAt(event) {
    const { count } = this.sounding(this.focus.layer);
    const box = this.canvas.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left - SIDE) / (box.width - 2 * SIDE)) * count);
    return at >= 0 && at < count ? at : null;
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

  update(focus) {
    this.focus = focus;
    const found = this.sounding(focus.layer);
    this.note.textContent = found ? "" : "This head does not attend to the recording: select one that does.";
    this.chips.replaceChildren(...(found && !focus.layer.self ? this.words(found.side) : []));
    if (found && this.loaded !== this.state.seq) {
      this.loaded = this.state.seq;
      this.audio.src = URL.createObjectURL(encodeWav(this.samples(found.labels), found.labels.sound));
    }
    this.redraw();
  }

  // The tokens of the other text, each a button that selects it.
  words(soundSide) {
    const { state, focus } = this;
    const [side, direction] = soundSide === "keys" ? ["queries", "to"] : ["keys", "from"];
    const units = side === focus.from ? focus.sources : focus.targets;
    const select = (u) => state.set({ chosen: [units.start[u]], direction, hover: null });
    return Array.from({ length: Math.min(units.count, 200) }, (_, u) => button(units.label(u), {
      class: "chip",
      title: direction === "to" ? "Color the frames that this token attends to" : "Color the frames that attend to it",
      "aria-pressed": String(side === focus.from && focus.picks.includes(u)),
      ...onPress(() => select(u)),
    }));
  }

  scale() {
    const { focus, state } = this;
    const found = this.sounding(focus.layer);
    const colored = found && focus.picks.length && (focus.layer.self || found.side === focus.other);
    return colored ? createScale(state.scale, focus.units, focus.uniform) : null;
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
    this.drawWeights(pen, box, found);
    drawWave(pen, box, this.samples(found.labels), (found.count * found.labels.seconds * found.labels.sound));
    this.drawChosen(pen, box, found);
    drawTimes(pen, box, found.count * found.labels.seconds, getComputedStyle(this.canvas).fontFamily);
    this.drawPosition(pen, box, found.count * found.labels.seconds);
  }

  drawWeights(pen, box, { count }) {
    const scale = this.scale();
    if (!scale) return;
    const { units, targets, to } = this.focus;
    for (let j = 0; j < count; j++) {
      const [x0, x1] = [j, j + 1].map((at) => Math.round(box.x + (at / count) * box.width));
      pen.fillStyle = shade(to ? "to" : "from", 0.75 * scale.of(units[targets.of[j]]));
      pen.fillRect(x0, box.y, x1 - x0, box.height);
    }
  }

  drawChosen(pen, box, { side, count }) {
    if (!this.focus.layer.self && side !== this.focus.from) return;
    pen.lineWidth = 2;
    pen.strokeStyle = cssColor("--accent");
    for (const u of this.focus.picks) {
      const at = this.focus.sources.start[u];
      pen.strokeRect(box.x + (at / count) * box.width, box.y + 1, Math.max(2, box.width / count), box.height - 2);
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
