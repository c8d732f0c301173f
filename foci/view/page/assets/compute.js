// "How it is computed": the computation of one query of one head with its real numbers, from vectors to output.

import { make } from "./dom.js";
import { formatPercent, shade } from "./colors.js";
import { chosenHeads, describeToken } from "./focus.js";
import { computeArithmetic, formatNumber } from "./arithmetic.js";
import { clipText } from "./tokens.js";
import { svgSheet, svgText } from "./export.js";

const NOT_RECORDED =
  "This record has neither the weights of this row nor its vectors: record with keep='lazy' to see them.";
const NONFINITE = "The weights of this row are NaN or infinite: there is nothing to compute.";

export class ComputeView {
  constructor({ store, state }) {
    Object.assign(this, { store, state });
    this.body = make("div", { class: "worked" });
    this.element = make(
      "section",
      { class: "view compute", "aria-label": "How it is computed", tabindex: "0" },
      this.body,
    );
  }

  update(focus) {
    const { store, state } = this;
    const one = chosenHeads(store, state)[0];
    const layer = store.layers[one.layer];
    const chosen = state.direction === "to" ? (state.hover ?? state.chosen[0]) : state.chosen[0];
    const i = Math.min(chosen ?? layer.Tq - 1, layer.Tq - 1);
    this.arithmetic = computeArithmetic(store, one, i, state.seq);
    this.body.replaceChildren(...this.steps(focus, one, layer, i));
  }

  steps(focus, one, layer, i) {
    const { arithmetic } = this;
    const { token: name, place } = describeToken(this.store, this.state, layer, "queries", i);
    const title = make(
      "h2",
      { class: "worked-title" },
      "Attention of ",
      make("bdi", { class: "wrote" }, name),
      `${place} in ${one.name}`,
    );
    if (!arithmetic) {
      return [
        title,
        make("p", { class: "note" }, this.store.hasFiniteRow(one, i, this.state.seq) ? NOT_RECORDED : NONFINITE),
      ];
    }
    const parts = [
      title,
      createFormula(layer.score),
      this.queryStep(layer, name),
      this.scoreStep(layer, name),
      this.softmaxStep(layer),
      this.sumStep(layer, name),
    ];
    return parts.filter(Boolean);
  }

  queryStep(layer, name) {
    const { q } = this.arithmetic;
    if (!q) {
      const exact = "the scores below are exact. The explorer shows the vectors.";
      const left = `This file is too large to include them; ${exact}`;
      const lost = "They were not recorded: record with keep='lazy' to see them.";
      return card("1", "The query and the keys are vectors", layer.score ? left : lost);
    }
    return card("1", "The query is a vector", `The ${q.length} numbers of the query vector of “${name}”.`, createVectorStrip(q, "q"));
  }

  scoreStep(layer, name) {
    const { keys, hidden, hasBias, lse } = this.arithmetic;
    if (lse === null) return card("2", "Score it against each key", "The scores were not recorded, only the weights.");
    const how = describeScore(layer.score);
    const parts = keys[0].raw !== null;
    const scaled = parts && layer.score.scale !== 1;
    const head = [
      "key",
      this.arithmetic.q ? "its vector k" : null,
      parts ? (layer.score.additive ? "w · tanh(q + k)" : "q · k") : null,
      scaled ? `× ${formatNumber(layer.score.scale)}` : null,
      parts && hasBias ? "+ bias" : null,
      "score",
    ];
    const rows = keys.map((key) => [
      tokenCell(key),
      this.arithmetic.q ? createVectorStrip(key.k, `k of ${key.name}`, true) : null,
      parts ? formatNumber(key.raw) : null,
      scaled ? formatNumber(key.scaled) : null,
      parts && hasBias ? formatNumber(key.bias) : null,
      strong(formatNumber(key.score)),
    ]);
    const mask = describeMask(layer, hidden);
    return card(
      "2",
      "Score it against each key",
      `${how} The ${keys.length} of ${layer.Tk} keys with the largest weights are listed. ${mask}`,
      table(head, rows),
    );
  }

  softmaxStep(layer) {
    const { keys, lse, others, sinkMass } = this.arithmetic;
    if (lse === null) {
      const rows = keys.map((key) => [tokenCell(key), bar(key.weight), strong(formatPercent(key.weight))]);
      return card(
        "3",
        "Softmax turns scores into weights",
        "Only the weights were recorded.",
        table(["key", "", "weight"], rows),
      );
    }
    const most = Math.max(...keys.map((key) => key.score));
    const total = Math.exp(lse - most);
    const rows = keys.map(
      (key) => [tokenCell(key), formatNumber(Math.exp(key.score - most)), bar(key.weight), strong(formatPercent(key.weight))],
    );
    if (others.count > 0) {
      rows.push(
        [`${others.count} other key${others.count === 1 ? "" : "s"}`, formatNumber(others.weight * total), bar(others.weight), formatPercent(others.weight)],
      );
    }
    if (sinkMass > 0) rows.push(["the learned sink", formatNumber(sinkMass * total), bar(sinkMass), formatPercent(sinkMass)]);
    rows.push(
      [
        strong("sum"),
        strong(formatNumber(total)),
        "",
        strong(formatPercent(keys.reduce((sum, key) => sum + key.weight, 0) + others.weight + sinkMass)),
      ],
    );
    const powers = `The largest score, ${formatNumber(most)}, is subtracted and the exponential taken: e^(score − largest).`;
    const text = `${powers} Divided by their sum, ${formatNumber(total)}, these are the weights.`;
    return card(
      "3",
      "Softmax turns scores into weights",
      text,
      table(["key", "e^(score − largest)", "", "weight"], rows),
    );
  }

