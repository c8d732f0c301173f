// The words of a text and the images that they attend to. Pointing at a word lights up the patches that it looks at;
// pointing at a patch lights up the words that look at it. A vision model has its class token and registers as words.

import { choice, cssColor, draw, labelled, make, onPress, prepareCanvas, oncePerFrame, slider } from "./dom.js";
import { formatPercent, createScale, shade, textColor } from "./colors.js";
import { getUnits } from "./focus.js";
import {
  DARK, MAX_DARKNESS, drawGrid, forEachCell, frameBox, layOut, lightUp, patchAt, patchBox, readPicture, shownSegments,
} from "./gridmaps.js";
import { createAnswer } from "./answer.js";
import { HeadMaps, drawSmallGrid } from "./headmaps.js";
import { LayerSlider, StepsAndFrames } from "./sliders.js";
import { focusCsv, svgSheet } from "./export.js";

const MAX_WORDS = 600;
const HEAD_MAP_SIDE = 84;
const SCALES = [
  ["relative", "relative", "The largest weight shown has the full color"],
  ["fixed", "fixed", "Keep the current scale, to compare words, layers and steps"],
];

export class ImageView {
  constructor({ store, state }) {
    Object.assign(this, { store, state, mode: "light", cursor: 0, canvases: [], chosenImage: 0 });
    this.wordDirection = "to";
    this.modes = choice("Draw attention as", [
      ["light", "light", "Patches with large weights are bright, the others dark"],
      ["color", "color", "Patches with large weights are dark red, the others pale"],
    ], () => this.mode, (value) => {
      this.mode = value;
      this.modes.refresh();
      state.notify(new Set(["mode"]));
    });
    this.fixing = choice("Color scale of the image", SCALES, () => (state.peak > 0 ? "fixed" : "relative"), (value) => {
      state.set({ peak: value === "fixed" ? this.scale()?.largest ?? 0 : 0 });
    });
    this.opacity = slider("Opacity of the attention", 0, 1, 0.05, (value) => state.set({ opacity: value }));
    this.note = make("p", { class: "count imagenote" });
    this.layerSlider = new LayerSlider(store, state, store.layers.filter((layer) => this.imageSide(layer) !== null));
    this.stepsAndFrames = new StepsAndFrames(store, state);
    this.sliders = make("div", { class: "sliders" }, this.layerSlider.row, ...this.stepsAndFrames.rows);
    this.words = make("div", { class: "chips words", role: "group", "aria-label": "Words" });
    this.images = make("div", { class: "images" });
    const drawMap = (canvas, valueAt) => this.drawMap(canvas, valueAt);
    this.heads = new HeadMaps({ store, state, layerSlider: this.layerSlider, drawMap });
    this.frame = make("div", { class: "imageframe" }, this.images);
    this.element = make(
      "section",
      { class: "view imageview", "aria-label": "Image" },
      make(
        "div",
        { class: "tools" },
        labelled("attention as", this.modes),
        labelled("colors", this.fixing),
        labelled("opacity", this.opacity),
        createAnswer(store),
      ),
      this.sliders,
      this.words,
      this.note,
      this.frame,
      this.heads.element,
    );
    this.redraw = oncePerFrame(() => this.render());
    new ResizeObserver(this.redraw).observe(this.frame);
  }

  updateSliders(focus) {
    const { store, state } = this;
    const images = this.side ? store.images(focus.layer, this.side, state.seq) : [];
    const isShown = [this.layerSlider.update(focus), this.stepsAndFrames.update(images)];
    this.sliders.hidden = !isShown.includes(true);
    this.opacity.value = String(state.opacity);
    this.fixing.refresh();
  }

  // The axis along which a layer has an image: the keys that words attend to, else the queries; null without an image.
  imageSide(layer) {
    return ["keys", "queries"].find((side) => this.store.images(layer, side, this.state.seq).length) ?? null;
  }

  // Of a self-attention with text and image, the selected direction decides which of the two attends to the other.
  chooseSides({ layer, to, from, picks, sources }) {
    this.side = this.imageSide(layer);
    if (!this.side) return;
    this.isVision = this.store.labels(layer, this.side).kind === "patches" && layer.self;
    if (!layer.self) this.wordDirection = this.side === "keys" ? "to" : "from";
    else {
      const patches = new Set(this.store.imagePositions(layer, from, this.state.seq));
      const isPatch = picks.length && patches.has(sources.start[picks[0]]);
      if (picks.length && (this.isVision || !isPatch)) this.wordDirection = to ? "to" : "from";
      this.side = this.wordDirection === "to" ? "keys" : "queries";
    }
    this.wordSide = this.side === "keys" ? "queries" : "keys";
  }

