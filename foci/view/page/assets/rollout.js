// Attention rollout: how much of each token reaches one token of the last layer, through the product of all layers. In an
// encoder-decoder it goes from the decoder through cross-attention to the source.

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
const TOO_LONG =
  "Rollout needs all weights of every layer, which the file of a long text does not have. Use Record.rollout or the" +
  " explorer.";

export class RolloutView {
  constructor({ store, state }) {
    Object.assign(this, { store, state, parts: [] });
    this.status = make("p", { class: "status", "aria-live": "polite" });
    this.panes = make("div", { class: "panes" });
    this.list = make("ol", { class: "rolllist" });
    const caveat = make("aside", { class: "caveat" }, make("strong", {}, "Read with care. "), CAVEAT);
    this.element = make(
      "section",
      { class: "view rollout", "aria-label": "Rollout" },
      caveat,
      this.status,
      this.panes,
      this.list,
    );
  }

  update() {
    const { store, state } = this;
    const chosen = store.layers[chosenHeads(store, state)[0].layer];
    const plan = planRollout(store, state, chosen);
    if (!plan) return this.refuse("Rollout needs self-attention, which this record does not have.");
    const picked = state.hover ?? state.chosen[0] ?? plan.queries - 1;
    // A selected key of self-attention is converted to its query.
    const wanted = chosen.self && state.direction === "from" ? picked - (chosen.Tk - chosen.Tq) : picked;
    const query = Math.min(Math.max(wanted, 0), plan.queries - 1);
    this.build(plan);
    const flows = this.getFlows(plan, query);
    if (!flows) return this.refuse(TOO_LONG);
    if (!flows.every((flow) => flow.every(Number.isFinite))) {
      return this.refuse("Rollout is undefined: some weights are NaN or infinite.");
    }
    this.draw(plan, flows, plan.place(query));
    this.describe(plan, chosen, picked, plan.place(query), flows);
  }

  // Colors the texts, and lists the tokens with the largest shares.
  draw(plan, flows, place) {
    const { store, state } = this;
    const count = flows.reduce((sum, flow) => sum + flow.length, 0);
    const hidden = this.parts.map(({ sinks }) => (state.hideSinks ? sinks : new Set()));
    const shown = flows.map((flow, n) => flow.map((w, j) => (hidden[n].has(j) ? 0 : w)));
    const scale = createScale(state.scale, shown.flatMap((flow) => [...flow]), 1 / count);
    this.flows = flows;
    this.parts.forEach(({ pane, layer, own }, n) => pane.update({
      direction: "to",
      tint: (j) => scale.of(shown[n][j]),
      mark: (j) => (own && j === place ? "c" : "") + (hidden[n].has(j) ? "s" : ""),
    }));
    const all = this.parts.flatMap(({ layer, side }, n) => {
      const units = getUnits(store, { ...state, words: false }, layer, side);
      return rankUnits(shown[n], 10).map((j) => [units.label(j), shown[n][j]]);
    });
    all.sort(([, a], [, b]) => b - a);
    this.list.replaceChildren(...all.slice(0, 10).map(([text, weight]) => createItem(text, weight, scale)));
  }

  describe(plan, chosen, picked, place, flows) {
    const { store, state } = this;
    // Named as it was selected: for a decoder position, the token generated there.
    const side = state.direction === "to" ? "queries" : "keys";
    const own = this.parts.at(-1);
    const read = getUnits(store, { ...state, words: false }, own.layer, own.side).label(place);
    const named = describeToken(store, state, chosen, side, Math.min(picked, chosen[side === "queries" ? "Tq" : "Tk"] - 1));
    const after = chosen.self || read === named.token ? "" : `, generated after “${clipText(read, 24)}”,`;
    const inSinks = this.parts.reduce((sum, { sinks }, n) => sum + [...sinks].reduce((s, j) => s + flows[n][j], 0), 0);
    const sinkNote = `; ${formatPercent(inSinks)} of it is ${state.hideSinks ? "hidden in sinks" : "from sinks"}`;
    this.status.replaceChildren(
      "Rollout to ",
      make("bdi", { class: "wrote" }, named.token),
      `${named.place}${after} through ${plan.title}`,
      inSinks > 0 ? sinkNote : "",
    );
    this.parts.forEach(({ share }, n) => {
      if (share) share.textContent = `${formatPercent(flows[n].reduce((sum, w) => sum + w, 0))} of the rollout`;
    });
  }

