// The second line of the page: direction, color scale, words or tokens, sinks, and sequence.

import { choice, labelled, make, toggle } from "./dom.js";
import { formatPercent } from "./colors.js";
import { SINKS } from "./store.js";

export class Controls {
  constructor(store, state, setDirection) {
    Object.assign(this, { store, state });
    this.hasWords = store.header.labels.some((labels) => labels.words);
    this.switches = [...this.choices(setDirection), ...this.toggles()];
    this.sinkShare = make("span", { class: "sinkshare", title: SINKS });
    const [direction, scale, ...toggles] = this.switches;
    const parts = [labelled("color by", direction), labelled("scale", scale), ...toggles, this.sinkShare];
    if (store.header.sequences > 1) parts.unshift(labelled("sequence", this.sequences()));
    this.element = make("div", { class: "controls", role: "toolbar", "aria-label": "Display options" }, ...parts);
  }

  choices(setDirection) {
    const { state } = this;
    const directions = [
      ["to", "attends to", "Color the tokens that the selected token attends to: its keys (d)"],
      ["from", "attended by", "Color the tokens that attend to the selected token: its queries (d)"],
    ];
    const scales = [
      ["linear", "linear", "The color is proportional to the weight: a weight half as large is half as dark (c)"],
      ["log", "log", "Each quarter of the colors is a factor of ten, so that weights down to 1/10,000 of the largest are visible (c)"],
      ["rank", "rank", "The color is the place in the order of the weights, whatever their size: the median has the middle color (c)"],
    ];
    return [
      choice("Direction", directions, () => state.direction, setDirection),
      choice("Color scale", scales, () => state.scale, (scale) => state.set({ scale })),
    ];
  }

  toggles() {
    const { state } = this;
    const flip = (name) => () => state.set({ [name]: !state[name] });
    this.words = toggle("words", "Add up the tokens of each word (w)", () => state.words, flip("words"));
    this.hideSinks = toggle("hide sinks", `${SINKS} (s)`, () => state.hideSinks, flip("hideSinks"));
    return [this.words, this.hideSinks];
  }

  sequences() {
    const { header } = this.store;
    const options = Array.from({ length: header.sequences }, (_, b) => make("option", { value: String(b) }, String(b)));
    const onchange = () => this.state.set({ seq: Number(this.sequence.value), chosen: [], hover: null });
    this.sequence = make("select", { "aria-label": "Sequence", onchange }, ...options);
    return this.sequence;
  }

  update(focus) {
    for (const part of this.switches) part.refresh();
    if (this.sequence) this.sequence.value = String(this.state.seq);
    // Two records are compared token by token, with their sinks.
    const isCompared = this.state.view === "compare";
    this.words.hidden = !this.hasWords || isCompared;
    const shown = this.store.canHaveSinks(focus.layer) && !isCompared;
    this.hideSinks.hidden = this.sinkShare.hidden = !shown;
    if (shown) this.sinkShare.textContent = describeSinks(focus, this.state.hideSinks);
  }
}

// The share of the selected queries, or of the whole head if none or keys are selected.
function describeSinks({ picks, to, sinks, sinkShare, headShare }, hidden) {
  if (!sinks.size) return "no sinks in this head";
  const where = hidden ? "hidden in sinks" : "in sinks";
  if (picks.length && to) return `${formatPercent(sinkShare)} of its attention is ${where}`;
  return `${formatPercent(headShare)} of this head’s attention is ${where}`;
}
