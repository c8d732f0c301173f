// Two records side by side: the text and the images of each, colored by the attention of the selected token, the
// difference between them, and the matrices of the head. Positions that both texts have are aligned.

import { button, legendParts, make, oncePerFrame, onPress, prepareCanvas } from "./dom.js";
import { createScale, formatPercent, isDark, shade, textColor } from "./colors.js";
import {
  drawGrid, forEachCell, frameBox, layOut, lightUp, patchAt, patchBox, readPicture, shownSegments,
} from "./gridmaps.js";
import { StepsAndFrames } from "./sliders.js";
import { label } from "./tokens.js";

const MAX_TOKENS = 800;
const MAX_MATRIX_CELLS = 300 * 300;
const MATRIX_SIDE = 230;
// What lies beside two maps in a narrow view: the padding and the gap of page.css.
const NARROW_MARGIN = 36 + 18 + 4;
// The side of a cell along the shorter side of a matrix.
const MATRIX_CELL = 12;
const MAX_LISTED = 12;
// Less and more weight in the second record.
const LESS = { light: [47, 134, 173], dark: [79, 176, 180] };
const MORE = { light: [196, 60, 117], dark: [238, 106, 93] };

export class CompareView {
  constructor({ store, state }) {
    Object.assign(this, { store, state, picked: null });
    const { names, pairs } = store.header.compare;
    Object.assign(this, { names, pairs, titles: [...names, `${names[1]} − ${names[0]}`] });
    this.select = make("select", { "aria-label": "Head", onchange: () => this.choose(this.select.value) });
    const heads = pairs.flatMap(({ names: all, changes, layers }) => all.map((name, head) => ({
      name, change: changes[head], head: store.layers[layers[0]].names[head],
    })));
    heads.sort((a, b) => b.change - a.change);
    this.select.append(...heads.map(({ name, change, head }) =>
      make("option", { value: head }, `${name} · changed by ${change ? formatPercent(change) : "0%"}`)));
    this.note = make("span", { class: "count", title: "The mean total variation distance of the rows of a head" },
      "heads that changed most first");
    this.stepsAndFrames = new StepsAndFrames(store, state);
    this.sliders = make("div", { class: "sliders" }, ...this.stepsAndFrames.rows);
    this.sources = make("div", { class: "comparetext", role: "group", "aria-label": "Selected token" });
    this.sourceName = make("h3");
    this.sourceRow = make("div", { class: "comparerow" }, this.sourceName, this.sources);
    this.panes = this.titles.map((name, n) => make("div", { class: "comparetext", "aria-label": n < 2 ? name : "Difference" }));
    this.rows = this.titles.map((name, n) => make("div", { class: "comparerow" }, make("h3", {}, name), this.panes[n]));
    this.missing = make("p", { class: "count", hidden: true });
    this.maps = make("div", { class: "matrices maps" });
    this.legends = make("div", { class: "comparelegends", "aria-hidden": "true" });
    this.same = make("p", { class: "count", hidden: true });
    this.list = make("table", { class: "differences" });
    this.matrices = make("div", { class: "matrices" });
    this.element = make(
      "section",
      { class: "view compareview", "aria-label": "Compare" },
      make("div", { class: "tools" }, make("span", { class: "label" }, "head"), this.select, this.note),
      this.sliders,
      make("div", { class: "comparebody" }, this.sourceRow, this.missing, this.maps, ...this.rows, this.legends,
        make("div", { class: "comparenumbers" }, this.matrices, this.same, this.list)),
    );
    this.redraw = oncePerFrame(() => this.render());
    new ResizeObserver(this.redraw).observe(this.element);
  }

  choose(head) {
    this.state.set({ heads: [head] });
  }

  // The pair of the selected head: { pair, head, sides }, the same head of both records.
  pair({ heads }) {
    const [one] = heads;
    const pair = this.pairs.find(({ layers }) => layers.includes(one.layer)) ?? this.pairs[0];
    const head = heads.length > 1 ? null : one.head;
    return { pair, head, sides: pair.layers.map((number) => this.store.layers[number]), side: pair.layers.indexOf(one.layer) };
  }

