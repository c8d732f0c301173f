// The text, colored by the attention of the selected tokens.

import { make, button } from "./dom.js";
import { TextPane } from "./textpane.js";
import { createScale } from "./colors.js";
import { createAnswer } from "./answer.js";
import { LayerStrip } from "./layerstrip.js";
import { focusCsv, textSvg } from "./export.js";

const MAX_HITS = 10000;

export class TextView {
  constructor({ store, state }) {
    Object.assign(this, { store, state });
    this.input = make("input", {
      type: "search",
      placeholder: "Find in the text",
      "aria-label": "Find in the text",
      class: "find",
      oninput: () => state.set({ find: this.input.value }),
      onkeydown: (event) => event.key === "Enter" && this.next(event.shiftKey ? -1 : 1),
    });
    this.count = make("span", { class: "count", "aria-live": "polite" });
    const steps = [
      button("↑", { title: "Previous (Shift+Enter)", onclick: () => this.next(-1) }),
      button("↓", { title: "Next (Enter)", onclick: () => this.next(1) }),
    ];
    this.tools = make("div", { class: "tools" }, this.input, ...steps, this.count, createAnswer(store));
    this.panes = make("div", { class: "panes" });
    this.strip = new LayerStrip(store, state);
    this.element = make(
      "section",
      { class: "view text", "aria-label": "Text" },
      this.tools,
      this.panes,
      this.strip.element,
    );
    new ResizeObserver(() => this.drawStrip()).observe(this.panes);
    this.at = 0;
  }

  build(focus) {
    const { layer } = focus;
    const signature = [layer.queries, layer.keys, layer.Tq, layer.Tk, this.state.seq].join(" ");
    if (signature === this.signature) return;
    this.signature = signature;
    this.searched = null;
    const sides = layer.self ? ["keys"] : ["queries", "keys"];
    this.bySide = new Map(sides.map((side) => [side, this.pane(layer, side)]));
    // Scrolls to the token that a link selects.
    const first = this.state.chosen[0];
    if (first !== undefined) {
      const pane = this.bySide.get(layer.self ? "keys" : focus.from);
      pane.wanted = layer.self && focus.to ? this.store.keyPosition(layer, first) : first;
    }
    this.panes.replaceChildren(
      ...sides.map((side) => {
                const heading = layer.self ? null : make("h3", {}, layer[side], make("span", { class: "axis" }, side));
        return make("div", { class: "paneframe" }, heading, this.bySide.get(side).element);
      }),
    );
  }

  pane(layer, side) {
    const { store, state } = this;
    // In self-attention, position j is a key, and a query if there is one.
    const direction = () => (layer.self ? state.direction : side === "queries" ? "to" : "from");
    const index = (i) => (layer.self && state.direction === "to" ? queryAt(store, layer, i) : i);
    return new TextPane({
      id: `pane-${side}`,
      name: `${layer[side]}: arrow keys move, Enter selects, Shift+Enter adds`,
      texts: store.texts(layer, side, state.seq),
      words: store.labels(layer, side).words?.[state.seq],
      onhover: (i) => state.set({
        hover: i === null ? null : index(i),
        ...(i === null ? {} : { direction: direction() }),
      }),
      onmove: (i) => state.set({ hover: index(i), direction: direction() }),
      onpick: (i, add) => {
        const place = index(i);
        if (place === null) return;
        const kept = direction() === state.direction ? state.chosen : [];
        const without = kept.filter((other) => other !== place);
        const fewer = add || kept.length === 1 ? without : [place];
        const more = add ? [...kept, place] : [place];
        const chosen = kept.includes(place) ? fewer : more;
        state.set({ chosen, hover: null, direction: direction() });
      },
    });
  }

