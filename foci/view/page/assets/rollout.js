// Attention rollout: how much of each token reaches one token of the last layer, through the product of all layers.

import { make } from "./dom.js";
import { TextPane } from "./textpane.js";
import { formatPercent, createScale, shade } from "./colors.js";
import { chosenHeads, rankUnits, describeToken, getUnits } from "./focus.js";
import { clipText } from "./tokens.js";
import { textSvg } from "./export.js";

const CAVEAT =
  "Rollout (Abnar and Zuidema, 2020) takes half of each layer’s output from attention, averaged over heads, and half" +
  " from the residual stream. It ignores values, MLPs and norms: it shows where information could come from, not what" +
  " the model used.";

export class RolloutView {
  constructor({ store, state }) {
    Object.assign(this, { store, state });
    this.status = make("p", { class: "status", "aria-live": "polite" });
    this.pane = null;
    this.panes = make("div", { class: "panes" });
    this.list = make("ol", { class: "rolllist" });
    const caveat = make(
      "aside",
      { class: "caveat" },
      make("strong", {}, "Read with care. "),
      CAVEAT,
    );
    this.element = make(
      "section",
      { class: "view rollout", "aria-label": "Rollout" },
      caveat,
      this.status,
      this.panes,
      this.list,
    );
  }

  // The self-attention layers of the selected head's stack; for cross-attention, those of the selected text.
  stack(chosen) {
    const { store, state } = this;
    const text = state.direction === "to" ? chosen.queries : chosen.keys;
    const selves = store.layers.filter((layer) => layer.self);
    const alike = selves.find((layer) => layer.queries === text);
    const nearest = alike ?? selves.find((layer) => layer.stack === "decoder") ?? selves[0];
    const own = chosen.self ? chosen.stack : nearest?.stack;
    return store.layers.filter(
      (layer) => layer.self && layer.stack === own && !layer.name.includes("#"),
    ).sort((a, b) => a.index - b.index);
  }

  update() {
    const { store, state } = this;
    const chosen = store.layers[chosenHeads(store, state)[0].layer];
    const layers = this.stack(chosen);
    const last = layers.at(-1);
    if (!last) return this.refuse("Rollout needs self-attention, which this record does not have.");
    const picked = state.hover ?? state.chosen[0] ?? last.Tq - 1;
    // A selected key of self-attention is converted to its query.
    const wanted = chosen.self && state.direction === "from" ? picked - (chosen.Tk - chosen.Tq) : picked;
    const query = Math.min(Math.max(wanted, 0), last.Tq - 1);
    const flow = this.getRollout(layers, query);
    this.build(last);
    if (!flow) {
      return this.refuse(
        "Rollout needs all weights of every layer, which the file of a long text does not have. Use Record.rollout or the" +
          " explorer.",
      );
    }
    if (!flow.every(Number.isFinite)) {
      return this.refuse("Rollout is undefined: some weights are NaN or infinite.");
    }
    this.flow = flow;
    const units = getUnits(store, { ...state, words: false }, last, "keys");
    const sinks = this.sinksOf(layers);
    const hidden = state.hideSinks ? sinks : new Set();
    const shown = flow.map((w, j) => (hidden.has(j) ? 0 : w));
    const inSinks = [...sinks].reduce((sum, j) => sum + flow[j], 0);
    const scale = createScale(state.scale, shown);
    const place = store.keyPosition(last, query);
    // Named as it was selected: for a decoder position, the token generated there.
    const side = state.direction === "to" ? "queries" : "keys";
    const read = units.label(place);
    const named = describeToken(store, state, chosen, side, Math.min(picked, chosen[side === "queries" ? "Tq" : "Tk"] - 1));
    const after = chosen.self || read === named.token ? "" : `, generated after “${clipText(read, 24)}”,`;
    this.status.replaceChildren(
      "Rollout to ",
      make("bdi", { class: "wrote" }, named.token),
      `${named.place}${after} through ${layers.length} layer${layers.length > 1 ? "s" : ""}`,
      sinks.size ? `; ${formatPercent(inSinks)} of it is ${state.hideSinks ? "hidden in sinks" : "from sinks"}` : "",
    );
    this.pane.update({
      direction: "to",
      tint: (j) => scale.of(shown[j]),
      mark: (j) => (j === place ? "c" : "") + (hidden.has(j) ? "s" : ""),
    });
    this.list.replaceChildren(...rankUnits(shown, 10).map((j) => this.item(units.label(j), shown[j], scale)));
  }

