// The list beside the text: the heaviest links in numbers, what is hidden, what is not known, and the legend.

import { make, button } from "./dom.js";
import { percent, scaleOf, shade } from "./colors.js";
import { clipped } from "./tokens.js";
import { ranked } from "./focus.js";

const FEW = 14;
const MANY = 100;

export class Ranked {
  constructor(store, state) {
    Object.assign(this, { store, state, most: FEW });
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
    this.most = this.most === FEW ? MANY : FEW;
    this.update(this.focus, this.given);
  }

  // `legend`: what a view that draws more than one row says of its own colours.
  update(focus, legend = null) {
    this.focus = focus;
    this.given = legend;
    const order = ranked(focus.units, this.most);
    const { title, columns } = spoken(focus);
    this.title.replaceChildren(...title);
    this.caption.textContent = `${columns} in ${focus.name}, heaviest first`;
    this.table.hidden = !focus.picks.length;
    const largest = order.length ? focus.units[order[0]] : 0;
    const scale = scaleOf(this.state.scale, focus.units, this.state.scale === "rank" ? null : largest);
    this.body.replaceChildren(...order.map((u, n) => this.row(u, n, focus, scale, largest)));
    const count = ranked(focus.units, MANY + 1).length;
    this.more.hidden = count <= FEW || !focus.picks.length;
    this.more.textContent = this.most === FEW ? `Show ${Math.min(count, MANY)}` : "Show fewer";
    this.facts.replaceChildren(...this.factsOf(focus));
    this.legend.hidden = !legend && !scale.largest;
    this.drawLegend(
      focus,
      legend ?? {
        scale,
        direction: focus.to ? "to" : "from",
        title: focus.to ? "share of attention that it gives" : "share of attention that each gives it",
      },
    );
    this.note.textContent = noteOf(focus, this.store, this.state);
  }

  row(u, n, focus, scale, largest) {
    const weight = focus.units[u];
    const bar = make("span", { class: "bar", "aria-hidden": "true" });
    bar.style.width = `${Math.max(1, (100 * weight) / largest)}%`;
    bar.style.backgroundColor = shade(focus.to ? "to" : "from", 0.25 + 0.55 * scale.of(weight));
    const position = focus.targets.start[u];
    const go = button(clipped(focus.targets.label(u), 22), {
      class: "link",
      title: `position ${position}: look at it`,
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
      make("td", { class: "weight" }, percent(weight)),
    );
  }

  factsOf(focus) {
    const { picks, sinkShare, sinks, learned, coverage, exact, to } = focus;
    const facts = [fact("head", focus.name)];
    if (!picks.length) return facts;
    if (!focus.known) return [...facts, fact("weights", "no numbers (NaN or infinite)")];
    if (to && sinks.size) {
      const where = [...sinks].slice(0, 3).map(
        (j) => `“${clipped(focus.targets.label(focus.targets.of[j]), 12)}”`,
      ).join(", ");
      facts.push(
        fact(
          this.state.hideSinks ? "hidden in sinks" : "in sinks",
          `${percent(sinkShare)} · ${where}${sinks.size > 3 ? " …" : ""}`,
        ),
      );
    } else if (to) facts.push(fact("sinks", "none in this head"));
    if (learned > 0) facts.push(fact("in the learned sink", percent(learned)));
    if (!exact && to) facts.push(fact("listed here", `${percent(coverage)} of its attention`));
    if (to && picks.length === 1) {
      const nats = entropyOf(focus, this.store, this.state);
      if (nats !== null) {
        facts.push(fact("entropy", `${nats.toFixed(2)} nats · like ${Math.exp(nats).toFixed(1)} keys`));
      }
    }
    if (!to) facts.push(fact("received", `${focus.total.toFixed(2)} queries’ worth`));
    return facts;
  }

  drawLegend(focus, { scale, direction = "to", title }) {
    const strip = make("div", { class: "strip" });
    for (let i = 0; i < 48; i++) {
      const cell = make("span");
      cell.style.backgroundColor = shade(direction, i / 47);
      strip.append(cell);
    }
    const ticks = make("div", { class: "ticks" });
    for (const [, text] of scale.ticks) ticks.append(make("span", {}, text));
    this.legend.replaceChildren(make("div", { class: "legend-title" }, `${title} · ${scale.mode}`), strip, ticks);
  }
}

// Of what is listed where all of it is; of one token of one head else.
function entropyOf({ exact, weights, heads, sources, picks }, store, state) {
  if (exact) return weights.reduce((sum, w) => (w > 0 ? sum - w * Math.log(w) : sum), 0);
  return heads.length === 1 ? store.entropy(heads[0], sources.start[picks[0]], state.seq) : null;
}

function headings() {
  return [
    make("th", { scope: "col", class: "rank" }, "#"),
    make("th", { scope: "col" }, "token"),
    make("th", { scope: "col", class: "position" }, "at"),
    make("th", { scope: "col", class: "weight" }, "weight"),
  ];
}

function fact(name, value) {
  return make("div", {}, make("dt", {}, name), make("dd", {}, value));
}

// "hungry" looks at / is looked at by
export function spoken(focus) {
  const texts = focus.picks.slice(0, 3).map((u) => `“${clipped(focus.sources.label(u), 18)}”`);
  if (!texts.length) return { title: ["Point at a token"], columns: "nothing chosen" };
  const who = texts.join(" + ") + (focus.picks.length > 3 ? ` + ${focus.picks.length - 3} more` : "");
  const many = focus.picks.length > 1;
  const verb = focus.to ? (many ? "look at" : "looks at") : many ? "are looked at by" : "is looked at by";
  return { title: [make("bdi", {}, who), " ", make("span", { class: "verb" }, verb)], columns: `${who} ${verb}` };
}

function noteOf(focus, store, state) {
  if (!focus.picks.length) return "Hover to look, click to keep, Shift-click to add. Press ? for all keys.";
  const unknown = store.unknownRows(focus.heads, state.seq);
  if (unknown) {
    const rows = `${unknown} of ${focus.layer.Tq * focus.heads.length} rows of ${focus.name}`;
    return `${rows} have weights that are NaN or infinite: nothing is drawn or counted there.`;
  }
  if (focus.exact) {
    const rounded = store.layers[focus.layer.number].entries === "log16" && !store.remote;
    const read = store.head.notes.length ? "Of what the model read, every entry" : "Every entry";
    return `${read} is here, ${rounded ? "to four digits" : "exact"}.`;
  }
  const k = store.topCount(focus.layer.number);
  if (store.remote) return "The heaviest keys first; every entry is on its way.";
  if (!k) return "This record kept no single entries, only pictures and statistics.";
  const kept = focus.to
    ? `the ${k} heaviest keys of each query are exact`
    : `only queries that have it among their ${k} heaviest keys are known`;
  return `Long text: in this file ${kept}; the rest is in the map’s pictures.`;
}
