// Generation, one step after the other: what was written, and where the model looked while it wrote it.

import { button, make } from "./dom.js";
import { TextPane } from "./textpane.js";
import { scaleOf, shade } from "./colors.js";
import { chosenHeads } from "./focus.js";
import { clipped, label } from "./tokens.js";
import { csvOf, textSvg } from "./exporting.js";
import { queryAt } from "./text.js";

const PACE = 700;
// From so many steps on bars are thin, so that some hundreds stand side by side.
const MANY = 80;

// The steps of a record: after a prompt in one text, or along the text that a decoder writes.
export function stepsOf(store, layer, seq) {
  const { prompt } = store.head;
  const written = store.texts(layer, "queries", seq);
  if (layer.self) {
    const texts = store.texts(layer, "keys", seq);
    const first = prompt ?? 1;
    // The token at position p was written by the query before it.
    return Array.from(
      { length: Math.max(0, texts.length - first) },
      (_, n) => ({ position: first + n, query: queryAt(store, layer, first + n - 1), text: texts[first + n] }),
    ).filter(({ query }) => query !== null);
  }
  // Between two texts the rows are named by what was read, as the decoder's own are, or by what was being written.
  const ahead = store.layers.some((other) => other.self && other.queries === layer.queries) ? 1 : 0;
  return written.map((_, i) => ({ position: i + ahead, query: i, text: written[i + ahead] ?? "the end" }));
}

// What is being written, who writes it, and what is not there yet.
function markOf(i, writer, written) {
  if (i === written) return "n";
  if (i === writer) return "c";
  return i > written ? "l" : "";
}

export class StepsView {
  constructor({ store, state }) {
    Object.assign(this, { store, state });
    this.play = button("▶", { title: "Play (p)", class: "play", onclick: () => this.toggle() });
    this.slider = make("input", {
      type: "range",
      min: 0,
      step: 1,
      "aria-label": "Step",
      oninput: () => this.go(Number(this.slider.value)),
    });
    this.told = make("p", { class: "told", "aria-live": "polite" });
    this.strip = make("div", { class: "stepstrip" });
    this.panes = make("div", { class: "panes" });
    const moves = make(
      "div",
      { class: "choice" },
      button("‹", { title: "One step back", onclick: () => this.go(this.state.step - 1) }),
      this.play,
      button("›", { title: "One step on", onclick: () => this.go(this.state.step + 1) }),
    );
    this.element = make(
      "section",
      { class: "view steps", "aria-label": "Steps" },
      make("div", { class: "tools" }, moves, this.slider),
      this.told,
      this.strip,
      make("p", { class: "stripnote" }, "a bar for each step: how spread its attention was"),
      this.panes,
    );
  }

  toggle() {
    if (this.timer) return this.stop();
    this.play.textContent = "❚❚";
    if (this.state.step >= this.steps.length - 1) this.go(0);
    this.timer = setInterval(
      () => (this.state.step >= this.steps.length - 1 ? this.stop() : this.go(this.state.step + 1)),
      PACE,
    );
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "▶";
  }

  leave() {
    if (this.timer) this.stop();
  }

  go(step) {
    const n = Math.min(Math.max(step, 0), this.steps.length - 1);
    this.state.set({ step: n, chosen: [this.steps[n].query], direction: "to", hover: null });
  }

  // The step decides what is chosen, so that the list beside shows the same row.
  arrive() {
    const layer = this.store.layers[chosenHeads(this.store, this.state)[0].layer];
    this.steps = stepsOf(this.store, layer, this.state.seq);
    if (this.steps.length) this.go(this.state.step);
  }

