// The second line of the page: direction, color scale, words or tokens, sinks, and sequence.

import { choice, make, toggle } from "./dom.js";
import { formatPercent } from "./colors.js";

const SINKS = "An attention sink is a key with at least 10% of a head’s attention and five times a uniform share (s)";

export class Controls {
  constructor(store, state, setDirection) {
    Object.assign(this, { store, state });
    this.hasWords = store.header.labels.some((labels) => labels.words);
    this.switches = [...this.choices(setDirection), ...this.toggles()];
    this.sinkShare = make("span", { class: "sinkshare" });
    const [direction, scale, ...toggles] = this.switches;
    const label = (text) => make("span", { class: "label" }, text);
    const parts = [label("color by"), direction, label("scale"), scale, ...toggles, this.sinkShare];
    if (store.header.sequences > 1) parts.unshift(label("sequence"), this.sequences());
    this.element = make("div", { class: "controls", role: "toolbar", "aria-label": "Display options" }, ...parts);
  }

  choices(setDirection) {
    const { state } = this;
    const directions = [
      ["to", "attends to", "Keys that the selected token attends to (d)"],
      ["from", "attended by", "Queries that attend to the selected token (d)"],
    ];
    const scales = [
      ["linear", "linear", "Color proportional to the weight (c)"],
      ["log", "log", "Color by the logarithm of the weight (c)"],
      ["rank", "rank", "Color by the rank of the weight (c)"],
    ];
    return [
      choice("Direction", directions, () => state.direction, setDirection),
      choice("Color scale", scales, () => state.scale, (scale) => state.set({ scale })),
    ];
  }

  toggles() {
    const { state } = this;
    const flip = (name) => () => state.set({ [name]: !state[name] });
    const words = toggle("words", "Words instead of tokens (w)", () => state.words, flip("words"));
    words.hidden = !this.hasWords;
    return [words, toggle("hide sinks", SINKS, () => state.hideSinks, flip("hideSinks"))];
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
    this.sinkShare.textContent = describeSinks(focus, this.state.hideSinks);
  }
}

// The share of the selected queries, or of the whole head if none or keys are selected.
function describeSinks({ picks, to, sinks, sinkShare, headShare }, hidden) {
  if (!sinks.size) return "no sinks in this head";
  const where = hidden ? "hidden in sinks" : "in sinks";
  if (picks.length && to) return `${formatPercent(sinkShare)} of its attention is ${where}`;
  return `${formatPercent(headShare)} of this head’s attention is ${where}`;
}
