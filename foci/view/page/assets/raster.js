// Weights as pixels: a picture of a head on a canvas of its own, one pixel for each block.

import { make } from "./dom.js";
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

// A part of a picture, row by row as wide as it is to be seen: rows that are stretched must not run into each other.
export function narrowed(canvas, [x, y, width, height], wide) {
  const [first, last] = [Math.floor(y), Math.ceil(y + height)];
  const strip = make("canvas", { width: Math.ceil(wide * devicePixelRatio), height: last - first });
  const pen = strip.getContext("2d");
  pen.drawImage(canvas, x, first, width, last - first, 0, 0, strip.width, strip.height);
  return [strip, [0, y - first, strip.width, height]];
}
