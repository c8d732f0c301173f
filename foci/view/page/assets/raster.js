// Draws weights on a canvas, one pixel per block.

import { make } from "./dom.js";
import { ramp, createScale } from "./colors.js";

// The grey of NaN and infinite weights.
const NAN_GREY = 140;

// Columns for which hidden(column) is true are drawn as 0. `sharedScale` is the color scale of several pictures.
export function drawRaster({ rows, columns, values, uniform }, mode, direction = "to", hidden = null, sharedScale = null) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const pen = canvas.getContext("2d");
  const image = pen.createImageData(columns, rows);
  const seen = hidden ? values.map((w, i) => (hidden(i % columns) ? 0 : w)) : values;
  const scale = sharedScale ?? createScale(mode, seen, uniform);
  const table = ramp(direction);
  const pixels = image.data;
  for (let i = 0; i < seen.length; i++) {
    const known = Number.isFinite(seen[i]);
    const at = 3 * Math.round(255 * Math.min(scale.of(seen[i]), 1));
    pixels[4 * i] = known ? table[at] : NAN_GREY;
    pixels[4 * i + 1] = known ? table[at + 1] : NAN_GREY;
    pixels[4 * i + 2] = known ? table[at + 2] : NAN_GREY;
    pixels[4 * i + 3] = 255;
  }
  pen.putImageData(image, 0, 0);
  return { canvas, scale };
}

// Resizes a part of a picture along its columns only: smoothing must not blend stretched rows.
export function resizeColumns(canvas, [x, y, width, height], wide) {
  const [first, last] = [Math.floor(y), Math.ceil(y + height)];
  const strip = make("canvas", { width: Math.ceil(wide * devicePixelRatio), height: last - first });
  const pen = strip.getContext("2d");
  pen.drawImage(canvas, x, first, width, last - first, 0, 0, strip.width, strip.height);
  return [strip, [0, y - first, strip.width, height]];
}
