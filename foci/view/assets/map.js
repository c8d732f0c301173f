// One head as a map: the picture of the whole from far, blocks from nearer, single entries from near. What is drawn is
// what is in sight; on a server's page finer tiles come when they are in sight, and only those are held.

import { button, choice, cssColor, make, penOf, perFrame } from "./dom.js";
import { ink, percent, scaleOf, shade } from "./colors.js";
import { rasterOf } from "./raster.js";
import { chosenHeads, unitsFor } from "./focus.js";
import { clipped } from "./tokens.js";
import { csvOf, matrixSvg } from "./exporting.js";

const LEFT = 116;
const TOP = 92;
const EDGE = 10;
const NEAREST = 72;
// Labels are written from this size of a cell on, and single entries drawn over blocks from this number of rows down.
const LABELLED = 11;
const MOST_ROWS = 800;
const SHADES = 24;

export class MapView {
  constructor({ store, state }) {
    Object.assign(this, { store, state });
    this.canvas = make("canvas", { class: "map", tabindex: "0", role: "img" });
    this.tip = make("div", { class: "tip", hidden: true });
    this.level = make("span", { class: "count", "aria-live": "polite" });
    this.reduce = choice("Blocks show", [["mean", "mean"], ["max", "max"]], () => state.reduce, (value) => state.set({ reduce: value }));
    const zoom = [
      button("−", { title: "Farther (-)", onclick: () => this.zoomBy(1 / 1.6) }),
      button("+", { title: "Nearer (+)", onclick: () => this.zoomBy(1.6) }),
      button("Fit", { title: "Everything (0)", onclick: () => this.fit() }),
    ];
    const tools = make("div", { class: "tools" }, make("div", { class: "choice" }, ...zoom), make("span", { class: "label" }, "a block shows its"), this.reduce, this.level);
    this.frame = make("div", { class: "mapframe" }, this.canvas, this.tip);
    this.element = make("section", { class: "view mapview", "aria-label": "Map" }, tools, this.frame);
    this.redraw = perFrame(() => this.render());
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

  // What the map shows: one head, or the mean of several, by tokens or, where every entry is here, by words.
  source() {
    const { store, state } = this;
    const heads = chosenHeads(store, state);
    const layer = store.layers[heads[0].layer];
    const key = [heads.map(({ order }) => order).join("."), state.seq, state.reduce, layer.exact && state.words].join(" ");
    if (key !== this.sourceKey) {
      this.sourceKey = key;
      this.shown = layer.exact ? this.exactSource(heads, layer) : this.blockSource(heads, layer);
      this.raster = null;
    }
    return this.shown;
  }

  exactSource(heads, layer) {
    const { store, state } = this;
    const [rows, columns] = [unitsFor(store, state, layer, "queries"), unitsFor(store, state, layer, "keys")];
    const values = new Float32Array(rows.count * columns.count);
    const row = new Float32Array(layer.Tk);
    for (let i = 0; i < layer.Tq; i++) {
      row.fill(0);
      for (const one of heads) store.addRow(row, one, i, state.seq, 1 / heads.length);
      const u = rows.of[i];
      for (let j = 0; j < layer.Tk; j++) values[u * columns.count + columns.of[j]] += row[j] / (rows.stop[u] - rows.start[u]);
    }
    return { heads, layer, rows, columns, Tq: rows.count, Tk: columns.count, picture: { rows: rows.count, columns: columns.count, values, whole: true } };
  }

  blockSource(heads, layer) {
    const { store, state } = this;
    const tokens = { ...state, words: false };
    const [rows, columns] = [unitsFor(store, tokens, layer, "queries"), unitsFor(store, tokens, layer, "keys")];
    const pictures = heads.map((one) => store.picture(one, state.seq, state.reduce)).filter(Boolean);
    let picture = pictures[0] ?? null;
    if (pictures.length > 1) {
      const values = new Float32Array(picture.values.length);
      for (const { values: some } of pictures) for (let i = 0; i < values.length; i++) values[i] += some[i] / pictures.length;
      picture = { ...picture, values };
    }
    return { heads, layer, rows, columns, Tq: layer.Tq, Tk: layer.Tk, picture };
  }

  size() {
    return [this.frame.clientWidth, this.frame.clientHeight];
  }

  // Pixels for each token; from the whole in sight to a cell as large as a thumb.
  bounds() {
    const { Tq, Tk } = this.source();
    const [width, height] = this.size();
    const whole = Math.min((width - LEFT - EDGE) / Tk, (height - TOP - EDGE) / Tq);
    return [Math.min(Math.max(whole, 1e-4), NEAREST), NEAREST];
  }

  viewport() {
    const { Tq, Tk } = this.source();
    const [least, most] = this.bounds();
    const s = Math.min(Math.max(least * 2 ** this.state.zoom, least), most);
    const [width, height] = this.size();
    const [w, h] = [(width - LEFT - EDGE) / s, (height - TOP - EDGE) / s];
    const clamp = (middle, seen, length) => (seen >= length ? 0 : Math.min(Math.max((middle < 0 ? length / 2 : middle) - seen / 2, 0), length - seen));
    return { s, w, h, x: clamp(this.state.x, w, Tk), y: clamp(this.state.y, h, Tq), width, height };
  }

  place(s, x, y, view) {
    const [least] = this.bounds();
    const { Tq, Tk } = this.source();
    const [w, h] = [(view.width - LEFT - EDGE) / s, (view.height - TOP - EDGE) / s];
    const inside = (start, seen, length) => Math.min(Math.max(start, 0), Math.max(0, length - seen)) + seen / 2;
    this.state.set({ zoom: Math.max(0, Math.log2(s / least)), x: inside(x, w, Tk), y: inside(y, h, Tq) });
    this.redraw();
  }

  zoomBy(factor, event = null) {
    const view = this.viewport();
    const [least, most] = this.bounds();
    const s = Math.min(Math.max(view.s * factor, least), most);
    const box = this.canvas.getBoundingClientRect();
    const px = event ? event.clientX - box.left - LEFT : (view.w * view.s) / 2;
    const py = event ? event.clientY - box.top - TOP : (view.h * view.s) / 2;
    this.place(s, view.x + px / view.s - px / s, view.y + py / view.s - py / s, view);
  }

  pan(dx, dy) {
    const view = this.viewport();
    this.place(view.s, view.x + dx / view.s, view.y + dy / view.s, view);
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
    const [j, i] = [Math.floor(view.x + (event.clientX - box.left - LEFT) / view.s), Math.floor(view.y + (event.clientY - box.top - TOP) / view.s)];
    return event.clientX - box.left >= LEFT && event.clientY - box.top >= TOP && i >= 0 && j >= 0 && i < Tq && j < Tk ? { i, j } : null;
  }

  pick(event) {
    const at = this.cellAt(event);
    if (at) this.state.set({ chosen: [this.source().rows.start[at.i]], direction: "to", hover: null });
  }

  // The weight at a cell, and what is known about it.
  valueAt({ i, j }) {
    const { heads, layer, picture, rows, columns } = this.source();
    if (picture?.whole) return { weight: picture.values[i * columns.count + j], about: "" };
    const tile = this.store.remote?.cell(heads, i, j, this.state, this.viewport().s);
    if (tile) return tile;
    let weight = 0;
    let known = 0;
    for (const one of heads) {
      this.store.eachTop(one, i, i + 1, this.state.seq, (_, key, w) => {
        if (key === j) [weight, known] = [weight + w / heads.length, known + 1];
      });
    }
    if (known === heads.length) return { weight, about: "exact" };
    if (!picture) return { weight: 0, about: "not kept" };
    const [r, c] = [blockOf(i, picture.rows, layer.Tq), blockOf(j, picture.columns, layer.Tk)];
    const edges = `${edge(r, picture.rows, layer.Tq)}–${edge(r + 1, picture.rows, layer.Tq) - 1} × ${edge(c, picture.columns, layer.Tk)}–${edge(c + 1, picture.columns, layer.Tk) - 1}`;
    return { weight: picture.values[r * picture.columns + c], about: `${picture.reduce} of the block ${edges}; not among the ${this.store.topCount(layer.number)} heaviest keys` };
  }

  showTip(event) {
    this.tip.hidden = !this.at;
    if (!this.at) return;
    const { rows, columns } = this.source();
    const { weight, about } = this.valueAt(this.at);
    const link = make("div", { class: "tip-link" }, make("bdi", {}, clipped(rows.label(this.at.i), 20)), make("span", { class: "verb" }, "looks at"), make("bdi", {}, clipped(columns.label(this.at.j), 20)));
    this.tip.replaceChildren(link, make("div", { class: "tip-value" }, percent(weight)), make("div", { class: "tip-about" }, `query ${rows.start[this.at.i]}, key ${columns.start[this.at.j]}${about ? ` · ${about}` : ""}`));
    const box = this.frame.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    this.tip.style.left = `${Math.min(x + 16, box.width - 250)}px`;
    this.tip.style.top = `${y > box.height - 110 ? y - 90 : y + 16}px`;
  }

  update() {
    this.reduce.refresh();
    const source = this.source();
    const buttons = [...this.reduce.children];
    // Where each cell is one entry, mean and maximum are the same.
    buttons.forEach((one) => (one.disabled = Boolean(source.picture?.whole) || !this.store.hasMaxima(source.layer.number)));
    this.redraw();
  }

  hiddenColumns() {
    const { heads, columns, picture, Tk } = this.source();
    if (!this.state.hideSinks) return null;
    const found = new Set();
    for (const one of heads) for (const j of this.store.sinks(one, this.state.seq)) found.add(Math.floor((columns.of[j] * picture.columns) / Tk));
    return found.size ? found : null;
  }

  colored() {
    const { picture } = this.source();
    const key = [this.state.scale, this.state.hideSinks, document.documentElement.dataset.theme, matchMedia("(prefers-color-scheme: dark)").matches].join(" ");
    if (!this.raster || this.rasterKey !== key) {
      this.rasterKey = key;
      const hidden = this.hiddenColumns();
      this.raster = rasterOf(picture, this.state.scale, "to", hidden && ((c) => hidden.has(c)));
      this.hidden = hidden;
    }
    return this.raster;
  }

  render() {
    const [width, height] = this.size();
    if (width < 50 || height < 50) return;
    const source = this.source();
    const pen = penOf(this.canvas, width, height);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    pen.clearRect(0, 0, width, height);
    if (!source.picture) {
      this.level.textContent = "This record kept no picture of the matrix.";
      return;
    }
    const view = this.viewport();
    const raster = this.colored();
    this.drawBlocks(pen, view, source, raster);
    this.drawHidden(pen, view, source);
    this.drawAxes(pen, view, source);
    this.drawCross(pen, view, source);
    if (this.state.zoom > 0.3) this.drawOverview(pen, view, source, raster);
    this.canvas.setAttribute("aria-label", `${this.level.textContent}. The table beside it has the numbers of the chosen token.`);
  }

  drawBlocks(pen, view, { heads, layer, picture, Tq, Tk }, raster) {
    const [x1, y1] = [Math.min(view.x + view.w, Tk), Math.min(view.y + view.h, Tq)];
    const [sx, sy] = [picture.columns / Tk, picture.rows / Tq];
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, (x1 - view.x) * view.s, (y1 - view.y) * view.s);
    pen.clip();
    pen.fillStyle = shade("to", 0);
    pen.fillRect(LEFT, TOP, view.width, view.height);
    // Smoothing only where several blocks share a pixel: else a block has sharp edges.
    pen.imageSmoothingEnabled = view.s / sx < 1;
    pen.drawImage(raster.canvas, view.x * sx, view.y * sy, (x1 - view.x) * sx, (y1 - view.y) * sy, LEFT, TOP, (x1 - view.x) * view.s, (y1 - view.y) * view.s);
    let told = picture.whole ? "Entries: every cell is one weight" : `Picture: a block is ${(1 / sy).toFixed(sy > 0.1 ? 1 : 0)} × ${(1 / sx).toFixed(sx > 0.1 ? 1 : 0)} tokens`;
    if (!picture.whole) {
      const tiles = this.store.remote?.drawTiles(pen, view, { heads, layer, LEFT, TOP, x1, y1, state: this.state, scale: raster.scale, redraw: this.redraw });
      if (tiles) told = tiles;
      else if (y1 - view.y <= MOST_ROWS && this.store.topCount(layer.number)) {
        this.drawEntries(pen, view, heads, y1, raster.scale);
        told += `, with the ${this.store.topCount(layer.number)} heaviest keys of each query over it, exact`;
      }
    }
    this.level.textContent = told;
    if (picture.whole && view.s >= 30) this.writeWeights(pen, view, picture, x1, y1, raster.scale);
    pen.restore();
  }

