// Entry point of the page of a monitored training: every head over the steps, as a map and as a curve.

import { button, choice, cssColor, draw, make, oncePerFrame, prepareCanvas } from "./dom.js";
import { ramp } from "./colors.js";
import { decodeBase64 } from "./payload.js";

const LEFT = 72;
const MAX_MAP_HEIGHT = 620;
const CURVE = { width: 900, height: 220, left: 56, right: 12, top: 12, bottom: 26 };

export function listHeads(layers) {
  return layers.flatMap(([layer, heads]) => Array.from({ length: heads }, (_, head) => `${layer}H${head}`));
}

export function formatNumber(value) {
  if (value === null || value === undefined) return "NaN or missing";
  return Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
}

function extent(rows) {
  let [low, high] = [Infinity, -Infinity];
  for (const row of rows) {
    for (const value of row) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return low > high ? [0, 1] : [low, high];
}

class HistoryPage {
  constructor(data) {
    this.data = data;
    this.heads = listHeads(data.layers);
    [this.statistic] = Object.keys(data.values);
    this.selected = this.findExtremeHead();
    this.map = make("canvas", { class: "history-map", tabindex: "0", role: "img" });
    this.tip = make("p", { class: "history-tip", "aria-live": "polite" });
    this.legend = make("p", { class: "history-legend" });
    this.about = make("p", { class: "history-about" });
    this.curve = make("div", { class: "history-curve" });
    this.refresh = oncePerFrame(() => this.redraw());
  }

  get rows() {
    return this.data.values[this.statistic];
  }

  // The head with the largest value of the first statistic, at which the page opens.
  findExtremeHead() {
    const peaks = this.rows.map((row) => Math.max(...row.map((value) => value ?? -Infinity)));
    return Math.max(0, peaks.indexOf(Math.max(...peaks)));
  }

  start(body) {
    const options = Object.entries(this.data.about).map(([name, text]) => [name, name.replaceAll("_", " "), text]);
    this.choices = choice("statistic", options, () => this.statistic, (name) => {
      this.statistic = name;
      this.refresh();
    });
    const { steps } = this.data;
    const span = steps.length > 1 ? `steps ${steps[0].toLocaleString("en")} to ${steps.at(-1).toLocaleString("en")}` : `step ${steps[0]}`;
    body.classList.add("history");
    body.append(
      make("header", {}, make("h1", {}, this.data.title), make("p", {}, `${this.heads.length} heads, ${span}`)),
      this.choices, this.about, this.map, this.tip, this.legend, this.curve,
    );
    this.map.addEventListener("pointermove", (event) => this.showTip(this.cellAt(event)));
    this.map.addEventListener("click", (event) => this.select(this.cellAt(event).head));
    this.map.addEventListener("keydown", (event) => {
      const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      this.select(this.selected + move);
    });
    window.addEventListener("resize", this.refresh);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.refresh);
    this.redraw();
  }

  select(head) {
    this.selected = Math.min(Math.max(head, 0), this.heads.length - 1);
    this.refresh();
  }

  cellAt(event) {
    const box = this.map.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left - LEFT, event.clientY - box.top];
    const clamp = (value, count) => Math.min(Math.max(Math.floor(value), 0), count - 1);
    return {
      head: clamp((y / box.height) * this.heads.length, this.heads.length),
      column: clamp((x / (box.width - LEFT)) * this.data.steps.length, this.data.steps.length),
    };
  }

  showTip({ head, column }) {
    const step = this.data.steps[column].toLocaleString("en");
    this.tip.textContent = `${this.heads[head]}, step ${step}: ${formatNumber(this.rows[head][column])}`;
  }

  redraw() {
    this.choices.refresh();
    this.about.textContent = `${this.statistic.replaceAll("_", " ")}: ${this.data.about[this.statistic]}. Each row is a head.`;
    const [low, high] = extent(this.rows);
    this.legend.textContent =
      `Colors from the background at ${formatNumber(low)} to the strongest at ${formatNumber(high)}; grey: NaN or missing.` +
      " Click a row, or use the arrow keys, to follow its head.";
    this.drawMap(low, high);
    this.drawCurve(low, high);
    this.map.setAttribute("aria-label", `${this.statistic} of ${this.heads.length} heads over the steps`);
  }

  drawMap(low, high) {
    const width = this.map.parentElement.clientWidth - 2 * 24;
    const rowHeight = Math.min(14, Math.max(2, MAX_MAP_HEIGHT / this.heads.length));
    const height = rowHeight * this.heads.length;
    this.map.style.height = `${height}px`;
    this.map.style.width = `${width}px`;
    const pen = prepareCanvas(this.map, width, height);
    const [table, columns] = [ramp("to"), this.data.steps.length];
    pen.clearRect(0, 0, width, height);
    const cell = (width - LEFT) / columns;
    for (let head = 0; head < this.heads.length; head++) {
      for (let column = 0; column < columns; column++) {
        const value = this.rows[head][column];
        const at = 3 * Math.round((255 * (value - low)) / (high - low || 1));
        pen.fillStyle = value === null ? "#8a8a8a" : `rgb(${table[at]}, ${table[at + 1]}, ${table[at + 2]})`;
        pen.fillRect(LEFT + column * cell, head * rowHeight, cell + 0.5, rowHeight + 0.5);
      }
    }
    this.drawLayerNames(pen, rowHeight);
    pen.strokeStyle = cssColor("--find");
    pen.lineWidth = 2;
    pen.strokeRect(LEFT, this.selected * rowHeight, width - LEFT - 1, rowHeight);
  }

  drawLayerNames(pen, rowHeight) {
    pen.fillStyle = cssColor("--soft");
    pen.font = "11px sans-serif";
    pen.textBaseline = "middle";
    let [start, free] = [0, -Infinity];
    for (const [layer, heads] of this.data.layers) {
      const middle = (start + heads / 2) * rowHeight;
      if (middle - 7 >= free) {
        pen.fillText(layer, 0, middle, LEFT - 8);
        free = middle + 7;
      }
      start += heads;
    }
  }

  drawCurve(low, high) {
    const { steps } = this.data;
    const [first, last] = [steps[0], steps.at(-1)];
    const x = (step) => CURVE.left + ((step - first) / (last - first || 1)) * (CURVE.width - CURVE.left - CURVE.right);
    const y = (value) => CURVE.top + (1 - (value - low) / (high - low || 1)) * (CURVE.height - CURVE.top - CURVE.bottom);
    const path = (row) => {
      let [text, isDrawing] = ["", false];
      row.forEach((value, index) => {
        if (value !== null) text += `${isDrawing ? "L" : "M"}${x(steps[index]).toFixed(1)} ${y(value).toFixed(1)}`;
        isDrawing = value !== null;
      });
      return text;
    };
    const layer = this.heads[this.selected].replace(/H\d+$/, "");
    const siblings = this.heads.flatMap((name, head) => (name.replace(/H\d+$/, "") === layer ? [head] : []));
    const image = draw("svg", { viewBox: `0 0 ${CURVE.width} ${CURVE.height}`, role: "img" },
      ...siblings.map((head) => draw("path", { d: path(this.rows[head]), class: "sibling" })),
      draw("path", { d: path(this.rows[this.selected]), class: "chosen" }),
      ...[low, high].map((value) => draw("text", { x: CURVE.left - 6, y: y(value) + 4, "text-anchor": "end" }, formatNumber(value))),
      draw("text", { x: CURVE.left, y: CURVE.height - 6 }, first.toLocaleString("en")),
      draw("text", { x: CURVE.width - CURVE.right, y: CURVE.height - 6, "text-anchor": "end" }, last.toLocaleString("en")));
    const label = `${this.heads[this.selected]} over the steps; thin: the other heads of ${layer}`;
    this.curve.replaceChildren(make("h2", {}, label), image,
      button("previous head", { onclick: () => this.select(this.selected - 1) }),
      button("next head", { onclick: () => this.select(this.selected + 1) }));
  }
}

function open() {
  const element = document.getElementById("payload");
  const page = new HistoryPage(JSON.parse(new TextDecoder().decode(decodeBase64(element.textContent))));
  element.remove();
  page.start(document.body);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

open();