  // Tokens that are sinks in at least half of the heads.
  sinksOf(layers) {
    const { store, state } = this;
    const heads = store.heads.filter(({ layer }) => layers.includes(store.layers[layer]));
    const counts = new Map();
    for (const one of heads) for (const j of store.sinks(one, state.seq)) counts.set(j, (counts.get(j) ?? 0) + 1);
    return new Set([...counts].filter(([, count]) => 2 * count >= heads.length).map(([j]) => j));
  }

  refuse(reason) {
    this.status.textContent = reason;
    this.list.replaceChildren();
    this.flows = null;
    for (const { pane } of this.parts) pane.update({ direction: "to", tint: () => 0, mark: () => "" });
  }

  build(plan) {
    const { state } = this;
    const signature = [plan.title, state.seq, ...plan.texts.map(({ layer, side }) => `${layer.number} ${side}`)].join(" ");
    if (signature === this.signature) return;
    this.signature = signature;
    this.parts = plan.texts.map((text) => ({ ...text, pane: this.pane(plan, text), sinks: this.sinksOf(text.layers) }));
    this.panes.replaceChildren(
      ...this.parts.map((part) => {
        const several = this.parts.length > 1;
        part.share = several ? make("span", { class: "axis" }) : null;
        const heading = several ? make("h3", {}, part.layer[part.side], part.share) : null;
        return make("div", { class: "paneframe" }, heading, part.pane.element);
      }),
    );
  }

  // A token of the decoder's own text can be selected; one of the source cannot.
  pane(plan, { layer, side, own }) {
    const { store, state } = this;
    const query = (j) => Math.min(Math.max(0, j - plan.place(0)), plan.queries - 1);
    const choose = (changes) => own && state.set({ ...changes, direction: "to" });
    return new TextPane({
      id: `rollout-${side}-${layer.number}`,
      name: layer[side],
      texts: store.texts(layer, side, state.seq),
      words: store.labels(layer, side).words?.[state.seq],
      onhover: (j) => (j === null ? state.set({ hover: null }) : choose({ hover: query(j) })),
      onmove: (j) => choose({ hover: query(j) }),
      onpick: (j) => choose({ chosen: [query(j)], hover: null }),
    });
  }

  // The shares of each text, or null if they are not here yet.
  getFlows(plan, query) {
    const { store, state } = this;
    if (plan.layers.every((layer) => layer.exact)) return plan.compute(query);
    const found = store.remote?.rollout(plan.stack, query, state.seq);
    if (!found) return null;
    const { layer, side } = plan.texts[0];
    const first = side === "keys" ? layer.Tk : layer.Tq;
    return plan.texts.length === 1 ? [found] : [found.subarray(0, first), found.subarray(first)];
  }

  repaint() {
    for (const { pane } of this.parts) pane.repaint();
  }

  svg(focus) {
    return textSvg(this.parts[0].pane, { ...focus, name: "rollout", to: true });
  }

  csv() {
    const rows = (this.flows ?? []).flatMap((flow, n) => {
      const { layer, side, pane } = this.parts[n];
      return [...flow].map((w, j) => [layer[side], j, pane.texts[j], w]);
    });
    return [["text", "position", "token", "rollout"], ...rows];
  }
}

function createItem(text, weight, scale) {
  const dot = make("span", { class: "dot", "aria-hidden": "true" });
  dot.style.backgroundColor = shade("to", scale.of(weight));
  return make("li", {}, dot, make("bdi", {}, clipText(text, 20)), make("span", { class: "value" }, formatPercent(weight)));
}

