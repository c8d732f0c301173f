// Requests exact weights from the explorer's server or a notebook's kernel on first use. A request returns the cached
// answer or null; when the answer arrives, the page is drawn again.

import { drawRaster } from "./raster.js";
import { createScale } from "./colors.js";

const CELLS = 256;
const MAX_LEVEL = 6;
const PICTURE_SIDE = 512;
const MAX_ANSWERS = 400;
const MAX_RUNNING = 3;
const MAX_WAITING = 24;

export class Remote {
  // ask(question, parts) returns the promise of a Response.
  constructor(ask, layers) {
    Object.assign(this, { ask, layers, answers: new Map(), waiting: [], running: new Set(), notify: () => {} });
    // The denoising step whose weights are asked for; null: their mean.
    this.step = null;
  }

  onAnswer(work) {
    this.notify = work;
  }

  // The cached answer, or null and a new request; the newest request runs first.
  request(question, parts, read) {
    const address = `${question}?${new URLSearchParams(parts)}`;
    if (this.answers.has(address)) return this.getRecent(address);
    const isKnown = [...this.waiting, ...this.running].some((one) => one.address === address);
    if (!isKnown) this.waiting.push({ address, question, parts, read });
    // Drops the oldest request: the pointer has moved on.
    if (this.waiting.length > MAX_WAITING) this.waiting.shift();
    this.runNext();
    return null;
  }

  getRecent(address) {
    const found = this.answers.get(address);
    this.answers.delete(address);
    this.answers.set(address, found);
    return found;
  }

  async runNext() {
    if (this.running.size >= MAX_RUNNING || !this.waiting.length) return;
    const next = this.waiting.pop();
    const { address, question, parts, read } = next;
    this.running.add(next);
    try {
      const response = await this.ask(question, parts);
      // A refused request is not repeated.
      this.answers.set(address, response.ok ? await read(response) : null);
      for (const oldest of this.answers.keys()) {
        if (this.answers.size <= MAX_ANSWERS) break;
        this.answers.delete(oldest);
      }
      this.notify();
    } catch {
      // The server has stopped: the page keeps what it has.
      this.waiting = [];
    } finally {
      this.running.delete(next);
      this.runNext();
    }
  }

  row(one, i, seq) {
    if (!this.layers[one.layer].hasEntries) return null;
    const found = this.part("rows", { layer: one.layer, query: i, seq, ...this.atStep() }, one);
    return found ?? this.request("row", { layer: one.layer, head: one.head, query: i, seq, ...this.atStep() }, floats);
  }

  column(one, j, seq) {
    if (!this.layers[one.layer].hasEntries) return null;
    const found = this.part("columns", { layer: one.layer, key: j, seq, ...this.atStep() }, one);
    return found ?? this.request("column", { layer: one.layer, head: one.head, key: j, seq, ...this.atStep() }, floats);
  }

  // Asks for the row of a query, or the column of a key, of all heads of a layer; true if they are here.
  askAllHeads(layer, to, position, seq) {
    if (!this.layers[layer].hasEntries) return false;
    const [question, name] = to ? ["rows", "query"] : ["columns", "key"];
    return Boolean(this.request(question, { layer, [name]: position, seq, ...this.atStep() }, floats));
  }

  // The part of one head of a cached answer for all heads, or null.
  part(question, parts, one) {
    const found = this.answers.get(`${question}?${new URLSearchParams(parts)}`);
    const width = found && found.length / this.layers[one.layer].heads;
    return found ? found.subarray(one.head * width, (one.head + 1) * width) : null;
  }

  atStep() {
    return this.step === null ? {} : { denoising: this.step };
  }

  arithmetic(one, i, seq, keys) {
    if (!this.layers[one.layer].hasEntries) return null;
    return this.request(
      "arithmetic",
      { layer: one.layer, head: one.head, query: i, seq, keys: keys.join(".") },
      (response) => response.json(),
    );
  }

  rollout(stack, query, seq) {
    return this.request("rollout", { stack, query, seq }, floats);
  }