  update(focus) {
    this.build(focus);
    const { state, store } = this;
    if (document.activeElement !== this.input) this.input.value = state.find;
    this.search(focus);
    const scale = createScale(state.scale, focus.units, focus.uniform);
    const direction = focus.to ? "to" : "from";
    const chosen = new Set(focus.picks.flatMap((u) => range(focus.sources.start[u], focus.sources.stop[u])));
    for (const [side, pane] of this.bySide) {
      const isTarget = focus.layer.self || side === focus.other;
      const isSource = focus.layer.self || side === focus.from;
      // Self-attention has one text, whose positions are those of the keys.
      const toTarget = (j) => (focus.layer.self && !focus.to ? queryAt(store, focus.layer, j) : j);
      const toSource = (j) => (focus.layer.self && focus.to ? queryAt(store, focus.layer, j) : j);
      pane.update({
        direction,
        tint: (j) => (isTarget && toTarget(j) !== null ? scale.of(focus.units[focus.targets.of[toTarget(j)]]) : 0),
        mark: (j) =>
          (isSource && toSource(j) !== null && chosen.has(toSource(j)) ? "c" : "") +
          (this.hits.has(side) && this.hits.get(side).set.has(j) ? "f" : "") +
          (side === "keys" && focus.to && state.hideSinks && focus.sinks.has(j) ? "s" : ""),
      });
    }
    this.focus = focus;
    this.drawStrip();
  }

  // Uses the height that the texts leave.
  drawStrip() {
    if (!this.focus) return;
    const taken = [...this.bySide.values()].reduce((sum, pane) => sum + pane.sheet.offsetHeight + 60, 0);
    this.strip.update(this.focus, this.element.clientHeight - this.tools.offsetHeight - taken);
  }

  search(focus) {
    const key = `${this.signature} ${this.state.find}`;
    if (key === this.searched) return;
    this.searched = key;
    this.at = -1;
    this.hits = new Map();
    if (this.state.find) for (const [side, pane] of this.bySide) this.hits.set(side, findHits(pane, this.state.find));
    const total = [...this.hits.values()].reduce((sum, { list }) => sum + list.length, 0);
    this.count.textContent = this.state.find ? (total ? `${total.toLocaleString("en")} found` : "not found") : "";
    if (total) this.next(1);
  }

  next(step) {
    const all = [...(this.hits ?? [])].flatMap(([side, { list }]) => list.map((i) => [side, i]));
    if (!all.length) return;
    this.at = (this.at + step + all.length) % all.length;
    const [side, i] = all[this.at];
    const pane = this.bySide.get(side);
    pane.cursor = i;
    pane.reveal(i);
    pane.refresh();
    this.count.textContent = `${(this.at + 1).toLocaleString("en")} of ${all.length.toLocaleString("en")}`;
  }

  repaint() {
    for (const pane of this.bySide?.values() ?? []) pane.repaint();
  }

  focusSearch() {
    this.input.focus();
    this.input.select();
  }

  svg(focus) {
    const side = focus.layer.self ? "keys" : focus.other;
    return textSvg(this.bySide.get(side), focus);
  }

  csv(focus) {
    return focusCsv(focus);
  }
}

function range(start, stop) {
  return Array.from({ length: stop - start }, (_, n) => start + n);
}

// The query at position j, or null.
export function queryAt(store, layer, j) {
  if (layer.queryPositions) {
    const i = layer.queryPositions.indexOf(j);
    return i < 0 ? null : i;
  }
  const i = j - (layer.Tk - layer.Tq);
  return i >= 0 && i < layer.Tq ? i : null;
}

// Finds tokens in the running text, across token boundaries and ignoring case.
function findHits(pane, sought) {
  if (!pane.running) {
    pane.offsets = new Int32Array(pane.texts.length + 1);
    const parts = pane.texts.map(
      (text, i) => (pane.hasGap(i) && !text.startsWith(" ") ? ` ${text}` : text).toLowerCase(),
    );
    parts.forEach((part, i) => (pane.offsets[i + 1] = pane.offsets[i] + part.length));
    pane.running = parts.join("");
  }
  const [list, set] = [[], new Set()];
  const wanted = sought.toLowerCase();
  let token = 0;
  const after = (at) => pane.running.indexOf(wanted, at);
  for (let at = after(0); at >= 0 && list.length < MAX_HITS; at = after(at + wanted.length)) {
    while (pane.offsets[token + 1] <= at) token++;
    // A match that starts in a gap belongs to the token after it.
    const first = token;
    list.push(first);
    for (let i = first; i < pane.texts.length && pane.offsets[i] < at + wanted.length; i++) set.add(i);
  }
  return { list, set };
}