  update(focus) {
    this.focus = focus;
    this.redraw();
  }

  // The selected one of the aligned positions; -1 if the texts have none in common.
  row(sources, side) {
    const { chosen } = this.state;
    if (this.picked?.chosen === chosen && sources.includes(this.picked.both)) return sources.indexOf(this.picked.both);
    const found = chosen.length ? sources.findIndex((both) => both[Math.max(0, side)] === chosen[0]) : -1;
    return found >= 0 ? found : sources.findLastIndex(([a, b]) => a !== null && b !== null);
  }

  pick(both) {
    const position = both[Math.max(0, this.pair(this.focus).side)];
    if (position !== null) this.state.set({ chosen: [position], hover: null });
    this.picked = { both, chosen: this.state.chosen };
    this.redraw();
  }

  // The weights of a query on all keys, or of all queries on a key; null where the text does not have it, or where the
  // file does not have this head at the chosen denoising step.
  weights(layer, head, position, isKey = false) {
    const all = this.store.heads.filter((one) => one.layer === layer.number);
    const heads = head === null ? all : [all[head]];
    if (position === null || !heads.every((one) => this.hasStep(one, head === null))) return null;
    const found = new Float32Array(isKey ? layer.Tq : layer.Tk);
    for (const one of heads) {
      this.store[isKey ? "addColumn" : "addRow"](found, one, position, this.state.seq, 1 / heads.length, head === null);
    }
    return found;
  }

  hasStep(one, all) {
    return this.store.step === null || this.store.block(one, this.state.seq, all) !== null;
  }

  // Whether a weight is known: of a single denoising step, the file has those between text and images.
  isKnown({ sides, to }, both) {
    if (this.store.step === null) return true;
    const axis = to === "keys" ? "columns" : "rows";
    const { seq } = this.state;
    return both.some((at, n) => this.store.block({ layer: sides[n].number, head: 0 }, seq, true)?.[axis].index.has(at));
  }

  render() {
    if (!this.focus) return;
    // Both records fit beside each other.
    this.side = Math.max(60, Math.min(MATRIX_SIDE, (this.element.clientWidth - NARROW_MARGIN) / 2));
    const { pair, head, sides, side } = this.pair(this.focus);
    if (head !== null) this.select.value = sides[0].names[head];
    const isKey = this.state.direction === "from";
    const axes = [pair.queries, pair.keys ?? pair.queries];
    const [sources, targets] = isKey ? [...axes].reverse() : axes;
    const [from, to] = isKey ? ["keys", "queries"] : ["queries", "keys"];
    const chosen = this.row(sources, side);
    const whole = sides.map((layer, n) => this.weights(layer, head, sources[chosen]?.[n] ?? null, isKey));
    const shown = {
      sides, chosen, sources, targets, from, to, whole, isKey,
      // In self-attention the tokens that are colored are those that can be selected.
      isShared: sides[0].self && !pair.keys,
      weights: whole.map((found, n) => found && Float32Array.from(targets, (both) => (both[n] === null ? 0 : found[both[n]]))),
    };
    const known = whole.every(Boolean);
    this.missing.hidden = known;
    this.missing.textContent = (sources[chosen] ?? []).includes(null)
      ? "Only one of the texts has this token."
      : "This file does not have this head at this step of both: choose another step, or the mean of all.";
    shown.texts = this.listTexts(shown, targets, to).filter((k) => this.isKnown(shown, targets[k])).slice(0, MAX_TOKENS);
    shown.maps = this.layOutMaps(shown);
    // One scale for texts and maps.
    const grids = shown.maps.flat().flatMap((one) => (one ? [...one.grid.values] : []));
    shown.scale = createScale(this.state.scale, [...shown.weights.flatMap((one) => [...(one ?? [])]), ...grids], 0);
    const changes = known ? shown.weights[0].map((weight, k) => shown.weights[1][k] - weight) : new Float32Array();
    const mapChanges = shown.maps.filter(haveSameGrid).flatMap((both) => [...subtractMaps(both)]);
    Object.assign(shown, { changes, largest: findLargest([...changes, ...mapChanges]) });
    this.renderSources(shown);
    this.renderMaps(shown);
    this.renderTexts(shown);
    this.renderLegends(shown);
    this.renderDifference(shown);
    this.renderMatrices(axes, head, shown);
  }