  sumStep(layer, name) {
    const { keys, out } = this.arithmetic;
    if (!out) {
      const why = layer.score && !this.arithmetic.q ? "This file is too large to include them" : "They were not recorded";
      return card(
        "4",
        "The weighted sum of the values",
        `${why}; the output is the sum of all values, each times its weight.`,
      );
    }
    const rows = keys.map((key) => [tokenCell(key), formatPercent(key.weight), createVectorStrip(key.v, `v of ${key.name}`, true)]);
    const result = make(
      "div",
      { class: "result" },
      make("span", { class: "label" }, "output = Σ weight · v"),
      createVectorStrip(out, "output"),
    );
    return card(
      "4",
      "The weighted sum of the values is the output",
      `The output of “${name}” is the sum of the values, each times its weight.`,
      table(["key", "weight", "its value v"], rows),
      result,
    );
  }

  csv() {
    const rows = (this.arithmetic?.keys ?? []).map(
      (key) => [key.index, key.name, key.raw ?? "", key.scaled ?? "", key.bias ?? "", key.score ?? "", key.weight],
    );
    return [["position", "key", "raw", "scaled", "bias", "score", "weight"], ...rows];
  }

  svg() {
    const rows = this.csv().map((row) => row.map((value) => (typeof value === "number" ? formatNumber(value) : value)));
    const sheet = svgSheet(760, 40 + 22 * rows.length);
    rows.forEach(
      (row, n) => row.forEach(
        (value, c) => sheet.append(svgText(16 + c * 104, 30 + n * 22, clipText(String(value), 14), { size: 12 })),
      ),
    );
    return sheet;
  }
}

function createFormula(score) {
  const kinds = { Additive: "wᵀ tanh(q + k)", General: "q W kᵀ", Cosine: "s · cos(q, k)" };
  const inner = kinds[score?.kind] ?? (score?.scale === 1 ? "q kᵀ" : "q kᵀ / √d");
  return make(
    "p",
    { class: "formula" },
    "output = softmax( ",
    make("em", {}, inner),
    score?.bias ? " + bias" : "",
    score?.mask ? ", masked" : "",
    " ) V",
  );
}

function describeMask({ score, Tk }, hidden) {
  if (score?.mask) return `The mask (${score.mask}) hides ${hidden} of ${Tk} keys: their score is −∞, their weight 0.`;
  if (hidden) return `${hidden} of ${Tk} keys have weight 0.`;
  return score ? `No mask: all ${Tk} keys are visible.` : "";
}

function describeScore(score) {
  if (!score) return "";
  if (score.additive) return "A small network scores the pair: tanh(q + k), weighted by a learned w.";
  const usual = Math.abs(score.scale - 1 / Math.sqrt(score.width)) < 1e-6;
  const root = `√${score.width} = ${formatNumber(Math.sqrt(score.width))}`;
  const scale = usual ? `It is divided by ${root}, so that the scores of wide vectors do not become extreme.` : "";
  return `q · k is the dot product of the two vectors: large if query and key are similar. ${scale}`;
}

function card(count, title, text, ...body) {
  return make(
    "article",
    { class: "card" },
    make("h3", {}, make("span", { class: "stepnumber", "aria-hidden": "true" }, count), title),
    make("p", {}, text),
    ...body,
  );
}

function table(head, rows) {
  const keep = head.map((title) => title !== null);
  const cells = (tag, row) => row.filter((_, c) => keep[c]).map(
    (cell) => make(tag, {}, cell instanceof Node ? cell : String(cell ?? "")),
  );
  return make(
    "div",
    { class: "tablewrap" },
    make(
      "table",
      { class: "numbers" },
      make("thead", {}, make("tr", {}, ...cells("th", head))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row)))),
    ),
  );
}

function tokenCell({ name, index }) {
  return make(
    "span",
    { class: "keyname" },
    make("bdi", {}, clipText(name, 18)),
    make("span", { class: "position" }, ` ${index}`),
  );
}

function strong(text) {
  return make("strong", {}, text);
}

function bar(weight) {
  const inner = make("span", { class: "bar", "aria-hidden": "true" });
  inner.style.width = `${Math.max(0.5, 100 * weight)}%`;
  inner.style.backgroundColor = shade("to", 0.55);
  return make("span", { class: "barframe" }, inner);
}

// A vector as a row of cells: warm for positive, cool for negative numbers; short vectors show their numbers.
function createVectorStrip(vector, name, small = false) {
  if (!vector) return make("span", { class: "note" }, "–");
  const first = vector.slice(0, 16).map((x) => x.toFixed(2)).join(", ");
  const most = Math.max(...vector.map(Math.abs), 1e-9);
  const cells = vector.map((x, d) => {
    const cell = make(
      "span",
      { title: `${name}[${d}] = ${x.toFixed(4)}` },
      vector.length <= (small ? 8 : 16) ? x.toFixed(2) : "",
    );
    const t = Math.abs(x) / most;
    cell.style.backgroundColor = shade(x >= 0 ? "to" : "from", 0.62 * t);
    return cell;
  });
  return make(
    "span",
    {
      class: small ? "vector small" : "vector",
      role: "img",
      "aria-label": `${name}: ${first}${vector.length > 16 ? ", …" : ""}`,
    },
    ...cells,
  );
}
