// "How it is computed": one query of one head, worked through with the real numbers, from vectors to output.

import { make } from "./dom.js";
import { percent, shade } from "./colors.js";
import { chosenHeads, tokenNamed } from "./focus.js";
import { number, workedFor } from "./worked.js";
import { clipped } from "./tokens.js";
import { svgSheet, svgText } from "./exporting.js";

const NOT_KEPT =
  "This record kept neither the entries of this row nor what made them: watch with keep='lazy' to see them.";
const NO_NUMBERS = "The weights of this row are NaN or infinite: there is nothing to be worked out.";

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
    this.worked = workedFor(store, one, i, state.seq);
    this.body.replaceChildren(...this.steps(focus, one, layer, i));
  }

  steps(focus, one, layer, i) {
    const { worked } = this;
    const { token: name, place } = tokenNamed(this.store, this.state, layer, "queries", i);
    const title = make(
      "h2",
      { class: "worked-title" },
      "How ",
      make("bdi", { class: "wrote" }, name),
      `${place} is worked out in ${one.name}`,
    );
    if (!worked) {
      return [
        title,
        make("p", { class: "note" }, this.store.isKnown(one, i, this.state.seq) ? NOT_KEPT : NO_NUMBERS),
      ];
    }
    const parts = [
      title,
      formulaOf(layer.score),
      this.queryStep(layer, name),
      this.scoreStep(layer, name),
      this.softmaxStep(layer),
      this.sumStep(layer, name),
    ];
    return parts.filter(Boolean);
  }

  queryStep(layer, name) {
    const { q } = this.worked;
    if (!q) {
      const exact = "the scores below are exact all the same. The explorer has the vectors.";
      const left = `This file is too large to carry them; ${exact}`;
      const lost = "They were not kept: watch with keep='lazy' to see them.";
      return card("1", "The query and the keys are vectors", layer.score ? left : lost);
    }
    return card("1", "The query is a vector", `${q.length} numbers that say what “${name}” asks for.`, strip(q, "q"));
  }

  scoreStep(layer, name) {
    const { keys, hidden, hasBias, lse } = this.worked;
    if (lse === null) return card("2", "Compare it with each key", "The scores were not kept, only what came out.");
    const how = scoreWords(layer.score);
    const parts = keys[0].raw !== null;
    const scaled = parts && layer.score.scale !== 1;
    const head = [
      "key",
      this.worked.q ? "its vector k" : null,
      parts ? (layer.score.additive ? "w · tanh(q + k)" : "q · k") : null,
      scaled ? `× ${number(layer.score.scale)}` : null,
      parts && hasBias ? "+ bias" : null,
      "score",
    ];
    const rows = keys.map((key) => [
      tokenCell(key),
      this.worked.q ? strip(key.k, `k of ${key.name}`, true) : null,
      parts ? number(key.raw) : null,
      scaled ? number(key.scaled) : null,
      parts && hasBias ? number(key.bias) : null,
      strong(number(key.score)),
    ]);
    const mask = maskWords(layer, hidden);
    return card(
      "2",
      "Compare it with each key",
      `${how} The ${keys.length} heaviest of ${layer.Tk} keys are listed. ${mask}`,
      table(head, rows),
    );
  }

  softmaxStep(layer) {
    const { keys, lse, others, sinkMass } = this.worked;
    if (lse === null) {
      const rows = keys.map((key) => [tokenCell(key), bar(key.weight), strong(percent(key.weight))]);
      return card(
        "3",
        "Softmax makes weights of the scores",
        "Of the scores only what came out was kept.",
        table(["key", "", "weight"], rows),
      );
    }
    const most = Math.max(...keys.map((key) => key.score));
    const total = Math.exp(lse - most);
    const rows = keys.map(
      (key) => [tokenCell(key), number(Math.exp(key.score - most)), bar(key.weight), strong(percent(key.weight))],
    );
    if (others.count > 0) {
      rows.push(
        [`the other ${others.count}`, number(others.weight * total), bar(others.weight), percent(others.weight)],
      );
    }
    if (sinkMass > 0) rows.push(["the learned sink", number(sinkMass * total), bar(sinkMass), percent(sinkMass)]);
    rows.push(
      [
        strong("together"),
        strong(number(total)),
        "",
        strong(percent(keys.reduce((sum, key) => sum + key.weight, 0) + others.weight + sinkMass)),
      ],
    );
    const powers = `Each score, less the largest of them, ${number(most)}, is an exponent: e^(score − largest).`;
    const text = `${powers} Over their sum, ${number(total)}, these are the weights.`;
    return card(
      "3",
      "Softmax makes weights of the scores",
      text,
      table(["key", "e^(score − largest)", "", "weight"], rows),
    );
  }

  sumStep(layer, name) {
    const { keys, out } = this.worked;
    if (!out) {
      const why = layer.score && !this.worked.q ? "This file is too large to carry them" : "They were not kept here";
      return card(
        "4",
        "The weighted sum of the values",
        `${why}; each key’s value is taken times its weight, and they are added up.`,
      );
    }
    const rows = keys.map((key) => [tokenCell(key), percent(key.weight), strip(key.v, `v of ${key.name}`, true)]);
    const result = make(
      "div",
      { class: "result" },
      make("span", { class: "label" }, "output = Σ weight · v"),
      strip(out, "output"),
    );
    return card(
      "4",
      "The weighted sum of the values is the output",
      `What “${name}” takes along from the tokens it looks at.`,
      table(["key", "weight", "its value v"], rows),
      result,
    );
  }

  csv() {
    const rows = (this.worked?.keys ?? []).map(
      (key) => [key.index, key.name, key.raw ?? "", key.scaled ?? "", key.bias ?? "", key.score ?? "", key.weight],
    );
    return [["position", "key", "raw", "scaled", "bias", "score", "weight"], ...rows];
  }

  svg() {
    const rows = this.csv().map((row) => row.map((value) => (typeof value === "number" ? number(value) : value)));
    const sheet = svgSheet(760, 40 + 22 * rows.length);
    rows.forEach(
      (row, n) => row.forEach(
        (value, c) => sheet.append(svgText(16 + c * 104, 30 + n * 22, clipped(String(value), 14), { size: 12 })),
      ),
    );
    return sheet;
  }
}

function formulaOf(score) {
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

function maskWords({ score, Tk }, hidden) {
  if (score?.mask) return `The mask (${score.mask}) closes ${hidden} of ${Tk} keys: their score is −∞, their weight 0.`;
  if (hidden) return `${hidden} of ${Tk} keys have no weight at all.`;
  return score ? `No mask: all ${Tk} keys may be looked at.` : "";
}

function scoreWords(score) {
  if (!score) return "";
  if (score.additive) return "A small network compares the two: tanh(q + k), weighed by a learned w.";
  const usual = Math.abs(score.scale - 1 / Math.sqrt(score.width)) < 1e-6;
  const root = `√${score.width} = ${number(Math.sqrt(score.width))}`;
  const scale = usual ? `The product is divided by ${root}, so that wide vectors do not make it extreme.` : "";
  return `q · k multiplies the two vectors number by number and adds up: large where key and query agree. ${scale}`;
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
    make("bdi", {}, clipped(name, 18)),
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

// A vector as a row of cells: warm for above zero, cool for below; small ones write their numbers.
function strip(vector, name, small = false) {
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
      "aria-label": `${name}: ${first}${vector.length > 16 ? " and so on" : ""}`,
    },
    ...cells,
  );
}