  // The whole matrix of a head in blocks, of a record whose payload has none.
  picture(one, seq, reduce) {
    const { hasEntries, Tq, Tk } = this.layers[one.layer];
    if (!hasEntries) return null;
    const values = this.request("picture", { layer: one.layer, head: one.head, seq, reduce }, floats);
    const [rows, columns] = [Math.min(PICTURE_SIDE, Tq), Math.min(PICTURE_SIDE, Tk)];
    return values && { rows, columns, values, whole: rows === Tq && columns === Tk, uniform: 1 / Tk, reduce };
  }

  // A tile of blocks of step x step entries.
  tile(heads, step, ty, tx, state) {
    const parts = {
      layer: heads[0].layer,
      heads: heads.map(({ head }) => head).join("."),
      seq: state.seq,
      step,
      y: ty * CELLS * step,
      x: tx * CELLS * step,
      reduce: step === 1 ? "mean" : state.reduce,
    };
    return this.request("tile", parts, floats);
  }

  // The block size of about one pixel; null if the picture of the whole matrix is fine enough.
  level(heads, s) {
    const z = Math.max(0, Math.ceil(Math.log2(1 / s)));
    const together = heads.every(({ layer }) => layer === heads[0].layer);
    return together && this.layers[heads[0].layer].hasEntries && z <= MAX_LEVEL ? 2 ** z : null;
  }

  // Draws the visible tiles and returns a description, or null if there are none yet.
  drawTiles(pen, view, { heads, layer, LEFT, TOP, x1, y1, state }) {
    const step = this.level(heads, view.u);
    if (!step) return null;
    const side = CELLS * step;
    const seen = [];
    for (let ty = Math.floor(view.y / side); ty * side < y1; ty++) {
      for (let tx = Math.floor(view.x / side); tx * side < x1; tx++) {
        const values = this.tile(heads, step, ty, tx, state);
        if (!values) continue;
        const columns = Math.ceil(Math.min(side, layer.Tk - tx * side) / step);
        seen.push({ ty, tx, values, columns, rows: values.length / columns });
      }
    }
    if (!seen.length) return null;
    const largest = seen.reduce((most, { values }) => values.reduce((a, b) => Math.max(a, b), most), 0);
    const scale = createScale(
      state.scale,
      state.scale === "rank" ? seen[0].values : [],
      1 / layer.Tk,
      state.scale === "rank" ? null : largest,
    );
    for (const part of seen) this.drawTile(pen, view, part, { step, side, layer, LEFT, TOP, state, scale });
    if (step === 1) return "Entries: every cell is one weight, exact";
    return `Blocks: ${step} × ${step} tokens, their ${state.reduce}`;
  }

  drawTile(pen, view, { ty, tx, values, rows, columns }, { step, side, layer, LEFT, TOP, state, scale }) {
    const { canvas } = drawRaster({ rows, columns, values }, state.scale, "to", null, scale);
    const [wide, tall] = [Math.min(side, layer.Tk - tx * side), Math.min(side, layer.Tq - ty * side)];
    pen.imageSmoothingEnabled = step * view.s < 1;
    // The last block may be smaller than the others; the map clips the rest.
    pen.drawImage(
      canvas,
      LEFT + (tx * side - view.x) * view.s,
      TOP + (ty * side - view.y) * view.t,
      Math.ceil(wide / step) * step * view.s,
      Math.ceil(tall / step) * step * view.t,
    );
  }

  cell(heads, i, j, state, s) {
    const step = this.level(heads, s);
    if (!step) return null;
    const side = CELLS * step;
    const [ty, tx] = [Math.floor(i / side), Math.floor(j / side)];
    const values = this.tile(heads, step, ty, tx, state);
    if (!values) return null;
    const columns = Math.ceil(Math.min(side, this.layers[heads[0].layer].Tk - tx * side) / step);
    const weight = values[Math.floor((i - ty * side) / step) * columns + Math.floor((j - tx * side) / step)];
    return { weight, about: step === 1 ? "exact" : `${state.reduce} of a block of ${step} × ${step}` };
  }
}

async function floats(response) {
  return new Float32Array(await response.arrayBuffer());
}
