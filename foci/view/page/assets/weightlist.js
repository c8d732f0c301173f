// The panel beside the view: the largest weights as numbers, facts about the row, and the legend.

import { make, button, legendParts } from "./dom.js";
import { formatPercent, createScale, shade } from "./colors.js";
import { clipText } from "./tokens.js";
import { rankUnits } from "./focus.js";
import { listFrames } from "./gridmaps.js";
import { SINKS } from "./store.js";

const ENTROPY = "How spread out the attention is. In nats: 0 = one key, ln n = uniform over n keys";
const RECEIVED = "The sum of the weights that all queries give to this token; 1 is the average";
const LEARNED_SINK = "The model has a parameter that takes a share of the attention without being a token";
const TOP_KEYS = "This file has only the largest weights of each query; they add up to this share";
const COLUMN_NAMES = {
  tokens: "token", patches: "patch (row,column)", video: "patch (frame:row,column)", frames: "time", positions: "position",
};
const SHORT_LIST = 14;
const LONG_LIST = 100;

export class WeightList {
  constructor(store, state) {
    Object.assign(this, { store, state, most: SHORT_LIST });
    this.title = make("h2", { class: "ranked-title" });
    this.body = make("tbody");
    this.caption = make("caption");
    this.table = make(
      "table",
      { class: "ranked" },
      this.caption,
      make("thead", {}, make("tr", {}, ...headings())),
      this.body,
    );
    this.more = button("Show more", { class: "quiet", onclick: () => this.showMore() });
    this.facts = make("dl", { class: "facts" });
    this.legend = make("div", { class: "legend", "aria-hidden": "true" });
    this.note = make("p", { class: "note" });
    this.element = make(
      "aside",
      { class: "panel right", "aria-label": "Numbers" },
      this.title,
      this.facts,
      this.table,
      this.more,
      this.legend,
      this.note,
    );
  }

  showMore() {
    this.most = this.most === SHORT_LIST ? LONG_LIST : SHORT_LIST;
    this.update(this.focus, this.viewLegend);
  }

  // `legend`: the color scale of a view that draws more than one row.
  update(focus, legend = null) {
    this.focus = focus;
    this.viewLegend = legend;
    const order = rankUnits(focus.units, this.most);
    const { title, columns } = describeFocus(focus);
    this.title.replaceChildren(...title);
    this.caption.textContent = `${columns} in ${focus.name}, largest weight first`;
    this.table.hidden = !focus.picks.length;
    const hasFrames = this.store.images(focus.layer, focus.other, this.state.seq).some(
      ({ segments }) => listFrames(segments).length);
    const kind = focus.kinds[focus.other];
    this.table.tHead.rows[0].cells[1].textContent = COLUMN_NAMES[kind === "patches" && hasFrames ? "video" : kind];
    const largest = order.length ? focus.units[order[0]] : 0;
    const scale = createScale(this.state.scale, focus.units, focus.uniform);
    this.body.replaceChildren(...order.map((u, n) => this.row(u, n, focus, scale, largest)));
    const count = rankUnits(focus.units, LONG_LIST + 1).length;
    this.more.hidden = count <= SHORT_LIST || !focus.picks.length;
    this.more.textContent = this.most === SHORT_LIST ? `Show ${Math.min(count, LONG_LIST)}` : "Show fewer";
    this.facts.replaceChildren(...this.listFacts(focus));
    this.legend.hidden = !legend && !scale.largest;
    this.drawLegend(
      legend ?? {
        scale,
        direction: focus.to ? "to" : "from",
        title: focus.to ? "attention weight on each key" : "attention weight from each query",
      },
    );
    this.note.textContent = describePrecision(focus, this.store, this.state);
  }

