// Access to the record: from the payload, or from the explorer's server or a notebook's kernel, which send exact rows and
// tiles on first use; the page is drawn again when they arrive.

import { isDelimiter } from "./tokens.js";

// A key is an attention sink if it receives at least this share of a head's attention, and this multiple of a uniform
// share. Few queries may all need the same key, so short inputs have no sinks; in a text that is not long, only the
// first token and delimiters can be sinks.
const MIN_SINK_SHARE = 0.1;
const MIN_SINK_FACTOR = 5;
const MIN_SINK_LENGTH = 24;
const LONG_TEXT = 256;
export const SINKS =
  "An attention sink is a token that many queries attend to whatever it says: the first token, a delimiter such as" +
  ` [SEP] or a comma, or any token of a text of at least ${LONG_TEXT} tokens. It receives at least 10% of the head’s` +
  ` attention and five times a uniform share. Inputs of fewer than ${MIN_SINK_LENGTH} tokens have none.`;

export class Store {
  constructor(header, arrays, remote = null) {
    this.header = header;
    this.arrays = arrays;
    this.remote = remote;
    this.layers = header.layers;
    this.heads = [];
    this.byName = new Map();
    this.cache = new Map();
    header.layers.forEach((layer, number) => {
      layer.number = number;
      layer.self = layer.queries === layer.keys;
      for (let h = 0; h < layer.heads; h++) {
        const one = { layer: number, head: h, name: layer.names[h], order: this.heads.length };
        this.heads.push(one);
        if (!this.byName.has(one.name)) this.byName.set(one.name, one);
      }
    });
  }

  cached(key, work) {
    if (!this.cache.has(key)) this.cache.set(key, work());
    return this.cache.get(key);
  }

  labels(layer, side) {
    return this.header.labels[layer.labels[side === "queries" ? 0 : 1]];
  }

  texts(layer, side, seq) {
    return this.labels(layer, side).texts[seq] ?? this.labels(layer, side).texts[0];
  }

  // The key position of query i in self-attention.
  keyPosition(layer, i) {
    return layer.queryPositions ? layer.queryPositions[i] : i + layer.Tk - layer.Tq;
  }

  entries(number) {
    return this.arrays.floats(`${number}.entries`);
  }

  base({ layer, head }, seq) {
    return seq * this.layers[layer].heads + head;
  }

  topCount(number) {
    return this.arrays.has(`${number}.keys`) ? this.arrays.shape(`${number}.keys`).at(-1) : 0;
  }

  // Whether every weight of a query is available.
  isExact(one, i, seq) {
    return this.layers[one.layer].exact || Boolean(this.remote?.row(one, i, seq));
  }

  // Whether the weights of a query are finite; NaN and infinite ones are not drawn or counted.
  hasFiniteRow(one, i, seq) {
    const layer = this.layers[one.layer];
    if (!this.countNonfiniteRows([one], seq)) return true;
    if (!this.isExact(one, i, seq)) return Number.isFinite(this.perQuery("entropy", one, i, seq));
    const row = new Float32Array(layer.Tk);
    this.addRow(row, one, i, seq);
    return row.every(Number.isFinite);
  }

  // The number of rows of these heads with NaN or infinite weights.
  countNonfiniteRows(heads, seq) {
    return heads.reduce((sum, one) => sum + (this.layers[one.layer].nonfiniteRows[seq]?.[one.head] ?? 0), 0);
  }

  // Adds a query's weights, times `factor`, to a Float32Array over the keys.
  addRow(target, one, i, seq, factor = 1) {
    const layer = this.layers[one.layer];
    if (layer.exact) {
      const at = (this.base(one, seq) * layer.Tq + i) * layer.Tk;
      const entries = this.entries(one.layer);
      for (let j = 0; j < layer.Tk; j++) target[j] += factor * entries[at + j];
      return;
    }
    const exact = this.remote?.row(one, i, seq);
    if (exact) {
      for (let j = 0; j < layer.Tk; j++) target[j] += factor * exact[j];
      return;
    }
    this.forEachTopKey(one, i, i + 1, seq, (_, key, weight) => {
      target[key] += factor * weight;
    });
  }

  // Adds the weights on one key, times `factor`, to a Float32Array over the queries.
  addColumn(target, one, j, seq, factor = 1) {
    const layer = this.layers[one.layer];
    if (layer.exact) {
      const entries = this.entries(one.layer);
      const at = this.base(one, seq) * layer.Tq * layer.Tk + j;
      for (let i = 0; i < layer.Tq; i++) target[i] += factor * entries[at + i * layer.Tk];
      return;
    }
    const exact = this.remote?.column(one, j, seq);
    if (exact) {
      for (let i = 0; i < layer.Tq; i++) target[i] += factor * exact[i];
      return;
    }
    this.forEachTopKey(one, 0, layer.Tq, seq, (i, key, weight) => {
      if (key === j) target[i] += factor * weight;
    });
  }

