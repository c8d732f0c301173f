// One head as a zoomable map: a picture of the whole matrix, then blocks, then single entries. Only the visible part is
// drawn; in the explorer finer tiles are loaded when they become visible.

import { button, choice, make, prepareCanvas, oncePerFrame } from "./dom.js";
import { formatPercent, shade } from "./colors.js";
import { resizeColumns, drawRaster } from "./raster.js";
import { chosenHeads } from "./focus.js";
import { buildBlockSource, buildExactSource } from "./mapsource.js";
import { clipText } from "./tokens.js";
import { focusCsv, matrixSvg } from "./export.js";
import {
  LEFT,
  TOP,
  blockOf,
  drawAxes,
  drawCross,
  drawEntries,
  drawHidden,
  drawOverview,
  blockStart,
  writeWeights,
} from "./mapdrawing.js";

const EDGE = 12;
// Room for the slanted label of the last column.
const RIGHT = 46;
const MAX_CELL = 72;
// If one axis is this many times longer than the other, cells are larger along the short one, up to this size.
const STRETCH_RATIO = 4;
const MAX_STRETCHED_CELL = 28;
// Single entries are drawn over blocks if at most this many rows are visible.
const MAX_ENTRY_ROWS = 800;

export class MapView {
  constructor({ store, state }) {
    Object.assign(this, { store, state });
    this.canvas = make("canvas", { class: "map", tabindex: "0", role: "img" });
    this.tip = make("div", { class: "tip", hidden: true });
    this.level = make("span", { class: "count", "aria-live": "polite" });
    this.reduce = choice(
      "Blocks show",
      [
        ["mean", "mean", "Each block shows the mean of its weights"],
        ["max", "max", "Each block shows its largest weight, so that single large weights stay visible"],
      ],
      () => state.reduce,
      (value) => state.set({ reduce: value }),
    );
    const zoom = [
      button("−", { title: "Zoom out (-)", onclick: () => this.zoomBy(1 / 1.6) }),
      button("+", { title: "Zoom in (+)", onclick: () => this.zoomBy(1.6) }),
      button("Fit", { title: "Show everything (0)", onclick: () => this.fit() }),
    ];
    const tools = make(
      "div",
      { class: "tools" },
      make("div", { class: "choice" }, ...zoom),
      make("span", { class: "label" }, "a block shows its"),
      this.reduce,
      this.level,
    );
    this.frame = make("div", { class: "mapframe" }, this.canvas, this.tip);
    this.element = make("section", { class: "view mapview", "aria-label": "Map" }, tools, this.frame);
    this.redraw = oncePerFrame(() => this.render());
    this.listen();
  }