  // The direction in which a patch is read: in a vision model that of the words, else the opposite.
  patchDirection() {
    if (this.isVision) return this.wordDirection;
    return this.wordDirection === "to" ? "from" : "to";
  }

  point(position, direction) {
    if (position !== null && position !== this.state.hover) this.state.set({ hover: position, direction });
  }

  // When the pointer leaves, the selected positions are shown again, which may need another direction.
  leave() {
    const { chosen, direction } = this.state;
    this.state.set({ hover: null, direction: chosen.length ? this.chosenDirection ?? direction : direction });
  }

  pick(position, direction, add) {
    if (position === null) return;
    const same = direction === (this.chosenDirection ?? direction);
    const chosen = same ? this.state.chosen : [];
    const added = add ? [...chosen, position] : [position];
    const next = chosen.includes(position) ? chosen.filter((other) => other !== position) : added;
    this.chosenDirection = direction;
    this.state.set({ chosen: next, direction, hover: null });
  }

  update(focus) {
    this.focus = focus;
    this.chooseSides(focus);
    if (this.state.hover === null) this.chosenDirection = this.state.direction;
    this.updateSliders(focus);
    const hasImage = this.side !== null;
    for (const part of [this.words, this.frame]) part.hidden = !hasImage;
    this.heads.update(focus, hasImage);
    if (!hasImage) {
      this.note.textContent = "This head has no image: choose another layer.";
      return;
    }
    this.note.textContent = this.describeState(focus);
    this.updateWords();
    this.updateImages();
    this.redraw();
  }

  describeState(focus) {
    if (!focus.picks.length) return this.isVision ? "Point at a patch or at the class token." : "Point at a word or at the image.";
    if (this.state.denoise && !this.store.remote && !focus.heads.every((one) => this.hasStep(one))) {
      return "This file has no weights of this head at this step: choose another layer, or the mean of its heads.";
    }
    return "";
  }

  hasStep(one) {
    return this.store.block(one, this.state.seq, this.focus.heads.length > 1) !== null;
  }

  // The words, or for a vision model what comes before its patches; they stay while the selection changes.
  updateWords() {
    const { store, state, focus } = this;
    const { layer } = focus;
    const units = getUnits(store, state, layer, this.wordSide);
    const patches = new Set(store.imagePositions(layer, this.wordSide, state.seq));
    const key = [layer.labels, this.wordSide, state.seq, units.count, this.isVision && state.hideSinks].join();
    if (key !== this.wordKey) {
      this.wordKey = key;
      const texts = store.texts(layer, this.wordSide, state.seq);
      // The padding of a prompt has no text.
      const isWord = (u) => !patches.has(units.start[u]) && texts[units.start[u]] !== "";
      const shown = Array.from({ length: units.count }, (_, u) => u).filter(isWord);
      // Registers take up attention like sinks.
      const isHidden = (u) => this.isVision && state.hideSinks && u > 0;
      this.chips = shown.filter((u) => !isHidden(u)).slice(0, MAX_WORDS).map((u) => this.chip(u, units));
      this.words.replaceChildren(...this.chips.map(({ element }) => element));
      if (shown.length > MAX_WORDS) this.words.append(make("span", { class: "count" }, `and ${shown.length - MAX_WORDS} more`));
    }
    const isSource = focus.from === this.wordSide && (!this.isVision || focus.from === "queries" || !focus.to);
    const isTarget = focus.other === this.wordSide || (layer.self && this.isVision);
    const known = this.chips.map(({ unit }) => (isTarget && focus.picks.length ? focus.units[unit] : 0));
    const scale = createScale(state.scale, known, 0);
    this.chips.forEach(({ element, value, unit }, n) => {
      const isPicked = isSource && focus.picks.includes(unit);
      const level = isTarget ? scale.of(known[n]) : 0;
      const direction = focus.to ? "to" : "from";
      element.setAttribute("aria-pressed", String(isPicked));
      element.style.backgroundColor = level && !isPicked ? shade(direction, 0.8 * level) : "";
      element.style.color = level && !isPicked ? textColor(direction, 0.8 * level) : "";
      // Where there are many words, numbers would move the image under the pointer.
      value.textContent = this.isVision && focus.picks.length ? formatPercent(known[n]) : "";
      element.title = isTarget && focus.picks.length ? formatPercent(known[n]) : "";
    });
  }