  // The numbers of the aligned positions that are text, without padding; those of patches are shown as maps.
  listTexts(shown, aligned, axis) {
    const patches = shown.sides.map((layer) => new Set(this.store.imagePositions(layer, axis, this.state.seq)));
    const isText = (both) => !both.some((position, n) => patches[n].has(position)) && this.name(shown, both, axis) !== "";
    return [...aligned.keys()].filter((k) => isText(aligned[k]));
  }

  // For each image its map in both records: { n, segments, grid }, of the chosen frame; null where it is not known.
  layOutMaps(shown) {
    const { sides, to, whole } = shown;
    const images = sides.map((layer) => this.store.images(layer, to, this.state.seq));
    this.sliders.hidden = !this.stepsAndFrames.update(images.flat());
    const layOutMap = (image, n) => {
      const segments = image && whole[n] ? shownSegments(image, this.state.frame) : [];
      const isThere = segments.length && this.isKnown(shown, n ? [null, segments[0].start] : [segments[0].start, null]);
      return isThere ? { n, segments, grid: layOut(segments, (at) => whole[n][at]) } : null;
    };
    const count = Math.max(...images.map((found) => found.length));
    return Array.from({ length: count }, (_, i) => images.map((found, n) => layOutMap(found[i], n)));
  }

  name({ sides }, both, axis) {
    const n = both[0] === null ? 1 : 0;
    return this.store.texts(sides[n], axis, this.state.seq)[both[n]];
  }

  renderSources(shown) {
    const { sources, from, chosen, isShared } = shown;
    this.sourceRow.hidden = isShared;
    if (isShared) return;
    this.sourceName.textContent = from === "queries" ? "query" : "key";
    const texts = this.listTexts(shown, sources, from);
    const listed = texts.length ? texts : [...sources.keys()];
    this.sources.replaceChildren(...listed.slice(0, MAX_TOKENS).map((k) => {
      const only = sources[k].indexOf(null);
      const title = only < 0 ? "" : `only in ${this.names[1 - only]}`;
      return this.token(this.name(shown, sources[k], from), k === chosen, title, () => this.pick(sources[k]));
    }));
  }

  token(text, isChosen, title, choose, background = "", color = "") {
    const options = { class: "comparetoken", title, "aria-pressed": String(isChosen), ...(choose ? onPress(choose) : {}) };
    const element = button(label(text), options);
    Object.assign(element.style, { backgroundColor: background, color });
    return element;
  }

  // A token that is colored, and that can be selected where it is a query and a key.
  target({ sides, targets, to, chosen, isShared }, k, title, background, color) {
    const choose = isShared ? () => this.pick(targets[k]) : null;
    return this.token(this.name({ sides }, targets[k], to), isShared && k === chosen, title, choose, background, color);
  }

  renderTexts(shown) {
    const { targets, weights, isKey, texts, scale } = shown;
    for (const row of this.rows) row.hidden = !texts.length;
    this.rows[2].hidden ||= !weights.every(Boolean);
    const direction = isKey ? "from" : "to";
    weights.forEach((one, n) => this.panes[n].replaceChildren(...texts.map((k) => {
      if (targets[k][n] === null) return make("span", { class: "gap", title: `only in ${this.names[1 - n]}` }, "·");
      const level = one ? 0.85 * scale.of(one[k]) : 0;
      const colors = level ? [shade(direction, level), textColor(direction, level)] : [];
      return this.target(shown, k, one ? formatPercent(one[k]) : "", ...colors);
    })));
  }

