// What the map shows of one head, or of the mean of several: its weights, and the tokens or words along its sides.

import { unitsFor } from "./focus.js";

// Every entry, by tokens or by words.
export function exactSource(store, state, heads, layer) {
  const [rows, columns] = [unitsFor(store, state, layer, "queries"), unitsFor(store, state, layer, "keys")];
  const values = new Float32Array(rows.count * columns.count);
  const row = new Float32Array(layer.Tk);
  for (let i = 0; i < layer.Tq; i++) {
    row.fill(0);
    for (const one of heads) store.addRow(row, one, i, state.seq, 1 / heads.length);
    const u = rows.of[i];
    for (let j = 0; j < layer.Tk; j++) {
      values[u * columns.count + columns.of[j]] += row[j] / (rows.stop[u] - rows.start[u]);
    }
  }
  return {
    heads,
    layer,
    rows,
    columns,
    Tq: rows.count,
    Tk: columns.count,
    picture: { rows: rows.count, columns: columns.count, values, whole: true },
  };
}

// The picture that a record kept, by tokens.
export function blockSource(store, state, heads, layer) {
  const tokens = { ...state, words: false };
  const [rows, columns] = [unitsFor(store, tokens, layer, "queries"), unitsFor(store, tokens, layer, "keys")];
  const pictures = heads.map((one) => store.picture(one, state.seq, state.reduce)).filter(Boolean);
  let picture = pictures[0] ?? null;
  if (pictures.length > 1) {
    const values = new Float32Array(picture.values.length);
    for (const { values: some } of pictures) {
      for (let i = 0; i < values.length; i++) values[i] += some[i] / pictures.length;
    }
    picture = { ...picture, values };
  }
  return { heads, layer, rows, columns, Tq: layer.Tq, Tk: layer.Tk, picture };
}
