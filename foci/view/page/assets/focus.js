// The one question of the page: for the chosen tokens and heads, how much attention goes where. Every view that shows
// one distribution shows this one, so that they agree.

import { clipped, unitsOf } from "./tokens.js";

// The heads that are looked at: the chosen ones of one layer shape, else the first head of the record.
export function chosenHeads(store, state) {
  const named = state.heads.flatMap((name) => headsNamed(store, name));
  const first = named[0] ?? store.heads[0];
  const layer = store.layers[first.layer];
  return (named.length ? named : [first]).filter((one) => {
    const other = store.layers[one.layer];
    return ["queries", "keys", "Tq", "Tk"].every((name) => other[name] === layer[name]);
  });
}

// "L5H3" is a head, "L5" all heads of a layer.
export function headsNamed(store, name) {
  if (store.byName.has(name)) return [store.byName.get(name)];
  return store.heads.filter((one) => store.layers[one.layer].label === name);
}

export function nameOf(heads, store) {
  if (heads.length === 1) return heads[0].name;
  const layer = store.layers[heads[0].layer];
  const whole = heads.length === layer.heads && heads.every((one) => one.layer === layer.number);
  if (whole) return `${layer.label}, mean of ${heads.length} heads`;
  const names = heads.slice(0, 4).map((one) => one.name).join(", ");
  return `mean of ${names}${heads.length > 4 ? "…" : ""}`;
}

export function unitsFor(store, state, layer, side) {
  const words = store.labels(layer, side).words?.[state.seq] ?? null;
  const by = state.words && words ? "words" : "tokens";
  const number = layer.labels[side === "queries" ? 0 : 1];
  return store.once(
    `units ${number} ${state.seq} ${by}`,
    () => unitsOf(store.texts(layer, side, state.seq), by === "words" ? words : null),
  );
}

// A token as every view names it: “.” (position 14, in “verrückt.”); the word only where words are chosen.
export function tokenNamed(store, state, layer, side, i) {
  const [tokens, units] = [{ ...state, words: false }, state].map((how) => unitsFor(store, how, layer, side));
  const [token, word] = [tokens.label(tokens.of[i]), units.label(units.of[i])];
  const within = units.stop[units.of[i]] - units.start[units.of[i]] > 1 ? `, in “${clipped(word, 24)}”` : "";
  return { token: clipped(token, 24), place: ` (position ${i}${within})` };
}

// Tokens picked: under the pointer, else those that were clicked.
export function picked(state, length) {
  const found = state.hover !== null ? [state.hover] : state.chosen;
  return found.filter((i) => i < length);
}

export function focusOf(store, state) {
  const heads = chosenHeads(store, state);
  const layer = store.layers[heads[0].layer];
  const to = state.direction === "to";
  const [from, other] = to ? ["queries", "keys"] : ["keys", "queries"];
  // A step of a generation is one token, whatever word it belongs to.
  const sources = unitsFor(store, state.view === "steps" ? { ...state, words: false } : state, layer, from);
  const targets = unitsFor(store, state, layer, other);
  const picks = [...new Set(picked(state, sources.of.length).map((i) => sources.of[i]))];
  const weights = new Float32Array(targets.of.length);
  for (const u of picks) addUnit(weights, store, state, heads, sources, u, to);
  const found = { heads, layer, to, from, other, sources, targets, picks, weights, name: nameOf(heads, store) };
  return { ...found, ...summed(found, store, state) };
}

// Over the keys of a word weights add up; over its queries they are averaged.
function addUnit(weights, store, state, heads, sources, unit, to) {
  const [start, stop] = [sources.start[unit], sources.stop[unit]];
  const factor = 1 / heads.length / (to ? stop - start : 1);
  for (const one of heads) {
    for (let i = start; i < stop; i++) {
      if (to) store.addRow(weights, one, i, state.seq, factor);
      else store.addColumn(weights, one, i, state.seq, factor);
    }
  }
}

// Weights per unit, what the sinks hold, and how much of the whole is known.
function summed({ heads, to, picks, sources, targets, weights }, store, state) {
  const sinks = new Set(heads.flatMap((one) => store.sinks(one, state.seq)));
  const units = new Float32Array(targets.count);
  let [total, inSinks] = [0, 0];
  for (let i = 0; i < weights.length; i++) {
    // Of what is no number nothing is made.
    if (!weights[i]) continue;
    total += weights[i];
    const isSink = to && sinks.has(i);
    if (isSink) inSinks += weights[i];
    if (isSink && state.hideSinks) continue;
    units[targets.of[i]] += to ? weights[i] : weights[i] / (targets.stop[targets.of[i]] - targets.start[targets.of[i]]);
  }
  const positions = picks.flatMap(
    (u) => Array.from({ length: sources.stop[u] - sources.start[u] }, (_, n) => sources.start[u] + n),
  );
  const exact = positions.every(
    (i) => heads.every((one) => (to ? store.isExact(one, i, state.seq) : exactColumn(store, one, i, state))),
  );
  const known = !to || positions.every((i) => heads.every((one) => store.isKnown(one, i, state.seq)));
  const sinkMass = (one, i) => store.perQuery("sinkMass", one, i, state.seq) ?? 0;
  const learned = to ? heads.reduce(
    (sum, one) => sum + positions.reduce((part, i) => part + sinkMass(one, i), 0),
    0,
  ) / heads.length / Math.max(1, positions.length) : 0;
  const whole = picks.length;
  const received = (one) => [...sinks].reduce((sum, j) => sum + store.received(one, state.seq)[j], 0);
  const headShare = heads.reduce((sum, one) => sum + received(one), 0) / heads.length;
  return {
    headShare,
    units,
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

function exactColumn(store, one, j, state) {
  return store.layers[one.layer].exact || Boolean(store.remote?.column(one, j, state.seq));
}

// Units by weight, heaviest first.
export function ranked(units, most) {
  const found = [];
  for (let u = 0; u < units.length; u++) if (units[u] > 0) found.push(u);
  found.sort((a, b) => units[b] - units[a] || a - b);
  return found.slice(0, most);
}