  // Which color is which weight, and which difference.
  renderLegends({ scale, largest, changes, isKey }) {
    const direction = isKey ? "from" : "to";
    const legend = (...parts) => make("div", { class: "legend" }, ...legendParts(...parts));
    const points = [-largest, 0, largest].map((change) => (change ? formatChange(change) : "0"));
    this.legends.hidden = !scale.largest;
    this.legends.replaceChildren(
      legend(`attention weight · ${scale.mode}`, (t) => shade(direction, t), scale.ticks.map(([, text]) => text)),
      ...(changes.some(Boolean) ? [legend("difference, in percentage points", (t) => tint(2 * t - 1), points)] : []),
    );
  }

  renderDifference(shown) {
    const { targets, to, weights: [a, b], texts, changes, largest } = shown;
    const order = [...changes.keys()].sort((x, y) => Math.abs(changes[y]) - Math.abs(changes[x]))
      .slice(0, MAX_LISTED).filter((k) => Math.abs(changes[k]) >= 0.0005);
    this.list.hidden = !order.length;
    this.same.hidden = !a || !b || order.length > 0;
    this.same.textContent = changes.some(Boolean) ? "All differences are below 0.05 percentage points." : "Its weights are the same.";
    this.panes[2].replaceChildren(...(changes.length ? texts : []).map((k) =>
      this.target(shown, k, formatChange(changes[k]), tint(changes[k] / largest))));
    const cells = (k) => [formatPercent(a[k]), formatPercent(b[k]), formatChange(changes[k])];
    this.list.replaceChildren(
      make("thead", {}, make("tr", {}, ...[texts.length ? "token" : "patch", ...this.names, "difference"].map((title) => make("th", {}, title)))),
      make("tbody", {}, ...order.map((k) => make("tr", {}, make("td", {}, label(this.name(shown, targets[k], to))),
        ...cells(k).map((text) => make("td", { class: "number" }, text))))),
    );
  }

  // The images of both records, and the difference where their grids are the same.
  renderMaps(shown) {
    this.maps.hidden = !shown.maps.flat().some(Boolean);
    this.maps.replaceChildren(...shown.maps.flatMap((both) => [
      ...both.filter(Boolean).map((one) => this.drawMap(one, shown)),
      ...(haveSameGrid(both) ? [this.drawChange(both, shown.largest)] : []),
    ]));
  }

  drawMap({ n, segments, grid }, shown) {
    const [scale, direction] = [shown.scale, shown.isKey ? "from" : "to"];
    const picture = readPicture(this.store, segments);
    const { figure, canvas, pen, width, height } = this.createMap(this.titles[n], grid, picture);
    if (picture) {
      pen.imageSmoothingEnabled = picture.width > 96;
      pen.drawImage(picture, 0, 0, width, height);
      forEachCell(grid, width, height, scale, (level, box) => lightUp(pen, box, level));
    } else drawGrid(pen, grid, width, height, scale, direction);
    if (!shown.isShared) return figure;
    const position = shown.targets[shown.chosen]?.[n] ?? null;
    const found = position === null ? null : patchBox(segments, position);
    if (found) frameBox(pen, found, width, height);
    canvas.addEventListener("pointerdown", ({ clientX, clientY }) => {
      const box = canvas.getBoundingClientRect();
      const at = patchAt(segments, (clientX - box.left) / box.width, (clientY - box.top) / box.height);
      const both = shown.targets.find((each) => at !== null && each[n] === at);
      if (both) this.pick(both);
    });
    return figure;
  }

  drawChange(both, largest) {
    const [{ segments, grid }] = both;
    const picture = readPicture(this.store, segments);
    const { figure, pen, width, height } = this.createMap(this.titles[2], grid, picture);
    const of = (change) => change / largest;
    forEachCell({ ...grid, values: subtractMaps(both) }, width, height, { of }, (level, box) => {
      pen.fillStyle = tint(level);
      pen.fillRect(...box);
    });
    return figure;
  }