  // Visits the top keys of the queries from start to stop: visit(query, key, weight).
  forEachTopKey(one, start, stop, seq, visit) {
    const layer = this.layers[one.layer];
    const k = this.topCount(one.layer);
    if (!k) return;
    const { steps, values } = this.cached(`top ${one.layer}`, () => ({
      steps: this.arrays.raw(`${one.layer}.keys`).planes,
      values: this.arrays.raw(`${one.layer}.values`).planes,
    }));
    const [s0, s1, s2] = steps;
    const [v0, v1] = values;
    const first = this.base(one, seq) * layer.Tq;
    for (let i = start; i < stop; i++) {
      let at = (first + i) * k;
      let key = 0;
      for (const end = at + k; at < end; at++) {
        const code = v0[at] | (v1[at] << 8);
        key += s0[at] | (s1[at] << 8) | (s2 ? s2[at] << 16 : 0);
        if (code) visit(i, key, decodeLog16(code));
      }
    }
  }

  // { rows, columns, values }: the matrix in blocks, or every entry of a short layer.
  picture(one, seq, reduce = "mean") {
    const layer = this.layers[one.layer];
    const base = this.base(one, seq);
    if (layer.exact) {
      const size = layer.Tq * layer.Tk;
      return {
        rows: layer.Tq,
        columns: layer.Tk,
        values: this.entries(one.layer).subarray(base * size, (base + 1) * size),
        whole: true,
        uniform: 1 / layer.Tk,
      };
    }
    const name = this.arrays.has(`${one.layer}.${reduce}`) ? `${one.layer}.${reduce}` : `${one.layer}.mean`;
    if (!this.arrays.has(name)) return this.remote?.picture(one, seq, reduce) ?? null;
    const [, rows, columns] = this.arrays.shape(name);
    const size = rows * columns;
    const values = this.cached(`${name} ${base}`, () => this.arrays.floats(name, base * size, (base + 1) * size));
    const whole = rows === layer.Tq && columns === layer.Tk;
    return { rows, columns, values, whole, uniform: 1 / layer.Tk, reduce: name.split(".")[1] };
  }

  hasMaxima(number) {
    return this.layers[number].exact || this.header.onDemand || this.arrays.has(`${number}.max`);
  }

  // The share of a head's attention that each key receives.
  received(one, seq) {
    const layer = this.layers[one.layer];
    return this.cached(`received ${one.order} ${seq}`, () => {
      const found = new Float32Array(layer.Tk);
      if (layer.exact) {
        const known = Array.from({ length: layer.Tq }, (_, i) => i).filter((i) => this.hasFiniteRow(one, i, seq));
        for (const i of known) this.addRow(found, one, i, seq, 1 / known.length);
      } else if (this.arrays.has(`${one.layer}.received`)) {
        const at = this.base(one, seq) * layer.Tk;
        found.set(this.arrays.floats(`${one.layer}.received`, at, at + layer.Tk));
      }
      return found;
    });
  }

  canHaveSinks(layer) {
    return Math.min(layer.Tq, layer.Tk) >= MIN_SINK_LENGTH;
  }

  sinks(one, seq) {
    const layer = this.layers[one.layer];
    if (!this.canHaveSinks(layer)) return [];
    return this.cached(`sinks ${one.order} ${seq}`, () => {
      const least = Math.max(MIN_SINK_SHARE, MIN_SINK_FACTOR / layer.Tk);
      const [texts, first] = [this.texts(layer, "keys", seq), Math.max(1, this.labels(layer, "keys").leading)];
      const mayBe = (key) => layer.Tk >= LONG_TEXT || key < first || isDelimiter(texts[key]);
      const found = [];
      this.received(one, seq).forEach((share, key) => {
        if (share >= least && mayBe(key)) found.push(key);
      });
      return found;
    });
  }

  perQuery(name, one, i, seq) {
    const full = `${one.layer}.${name}`;
    if (!this.arrays.has(full)) return null;
    return this.arrays.floats(full)[this.base(one, seq) * this.layers[one.layer].Tq + i];
  }

  // Entropy in nats: 0 = one key, ln n = uniform over n keys.
  entropy(one, i, seq) {
    const layer = this.layers[one.layer];
    if (!this.hasFiniteRow(one, i, seq)) return null;
    if (!this.isExact(one, i, seq)) return this.perQuery("entropy", one, i, seq);
    const row = new Float32Array(layer.Tk);
    this.addRow(row, one, i, seq);
    let sum = 0;
    for (const w of row) if (w > 0) sum -= w * Math.log(w);
    return sum;
  }
}

function decodeLog16(code) {
  return Math.exp((code - 65535) / 2048);
}
