// Two records side by side: the text and the images of each, colored by the attention of the selected token, the
// difference between them, and the matrices of the head. Positions that both texts have are aligned.

import { button, make, oncePerFrame, onPress, prepareCanvas } from "./dom.js";
import { createScale, formatPercent, isDark, shade, textColor } from "./colors.js";
import { drawGrid, forEachCell, frameBox, layOut, lightUp, patchAt, patchBox, readPicture } from "./gridmaps.js";
import { label } from "./tokens.js";

const MAX_TOKENS = 800;
const MAX_MATRIX_CELLS = 300 * 300;
const MATRIX_SIDE = 230;
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
      make("option", { value: head }, `${name} · changed by ${formatPercent(change)}`)));
    this.note = make("span", { class: "count", title: "The mean total variation distance of the rows of a head" },
      "heads that changed most first");
    this.sources = make("div", { class: "comparetext", role: "group", "aria-label": "Selected token" });
    this.sourceName = make("h3");
    this.sourceRow = make("div", { class: "comparerow" }, this.sourceName, this.sources);
    this.panes = this.titles.map((name, n) => make("div", { class: "comparetext", "aria-label": n < 2 ? name : "Difference" }));
    this.rows = this.titles.map((name, n) => make("div", { class: "comparerow" }, make("h3", {}, name), this.panes[n]));
    this.missing = make("p", { class: "count", hidden: true }, "Only one of the texts has this token.");
    this.maps = make("div", { class: "matrices maps" });
    this.list = make("table", { class: "differences" });
    this.matrices = make("div", { class: "matrices" });
    this.element = make(
      "section",
      { class: "view compareview", "aria-label": "Compare" },
      make("div", { class: "tools" }, make("span", { class: "label" }, "head"), this.select, this.note),
      make("div", { class: "comparebody" }, this.sourceRow, this.missing, this.maps, ...this.rows,
        make("div", { class: "comparenumbers" }, this.matrices, this.list)),
    );
    this.redraw = oncePerFrame(() => this.render());
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

  // The weights of a query on all keys, or of all queries on a key; null where the text does not have it.
  weights(layer, head, position, isKey = false) {
    if (position === null) return null;
    const all = this.store.heads.filter((one) => one.layer === layer.number);
    const heads = head === null ? all : [all[head]];
    const found = new Float32Array(isKey ? layer.Tq : layer.Tk);
    for (const one of heads) {
      this.store[isKey ? "addColumn" : "addRow"](found, one, position, this.state.seq, 1 / heads.length, head === null);
    }
    return found;
  }

  render() {
    if (!this.focus) return;
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
    this.missing.hidden = whole.every(Boolean);
    this.renderSources(shown);
    this.renderMaps(shown);
    this.renderTexts(shown);
    this.renderDifference(shown);
    this.renderMatrices(axes, head, shown);
  }

  // The numbers of the aligned positions that are text, without padding; those of patches are shown as maps.
  listTexts(shown, aligned, axis) {
    const patches = shown.sides.map((layer) => new Set(this.store.imagePositions(layer, axis, this.state.seq)));
    const isText = (both) => !both.some((position, n) => patches[n].has(position)) && this.name(shown, both, axis) !== "";
    return [...aligned.keys()].filter((k) => isText(aligned[k]));
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
    const { targets, to, weights, isKey } = shown;
    const texts = this.listTexts(shown, targets, to).slice(0, MAX_TOKENS);
    for (const row of this.rows) row.hidden = !texts.length;
    this.rows[2].hidden ||= !weights.every(Boolean);
    const scale = createScale(this.state.scale, weights.flatMap((one) => [...(one ?? [])]), 0);
    const direction = isKey ? "from" : "to";
    weights.forEach((one, n) => this.panes[n].replaceChildren(...texts.map((k) => {
      if (targets[k][n] === null) return make("span", { class: "gap", title: `only in ${this.names[1 - n]}` }, "·");
      const level = one ? 0.85 * scale.of(one[k]) : 0;
      const colors = level ? [shade(direction, level), textColor(direction, level)] : [];
      return this.target(shown, k, one ? formatPercent(one[k]) : "", ...colors);
    })));
  }

  renderDifference(shown) {
    const { targets, to, weights: [a, b] } = shown;
    this.list.hidden = !a || !b;
    if (!a || !b) return;
    const change = Float32Array.from(a, (weight, k) => b[k] - weight);
    const largest = findLargest(change);
    this.panes[2].replaceChildren(...this.listTexts(shown, targets, to).slice(0, MAX_TOKENS).map((k) =>
      this.target(shown, k, formatChange(change[k]), tint(change[k] / largest))));
    const order = [...change.keys()].sort((x, y) => Math.abs(change[y]) - Math.abs(change[x]))
      .slice(0, MAX_LISTED).filter((k) => Math.abs(change[k]) >= 0.0005);
    const cells = (k) => [formatPercent(a[k]), formatPercent(b[k]), formatChange(change[k])];
    const isImage = !this.listTexts(shown, targets, to).length;
    this.list.replaceChildren(
      make("thead", {}, make("tr", {}, ...[isImage ? "patch" : "token", ...this.names, "difference"].map((title) => make("th", {}, title)))),
      make("tbody", {}, ...order.map((k) => make("tr", {}, make("td", {}, label(this.name(shown, targets[k], to))),
        ...cells(k).map((text) => make("td", { class: "number" }, text))))),
    );
  }

  // The images of both records, and the difference where their grids are the same.
  renderMaps(shown) {
    const { sides, to, whole, isKey } = shown;
    const images = sides.map((layer) => this.store.images(layer, to, this.state.seq));
    const count = Math.max(...images.map((found) => found.length));
    this.maps.hidden = !count;
    const pairs = Array.from({ length: count }, (_, i) => images.map((found, n) =>
      (found[i] && whole[n] ? { n, segments: found[i].segments, grid: layOut(found[i].segments, (at) => whole[n][at]) } : null)));
    const scale = createScale(this.state.scale, pairs.flat().flatMap((one) => (one ? [...one.grid.values] : [])), 0);
    this.maps.replaceChildren(...pairs.flatMap(([a, b]) => [
      ...[a, b].filter(Boolean).map((one) => this.drawMap(one, scale, isKey ? "from" : "to", shown)),
      ...(a && b && a.grid.rows === b.grid.rows && a.grid.columns === b.grid.columns ? [this.drawChange(a, b)] : []),
    ]));
  }

  drawMap({ n, segments, grid }, scale, direction, shown) {
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

  drawChange({ segments, grid }, { grid: other }) {
    const change = grid.values.map((weight, k) => other.values[k] - weight);
    const largest = findLargest(change);
    const picture = readPicture(this.store, segments);
    const { figure, pen, width, height } = this.createMap(this.titles[2], grid, picture);
    forEachCell({ ...grid, values: change }, width, height, { of: (weight) => weight / largest }, (level, box) => {
      pen.fillStyle = tint(level);
      pen.fillRect(...box);
    });
    return figure;
  }

  createMap(title, { rows, columns }, picture) {
    const canvas = make("canvas", { role: "img", "aria-label": `Image: ${title}` });
    const ratio = picture ? picture.width / picture.height : columns / rows;
    const [width, height] = ratio > 1 ? [MATRIX_SIDE, MATRIX_SIDE / ratio] : [MATRIX_SIDE * ratio, MATRIX_SIDE];
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const figure = make("figure", {}, canvas, make("figcaption", {}, title));
    return { figure, canvas, width, height, pen: prepareCanvas(canvas, width, height) };
  }

  renderMatrices([queries, keys], head, { sides, chosen, isKey }) {
    const isKnown = sides.every((layer) => layer.exact) && queries.length * keys.length <= MAX_MATRIX_CELLS;
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
    const scale = MATRIX_SIDE / Math.max(rows, columns);
    const [width, height] = [columns * scale, rows * scale];
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const pen = prepareCanvas(canvas, width, height);
    for (let i = 0; i < rows; i++) {
      for (let k = 0; k < columns; k++) {
        const [x, y] = [Math.floor(k * scale), Math.floor(i * scale)];
        pen.fillStyle = color(i, k) ?? "rgb(128 128 128 / 30%)";
        pen.fillRect(x, y, Math.floor((k + 1) * scale) - x, Math.floor((i + 1) * scale) - y);
      }
    }
    pen.strokeStyle = "#ffb000";
    const [at, side] = [chosen * scale + 0.5, Math.max(2, scale) - 1];
    if (chosen >= 0) pen.strokeRect(...(isKey ? [at, 0.5, side, height - 1] : [0.5, at, width - 1, side]));
    return make("figure", {}, canvas, make("figcaption", {}, title));
  }
}

// From -1, less weight in the second record, to 1.
function tint(t) {
  const [r, g, b] = (t < 0 ? LESS : MORE)[isDark() ? "dark" : "light"];
  return `rgb(${r} ${g} ${b} / ${Math.round(100 * Math.min(1, Math.abs(t)))}%)`;
}

function findLargest(changes) {
  return changes.reduce((most, change) => Math.max(most, Math.abs(change)), 1e-6);
}

function formatChange(change) {
  return `${change < 0 ? "−" : "+"}${(100 * Math.abs(change)).toFixed(1)}`;
}