  // Tokens that are sinks in at least half of the heads.
  sinksOf(layers) {
    const { store, state } = this;
    const heads = store.heads.filter(({ layer }) => layers.includes(store.layers[layer]));
    const counts = new Map();
    for (const one of heads) for (const j of store.sinks(one, state.seq)) counts.set(j, (counts.get(j) ?? 0) + 1);
    return new Set([...counts].filter(([, count]) => 2 * count >= heads.length).map(([j]) => j));
  }

  item(text, weight, scale) {
    const dot = make("span", { class: "dot", "aria-hidden": "true" });
    dot.style.backgroundColor = shade("to", scale.of(weight));
    return make("li", {}, dot, make("bdi", {}, clipText(text, 20)), make("span", { class: "value" }, formatPercent(weight)));
  }

  refuse(reason) {
    this.status.textContent = reason;
    this.list.replaceChildren();
    this.flow = null;
    this.pane?.update({ direction: "to", tint: () => 0, mark: () => "" });
  }

  build(layer) {
    const { store, state } = this;
    const signature = [layer.stack, state.seq, layer.Tk].join(" ");
    if (signature === this.signature) return;
    this.signature = signature;
    const query = (j) => Math.max(0, j - (layer.Tk - layer.Tq));
    this.pane = new TextPane({
      id: "rollout",
      name: layer.keys,
      texts: store.texts(layer, "keys", state.seq),
      words: store.labels(layer, "keys").words?.[state.seq],
      onhover: (j) => state.set({ hover: j === null ? null : query(j), ...(j === null ? {} : { direction: "to" }) }),
      onmove: (j) => state.set({ hover: query(j), direction: "to" }),
      onpick: (j) => state.set({ chosen: [query(j)], hover: null, direction: "to" }),
    });
    this.panes.replaceChildren(make("div", { class: "paneframe" }, this.pane.element));
  }

  getRollout(layers, query) {
    const { store, state } = this;
    if (layers.every((layer) => layer.exact)) return computeRollout(store, layers, query, state.seq);
    return store.remote?.rollout(layers.at(-1).stack, query, state.seq) ?? null;
  }

  repaint() {
    this.pane?.repaint();
  }

  svg(focus) {
    return textSvg(this.pane, { ...focus, name: "rollout" });
  }

  csv() {
    return [["position", "token", "rollout"], ...[...(this.flow ?? [])].map((w, j) => [j, this.pane.texts[j], w])];
  }
}

// The same products as foci.record.metrics.compute_rollout.
function computeRollout(store, layers, query, seq) {
  const last = layers.at(-1);
  let flow = new Float64Array(last.Tk);
  flow[store.keyPosition(last, query)] = 1;
  for (const layer of [...layers].reverse()) {
    const next = Float64Array.from(flow);
    const row = new Float32Array(layer.Tk);
    for (let i = 0; i < layer.Tq; i++) {
      const here = flow[store.keyPosition(layer, i)];
      if (!here) continue;
      row.fill(0);
      for (let h = 0; h < layer.heads; h++) {
        store.addRow(row, { layer: layer.number, head: h }, i, seq, 1 / layer.heads);
      }
      let seen = 0;
      for (let j = 0; j < row.length; j++) {
        next[j] += 0.5 * here * row[j];
        seen += row[j];
      }
      next[store.keyPosition(layer, i)] -= 0.5 * here * seen;
    }
    flow = next;
  }
  return Float32Array.from(flow);
}
