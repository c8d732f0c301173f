// Draws the parts of the map: entries over blocks, numbers, hatched sinks, axes, overview.
// A view is { x, y, w, h, s, t, width, height }: the visible part of the matrix, and pixels per key and per query.

import { cssColor } from "./dom.js";
import { textColor, createScale, shade } from "./colors.js";
import { clipText } from "./tokens.js";

// The origin of the matrix on the canvas.
export const LEFT = 116;
export const TOP = 92;
// Smaller cells have no labels.
const MIN_LABELLED_CELL = 11;
const SHADES = 24;
const TIME = /^[\d.]+ s$/;

// The top keys of the visible rows, over the blocks; their color scale is that of single entries.
export function drawEntries(pen, view, { store, state, heads, y1, blocks }) {
  const [wide, tall] = [Math.max(view.s, 1.25), Math.max(view.t, 1.25)];
  const scale = state.scale === "rank" ? blocks : createScale(state.scale, [], 0, Math.max(blocks.largest, 0.25));
  const sinks = state.hideSinks ? new Set(heads.flatMap((one) => store.sinks(one, state.seq))) : null;
  // Sorted by shade, because changing the color of a canvas for each cell is slow.
  const shades = Array.from({ length: SHADES }, () => []);
  for (const one of heads) {
    store.forEachTopKey(one, Math.floor(view.y), Math.ceil(y1), state.seq, (i, j, weight) => {
      if (j + 1 < view.x || j > view.x + view.w || sinks?.has(j)) return;
      shades[Math.round((SHADES - 1) * Math.min(1, scale.of(weight)))].push(j, i);
    });
  }
  shades.forEach((places, level) => {
    pen.fillStyle = shade("to", Math.max(0.12, level / (SHADES - 1)));
    for (let n = 0; n < places.length; n += 2) {
      pen.fillRect(LEFT + (places[n] - view.x) * view.s, TOP + (places[n + 1] - view.y) * view.t, wide, tall);
    }
  });
}

