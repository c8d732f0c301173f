// The data of the map: the weights of a head or of the mean of several, and the units along both axes.

import { getUnits } from "./focus.js";

// Every weight, by tokens or by words.
export function buildExactSource(store, state, heads, layer) {
  const [rows, columns] = [getUnits(store, state, layer, "queries"), getUnits(store, state, layer, "keys")];
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
    picture: { rows: rows.count, columns: columns.count, values, whole: true, uniform: 1 / columns.count },
  };
}

// The picture in blocks, by tokens.
export function buildBlockSource(store, state, heads, layer) {
  const tokens = { ...state, words: false };
  const [rows, columns] = [getUnits(store, tokens, layer, "queries"), getUnits(store, tokens, layer, "keys")];
  const pictures = heads.map((one) => store.picture(one, state.seq, state.reduce)).filter(Boolean);
  let picture = pictures.length === heads.length ? pictures[0] : null;
  if (pictures.length > 1) {
    const values = new Float32Array(picture.values.length);
    for (const { values: some } of pictures) {
      for (let i = 0; i < values.length; i++) values[i] += some[i] / pictures.length;
    }
    picture = { ...picture, values };
  }
  return { heads, layer, rows, columns, Tq: layer.Tq, Tk: layer.Tk, picture };
}