  update(focus) {
    const { layer } = focus;
    this.steps = stepsOf(this.store, layer, this.state.seq);
    if (!this.steps.length) {
      this.told.textContent = "Nothing was written after the prompt.";
      return;
    }
    this.build(focus);
    const n = Math.min(this.state.step, this.steps.length - 1);
    const { position, query, text } = this.steps[n];
    this.slider.max = this.steps.length - 1;
    this.slider.value = n;
    this.told.replaceChildren(
      `Step ${n + 1} of ${this.steps.length}: it wrote `,
      make("bdi", { class: "wrote" }, clipped(label(text), 30)),
      `, and looked like this in ${focus.name}.`,
    );
    this.press(n);
    const scale = scaleOf(this.state.scale, focus.units);
    const place = this.store.place(layer, query);
    const hidden = this.state.hideSinks ? focus.sinks : new Set();
    this.keysPane.update({
      direction: "to",
      // Of a word that is half written, what is to come was not there to be looked at.
      tint: (j) => (layer.self && j >= position ? 0 : scale.of(focus.units[focus.targets.of[j]])),
      mark: (j) => (layer.self ? markOf(j, place, position) : "") + (hidden.has(j) ? "s" : ""),
    });
    if (layer.self) this.keysPane.reveal(position);
    this.writtenPane?.update({
      direction: "to",
      tint: () => 0,
      mark: (i) => markOf(i, query, position),
    });
    this.writtenPane?.reveal(query);
  }

  // The bar of a step, pressed and in sight.
  press(n) {
    for (const bar of this.strip.children) bar.setAttribute("aria-pressed", String(Number(bar.dataset.step) === n));
    const bar = this.strip.children[n];
    if (!bar) return;
    const left = bar.offsetLeft - this.strip.offsetLeft;
    const { scrollLeft, clientWidth } = this.strip;
    if (left < scrollLeft || left + bar.offsetWidth > scrollLeft + clientWidth) {
      this.strip.scrollLeft = left - clientWidth / 2;
    }
  }

  build({ layer }) {
    const signature = [layer.number, this.state.seq, this.state.heads.join(".")].join(" ");
    if (signature === this.signature) return;
    this.signature = signature;
    const { store, state } = this;
    const pane = (side, pick) => new TextPane({
      id: `steps-${side}`,
      name: `${layer[side]}`,
      texts: store.texts(layer, side, state.seq),
      words: store.labels(layer, side).words?.[state.seq],
      onhover: () => {},
      onmove: () => {},
      onpick: pick,
    });
    const jump = (position) => this.go(this.steps.findIndex((step) => step.position === position));
    this.keysPane = pane("keys", layer.self ? jump : () => {});
    this.writtenPane = layer.self ? null : pane("queries", (i) => this.go(i));
    const framed = (title, axis, one) => make(
      "div",
      { class: "paneframe" },
      make("h3", {}, title, make("span", { class: "axis" }, axis)),
      one.element,
    );
    this.panes.replaceChildren(
      ...(this.writtenPane ? [framed(layer.queries, "is written", this.writtenPane)] : []),
      framed(layer.keys, "is looked at", this.keysPane),
    );
    this.strip.replaceChildren(...this.bars(layer));
    this.strip.classList.toggle("many", this.steps.length > MANY);
  }

  // One bar per step: how spread the attention was, as a share of the most that it could be.
  bars(layer) {
    const one = chosenHeads(this.store, this.state)[0];
    return this.steps.slice(0, 400).map(({ query, text }, n) => {
      const nats = this.store.entropy(one, query, this.state.seq);
      const most = Math.log(Math.max(2, layer.self ? this.store.place(layer, query) + 1 : layer.Tk));
      const bar = button("", {
        class: "stepbar",
        "data-step": String(n),
        title: `step ${n + 1}: ${label(text)}${nats === null ? "" : ` · entropy ${nats.toFixed(2)} nats`}`,
        "aria-label": `step ${n + 1}: ${label(text)}`,
        onclick: () => this.go(n),
      });
      const fill = make("span");
      fill.style.height = `${Math.max(6, Math.min(100, (100 * (nats ?? 0)) / most))}%`;
      fill.style.backgroundColor = shade("from", 0.55);
      bar.append(fill);
      return bar;
    });
  }

  repaint() {
    this.keysPane?.repaint();
    this.writtenPane?.repaint();
  }

  svg(focus) {
    return textSvg(this.keysPane, focus);
  }

  csv(focus) {
    return csvOf(focus);
  }
}