  createMap(title, { rows, columns }, picture) {
    const canvas = make("canvas", { role: "img", "aria-label": `Image: ${title}` });
    const ratio = picture ? picture.width / picture.height : columns / rows;
    const [width, height] = ratio > 1 ? [this.side, this.side / ratio] : [this.side * ratio, this.side];
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const figure = make("figure", {}, canvas, make("figcaption", {}, title));
    return { figure, canvas, width, height, pen: prepareCanvas(canvas, width, height) };
  }

  renderMatrices([queries, keys], head, { sides, chosen, isKey }) {
    const isKnown = sides.every((layer) => this.store.hasEntries(layer)) && queries.length * keys.length <= MAX_MATRIX_CELLS;
    this.matrices.hidden = !isKnown;
    if (!isKnown) return;
    const [a, b] = sides.map((layer, n) => queries.map((both) => {
      const row = this.weights(layer, head, both[n]);
      return row && Float32Array.from(keys, (each) => (each[n] === null ? 0 : row[each[n]]));
    }));
    let largest = 1e-6;
    a.forEach((row, i) => row && b[i] && row.forEach((weight, k) => (largest = Math.max(largest, Math.abs(b[i][k] - weight)))));
    const scale = createScale(this.state.scale, [...a, ...b].flatMap((row) => [...(row ?? [])]), 0);
    const plain = (matrix) => (i, k) => (matrix[i] ? shade("to", scale.of(matrix[i][k])) : null);
    const change = (i, k) => (a[i] && b[i] ? tint((b[i][k] - a[i][k]) / largest) : null);
    this.matrices.replaceChildren(...[plain(a), plain(b), change].map((color, n) =>
      this.drawMatrix(this.titles[n], queries.length, keys.length, color, chosen, isKey)));
  }

  drawMatrix(title, rows, columns, color, chosen, isKey) {
    const canvas = make("canvas", { role: "img", "aria-label": `Matrix: ${title}` });
    const square = this.side / Math.max(rows, columns);
    const [width, height] = [columns, rows].map((n) => Math.max(n * square, Math.min(n * MATRIX_CELL, this.side)));
    const [wide, tall] = [width / columns, height / rows];
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = prepareCanvas(canvas, width, height);
    for (let i = 0; i < rows; i++) {
      for (let k = 0; k < columns; k++) {
        const [x, y] = [Math.floor(k * wide), Math.floor(i * tall)];
        pen.fillStyle = color(i, k) ?? "rgb(128 128 128 / 30%)";
        pen.fillRect(x, y, Math.floor((k + 1) * wide) - x, Math.floor((i + 1) * tall) - y);
      }
    }
    pen.strokeStyle = "#ffb000";
    const cell = isKey ? wide : tall;
    const [at, side] = [chosen * cell + 0.5, Math.max(2, cell) - 1];
    if (chosen >= 0) pen.strokeRect(...(isKey ? [at, 0.5, side, height - 1] : [0.5, at, width - 1, side]));
    return make("figure", {}, canvas, make("figcaption", {}, title));
  }
}

// From -1, less weight in the second record, to 1.
function tint(t) {
  const [r, g, b] = (t < 0 ? LESS : MORE)[isDark() ? "dark" : "light"];
  return `rgb(${r} ${g} ${b} / ${Math.round(100 * Math.min(1, Math.abs(t)))}%)`;
}

// Whether an image is in both records, with the same grid.
function haveSameGrid([a, b]) {
  return Boolean(a && b) && a.grid.rows === b.grid.rows && a.grid.columns === b.grid.columns;
}

function subtractMaps([a, b]) {
  return a.grid.values.map((weight, k) => b.grid.values[k] - weight);
}

function findLargest(changes) {
  return changes.reduce((most, change) => Math.max(most, Math.abs(change)), 1e-6);
}

function formatChange(change) {
  const points = 100 * Math.abs(change);
  return `${change < 0 ? "−" : "+"}${points && points < 0.05 ? Number(points.toPrecision(1)) : points.toFixed(1)}`;
}
