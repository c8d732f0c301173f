// Weights as pixels: a picture of a head on a canvas of its own, one pixel for each block.

import { ramp, scaleOf } from "./colors.js";

// The grey of what is no number.
const UNKNOWN = 140;

// hidden(column) says which columns are left out of the colours; they are drawn as nothing. A given scale is that of
// more than this picture.
export function rasterOf({ rows, columns, values }, mode, direction = "to", hidden = null, given = null) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(columns, rows);
  const seen = hidden ? values.map((w, i) => (hidden(i % columns) ? 0 : w)) : values;
  const scale = given ?? scaleOf(mode, seen);
  const table = ramp(direction);
  const pixels = image.data;
  for (let i = 0; i < seen.length; i++) {
    const known = Number.isFinite(seen[i]);
    const at = 3 * Math.round(255 * Math.min(scale.of(seen[i]), 1));
    pixels[4 * i] = known ? table[at] : UNKNOWN;
    pixels[4 * i + 1] = known ? table[at + 1] : UNKNOWN;
    pixels[4 * i + 2] = known ? table[at + 2] : UNKNOWN;
    pixels[4 * i + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  return { canvas, scale };
}
