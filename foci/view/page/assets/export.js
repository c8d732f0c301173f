// Copies the current view as SVG, PNG or CSV to the clipboard, or saves a file if the browser refuses that.

import { cssColor, draw, make } from "./dom.js";
import { textColor, formatPercent, createScale, shade } from "./colors.js";
import { label } from "./tokens.js";
import { rankUnits } from "./focus.js";

const FONT = "Inter, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif";

export function svgSheet(width, height) {
  const sheet = draw("svg", {
    xmlns: "http://www.w3.org/2000/svg",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    "font-family": FONT,
  });
  sheet.append(draw("rect", { width, height, fill: cssColor("--card") }));
  return sheet;
}

export function svgText(x, y, text, { size = 13, fill = cssColor("--ink"), anchor = "start", turn = null } = {}) {
  return draw(
    "text",
    {
      x,
      y,
      "font-size": size,
      fill,
      "text-anchor": anchor,
      transform: turn === null ? null : `rotate(${turn} ${x} ${y})`,
      style: null,
      "xml:space": "preserve",
    },
    text,
  );
}

// The colored text, up to 1,500 tokens.
export function textSvg(pane, focus) {
  const [width, line, most] = [720, 30, 1500];
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `15px ${FONT}`;
  const parts = [];
  let [x, y] = [20, 60];
  for (let i = 0; i < Math.min(pane.texts.length, most); i++) {
    const text = pane.tokenText(i);
    const wide = pen.measureText(text).width + 4;
    if (pane.hasGap(i)) x += 5;
    if (x + wide > width - 20) [x, y] = [20, y + line];
    const t = pane.tint(i);
    if (t > 0.004) {
      parts.push(draw("rect", { x, y: y - 17, width: wide, height: 23, rx: 3, fill: shade(pane.direction, t) }));
    }
    if (pane.mark(i).includes("c")) {
      parts.push(
        draw("rect", {
          x,
          y: y - 17,
          width: wide,
          height: 23,
          rx: 3,
          fill: "none",
          stroke: cssColor("--ink"),
          "stroke-width": 1.5,
        }),
      );
    }
    parts.push(svgText(x + 2, y, text, { size: 15, fill: t > 0.004 ? textColor(pane.direction, t) : cssColor("--ink") }));
    x += wide;
  }
  const sheet = svgSheet(width, y + 30);
  sheet.append(
    svgText(20, 28, `${focus.name} · ${focus.to ? "keys that the framed tokens attend to" : "queries that attend to the framed tokens"}`, {
      size: 12,
      fill: cssColor("--soft"),
    }),
    ...parts,
  );
  return sheet;
}

export function focusCsv(focus) {
  const order = rankUnits(focus.units, focus.units.length);
  const rows = order.map((u, n) => [n + 1, focus.targets.start[u], focus.targets.text(u), focus.units[u]]);
  return [["rank", "position", focus.to ? "key" : "query", "weight"], ...rows];
}

// A text that a spreadsheet would run as a formula is quoted.
function csvField(value) {
  const text = typeof value === "number" ? String(Number(value.toPrecision(6))) : String(value);
  const plain = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

export function csvText(rows) {
  return `${rows.map((row) => row.map(csvField).join(",")).join("\n")}\n`;
}

export function serializeSvg(sheet) {
  // Invalid XML characters are already replaced by signs; surrogates are not.
  return new XMLSerializer().serializeToString(sheet).toWellFormed?.() ?? new XMLSerializer().serializeToString(sheet);
}

export async function renderPng(sheet) {
  const [width, height] = [Number(sheet.getAttribute("width")), Number(sheet.getAttribute("height"))];
  const url = URL.createObjectURL(new Blob([serializeSvg(sheet)], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = make("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
    return await new Promise((done) => canvas.toBlob(done, "image/png"));
  } finally {
    URL.revokeObjectURL(url);
  }
}

export function saveFile(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  return `Saved as ${name}`;
}

// Returns a message for the user.
export async function copyView(kind, view, focus) {
  const name = `attention.${kind}`;
  if (kind === "png") {
    const blob = await renderPng(view.svg(focus));
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
      return "PNG copied";
    } catch {
      return saveFile(blob, name);
    }
  }
  const text = kind === "svg" ? serializeSvg(view.svg(focus)) : csvText(view.csv(focus));
  try {
    await navigator.clipboard.writeText(text);
    return `${kind.toUpperCase()} copied`;
  } catch {
    return saveFile(new Blob([text], { type: kind === "svg" ? "image/svg+xml" : "text/csv" }), name);
  }
}

// A matrix with its labels.
export function matrixSvg({ rows, columns, weight, uniform, mode, direction = "to", marks = [], title = "" }) {
  const cell = Math.max(6, Math.min(26, 680 / columns.length));
  const [left, top] = [130, 130];
  const sheet = svgSheet(left + columns.length * cell + 30, top + rows.length * cell + 30);
  const values = rows.flatMap((_, i) => columns.map((_, j) => weight(i, j)));
  const scale = createScale(mode, values, uniform);
  rows.forEach((_, i) =>
    columns.forEach((_, j) => {
      const t = scale.of(weight(i, j));
      if (t > 0.004) {
        sheet.append(
          draw(
            "rect",
            { x: left + j * cell, y: top + i * cell, width: cell - 0.5, height: cell - 0.5, fill: shade(direction, t) },
            draw("title", {}, formatPercent(weight(i, j))),
          ),
        );
      }
    }),
  );
  for (const [i, j] of marks) {
    sheet.append(
      draw("circle", {
        cx: left + (j + 0.5) * cell,
        cy: top + (i + 0.5) * cell,
        r: cell / 5,
        fill: "none",
        stroke: cssColor("--ink"),
      }),
    );
  }
  if (cell >= 9) {
    rows.forEach(
      (text, i) => sheet.append(
        svgText(left - 6, top + (i + 0.7) * cell, label(text).slice(0, 18), {
          size: Math.min(12, cell - 1),
          anchor: "end",
        }),
      ),
    );
    columns.forEach(
      (text, j) => sheet.append(
        svgText(left + (j + 0.65) * cell, top - 6, label(text).slice(0, 18), {
          size: Math.min(12, cell - 1),
          turn: -55,
        }),
      ),
    );
  }
  sheet.append(
    svgText(12, 20, title, { size: 12, fill: cssColor("--soft") }),
    svgText(12, top + 12, "queries ↓", { size: 11, fill: cssColor("--soft") }),
    svgText(left, top - 108 + 20, "keys →", { size: 11, fill: cssColor("--soft") }),
  );
  return sheet;
}
