// The computation of one row: query, keys, scores, weights, values and output, from the payload or from the server.

import { rankUnits } from "./focus.js";
import { label } from "./tokens.js";

const MAX_LISTED_KEYS = 10;

// Everything that is known of a row. The score is ln(weight) + log-sum-exp.
export function computeArithmetic(store, one, i, seq) {
  const layer = store.layers[one.layer];
  const row = new Float32Array(layer.Tk);
  store.addRow(row, one, i, seq);
  const order = rankUnits(row, MAX_LISTED_KEYS);
  if (!order.length) return null;
  const sent = store.remote?.arithmetic(one, i, seq, order) ?? null;
  const vectors = sent ?? readVectors(store, one, i, seq, order);
  const lse = (sent ? sent.lse : store.perQuery("lse", one, i, seq)) ?? null;
  const texts = store.texts(layer, "keys", seq);
  const known = row.reduce((sum, w) => sum + w, 0);
  const listed = order.reduce((sum, j) => sum + row[j], 0);
  const keys = order.map((j, n) => describeKey(layer, j, label(texts[j] ?? ""), row[j], lse, vectors, n));
  const visible = row.reduce((count, w) => count + (w > 0 ? 1 : 0), 0);
  const exact = store.isExact(one, i, seq);
  const sinkMass = store.perQuery("sinkMass", one, i, seq) ?? 0;
  const rest = exact ? known - listed : Math.max(0, 1 - sinkMass - listed);
  return {
    q: vectors?.q ?? null,
    out: vectors?.out ?? null,
    keys,
    lse,
    hidden: exact ? layer.Tk - visible : 0,
    others: { count: exact ? visible - order.length : layer.Tk - order.length, weight: Math.max(0, rest) },
    sinkMass,
    hasBias: Boolean(layer.score?.bias),
  };
}

// Values that were not recorded and cannot be derived are null.
function describeKey(layer, index, name, weight, lse, vectors, n) {
  const score = lse === null ? null : Math.log(weight) + lse;
  const k = vectors?.k[n] ?? null;
  const known = { index, name, weight, k, v: vectors?.v?.[n] ?? null, score };
  const described = layer.score;
  // Without the vectors, the product follows from the score if there is no bias and no softcap.
  const plain = described && score !== null && !described.softcap && !described.bias;
  if (!k && !plain) return { ...known, raw: null, scaled: null, bias: null };
  const raw = k ? computeProduct(described, vectors, k) : score / described.scale;
  const uncapped = raw * described.scale;
  const scaled = described.softcap ? described.softcap * Math.tanh(uncapped / described.softcap) : uncapped;
  return { ...known, raw, scaled, bias: score === null ? null : score - scaled };
}

function computeProduct({ additive }, { q, w }, k) {
  const part = additive ? (x, d) => w[d] * Math.tanh(x + k[d]) : (x, d) => x * k[d];
  return q.reduce((sum, x, d) => sum + part(x, d), 0);
}

function readVectors(store, one, i, seq, order) {
  const layer = store.layers[one.layer];
  const name = (part) => `${layer.number}.${part}`;
  if (!store.arrays.has(name("q"))) return null;
  // Query heads of a group share a key head.
  const slice = (part, length, position) => {
    const [, heads, , width] = store.arrays.shape(name(part));
    const head = Math.floor((one.head * heads) / layer.heads);
    const at = ((seq * heads + head) * length + position) * width;
    return [...store.arrays.floats(name(part)).subarray(at, at + width)];
  };
  const q = slice("q", layer.Tq, i);
  const k = order.map((j) => slice("k", layer.Tk, j));
  const learned = store.arrays.has(name("w")) ? store.arrays.floats(name("w")) : null;
  const w = learned && [...learned.subarray(one.head * q.length, (one.head + 1) * q.length)];
  if (!store.arrays.has(name("v"))) return { q, k, w, v: null, out: null };
  const row = new Float32Array(layer.Tk);
  store.addRow(row, one, i, seq);
  const v = order.map((j) => slice("v", layer.Tk, j));
  const out = v[0].map(() => 0);
  row.forEach((weight, j) => {
    if (weight) slice("v", layer.Tk, j).forEach((x, d) => (out[d] += weight * x));
  });
  return { q, k, w, v, out };
}

export function formatNumber(x) {
  if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
  const size = Math.abs(x);
  const text = size !== 0 && (size < 0.001 || size >= 100000) ? x.toExponential(2) : x.toFixed(size >= 100 ? 1 : 3);
  return text.replace("-", "−");
}
