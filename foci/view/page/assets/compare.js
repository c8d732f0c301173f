// Two records side by side: the text of each, colored by the attention of the selected token, the difference between
// them, and the matrices of the head. Positions that both texts have are aligned.

import { button, make, oncePerFrame, onPress, prepareCanvas } from "./dom.js";
import { createScale, formatPercent, isDark, shade, textColor } from "./colors.js";
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
    Object.assign(this, { store, state, hovered: null });
    const { names, pairs } = store.header.compare;
    Object.assign(this, { names, pairs });
    this.select = make("select", { "aria-label": "Head", onchange: () => this.choose(this.select.value) });
    const heads = pairs.flatMap(({ names: all, changes, layers }) => all.map((name, head) => ({
      name, change: changes[head], head: store.layers[layers[0]].names[head],
    })));
    heads.sort((a, b) => b.change - a.change);
    this.select.append(...heads.map(({ name, change, head }) =>
      make("option", { value: head }, `${name} · changed by ${formatPercent(change)}`)));
    this.note = make("span", { class: "count", title: "The mean total variation distance of the rows of a head" },
      "heads that changed most first");
    this.panes = names.map((name) => make("div", { class: "comparetext", "aria-label": name }));
    this.difference = make("div", { class: "comparetext", "aria-label": "Difference" });
    this.list = make("table", { class: "differences" });
    this.matrices = make("div", { class: "matrices" });
    const rows = [...names.map((name, side) => [name, this.panes[side]]), [`${names[1]} − ${names[0]}`, this.difference]];
    this.element = make(
      "section",
      { class: "view compareview", "aria-label": "Compare" },
      make("div", { class: "tools" }, make("span", { class: "label" }, "head"), this.select, this.note),
      make("div", { class: "comparebody" },
        ...rows.map(([name, pane]) => make("div", { class: "comparerow" }, make("h3", {}, name), pane)),
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

  // The selected row of the aligned texts, from a position of one of them.
  row(queries, side) {
    const { chosen } = this.state;
    const found = chosen.length ? queries.findIndex((both) => both[Math.max(0, side)] === chosen[0]) : -1;
    const pick = this.hovered ?? (found >= 0 ? found : null);
    if (pick !== null && pick < queries.length) return pick;
    return queries.findLastIndex(([a, b]) => a !== null && b !== null);
  }

  // The weights of a row of one record along the keys of both; null where the text does not have the query.
  weights(sides, side, head, query, keys) {
    if (query === null) return null;
    const layer = sides[side];
    const all = this.store.heads.filter((one) => one.layer === layer.number);
    const heads = head === null ? all : [all[head]];
    const row = new Float32Array(layer.Tk);
    for (const one of heads) this.store.addRow(row, one, query, this.state.seq, 1 / heads.length, head === null);
    return Float32Array.from(keys, (both) => (both[side] === null ? 0 : row[both[side]]));
  }

  render() {
    if (!this.focus) return;
    const { pair, head, sides, side } = this.pair(this.focus);
    const { queries } = pair;
    const keys = pair.keys ?? queries;
    if (head !== null) this.select.value = sides[0].names[head];
    const row = this.row(queries, side);
    const rows = [0, 1].map((n) => this.weights(sides, n, head, queries[row][n], keys));
    const largest = Math.max(...rows.flatMap((weights) => [...(weights ?? [0])]));
    const scale = createScale(this.state.scale, [], 0, largest);
    const texts = [0, 1].map((n) => this.store.texts(sides[n], "keys", this.state.seq));
    const isSelf = sides[0].self;
    const place = isSelf ? this.keyRow(sides, queries[row], keys) : null;
    [0, 1].forEach((n) => this.panes[n].replaceChildren(
      ...keys.slice(0, MAX_TOKENS).map((both, k) => both[n] === null
        ? make("span", { class: "gap", title: `only in ${this.names[1 - n]}` }, "·")
        : this.token(texts[n][both[n]], k, k === place, rows[n] ? shade("to", 0.85 * scale.of(rows[n][k])) : "",
          rows[n] ? textColor("to", 0.85 * scale.of(rows[n][k])) : "", rows[n] ? formatPercent(rows[n][k]) : "", queries, isSelf)),
    ));
    this.renderDifference({ rows, keys, texts, place, queries, isSelf });
    this.renderMatrices({ pair, head, sides, keys, row });
  }

  // The row of the keys that is the selected query, in self-attention.
  keyRow(sides, [a, b], keys) {
    const side = a === null ? 1 : 0;
    const position = this.store.keyPosition(sides[side], a ?? b);
    return keys.findIndex((both) => both[side] === position);
  }

  token(text, k, isChosen, background, color, title, queries, isSelf) {
    const element = button(label(text), {
      class: "comparetoken",
      title,
      "aria-pressed": String(isChosen),
      ...(isSelf ? onPress(() => this.pick(k, queries)) : {}),
    });
    if (background) Object.assign(element.style, { backgroundColor: background, color });
    return element;
  }

  pick(k, queries) {
    const { side } = this.pair(this.focus);
    const both = queries[Math.min(k, queries.length - 1)];
    this.hovered = k < queries.length ? k : null;
    const position = both[Math.max(0, side)];
    if (position !== null) this.state.set({ chosen: [position], hover: null });
    this.redraw();
  }

  renderDifference({ rows: [a, b], keys, texts, place, queries, isSelf }) {
    const name = (k) => (keys[k][0] === null ? texts[1][keys[k][1]] : texts[0][keys[k][0]]);
    if (!a || !b) {
      this.difference.replaceChildren(make("span", { class: "count" }, "Only one of the texts has this token."));
      this.list.replaceChildren();
      return;
    }
    const change = Float32Array.from(a, (weight, k) => b[k] - weight);
    const largest = Math.max(1e-6, ...change.map(Math.abs));
    this.difference.replaceChildren(...keys.slice(0, MAX_TOKENS).map((_, k) => this.token(
      name(k), k, k === place, tint(change[k] / largest), "", formatChange(change[k]), queries, isSelf)));
    const order = [...change.keys()].sort((x, y) => Math.abs(change[y]) - Math.abs(change[x]))
      .slice(0, MAX_LISTED).filter((k) => Math.abs(change[k]) >= 0.0005);
    const cells = (k) => [formatPercent(a[k]), formatPercent(b[k]), formatChange(change[k])];
    this.list.replaceChildren(
      make("thead", {}, make("tr", {}, ...["token", ...this.names, "difference"].map((title) => make("th", {}, title)))),
      make("tbody", {}, ...order.map((k) => make("tr", {}, make("td", {}, label(name(k))),
        ...cells(k).map((text) => make("td", { class: "number" }, text))))),
    );
  }

  renderMatrices({ pair: { queries }, head, sides, keys, row }) {
    const isKnown = sides.every((layer) => layer.exact) && queries.length * keys.length <= MAX_MATRIX_CELLS;
    this.matrices.hidden = !isKnown;
    if (!isKnown) return;
    const [a, b] = [0, 1].map((n) => queries.map((both) => this.weights(sides, n, head, both[n], keys)));
    let [most, largest] = [1e-6, 1e-6];
    a.forEach((weights, i) => keys.forEach((_, k) => {
      most = Math.max(most, weights?.[k] ?? 0, b[i]?.[k] ?? 0);
      if (weights && b[i]) largest = Math.max(largest, Math.abs(b[i][k] - weights[k]));
    }));
    const scale = createScale(this.state.scale, [], 0, most);
    const plain = (matrix) => (i, k) => (matrix[i] ? shade("to", scale.of(matrix[i][k])) : null);
    const change = (i, k) => (a[i] && b[i] ? tint((b[i][k] - a[i][k]) / largest) : null);
    const titles = [...this.names, `${this.names[1]} − ${this.names[0]}`];
    this.matrices.replaceChildren(...[plain(a), plain(b), change].map((color, n) =>
      this.drawMatrix(titles[n], queries.length, keys.length, color, row)));
  }

  drawMatrix(title, rows, columns, color, chosen) {
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
    pen.strokeRect(0.5, chosen * scale + 0.5, width - 1, Math.max(2, scale) - 1);
    return make("figure", {}, canvas, make("figcaption", {}, title));
  }
}

// From -1, less weight in the second record, to 1.
function tint(t) {
  const [r, g, b] = (t < 0 ? LESS : MORE)[isDark() ? "dark" : "light"];
  return `rgb(${r} ${g} ${b} / ${Math.round(100 * Math.min(1, Math.abs(t)))}%)`;
}

function formatChange(change) {
  return `${change < 0 ? "−" : "+"}${(100 * Math.abs(change)).toFixed(1)}`;
}
