// Computes the attention of the selected tokens and heads. All views share this result, so they agree.

import { clipText, groupUnits } from "./tokens.js";

// The selected heads that have the same queries and keys, else the first head of the record.
export function chosenHeads(store, state) {
  const named = state.heads.flatMap((name) => findHeads(store, name));
  const first = named[0] ?? store.heads[0];
  const layer = store.layers[first.layer];
  return (named.length ? named : [first]).filter((one) => {
    const other = store.layers[one.layer];
    return ["queries", "keys", "Tq", "Tk"].every((name) => other[name] === layer[name]);
  });
}

// "L5H3" is a head, "L5" all heads of a layer.
export function findHeads(store, name) {
  if (store.byName.has(name)) return [store.byName.get(name)];
  return store.heads.filter((one) => store.layers[one.layer].label === name);
}

export function describeHeads(heads, store) {
  if (heads.length === 1) return heads[0].name;
  const layer = store.layers[heads[0].layer];
  const whole = heads.length === layer.heads && heads.every((one) => one.layer === layer.number);
  if (whole) return `${layer.label}, mean of ${heads.length} heads`;
  const layers = new Set(heads.map((one) => one.layer));
  const total = [...layers].reduce((sum, number) => sum + store.layers[number].heads, 0);
  if (total === heads.length) return `mean of ${layers.size} layers`;
  const names = heads.slice(0, 4).map((one) => one.name).join(", ");
  return `mean of ${names}${heads.length > 4 ? "…" : ""}`;
}

export function getUnits(store, state, layer, side) {
  const words = store.labels(layer, side).words?.[state.seq] ?? null;
  const by = state.words && words ? "words" : "tokens";
  const number = layer.labels[side === "queries" ? 0 : 1];
  return store.cached(
    `units ${number} ${state.seq} ${by}`,
    () => groupUnits(store.texts(layer, side, state.seq), by === "words" ? words : null),
  );
}

// The name of a token in all views: “.” (position 14, in “verrückt.”); the word only if words are shown.
export function describeToken(store, state, layer, side, i) {
  const [tokens, units] = [{ ...state, words: false }, state].map((how) => getUnits(store, how, layer, side));
  const [token, word] = [tokens.label(tokens.of[i]), units.label(units.of[i])];
  const within = units.stop[units.of[i]] - units.start[units.of[i]] > 1 ? `, in “${clipText(word, 24)}”` : "";
  return { token: clipText(token, 24), place: ` (position ${i}${within})` };
}

// The tokens of the selection: the one under the pointer, else the clicked ones.
export function pickedTokens(state, length) {
  const found = state.hover !== null ? [state.hover] : state.chosen;
  return found.filter((i) => i < length);
}

export function computeFocus(store, state) {
  const heads = chosenHeads(store, state);
  const layer = store.layers[heads[0].layer];
  const to = state.direction === "to";
  const [from, other] = to ? ["queries", "keys"] : ["keys", "queries"];
  // A generation step is one token, even if words are shown.
  const sources = getUnits(store, state.view === "steps" ? { ...state, words: false } : state, layer, from);
  const targets = getUnits(store, state, layer, other);
  const picks = [...new Set(pickedTokens(state, sources.of.length).map((i) => sources.of[i]))];
  const weights = new Float32Array(targets.of.length);
  for (const u of picks) addUnitWeights(weights, store, state, heads, sources, u, to);
  const kinds = Object.fromEntries(["queries", "keys"].map((side) => [side, store.labels(layer, side).kind]));
  const name = describeHeads(heads, store);
  const focus = { heads, layer, to, from, other, kinds, sources, targets, picks, weights, name };
  return { ...focus, ...summarizeWeights(focus, store, state) };
}

// Weights are summed over the keys of a word and averaged over its queries.
export function addUnitWeights(weights, store, state, heads, sources, unit, to) {
  const [start, stop] = [sources.start[unit], sources.stop[unit]];
  const factor = 1 / heads.length / (to ? stop - start : 1);
  const counts = new Map();
  for (const { layer } of heads) counts.set(layer, (counts.get(layer) ?? 0) + 1);
  for (const one of heads) {
    const all = counts.get(one.layer) === store.layers[one.layer].heads;
    for (let i = start; i < stop; i++) {
      if (to) store.addRow(weights, one, i, state.seq, factor, all);
      else store.addColumn(weights, one, i, state.seq, factor, all);
    }
  }
}