  row(u, n, focus, scale, largest) {
    const weight = focus.units[u];
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${Math.max(1, (100 * weight) / largest)}%`;
    bar.style.backgroundColor = shade(focus.to ? "to" : "from", 0.25 + 0.55 * scale.of(weight));
    const position = focus.targets.start[u];
    const go = button(clipText(focus.targets.label(u), 22), {
      class: "link",
      title: `position ${position}: select it`,
      onclick: () => this.state.set({
        chosen: [position],
        hover: null,
        direction: focus.layer.self ? this.state.direction : focus.to ? "from" : "to",
      }),
    });
    const name = make("td", {}, make("bdi", {}, go), bar);
    return make(
      "tr",
      {},
      make("td", { class: "rank" }, String(n + 1)),
      name,
      make("td", { class: "position" }, String(position)),
      make("td", { class: "weight" }, formatPercent(weight)),
    );
  }

  listFacts(focus) {
    const { picks, sinkShare, sinks, learned, coverage, entropy, exact, to } = focus;
    const facts = [fact("head", focus.name)];
    if (!picks.length) return facts;
    if (!focus.known) return [...facts, fact("weights", "NaN or infinite")];
    if (to && sinks.size) {
      const where = [...sinks].slice(0, 3).map(
        (j) => `“${clipText(focus.targets.label(focus.targets.of[j]), 12)}”`,
      ).join(", ");
      facts.push(
        fact(
          this.state.hideSinks ? "hidden in sinks" : "in sinks",
          `${formatPercent(sinkShare)} · ${where}${sinks.size > 3 ? " …" : ""}`,
          SINKS,
        ),
      );
    } else if (to && this.store.canHaveSinks(focus.layer)) facts.push(fact("sinks", "none in this head", SINKS));
    if (learned > 0) facts.push(fact("in the learned sink", formatPercent(learned), LEARNED_SINK));
    if (!exact && to && !this.store.block(focus.heads[0], this.state.seq, true)) facts.push(fact("in the top keys", `${formatPercent(coverage)} of its attention`, TOP_KEYS));
    if (entropy) facts.push(fact("entropy", `${entropy.nats.toFixed(2)} nats ${entropy.over}`, ENTROPY));
    if (!to) facts.push(fact("received", `${focus.total.toFixed(2)} in total`, RECEIVED));
    return facts;
  }

  // `color(t)` replaces the ramp of the direction.
  drawLegend({ scale, direction = "to", title, color = null }) {
    const colors = color ?? ((t) => shade(direction, t));
    this.legend.replaceChildren(...legendParts(`${title} · ${scale.mode}`, colors, scale.ticks.map(([, text]) => text)));
  }
}

function headings() {
  return [
    make("th", { scope: "col", class: "rank" }, "#"),
    make("th", { scope: "col" }, "token"),
    make("th", { scope: "col", class: "position", title: "Position in the text, from 0" }, "pos"),
    make("th", { scope: "col", class: "weight", title: "The share of the attention, in percent" }, "weight"),
  ];
}

function fact(name, value, title = null) {
  return make("div", { title }, make("dt", {}, name), make("dd", {}, value));
}

// “hungry”, or patch 3,4 of an image.
function describeUnit(text, kind) {
  return kind === "patches" && /^\d+,\d+$/.test(text) ? `patch ${text}` : `“${clipText(text, 18)}”`;
}

// “hungry” attends to / is attended to by
export function describeFocus(focus) {
  const texts = focus.picks.slice(0, 3).map((u) => describeUnit(focus.sources.label(u), focus.kinds[focus.from]));
  if (!texts.length) return { title: ["Point at a token"], columns: "nothing selected" };
  const who = texts.join(" + ") + (focus.picks.length > 3 ? ` + ${focus.picks.length - 3} more` : "");
  const many = focus.picks.length > 1;
  const verb = focus.to ? (many ? "attend to" : "attends to") : many ? "are attended to by" : "is attended to by";
  return { title: [make("bdi", {}, who), " ", make("span", { class: "verb" }, verb)], columns: `${who} ${verb}` };
}

function describePrecision(focus, store, state) {
  if (!focus.picks.length) return "Hover to preview, click to select, Shift-click to add. Press ? for all keyboard shortcuts.";
  const nonfinite = store.countNonfiniteRows(focus.heads, state.seq);
  if (nonfinite) {
    const rows = `${nonfinite} of ${focus.layer.Tq * focus.heads.length} rows of ${focus.name}`;
    return `${rows} have NaN or infinite weights, which are not drawn or counted.`;
  }
  if (focus.exact) {
    const rounded = store.layers[focus.layer.number].entries === "log16" && !store.remote;
    const which = store.header.notes.length ? "All weights of the part that the model read" : "All weights";
    return `${which} are here, ${rounded ? "rounded to four digits" : "exact"}.`;
  }
  const k = store.topCount(focus.layer.number);
  const isLinked = focus.heads.every((one) => store.block(one, state.seq, focus.heads.length === focus.layer.heads));
  if (isLinked && !store.remote) {
    const others = store.step === null && k ? `; of the others, the ${k} top keys of each query` : "";
    return `This file has all weights between text and image, rounded to four digits${others}.`;
  }
  if (store.remote) return k ? "The top keys are shown; all weights are loading." : "The weights are loading.";
  if (store.step !== null) return "Of a single denoising step, this file has weights between text and image only.";
  if (!k) return "This record has only pictures and statistics, no single weights.";
  const stored = focus.to
    ? `the exact weights of the ${k} top keys of each query`
    : `only queries with this key among their ${k} top keys`;
  return `Long text: this file has ${stored}; the map shows pictures of the rest.`;
}
