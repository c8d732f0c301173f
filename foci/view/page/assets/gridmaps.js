// Weights on image patches as grids: where a patch lies in its image, and a grid drawn as colored cells.

import { shade } from "./colors.js";
import { segmentPositions } from "./store.js";

// The darkness of a place with weight 0, and the colors of dark and of bright places.
export const MAX_DARKNESS = 0.62;
export const DARK = "#0b0c10";
const LIGHT = "#6b5733";

// The segments of an image that are shown: all of them, or those of one frame of a video.
export function shownSegments({ segments }, frame) {
  const frames = listFrames(segments);
  if (!frames.length) return segments;
  return segments.filter((segment) => segment.frame === frames[Math.min(frame, frames.length - 1)]);
}

export function listFrames(segments) {
  return [...new Set(segments.map((segment) => segment.frame))].filter((frame) => frame !== null).sort((a, b) => a - b);
}

// { rows, columns, values }: the weights at their places in the image, on the finest of its grids. A coarser patch is
// spread over the finer ones that it covers, so that the grid adds up to the weight on the image.
export function layOut(segments, valueAt) {
  const rows = Math.max(...segments.map(({ rows, box: [top, , bottom] }) => Math.round(rows / (bottom - top))));
  const columns = Math.max(...segments.map(({ columns, box: [, left, , right] }) => Math.round(columns / (right - left))));
  const values = new Float32Array(rows * columns);
  for (const segment of segments) {
    const [top, left, bottom, right] = segment.box;
    const down = overlap(segment.rows, top, bottom, rows);
    const across = overlap(segment.columns, left, right, columns);
    segmentPositions(segment).forEach((position, n) => {
      const weight = valueAt(position);
      if (!weight) return;
      for (const [y, tall] of down[Math.floor(n / segment.columns)]) {
        for (const [x, wide] of across[n % segment.columns]) values[y * columns + x] += weight * tall * wide;
      }
    });
  }
  return { rows, columns, values };
}

// For each of the cells from low to high: [finer cell, its share of the cell].
function overlap(cells, low, high, finer) {
  const size = (high - low) / cells;
  return Array.from({ length: cells }, (_, cell) => {
    const [start, end] = [low + cell * size, low + (cell + 1) * size];
    const found = [];
    for (let n = Math.max(0, Math.floor(start * finer - 1e-9)); n < Math.min(finer, Math.ceil(end * finer - 1e-9)); n++) {
      const share = (Math.min(end, (n + 1) / finer) - Math.max(start, n / finer)) / size;
      if (share > 1e-6) found.push([n, share]);
    }
    return found;
  });
}

// The position of the patch at a point from 0 to 1; of a tile rather than of the whole image, which is coarser.
export function patchAt(segments, x, y) {
  const area = ({ box: [top, left, bottom, right] }) => (bottom - top) * (right - left);
  const inside = ({ box: [top, left, bottom, right] }) => y >= top && y < bottom && x >= left && x < right;
  const found = segments.filter(inside).sort((a, b) => area(a) - area(b))[0];
  if (!found) return null;
  const [top, left, bottom, right] = found.box;
  const row = Math.min(found.rows - 1, Math.floor(((y - top) / (bottom - top)) * found.rows));
  const column = Math.min(found.columns - 1, Math.floor(((x - left) / (right - left)) * found.columns));
  return segmentPositions(found)[row * found.columns + column];
}

// The box of a position from 0 to 1: { x, y, width, height }; null if it is not a patch of these segments.
export function patchBox(segments, position) {
  for (const segment of segments) {
    const n = segmentPositions(segment).indexOf(position);
    if (n < 0) continue;
    const [top, left, bottom, right] = segment.box;
    const [height, width] = [(bottom - top) / segment.rows, (right - left) / segment.columns];
    return { x: left + (n % segment.columns) * width, y: top + Math.floor(n / segment.columns) * height, width, height };
  }
  return null;
}

// The picture of an image or a frame as a canvas; null without one.
export function readPicture(store, segments) {
  const name = segments.find((segment) => segment.picture)?.picture;
  if (!name) return null;
  return store.cached(`picture ${name}`, () => {
    const [height, width] = store.arrays.shape(name);
    const bytes = store.arrays.raw(name).planes[0];
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [width, height];
    const pen = canvas.getContext("2d");
    const image = pen.createImageData(width, height);
    for (let i = 0; i < width * height; i++) {
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = bytes[3 * i + c];
      image.data[4 * i + 3] = 255;
    }
    pen.putImageData(image, 0, 0);
    return canvas;
  });
}

// Draws the cells of a grid; draw(level, box) gets the level of each from 0 to 1 and its place in whole pixels.
export function forEachCell({ rows, columns, values }, width, height, scale, draw) {
  for (let n = 0; n < rows * columns; n++) {
    const [c, r] = [n % columns, Math.floor(n / columns)];
    const [x, y] = [Math.round((c * width) / columns), Math.round((r * height) / rows)];
    const box = [x, y, Math.round(((c + 1) * width) / columns) - x, Math.round(((r + 1) * height) / rows) - y];
    draw(Math.min(1, scale.of(values[n])), box);
  }
}

export function drawGrid(pen, grid, width, height, scale, direction) {
  forEachCell(grid, width, height, scale, (level, box) => {
    pen.fillStyle = shade(direction, level);
    pen.fillRect(...box);
  });
}

// Darkens a box of a picture with weight 0, and brightens one with level 1.
export function lightUp(pen, box, level, opacity = 1) {
  const fill = (color, alpha, how) => {
    Object.assign(pen, { fillStyle: color, globalAlpha: alpha, globalCompositeOperation: how });
    pen.fillRect(...box);
  };
  fill(DARK, Math.min(1, MAX_DARKNESS * opacity * (1 - level)), "source-over");
  // A black place must brighten too.
  fill(LIGHT, level * opacity, "lighten");
  Object.assign(pen, { globalAlpha: 1, globalCompositeOperation: "source-over" });
}

// Frames a patch, whose box is from 0 to 1.
export function frameBox(pen, { x, y, width: wide, height: tall }, width, height) {
  const box = [x * width + 1, y * height + 1, wide * width - 2, tall * height - 2];
  for (const [line, color] of [[4, DARK], [2, "#ffd166"]]) {
    Object.assign(pen, { lineWidth: line, strokeStyle: color });
    pen.strokeRect(...box);
  }
  pen.lineWidth = 1;
}