  // The heaviest keys of the rows in sight, over their blocks; their scale is that of a single entry.
  drawEntries(pen, view, heads, y1, blocks) {
    const size = Math.max(view.s, 1.25);
    const scale = this.state.scale === "rank" ? blocks : scaleOf(this.state.scale, [], Math.max(blocks.largest, 0.25));
    const sinks = this.state.hideSinks ? new Set(heads.flatMap((one) => this.store.sinks(one, this.state.seq))) : null;
    // By shade, light ones first: a canvas is slow where each cell changes the colour.
    const shades = Array.from({ length: SHADES }, () => []);
    for (const one of heads) {
      this.store.eachTop(one, Math.floor(view.y), Math.ceil(y1), this.state.seq, (i, j, weight) => {
        if (j + 1 < view.x || j > view.x + view.w || sinks?.has(j)) return;
        shades[Math.round((SHADES - 1) * Math.min(1, scale.of(weight)))].push(j, i);
      });
    }
    shades.forEach((places, level) => {
      pen.fillStyle = shade("to", Math.max(0.12, level / (SHADES - 1)));
      for (let n = 0; n < places.length; n += 2) pen.fillRect(LEFT + (places[n] - view.x) * view.s, TOP + (places[n + 1] - view.y) * view.s, size, size);
    });
  }

