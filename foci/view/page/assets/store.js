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
  ` [SEP] or a comma, a patch of an image, or any token of a text of at least ${LONG_TEXT} tokens. It receives at least 10% of the head’s` +
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
    // The denoising step whose weights are read; null: their mean.
    this.step = null;
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

  // The images of a sequence along an axis: each has segments, which are grids of patches.
  images(layer, side, seq) {
    const { images } = this.labels(layer, side);
    return images[seq] ?? images[0] ?? [];
  }

  imagePositions(layer, side, seq) {
    const number = layer.labels[side === "queries" ? 0 : 1];
    return this.cached(`patches ${number} ${seq}`, () =>
      this.images(layer, side, seq).flatMap(({ segments }) => segments.flatMap(segmentPositions)));
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

  setStep(step) {
    this.step = step;
    if (this.remote) this.remote.step = step;
  }

  // Whether the file has every entry of a layer, at the chosen step.
  hasEntries(layer) {
    return layer.exact && this.step === null;
  }

  // Whether every weight of a query is available.
  isExact(one, i, seq) {
    return this.hasEntries(this.layers[one.layer]) || Boolean(this.remote?.row(one, i, seq));
  }

  // The weights between text and image: { values, rows, columns, at }; null if the file has none of this head. `at(seq)`
  // is the index of the first weight. A block with only the mean of the heads fits if it is read for all heads.
  block({ layer: number, head }, seq, all = false) {
    const layer = this.layers[number];
    const name = this.step === null ? `${number}.block` : `${number}@${this.step}.block`;
    if (!this.arrays.has(name)) return null;
    const [, heads, count, width] = this.arrays.shape(name);
    if (heads < layer.heads && !all) return null;
    const { rows, columns } = this.step === null ? layer.block : layer.stepBlock;
    const at = (seq * heads + (heads < layer.heads ? 0 : head)) * count * width;
    const maps = this.cached(`places ${number} ${this.step === null}`, () => [rows, columns].map(indexPositions));
    return { values: this.arrays.floats(name), at, rows: maps[0], columns: maps[1] };
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
  // `all`: the caller adds every head of the layer.
  addRow(target, one, i, seq, factor = 1, all = false) {
    const layer = this.layers[one.layer];
    if (this.hasEntries(layer)) {
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
    const block = this.block(one, seq, all);
    const row = block?.rows.index.get(i);
    if (row !== undefined) {
      const { values, at, columns: { positions } } = block;
      positions.forEach((key, n) => (target[key] += factor * values[at + row * positions.length + n]));
    }
    if (this.step !== null) return;
    this.forEachTopKey(one, i, i + 1, seq, (_, key, weight) => {
      if (row === undefined || !block.columns.index.has(key)) target[key] += factor * weight;
    });
  }

  // Adds the weights on one key, times `factor`, to a Float32Array over the queries.
  addColumn(target, one, j, seq, factor = 1, all = false) {
    const layer = this.layers[one.layer];
    if (this.hasEntries(layer)) {
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
    const block = this.block(one, seq, all);
    const column = block?.columns.index.get(j);
    if (column !== undefined) {
      const { values, at, rows: { positions }, columns } = block;
      const width = columns.positions.length;
      positions.forEach((i, n) => (target[i] += factor * values[at + n * width + column]));
    }
    if (this.step !== null) return;
    this.forEachTopKey(one, 0, layer.Tq, seq, (i, key, weight) => {
      if (key === j && (column === undefined || !block.rows.index.has(i))) target[i] += factor * weight;
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
        // Of the mean over the denoising steps, whichever is shown.
        const { step } = this;
        this.setStep(null);
        const known = Array.from({ length: layer.Tq }, (_, i) => i).filter((i) => this.hasFiniteRow(one, i, seq));
        for (const i of known) this.addRow(found, one, i, seq, 1 / known.length);
        this.setStep(step);
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
      const patches = new Set(this.imagePositions(layer, "keys", seq));
      const mayBe = (key) => layer.Tk >= LONG_TEXT || key < first || patches.has(key) || isDelimiter(texts[key]);
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

// The position of each patch of a segment, row by row.
export function segmentPositions({ start, rows, columns, stride, order }) {
  const inRows = Array.from({ length: rows * columns }, (_, n) => start + Math.floor(n / columns) * stride + (n % columns));
  if (!order) return inRows;
  const placed = new Array(inRows.length);
  order.forEach((patch, n) => (placed[patch] = inRows[n]));
  return placed;
}

function indexPositions(described) {
  const positions = Array.isArray(described)
    ? described
    : Array.from({ length: described.count }, (_, n) => described.start + n);
  return { positions, index: new Map(positions.map((position, n) => [position, n])) };
}

function decodeLog16(code) {
  return Math.exp((code - 65535) / 2048);
}
