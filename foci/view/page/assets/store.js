// Questions about a record, answered from the payload; where a server is behind the page, exact rows and tiles come
// from there when they are first asked for, and everything is drawn again once they are here.

// A key is a sink where it takes a tenth of a head's attention, and five times an even share.
const SINK_SHARE = 0.1;
const SINK_TIMES = 5;

export class Store {
  constructor(head, arrays, remote = null) {
    this.head = head;
    this.arrays = arrays;
    this.remote = remote;
    this.layers = head.layers;
    this.heads = [];
    this.byName = new Map();
    this.cache = new Map();
    head.layers.forEach((layer, number) => {
      layer.number = number;
      layer.self = layer.queries === layer.keys;
      for (let h = 0; h < layer.heads; h++) {
        const one = { layer: number, head: h, name: layer.names[h], order: this.heads.length };
        this.heads.push(one);
        if (!this.byName.has(one.name)) this.byName.set(one.name, one);
      }
    });
  }

  once(key, work) {
    if (!this.cache.has(key)) this.cache.set(key, work());
    return this.cache.get(key);
  }

  labels(layer, side) {
    return this.head.labels[layer.labels[side === "queries" ? 0 : 1]];
  }

  texts(layer, side, seq) {
    return this.labels(layer, side).texts[seq] ?? this.labels(layer, side).texts[0];
  }

  // Where query i stands among the keys of a layer that looks at its own text.
  place(layer, i) {
    return layer.places ? layer.places[i] : i + layer.Tk - layer.Tq;
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

  // Whether the row of a query is known entry by entry.
  isExact(one, i, seq) {
    return this.layers[one.layer].exact || Boolean(this.remote?.row(one, i, seq));
  }

  // Whether the weights of a query are numbers; NaN and infinite ones are drawn and counted nowhere.
  isKnown(one, i, seq) {
    const layer = this.layers[one.layer];
    if (!this.unknownRows([one], seq)) return true;
    if (!this.isExact(one, i, seq)) return Number.isFinite(this.perQuery("entropy", one, i, seq));
    const row = new Float32Array(layer.Tk);
    this.addRow(row, one, i, seq);
    return row.every(Number.isFinite);
  }

  // Of the rows of these heads, how many are not known.
  unknownRows(heads, seq) {
    return heads.reduce((sum, one) => sum + (this.layers[one.layer].unknown[seq]?.[one.head] ?? 0), 0);
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
    this.eachTop(one, i, i + 1, seq, (_, key, weight) => {
      target[key] += factor * weight;
    });
  }

  // Adds what the queries give to one key, times `factor`, to a Float32Array over the queries.
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
    this.eachTop(one, 0, layer.Tq, seq, (i, key, weight) => {
      if (key === j) target[i] += factor * weight;
    });
  }

  // Visits the heaviest keys of the queries from start to stop: visit(query, key, weight).
  eachTop(one, start, stop, seq, visit) {
    const layer = this.layers[one.layer];
    const k = this.topCount(one.layer);
    if (!k) return;
    const { steps, values } = this.once(`top ${one.layer}`, () => ({
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
        if (code) visit(i, key, weightOf(code));
      }
    }
  }

  // { rows, columns, values }: the whole matrix in blocks, or entry by entry where the layer is short.
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
      };
    }
    const name = this.arrays.has(`${one.layer}.${reduce}`) ? `${one.layer}.${reduce}` : `${one.layer}.mean`;
    if (!this.arrays.has(name)) return null;
    const [, rows, columns] = this.arrays.shape(name);
    const size = rows * columns;
    const values = this.once(`${name} ${base}`, () => this.arrays.floats(name, base * size, (base + 1) * size));
    return { rows, columns, values, whole: rows === layer.Tq && columns === layer.Tk, reduce: name.split(".")[1] };
  }

  hasMaxima(number) {
    return this.layers[number].exact || this.arrays.has(`${number}.max`);
  }

  // The share of a head's attention that each key gets.
  received(one, seq) {
    const layer = this.layers[one.layer];
    return this.once(`received ${one.order} ${seq}`, () => {
      const found = new Float32Array(layer.Tk);
      if (layer.exact) {
        const known = Array.from({ length: layer.Tq }, (_, i) => i).filter((i) => this.isKnown(one, i, seq));
        for (const i of known) this.addRow(found, one, i, seq, 1 / known.length);
      } else if (this.arrays.has(`${one.layer}.received`)) {
        const at = this.base(one, seq) * layer.Tk;
        found.set(this.arrays.floats(`${one.layer}.received`, at, at + layer.Tk));
      }
      return found;
    });
  }

  sinks(one, seq) {
    const layer = this.layers[one.layer];
    return this.once(`sinks ${one.order} ${seq}`, () => {
      const least = Math.max(SINK_SHARE, SINK_TIMES / layer.Tk);
      const found = [];
      this.received(one, seq).forEach((share, key) => {
        if (share >= least) found.push(key);
      });
      return found;
    });
  }

  perQuery(name, one, i, seq) {
    const full = `${one.layer}.${name}`;
    if (!this.arrays.has(full)) return null;
    return this.arrays.floats(full)[this.base(one, seq) * this.layers[one.layer].Tq + i];
  }

  // Nats: how many keys a query spreads over, as a logarithm.
  entropy(one, i, seq) {
    const layer = this.layers[one.layer];
    if (!this.isKnown(one, i, seq)) return null;
    if (!this.isExact(one, i, seq)) return this.perQuery("entropy", one, i, seq);
    const row = new Float32Array(layer.Tk);
    this.addRow(row, one, i, seq);
    let sum = 0;
    for (const w of row) if (w > 0) sum -= w * Math.log(w);
    return sum;
  }
}

function weightOf(code) {
  return Math.exp((code - 65535) / 2048);
}