// What a rollout goes through: { stack, title, layers, queries, place(query), texts, compute(query) }.
function planRollout(store, state, chosen) {
  const first = store.layers.filter((layer) => !layer.name.includes("#")).sort((a, b) => a.index - b.index);
  const [selves, crosses] = [first.filter((layer) => layer.self), first.filter((layer) => !layer.self)];
  const text = state.direction === "to" ? chosen.queries : chosen.keys;
  if (crosses.length && text !== crosses[0].keys) return planCross(store, state, selves, crosses);
  const stack = chosen.self ? chosen.stack : selves.find((layer) => layer.queries === text)?.stack;
  const layers = selves.filter((layer) => layer.stack === stack);
  const last = layers.at(-1);
  if (!last) return null;
  return {
    stack,
    title: countLayers(layers),
    layers,
    queries: last.Tq,
    place: (query) => store.keyPosition(last, query),
    texts: [{ layer: last, side: "keys", layers, own: true }],
    compute: (query) => [Float32Array.from(rollBack(store, layers, mark(last.Tk, store.keyPosition(last, query)), state.seq))],
  };
}

// From the decoder through cross-attention and the encoder to the source; the target keeps the rest.
function planCross(store, state, selves, crosses) {
  const last = crosses.at(-1);
  const encoder = selves.filter((layer) => layer.keys === last.keys && layer.Tk === last.Tk);
  const decoder = selves.filter((layer) => !encoder.includes(layer) && layer.Tq === last.Tq);
  const own = decoder.at(-1);
  const place = (query) => (own ? store.keyPosition(own, query) : query);
  return {
    stack: last.stack,
    title: `${countLayers(decoder.length ? decoder : crosses)} with cross-attention and ${countLayers(encoder)} of the encoder`,
    layers: [...encoder, ...decoder, ...crosses],
    queries: last.Tq,
    place,
    texts: [
      { layer: last, side: "keys", layers: encoder, own: false },
      { layer: own ?? last, side: own ? "keys" : "queries", layers: decoder, own: true },
    ],
    compute: (query) => {
      const [target, source] = [mark(own ? own.Tk : last.Tq, place(query)), new Float64Array(last.Tk)];
      // Cross-attention follows self-attention in a layer; the flow goes back in the reverse order.
      const order = [...decoder, ...crosses].sort((a, b) => b.index - a.index || Number(a.self) - Number(b.self));
      for (const layer of order) {
        if (layer.self) rollBack(store, [layer], target, state.seq);
        else splitFlow(store, layer, target, place, state.seq).forEach((w, j) => (source[j] += w));
      }
      rollBack(store, encoder, source, state.seq);
      return [source, target].map((flow) => Float32Array.from(flow));
    },
  };
}

function countLayers(layers) {
  return `${layers.length} layer${layers.length === 1 ? "" : "s"}`;
}

function mark(length, place) {
  const flow = new Float64Array(length);
  flow[place] = 1;
  return flow;
}

// The same products as foci.record.metrics.compute_rollout: changes the flow into that before the layers.
function rollBack(store, layers, flow, seq) {
  for (const layer of [...layers].reverse()) {
    splitFlow(store, layer, flow, (i) => store.keyPosition(layer, i), seq).forEach((w, j) => (flow[j] += w));
  }
  return flow;
}

// Leaves in the flow what each query has from the residual, and returns what it has from each key.
function splitFlow(store, layer, flow, place, seq) {
  const attended = new Float64Array(layer.Tk);
  const row = new Float32Array(layer.Tk);
  for (let i = 0; i < layer.Tq; i++) {
    const here = flow[place(i)];
    if (!here) continue;
    row.fill(0);
    for (let h = 0; h < layer.heads; h++) {
      store.addRow(row, { layer: layer.number, head: h }, i, seq, 1 / layer.heads);
    }
    const share = here / (1 + row.reduce((sum, w) => sum + w, 0));
    row.forEach((w, j) => (attended[j] += share * w));
    flow[place(i)] = share;
  }
  return attended;
}