  writeWeights(pen, view, { values, columns }, x1, y1, scale) {
    pen.font = `${Math.min(12, view.s * 0.3)}px ${getComputedStyle(this.canvas).fontFamily}`;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    for (let i = Math.floor(view.y); i < y1; i++) {
      for (let j = Math.floor(view.x); j < x1; j++) {
        const weight = values[i * columns + j];
        if (weight < 0.005) continue;
        pen.fillStyle = this.hidden?.has(j) ? "transparent" : ink("to", scale.of(weight));
        pen.fillText((100 * weight).toFixed(0), LEFT + (j + 0.5 - view.x) * view.s, TOP + (i + 0.5 - view.y) * view.s);
      }
    }
  }

  // Columns of hidden sinks are crossed out, never silently empty.
  drawHidden(pen, view, { picture, Tk, Tq }) {
    if (!this.hidden) return;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, Math.min(view.w, Tk - view.x) * view.s, Math.min(view.h, Tq - view.y) * view.s);
    pen.clip();
    pen.strokeStyle = cssColor("--line-strong");
    for (const c of this.hidden) {
      const [from, to] = [(c * Tk) / picture.columns, ((c + 1) * Tk) / picture.columns];
      const [x, wide] = [LEFT + (from - view.x) * view.s, Math.max(2, (to - from) * view.s)];
      pen.save();
      pen.beginPath();
      pen.rect(x, TOP, wide, view.height);
      pen.clip();
      pen.beginPath();
      for (let y = TOP - wide; y < view.height; y += 7) {
        pen.moveTo(x, y + wide);
        pen.lineTo(x + wide, y);
      }
      pen.stroke();
      pen.restore();
    }
    pen.restore();
  }

  drawAxes(pen, view, { rows, columns, Tq, Tk }) {
    const family = getComputedStyle(this.canvas).fontFamily;
    const [ink1, soft] = [cssColor("--ink"), cssColor("--soft")];
    pen.textBaseline = "middle";
    pen.fillStyle = soft;
    pen.font = `600 11px ${family}`;
    pen.textAlign = "left";
    pen.fillText("is looked at →", LEFT, 12);
    pen.save();
    pen.translate(12, TOP);
    pen.rotate(Math.PI / 2);
    pen.fillText("looks →", 0, 0);
    pen.restore();
    const [x1, y1] = [Math.min(view.x + view.w, Tk), Math.min(view.y + view.h, Tq)];
    pen.strokeStyle = cssColor("--line-strong");
    pen.strokeRect(LEFT - 0.5, TOP - 0.5, (x1 - view.x) * view.s + 1, (y1 - view.y) * view.s + 1);
    const labelled = view.s >= LABELLED;
    pen.font = `${labelled ? Math.min(13, view.s * 0.85) : 11}px ${family}`;
    const step = labelled ? 1 : tickStep(64 / view.s);
    const chosen = new Set(this.state.direction === "to" ? this.state.chosen.map((i) => rows.of[i]) : []);
    for (let i = Math.ceil(view.y / step) * step; i < y1; i += step) {
      const y = TOP + (i + (labelled ? 0.5 : 0) - view.y) * view.s;
      if (y < TOP - 1) continue;
      pen.textAlign = "right";
      pen.fillStyle = this.at?.i === i || chosen.has(i) ? ink1 : soft;
      pen.fillText(labelled ? clipped(rows.label(i), 12) : String(i), LEFT - 7, y);
    }
    for (let j = Math.ceil(view.x / step) * step; j < x1; j += step) {
      const x = LEFT + (j + (labelled ? 0.5 : 0) - view.x) * view.s;
      if (x < LEFT - 1) continue;
      pen.fillStyle = this.at?.j === j ? ink1 : soft;
      pen.textAlign = labelled ? "left" : "center";
      pen.save();
      pen.translate(x, TOP - 8);
      if (labelled) pen.rotate(-Math.PI / 3.4);
      pen.fillText(labelled ? clipped(columns.label(j), 11) : String(j), 0, 0);
      pen.restore();
    }
  }

  drawCross(pen, view, { rows, Tk }) {
    pen.strokeStyle = cssColor("--accent");
    const wide = Math.min(view.w, Tk - view.x) * view.s;
    if (this.state.direction === "to") {
      pen.lineWidth = 1.5;
      for (const i of this.state.chosen) {
        const u = rows.of[i];
        const y = TOP + (u - view.y) * view.s;
        if (u !== undefined && y >= TOP - view.s && y < view.height) pen.strokeRect(LEFT, Math.max(y, TOP), wide, Math.max(view.s, 1));
      }
      pen.lineWidth = 1;
    }
    if (!this.at) return;
    const [x, y] = [LEFT + (this.at.j - view.x) * view.s, TOP + (this.at.i - view.y) * view.s];
    pen.strokeStyle = cssColor("--ink");
    pen.strokeRect(x, y, Math.max(view.s, 3), Math.max(view.s, 3));
  }

  drawOverview(pen, view, { Tq, Tk }, raster) {
    const side = 110;
    const [w, h] = Tk >= Tq ? [side, Math.max(8, (side * Tq) / Tk)] : [Math.max(8, (side * Tk) / Tq), side];
    const [x, y] = [view.width - w - 18, view.height - h - 18];
    pen.fillStyle = cssColor("--card");
    pen.fillRect(x - 4, y - 4, w + 8, h + 8);
    pen.imageSmoothingEnabled = true;
    pen.drawImage(raster.canvas, x, y, w, h);
    pen.strokeStyle = cssColor("--line-strong");
    pen.strokeRect(x - 4.5, y - 4.5, w + 9, h + 9);
    pen.strokeStyle = cssColor("--accent");
    pen.lineWidth = 1.5;
    pen.strokeRect(x + (view.x / Tk) * w, y + (view.y / Tq) * h, Math.max(4, (Math.min(view.w, Tk) / Tk) * w), Math.max(4, (Math.min(view.h, Tq) / Tq) * h));
    pen.lineWidth = 1;
  }

  legend() {
    return this.raster ? { scale: this.raster.scale, title: this.source().picture.whole ? "weight of a cell" : `${this.source().picture.reduce} weight of a block` } : null;
  }

  svg(focus) {
    const { picture, rows, columns, Tq, Tk } = this.source();
    const labels = (units, count, length) => Array.from({ length: count }, (_, n) => (count === length ? units.text(n) : String(Math.floor((n * length) / count))));
    return matrixSvg({ rows: labels(rows, picture.rows, Tq), columns: labels(columns, picture.columns, Tk), weight: (i, j) => picture.values[i * picture.columns + j], mode: this.state.scale, title: focus.name });
  }

  csv(focus) {
    const { picture, rows, columns, Tq, Tk } = this.source();
    if (!picture?.whole) return csvOf(focus);
    const body = Array.from({ length: Tq }, (_, i) => [rows.text(i), ...picture.values.subarray(i * Tk, (i + 1) * Tk)]);
    return [["looks \\ is looked at", ...Array.from({ length: Tk }, (_, j) => columns.text(j))], ...body];
  }
}

// Blocks have the edges floor(r T / rows).
function edge(r, blocks, length) {
  return Math.floor((r * length) / blocks);
}

function blockOf(i, blocks, length) {
  let r = Math.floor((i * blocks) / length);
  while (edge(r + 1, blocks, length) <= i) r++;
  while (edge(r, blocks, length) > i) r--;
  return r;
}

// 1, 2 or 5 times a power of ten.
function tickStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least) ?? 10 * power;
}