  listen() {
    const { canvas } = this;
    new ResizeObserver(this.redraw).observe(this.frame);
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey) this.pan(event.deltaY, 0);
      else this.zoomBy(Math.exp(-event.deltaY * 0.0015), event);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.drag = { x: event.clientX, y: event.clientY, moved: false };
    });
    canvas.addEventListener("pointermove", (event) => this.pointed(event));
    canvas.addEventListener("pointerup", (event) => {
      if (this.drag && !this.drag.moved) this.pick(event);
      this.drag = null;
    });
    canvas.addEventListener("pointerleave", () => {
      this.at = null;
      this.tip.hidden = true;
      this.redraw();
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const far = event.shiftKey ? 240 : 60;
    const moves = { ArrowLeft: [-far, 0], ArrowRight: [far, 0], ArrowUp: [0, -far], ArrowDown: [0, far] };
    if (moves[event.key]) this.pan(...moves[event.key]);
    else if (event.key === "+" || event.key === "=") this.zoomBy(1.6);
    else if (event.key === "-") this.zoomBy(1 / 1.6);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // The data of the map: one head or the mean of several, by tokens or, if every weight is available, by words.
  source() {
    const { store, state } = this;
    const heads = chosenHeads(store, state);
    const layer = store.layers[heads[0].layer];
    const key = [
      heads.map(({ order }) => order).join("."),
      state.seq,
      state.reduce,
      layer.exact && state.words,
    ].join(" ");
    // A picture that the kernel of a notebook computes comes later.
    if (key !== this.sourceKey || !this.shown.picture) {
      this.sourceKey = key;
      this.shown = (layer.exact ? buildExactSource : buildBlockSource)(store, state, heads, layer);
      this.raster = null;
    }
    return this.shown;
  }

  size() {
    return [this.frame.clientWidth, this.frame.clientHeight];
  }

  // How much larger cells are along each axis, so that few queries or keys are not drawn as a thin line.
  stretch() {
    const { Tq, Tk } = this.source();
    const [width, height] = this.size();
    const [wide, tall] = [(width - LEFT - RIGHT) / Tk, (height - TOP - EDGE) / Tq];
    const of = (own, other) => (own > STRETCH_RATIO * other ? Math.max(1, Math.min(own, MAX_STRETCHED_CELL) / other) : 1);
    return { wide, tall, across: of(wide, tall), down: of(tall, wide) };
  }

  // The smallest and largest pixels per token of the longer axis: from the whole matrix to single cells.
  bounds() {
    const { wide, tall, across, down } = this.stretch();
    return [Math.min(Math.max(Math.min(wide / across, tall / down), 1e-4), MAX_CELL), MAX_CELL];
  }

  // Pixels per key and per query.
  cellsAt(u) {
    const { across, down } = this.stretch();
    return [across, down].map((times) => Math.max(u, Math.min(u * times, MAX_CELL)));
  }

  viewport() {
    const { Tq, Tk } = this.source();
    const [least, most] = this.bounds();
    const u = Math.min(Math.max(least * 2 ** this.state.zoom, least), most);
    const [s, t] = this.cellsAt(u);
    const [width, height] = this.size();
    const [w, h] = [(width - LEFT - RIGHT) / s, (height - TOP - EDGE) / t];
    const clamp = (middle, seen, length) => (seen >= length ? 0 : Math.min(
      Math.max((middle < 0 ? length / 2 : middle) - seen / 2, 0),
      length - seen,
    ));
    return { u, s, t, w, h, x: clamp(this.state.x, w, Tk), y: clamp(this.state.y, h, Tq), width, height };
  }

  place(u, x, y, view) {
    const [least] = this.bounds();
    const { Tq, Tk } = this.source();
    const [s, t] = this.cellsAt(u);
    const [w, h] = [(view.width - LEFT - RIGHT) / s, (view.height - TOP - EDGE) / t];
    const inside = (start, seen, length) => Math.min(Math.max(start, 0), Math.max(0, length - seen)) + seen / 2;
    this.state.set({ zoom: Math.max(0, Math.log2(u / least)), x: inside(x, w, Tk), y: inside(y, h, Tq) });
    this.redraw();
  }

  zoomBy(factor, event = null) {
    const view = this.viewport();
    const [least, most] = this.bounds();
    const u = Math.min(Math.max(view.u * factor, least), most);
    const [s, t] = this.cellsAt(u);
    const box = this.canvas.getBoundingClientRect();
    const px = event ? event.clientX - box.left - LEFT : (view.w * view.s) / 2;
    const py = event ? event.clientY - box.top - TOP : (view.h * view.t) / 2;
    this.place(u, view.x + px / view.s - px / s, view.y + py / view.t - py / t, view);
  }

  pan(dx, dy) {
    const view = this.viewport();
    this.place(view.u, view.x + dx / view.s, view.y + dy / view.t, view);
  }

  fit() {
    this.state.set({ zoom: 0, x: -1, y: -1 });
    this.redraw();
  }

  pointed(event) {
    if (this.drag && event.buttons === 1) {
      const [dx, dy] = [event.clientX - this.drag.x, event.clientY - this.drag.y];
      if (this.drag.moved || Math.hypot(dx, dy) > 4) {
        this.pan(-dx, -dy);
        this.drag = { x: event.clientX, y: event.clientY, moved: true };
        this.tip.hidden = true;
        return;
      }
    }
    this.at = this.cellAt(event);
    this.showTip(event);
    this.redraw();
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const view = this.viewport();
    const { Tq, Tk } = this.source();
    const [j, i] = [
      Math.floor(view.x + (event.clientX - box.left - LEFT) / view.s),
      Math.floor(view.y + (event.clientY - box.top - TOP) / view.t),
    ];
    const inside = event.clientX - box.left >= LEFT && event.clientY - box.top >= TOP;
    return inside && i >= 0 && j >= 0 && i < Tq && j < Tk ? { i, j } : null;
  }

  pick(event) {
    const at = this.cellAt(event);
    if (at) this.state.set({ chosen: [this.source().rows.start[at.i]], direction: "to", hover: null });
  }

  // The weight at a cell, and how exact it is.
  valueAt({ i, j }) {
    const { heads, layer, picture, rows, columns } = this.source();
    if (picture?.whole) return { weight: picture.values[i * columns.count + j], about: "" };
    const tile = this.store.remote?.cell(heads, i, j, this.state, this.viewport().u);
    if (tile) return tile;
    let weight = 0;
    let known = 0;
    for (const one of heads) {
      this.store.forEachTopKey(one, i, i + 1, this.state.seq, (_, key, w) => {
        if (key === j) [weight, known] = [weight + w / heads.length, known + 1];
      });
    }
    if (known === heads.length) return { weight, about: "exact" };
    if (!picture) return { weight: 0, about: "not recorded" };
    const [r, c] = [blockOf(i, picture.rows, layer.Tq), blockOf(j, picture.columns, layer.Tk)];
    const k = this.store.topCount(layer.number);
    const span = (n, blocks, length) => `${blockStart(n, blocks, length)}–${blockStart(n + 1, blocks, length) - 1}`;
    const edges = `${span(r, picture.rows, layer.Tq)} × ${span(c, picture.columns, layer.Tk)}`;
    return {
      weight: picture.values[r * picture.columns + c],
      about: `${picture.reduce} of the block ${edges}; not among the ${k} top keys`,
    };
  }

  showTip(event) {
    this.tip.hidden = !this.at;
    if (!this.at) return;
    const { rows, columns } = this.source();
    const { weight, about } = this.valueAt(this.at);
    const link = make(
      "div",
      { class: "tip-link" },
      make("bdi", {}, clipText(rows.label(this.at.i), 20)),
      make("span", { class: "verb" }, "attends to"),
      make("bdi", {}, clipText(columns.label(this.at.j), 20)),
    );
    this.tip.replaceChildren(
      link,
      make("div", { class: "tip-value" }, formatPercent(weight)),
      make(
        "div",
        { class: "tip-about" },
        `query ${rows.start[this.at.i]}, key ${columns.start[this.at.j]}${about ? ` · ${about}` : ""}`,
      ),
    );
    const box = this.frame.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    this.tip.style.left = `${Math.min(x + 16, box.width - 250)}px`;
    this.tip.style.top = `${y > box.height - 110 ? y - 90 : y + 16}px`;
  }

  update() {
    this.reduce.refresh();
    const source = this.source();
    const buttons = [...this.reduce.children];
    // Mean and maximum of a single entry are the same.
    buttons.forEach(
      (one) => (one.disabled = Boolean(source.picture?.whole) || !this.store.hasMaxima(source.layer.number)),
    );
    this.redraw();
  }

  hiddenColumns() {
    const { heads, columns, picture, Tk } = this.source();
    if (!this.state.hideSinks) return null;
    const found = new Set();
    for (const one of heads) {
      for (const j of this.store.sinks(one, this.state.seq)) {
        found.add(Math.floor((columns.of[j] * picture.columns) / Tk));
      }
    }
    return found.size ? found : null;
  }

  colored() {
    const { picture } = this.source();
    const key = [
      this.state.scale,
      this.state.hideSinks,
      document.documentElement.dataset.theme,
      matchMedia("(prefers-color-scheme: dark)").matches,
    ].join(" ");
    if (!this.raster || this.rasterKey !== key) {
      this.rasterKey = key;
      const hidden = this.hiddenColumns();
      this.raster = drawRaster(picture, this.state.scale, "to", hidden && ((c) => hidden.has(c)));
      this.hidden = hidden;
    }
    return this.raster;
  }

  render() {
    const [width, height] = this.size();
    if (width < 50 || height < 50) return;
    const source = this.source();
    const pen = prepareCanvas(this.canvas, width, height);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    pen.clearRect(0, 0, width, height);
    if (!source.picture) {
      const isComing = this.store.remote && source.layer.hasEntries;
      this.level.textContent = isComing
        ? "The picture of the whole matrix is being computed: it can take a minute at 100,000 tokens on a CPU."
        : "This record has no picture of the matrix.";
      return;
    }
    const view = this.viewport();
    const raster = this.colored();
    this.drawBlocks(pen, view, source, raster);
    const chosen = this.state.direction === "to" ? this.state.chosen.filter((i) => i < source.rows.of.length) : [];
    const marks = { at: this.at, chosen, family: getComputedStyle(this.canvas).fontFamily };
    drawHidden(pen, view, source, this.hidden);
    drawAxes(pen, view, source, marks);
    drawCross(pen, view, source, marks);
    if (this.state.zoom > 0.3) drawOverview(pen, view, source, raster);
    this.canvas.setAttribute(
      "aria-label",
      `${this.level.textContent}. The table beside it lists the weights of the selected token.`,
    );
  }

  drawBlocks(pen, view, { heads, layer, picture, Tq, Tk }, raster) {
    const [x1, y1] = [Math.min(view.x + view.w, Tk), Math.min(view.y + view.h, Tq)];
    const [sx, sy] = [picture.columns / Tk, picture.rows / Tq];
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, (x1 - view.x) * view.s, (y1 - view.y) * view.t);
    pen.clip();
    pen.fillStyle = shade("to", 0);
    pen.fillRect(LEFT, TOP, view.width, view.height);
    // Smoothing only if several blocks share a pixel; otherwise blocks have sharp edges.
    const [wide, tall] = [(x1 - view.x) * view.s, (y1 - view.y) * view.t];
    const smooth = view.s / sx < 1;
    let from = raster.canvas;
    let part = [view.x * sx, view.y * sy, (x1 - view.x) * sx, (y1 - view.y) * sy];
    if (smooth && view.t / sy > 1) [from, part] = resizeColumns(from, part, wide);
    pen.imageSmoothingEnabled = smooth && from === raster.canvas;
    pen.drawImage(from, ...part, LEFT, TOP, wide, tall);
    this.level.textContent = this.drawFiner(pen, view, { heads, layer, picture, x1, y1 }, raster.scale);
    pen.restore();
  }

  // Draws finer data over the picture, and returns a description of what is visible.
  drawFiner(pen, view, { heads, layer, picture, x1, y1 }, scale) {
    const { store, state, hidden } = this;
    if (picture.whole) {
      const { fontFamily: family } = getComputedStyle(this.canvas);
      if (Math.min(view.s, view.t) >= 30) writeWeights(pen, view, picture, { x1, y1, scale, hidden, family });
      return "Entries: every cell is one weight";
    }
    const tiles = store.remote?.drawTiles(pen, view, { heads, layer, LEFT, TOP, x1, y1, state });
    if (tiles) return tiles;
    const size = (blocks, length) => Number((length / blocks).toFixed(length / blocks < 10 ? 1 : 0));
    const described = `Picture: a block is ${size(picture.rows, layer.Tq)} × ${size(picture.columns, layer.Tk)} tokens`;
    const k = store.topCount(layer.number);
    if (!k || y1 - view.y > MAX_ENTRY_ROWS) return described;
    drawEntries(pen, view, { store, state, heads, y1, blocks: scale });
    return `${described}, overlaid with the exact ${k} top keys of each query`;
  }

  legend() {
    return this.source().picture ? {
      scale: this.colored().scale,
      title: this.source().picture.whole ? "attention weight" : `${this.source().picture.reduce} of the weights of a block`,
    } : null;
  }

  svg(focus) {
    const { picture, rows, columns, Tq, Tk } = this.source();
    const labels = (units, count, length) => Array.from(
      { length: count },
      (_, n) => (count === length ? units.text(n) : String(Math.floor((n * length) / count))),
    );
    return matrixSvg({
      rows: labels(rows, picture.rows, Tq),
      columns: labels(columns, picture.columns, Tk),
      weight: (i, j) => picture.values[i * picture.columns + j],
      uniform: picture.uniform,
      mode: this.state.scale,
      title: focus.name,
    });
  }

  csv(focus) {
    const { picture, rows, columns, Tq, Tk } = this.source();
    if (!picture?.whole) return focusCsv(focus);
    const body = Array.from({ length: Tq }, (_, i) => [rows.text(i), ...picture.values.subarray(i * Tk, (i + 1) * Tk)]);
    return [["query \\ key", ...Array.from({ length: Tk }, (_, j) => columns.text(j))], ...body];
  }
}