export function writeWeights(pen, view, { values, columns }, { x1, y1, scale, hidden, family }) {
  pen.font = `${Math.min(12, view.s * 0.3, view.t * 0.5)}px ${family}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let i = Math.floor(view.y); i < y1; i++) {
    for (let j = Math.floor(view.x); j < x1; j++) {
      const weight = values[i * columns + j];
      if (weight < 0.005) continue;
      pen.fillStyle = hidden?.has(j) ? "transparent" : textColor("to", scale.of(weight));
      pen.fillText((100 * weight).toFixed(0), LEFT + (j + 0.5 - view.x) * view.s, TOP + (i + 0.5 - view.y) * view.t);
    }
  }
}

// Columns of hidden sinks are hatched, so they are not mistaken for empty ones.
export function drawHidden(pen, view, { picture, Tk, Tq }, hidden) {
  if (!hidden) return;
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, TOP, Math.min(view.w, Tk - view.x) * view.s, Math.min(view.h, Tq - view.y) * view.t);
  pen.clip();
  pen.strokeStyle = cssColor("--line-strong");
  for (const c of hidden) {
    const [from, to] = [(c * Tk) / picture.columns, ((c + 1) * Tk) / picture.columns];
    const [x, wide] = [LEFT + (from - view.x) * view.s, Math.max(2, (to - from) * view.s)];
    pen.save();
    pen.beginPath();
    pen.rect(x, TOP, wide, view.height);
    pen.clip();
    pen.beginPath();
    for (let y = TOP - wide; y < view.height; y += 7) {
      pen.moveTo(x, y + wide);
      pen.lineTo(x + wide, y);
    }
    pen.stroke();
    pen.restore();
  }
  pen.restore();
}

// Queries at the left, keys above: words if they fit, else positions.
export function drawAxes(pen, view, source, { at, chosen, family }) {
  const { Tq, Tk } = source;
  pen.textBaseline = "middle";
  pen.fillStyle = cssColor("--soft");
  pen.font = `600 11px ${family}`;
  pen.textAlign = "left";
  pen.fillText("keys →", LEFT, 12);
  pen.save();
  pen.translate(12, TOP);
  pen.rotate(Math.PI / 2);
  pen.fillText("queries →", 0, 0);
  pen.restore();
  const [x1, y1] = [Math.min(view.x + view.w, Tk), Math.min(view.y + view.h, Tq)];
  pen.strokeStyle = cssColor("--line-strong");
  pen.strokeRect(LEFT - 0.5, TOP - 0.5, (x1 - view.x) * view.s + 1, (y1 - view.y) * view.t + 1);
  const marked = new Set([at?.i, ...chosen.map((i) => source.rows.of[i])]);
  writeRows(pen, view, source.rows, { y1, ...chooseTicks(pen, view.t, family), marked });
  writeColumns(pen, view, source.columns, { x1, ...chooseTicks(pen, view.s, family), marked: at?.j });
}

// Every word if the cells are large enough, else positions at intervals; sets the font.
function chooseTicks(pen, size, family) {
  const labelled = size >= MIN_LABELLED_CELL;
  pen.font = `${labelled ? Math.min(13, size * 0.85) : 11}px ${family}`;
  return { labelled, step: labelled ? 1 : tickStep(64 / size) };
}

// A word if it fits, else its position; for audio frames always the time.
function labelAt(units, i, labelled) {
  const name = units.label(i);
  return labelled || TIME.test(name) ? clipText(name, 12) : String(i);
}

function writeRows(pen, view, rows, { y1, step, labelled, marked }) {
  pen.textAlign = "right";
  for (let i = Math.ceil(view.y / step) * step; i < y1; i += step) {
    const y = TOP + (i + (labelled ? 0.5 : 0) - view.y) * view.t;
    pen.fillStyle = cssColor(marked.has(i) ? "--ink" : "--soft");
    if (y >= TOP - 1) pen.fillText(labelAt(rows, i, labelled), LEFT - 7, y);
  }
}

function writeColumns(pen, view, columns, { x1, step, labelled, marked }) {
  pen.textAlign = labelled ? "left" : "center";
  for (let j = Math.ceil(view.x / step) * step; j < x1; j += step) {
    const x = LEFT + (j + (labelled ? 0.5 : 0) - view.x) * view.s;
    if (x < LEFT - 1) continue;
    pen.fillStyle = cssColor(marked === j ? "--ink" : "--soft");
    pen.save();
    pen.translate(x, TOP - 8);
    if (labelled) pen.rotate(-Math.PI / 3.4);
    pen.fillText(labelAt(columns, j, labelled), 0, 0);
    pen.restore();
  }
}

export function drawCross(pen, view, { rows, Tk }, { at, chosen }) {
  pen.strokeStyle = cssColor("--accent");
  const wide = Math.min(view.w, Tk - view.x) * view.s;
  pen.lineWidth = 1.5;
  for (const i of chosen) {
    const y = TOP + (rows.of[i] - view.y) * view.t;
    if (y >= TOP - view.t && y < view.height) pen.strokeRect(LEFT, Math.max(y, TOP), wide, Math.max(view.t, 1));
  }
  pen.lineWidth = 1;
  if (!at) return;
  const [x, y] = [LEFT + (at.j - view.x) * view.s, TOP + (at.i - view.y) * view.t];
  pen.strokeStyle = cssColor("--ink");
  pen.strokeRect(x, y, Math.max(view.s, 3), Math.max(view.t, 3));
}

// The visible part inside the whole matrix.
export function drawOverview(pen, view, { Tq, Tk }, raster) {
  const side = 110;
  const [w, h] = Tk >= Tq ? [side, Math.max(8, (side * Tq) / Tk)] : [Math.max(8, (side * Tk) / Tq), side];
  const [x, y] = [view.width - w - 18, view.height - h - 18];
  pen.fillStyle = cssColor("--card");
  pen.fillRect(x - 4, y - 4, w + 8, h + 8);
  pen.imageSmoothingEnabled = true;
  pen.drawImage(raster.canvas, x, y, w, h);
  pen.strokeStyle = cssColor("--line-strong");
  pen.strokeRect(x - 4.5, y - 4.5, w + 9, h + 9);
  pen.strokeStyle = cssColor("--accent");
  pen.lineWidth = 1.5;
  pen.strokeRect(
    x + (view.x / Tk) * w,
    y + (view.y / Tq) * h,
    Math.max(4, (Math.min(view.w, Tk) / Tk) * w),
    Math.max(4, (Math.min(view.h, Tq) / Tq) * h),
  );
  pen.lineWidth = 1;
}

// Block r starts at floor(r T / blocks).
export function blockStart(r, blocks, length) {
  return Math.floor((r * length) / blocks);
}

export function blockOf(i, blocks, length) {
  let r = Math.floor((i * blocks) / length);
  while (blockStart(r + 1, blocks, length) <= i) r++;
  while (blockStart(r, blocks, length) > i) r--;
  return r;
}

// 1, 2 or 5 times a power of ten.
function tickStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least) ?? 10 * power;
}
