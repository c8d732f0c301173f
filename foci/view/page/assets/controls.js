// The second line of the page: how to look. Direction, colours, words, sinks, and which sequence.

import { choice, make, toggle } from "./dom.js";
import { percent } from "./colors.js";

const SINKS = "A sink takes a tenth of a head’s attention or more, and five times an even share (s)";

export class Controls {
  constructor(store, state, turn) {
    Object.assign(this, { store, state });
    this.hasWords = store.head.labels.some((labels) => labels.words);
    this.switches = [...this.choices(turn), ...this.toggles()];
    this.sinkShare = make("span", { class: "sinkshare" });
    const [direction, scale, ...toggles] = this.switches;
    const label = (text) => make("span", { class: "label" }, text);
    const parts = [label("tint by"), direction, label("colours"), scale, ...toggles, this.sinkShare];
    if (store.head.sequences > 1) parts.unshift(label("sequence"), this.sequences());
    this.element = make("div", { class: "controls", role: "toolbar", "aria-label": "How to look" }, ...parts);
  }

  choices(turn) {
    const { state } = this;
    const directions = [["to", "where it looks", "d"], ["from", "who looks at it", "d"]];
    const scales = [["linear", "linear", "c"], ["log", "log", "c"], ["rank", "rank", "c"]];
    return [
      choice("Direction", directions, () => state.direction, turn),
      choice("Colours", scales, () => state.scale, (scale) => state.set({ scale })),
    ];
  }

  toggles() {
    const { state } = this;
    const flip = (name) => () => state.set({ [name]: !state[name] });
    const words = toggle("words", "Words instead of sub-words (w)", () => state.words, flip("words"));
    words.hidden = !this.hasWords;
    return [words, toggle("hide sinks", SINKS, () => state.hideSinks, flip("hideSinks"))];
  }

  sequences() {
    const { head } = this.store;
    const options = Array.from({ length: head.sequences }, (_, b) => make("option", { value: String(b) }, String(b)));
    const onchange = () => this.state.set({ seq: Number(this.sequence.value), chosen: [], hover: null });
    this.sequence = make("select", { "aria-label": "Sequence", onchange }, ...options);
    return this.sequence;
  }

  update(focus) {
    for (const part of this.switches) part.refresh();
    if (this.sequence) this.sequence.value = String(this.state.seq);
    this.sinkShare.textContent = sinkWords(focus, this.state.hideSinks);
  }
}

// Of what is looked at now; of the whole head where nothing is, or where somebody is looked at.
function sinkWords({ picks, to, sinks, sinkShare, headShare }, hidden) {
  if (!sinks.size) return "no sinks in this head";
  const where = hidden ? "hidden in sinks" : "in sinks";
  if (picks.length && to) return `${percent(sinkShare)} of this look is ${where}`;
  return `${percent(headShare)} of this head is ${where}`;
}