// The weights per unit, the share of sinks, and how much of the whole is known.
function summarizeWeights({ heads, to, picks, sources, targets, weights }, store, state) {
  const sinks = new Set(heads.flatMap((one) => store.sinks(one, state.seq)));
  const [units, all] = [new Float32Array(targets.count), new Float32Array(targets.count)];
  let [total, inSinks] = [0, 0];
  for (let i = 0; i < weights.length; i++) {
    // Skips 0 and NaN.
    if (!weights[i]) continue;
    total += weights[i];
    const isSink = to && sinks.has(i);
    if (isSink) inSinks += weights[i];
    const u = targets.of[i];
    const part = to ? weights[i] : weights[i] / (targets.stop[u] - targets.start[u]);
    all[u] += part;
    if (!(isSink && state.hideSinks)) units[u] += part;
  }
  const positions = picks.flatMap(
    (u) => Array.from({ length: sources.stop[u] - sources.start[u] }, (_, n) => sources.start[u] + n),
  );
  const exact = positions.every(
    (i) => heads.every((one) => (to ? store.isExact(one, i, state.seq) : isColumnExact(store, one, i, state))),
  );
  const known = !to || positions.every((i) => heads.every((one) => store.hasFiniteRow(one, i, state.seq)));
  const sinkMass = (one, i) => store.perQuery("sinkMass", one, i, state.seq) ?? 0;
  const learned = to ? heads.reduce(
    (sum, one) => sum + positions.reduce((part, i) => part + sinkMass(one, i), 0),
    0,
  ) / heads.length / Math.max(1, positions.length) : 0;
  const whole = picks.length;
  const entropy = to && whole === 1 && known ? computeEntropy(exact ? all : null, { heads, positions, targets }, store, state) : null;
  const received = (one) => [...sinks].reduce((sum, j) => sum + store.received(one, state.seq)[j], 0);
  const headShare = heads.reduce((sum, one) => sum + received(one), 0) / heads.length;
  return {
    headShare,
    units,
    entropy,
    // The weight of each unit if the selected queries attended to all keys alike.
    uniform: whole / (to ? targets.count : sources.count),
    sinks,
    total,
    sinkShare: whole ? inSinks / whole : 0,
    exact,
    known,
    learned,
    whole,
    coverage: to && whole ? total / whole : 1,
  };
}

// { nats, over }: of the listed weights, or the mean over heads and tokens if a file has only their statistics.
function computeEntropy(units, { heads, positions, targets }, store, state) {
  if (units) {
    const what = targets.count < targets.of.length ? "words" : "keys";
    const nats = units.reduce((sum, w) => (w > 0 ? sum - w * Math.log(w) : sum), 0);
    return { nats, over: `≈ ${Math.exp(nats).toFixed(1)} ${what}` };
  }
  const all = heads.flatMap((one) => positions.map((i) => store.entropy(one, i, state.seq)));
  if (all.some((nats) => nats === null)) return null;
  const nats = all.reduce((sum, one) => sum + one, 0) / all.length;
  if (all.length === 1) return { nats, over: `≈ ${Math.exp(nats).toFixed(1)} keys` };
  const counts = [[heads.length, "heads"], [positions.length, "tokens"]].filter(([count]) => count > 1);
  return { nats, over: `mean of ${counts.map(([count, what]) => `${count} ${what}`).join(" × ")}` };
}

function isColumnExact(store, one, j, state) {
  return store.hasEntries(store.layers[one.layer]) || Boolean(store.remote?.column(one, j, state.seq));
}

// The units with the largest weights, in descending order.
export function rankUnits(units, most) {
  const found = [];
  for (let u = 0; u < units.length; u++) if (units[u] > 0) found.push(u);
  found.sort((a, b) => units[b] - units[a] || a - b);
  return found.slice(0, most);
}