  chip(unit, units) {
    const value = make("span", { class: "value" });
    const position = units.start[unit];
    const element = make(
      "button",
      {
        type: "button",
        class: "chip",
        ...onPress((event) => this.pick(position, this.wordDirection, event.shiftKey)),
        onpointerenter: () => this.point(position, this.wordDirection),
        onpointerleave: () => this.leave(),
      },
      make("bdi", {}, units.label(unit)),
      value,
    );
    return { element, value, unit };
  }

  // One canvas for each image, which stays while the selection changes.
  updateImages() {
    const { store, state, focus } = this;
    const images = store.images(focus.layer, this.side, state.seq);
    const key = [focus.layer.labels, this.side, state.seq].join();
    if (key === this.imageKey) return;
    this.imageKey = key;
    this.canvases = images.map((image, n) => this.createCanvas(image, n, images.length));
    this.images.replaceChildren(...this.canvases.map(({ figure }) => figure));
    this.chooseImage(0);
  }

  // The small maps are those of one image.
  chooseImage(n) {
    this.chosenImage = n;
    this.canvases.forEach(({ name }, i) => name?.setAttribute("aria-pressed", String(i === n)));
    this.redraw();
  }

  createCanvas(image, n, count) {
    const name = count > 1 ? `Image ${n + 1}` : "Image";
    const canvas = make("canvas", {
      class: "image",
      tabindex: "0",
      role: "img",
      "aria-label": `${name}: arrow keys move over its patches, Enter selects`,
    });
    const segments = () => shownSegments(image, this.state.frame);
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return patchAt(segments(), (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    };
    canvas.addEventListener("pointermove", (event) => this.point(at(event), this.patchDirection()));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("click", (event) => this.pick(at(event), this.patchDirection(), event.shiftKey));
    canvas.addEventListener("keydown", (event) => this.key(event, segments()));
    const options = { type: "button", class: "chip", title: "Small maps of this image", onclick: () => this.chooseImage(n) };
    const chooser = count > 1 ? make("button", options, name) : null;
    const figure = make("figure", {}, canvas, chooser && make("figcaption", {}, chooser));
    return { canvas, segments, figure, name: chooser };
  }

  key(event, [segment]) {
    const { rows, columns } = segment;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    const [top, left, bottom, right] = segment.box;
    const position = () => patchAt(
      [segment],
      left + (((this.cursor % columns) + 0.5) / columns) * (right - left),
      top + ((Math.floor(this.cursor / columns) + 0.5) / rows) * (bottom - top),
    );
    if (step) {
      this.cursor = Math.min(Math.max(this.cursor + step, 0), rows * columns - 1);
      this.point(position(), this.patchDirection());
    } else if (event.key === "Enter" || event.key === " ") this.pick(position(), this.patchDirection(), event.shiftKey);
    else return;
    event.preventDefault();
  }

  // Whether the patches are colored: the weights are theirs, and the selection is not a patch next to a text.
  isColored() {
    const { focus } = this;
    return Boolean(this.side && focus.picks.length && (focus.other === this.side || (this.isVision && focus.layer.self)));
  }

  grid(segments) {
    const { units, targets } = this.focus;
    return layOut(segments, (position) => units[targets.of[position]]);
  }

  // One scale for all images.
  scale() {
    if (!this.focus || !this.isColored()) return null;
    const { uniform } = this.focus;
    const all = this.canvases.flatMap(({ segments }) => [...this.grid(segments()).values]);
    return createScale(this.state.scale, all, uniform, this.state.peak > 0 ? this.state.peak : null);
  }

  render() {
    if (!this.focus || !this.side || !this.canvases.length) return;
    const scale = this.scale();
    const room = this.frame.clientWidth - 24;
    // The height does not depend on what is selected: the image must not move under the pointer.
    const share = this.heads.element.hidden ? 0.64 : 0.48;
    const high = Math.max(200, share * Math.min(window.innerHeight, this.element.clientHeight));
    const across = Math.min(this.canvases.length, Math.max(1, Math.floor(room / 180)));
    for (const one of this.canvases) this.drawImage(one, room / across - 12, high, scale);
    this.heads.render(this.isColored());
  }

  drawImage({ canvas, segments }, room, high, scale) {
    const parts = segments();
    const picture = readPicture(this.store, parts);
    const grid = this.grid(parts);
    const ratio = picture ? picture.width / picture.height : grid.columns / grid.rows;
    const width = Math.max(60, Math.min(room, high * ratio));
    const height = width / ratio;
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = prepareCanvas(canvas, width, height);
    pen.imageSmoothingEnabled = !picture || picture.width > 96;
    if (picture) pen.drawImage(picture, 0, 0, width, height);
    else {
      pen.fillStyle = cssColor("--faint");
      pen.fillRect(0, 0, width, height);
    }
    if (scale && picture) this.paintPatches(pen, width, height, grid, scale);
    // Without a picture the grid alone is drawn.
    else if (scale) drawGrid(pen, grid, width, height, scale, this.focus.to ? "to" : "from");
    if (!picture) drawLines(pen, grid, width, height);
    this.frameChosen(pen, width, height, parts);
  }

  paintPatches(pen, width, height, grid, scale) {
    const direction = this.focus.to ? "to" : "from";
    const { opacity } = this.state;
    forEachCell(grid, width, height, scale, (t, box) => {
      if (this.mode === "light") return lightUp(pen, box, t, opacity);
      Object.assign(pen, { fillStyle: shade(direction, t), globalAlpha: (0.25 + 0.5 * t) * opacity });
      pen.fillRect(...box);
    });
    pen.globalAlpha = 1;
  }

  frameChosen(pen, width, height, segments) {
    const { focus } = this;
    const isHere = focus.layer.self || this.side === focus.from;
    for (const u of isHere ? focus.picks : []) {
      const found = patchBox(segments, this.imagePosition(focus.sources.start[u]));
      if (!found) continue;
      frameBox(pen, found, width, height);
    }
  }

  // A position of the selected axis as one of the axis of the image: queries may start after the first key.
  imagePosition(position) {
    const { layer, from } = this.focus;
    if (!layer.self || from === this.side) return position;
    return from === "queries" ? this.store.keyPosition(layer, position) : position - (layer.Tk - layer.Tq);
  }

  // A small map of the chosen image.
  drawMap(canvas, valueAt) {
    const { state, focus } = this;
    const grid = layOut(this.canvases[this.chosenImage].segments(), valueAt);
    const scale = createScale(state.scale, grid.values, focus.uniform, state.peak > 0 ? state.peak : null);
    const ratio = grid.columns / grid.rows;
    const size = ratio > 1 ? [HEAD_MAP_SIDE, HEAD_MAP_SIDE / ratio] : [HEAD_MAP_SIDE * ratio, HEAD_MAP_SIDE];
    drawSmallGrid(canvas, grid, size, scale, focus.to ? "to" : "from");
  }

  legend() {
    const scale = this.scale();
    const direction = this.focus?.to ? "to" : "from";
    const hasPicture = this.canvases.some(({ segments }) => segments().some((segment) => segment.picture));
    const color = this.mode === "light" && hasPicture ? lightenGrey : null;
    return scale ? { scale, direction, color, title: "attention weight of each patch" } : null;
  }

  svg() {
    const sizes = this.canvases.map(({ canvas }) => [canvas.clientWidth, canvas.clientHeight]);
    const sheet = svgSheet(
      sizes.reduce((sum, [width]) => sum + width + 8, -8),
      Math.max(...sizes.map(([, height]) => height)),
    );
    let x = 0;
    this.canvases.forEach(({ canvas }, n) => {
      const [width, height] = sizes[n];
      sheet.append(draw("image", { href: canvas.toDataURL(), x, width, height }));
      x += width + 8;
    });
    return sheet;
  }

  csv(focus) {
    return focusCsv(focus);
  }
}

// The borders of the patches, where no picture shows them.
function drawLines(pen, { rows, columns }, width, height) {
  if (width / columns < 6) return;
  Object.assign(pen, { strokeStyle: cssColor("--line"), lineWidth: 1 });
  pen.beginPath();
  for (let c = 1; c < columns; c++) {
    pen.moveTo(Math.round((c * width) / columns) + 0.5, 0);
    pen.lineTo(Math.round((c * width) / columns) + 0.5, height);
  }
  for (let r = 1; r < rows; r++) {
    pen.moveTo(0, Math.round((r * height) / rows) + 0.5);
    pen.lineTo(width, Math.round((r * height) / rows) + 0.5);
  }
  pen.stroke();
}

// The brightness of a grey patch in the light mode, for the legend.
function lightenGrey(t) {
  const level = Math.round(190 * (1 - MAX_DARKNESS * (1 - t)));
  return `rgb(${level}, ${level}, ${level})`;
}
