// All heads as thumbnails: by layer with groups of heads that share keys, or sorted by a metric.

import { make, button, choice, draw, prepareCanvas } from "./dom.js";
import { shade } from "./colors.js";
import { drawRaster } from "./raster.js";
import { svgSheet, svgText } from "./export.js";
import { chosenHeads } from "./focus.js";
import { STACK_TITLES, groupByStack, formatMetric, getMetricLevel, getMetric, spellMetric } from "./picker.js";

// The smallest and largest side of a thumbnail, and the smallest whose caption has room for a number.
const [MIN_SIDE, MAX_SIDE, MIN_CAPTION_SIDE] = [46, 96, 68];

export class HeadsView {
  constructor({ store, state }) {
    Object.assign(this, { store, state, drawn: new WeakMap() });
    this.order = choice(
      "Order",
      [["false", "by layer"], ["true", "sorted"]],
      () => String(state.sorted),
      (value) => state.set({ sorted: value === "true" }),
    );
    this.description = make("span", { class: "count" });
    this.grid = make("div", { class: "thumbs" });
    const tools = make("div", { class: "tools" }, make("span", { class: "label" }, "order"), this.order, this.description);
    const axes = make(
      "p",
      { class: "axisnote" },
      "Rows are queries, columns are keys; each picture has its own color scale. Double-click opens the map.",
    );
    this.element = make("section", { class: "view heads", "aria-label": "Heads" }, tools, axes, this.grid);
    new ResizeObserver(() => this.resize()).observe(this.element);
    this.watcher = new IntersectionObserver(
      (entries) => entries.forEach((entry) => entry.isIntersecting && this.paint(entry.target)),
      { rootMargin: "200px" },
    );
  }

  // A row has as many thumbnails as a layer has heads, if there is room.
  resize() {
    const most = Math.max(...this.store.layers.map(({ heads }) => heads));
    const side = Math.round(Math.min(MAX_SIDE, Math.max(MIN_SIDE, (this.element.clientWidth - 84) / most - 16)));
    if (!this.element.clientWidth || side === this.side) return;
    this.side = side;
    this.grid.style.setProperty("--side", `${side}px`);
    this.grid.classList.toggle("tight", side < MIN_CAPTION_SIDE);
    this.repaint();
  }

  update(focus, changed) {
    this.resize();
    this.order.refresh();
    const metric = getMetric(this.store, this.state);
    this.description.textContent = metric ? `${spellMetric(metric.name)}: ${metric.description}` : "";
    const built = `${this.state.sorted} ${metric?.name} ${this.state.seq}`;
    if (built !== this.built) {
      this.built = built;
      this.grid.classList.toggle("sorted", this.state.sorted);
      this.grid.replaceChildren(...(this.state.sorted ? this.sortedThumbs(metric) : this.byLayer(metric)));
    }
    const chosen = new Set(chosenHeads(this.store, this.state).map(({ name }) => name));
    for (const thumb of this.grid.querySelectorAll(".thumb")) {
      thumb.setAttribute("aria-pressed", String(chosen.has(thumb.dataset.name)));
    }
    if (!changed || ["scale", "hideSinks", "theme", "reduce", "seq"].some((name) => changed.has(name))) this.repaint();
  }

  repaint() {
    for (const canvas of this.grid.querySelectorAll("canvas")) {
      this.drawn.delete(canvas);
      this.watcher.unobserve(canvas);
      this.watcher.observe(canvas);
    }
  }

  sortedThumbs(metric) {
    const value = (one) => metric?.values[one.layer][one.head] ?? -Infinity;
    return [...this.store.heads].sort((a, b) => value(b) - value(a)).map((one) => this.thumb(one, metric));
  }

  byLayer(metric) {
    return [...groupByStack(this.store)].flatMap(([stack, layers]) => {
      const title = stack ? [make("h3", {}, STACK_TITLES[stack] ?? stack)] : [];
      return [...title, ...layers.map((layer) => this.rowOf(layer, metric))];
    });
  }

  rowOf(layer, metric) {
    const heads = this.store.heads.filter((one) => one.layer === layer.number);
    const shared = layer.heads / layer.kvHeads;
    const groups = [];
    for (let h = 0; h < heads.length; h += shared) {
      const thumbs = heads.slice(h, h + shared).map((one) => this.thumb(one, metric));
      groups.push(
        shared > 1 ? make(
          "div",
          { class: "group", title: `heads ${h} to ${h + shared - 1} share a key/value head` },
          ...thumbs,
        ) : thumbs,
      );
    }
    return make(
      "div",
      { class: "thumbrow" },
      make("span", { class: "layername" }, `L${layer.index}`),
      make("div", { class: "thumbcells" }, ...groups.flat()),
    );
  }

  thumb(one, metric) {
    const canvas = make("canvas", { "aria-hidden": "true" });
    canvas.one = one;
    const value = metric?.values[one.layer][one.head] ?? null;
    const dot = make("span", { class: "dot", "aria-hidden": "true" });
    const level = getMetricLevel(metric, one);
    dot.style.backgroundColor = level === null ? "transparent" : shade("from", 0.06 + 0.9 * level);
    const caption = make(
      "span",
      { class: "caption" },
      dot,
      make("span", {}, ...this.nameParts(one)),
      make("span", { class: "value" }, formatMetric(value)),
    );
    const choose = (event) => {
      const names = event.shiftKey ? [...new Set(
        [...chosenHeads(this.store, this.state).map(({ name }) => name), one.name],
      )] : [one.name];
      this.state.set({ heads: names });
    };
    const open = () => this.state.set({ heads: [one.name], view: "map", zoom: 0 });
    this.watcher.observe(canvas);
    return button(
      canvas,
      {
        class: "thumb",
        "data-name": one.name,
        title: `${one.name}: click to select, double-click to open its map`,
        onclick: choose,
        ondblclick: open,
      },
      caption,
    );
  }

  // "L0H1" below the title of its stack, else "cross.L0H1", which may break after the dot.
  nameParts({ name, layer }) {
    const { stack } = this.store.layers[layer];
    if (!stack || !name.startsWith(`${stack}.`)) return [name];
    const short = name.slice(stack.length + 1);
    return this.state.sorted ? [`${stack}.`, make("wbr"), short] : [short];
  }

  paint(canvas) {
    if (this.drawn.has(canvas)) return;
    this.drawn.set(canvas, true);
    const { one } = canvas;
    const picture = this.store.picture(one, this.state.seq, this.state.reduce);
    const { side } = this;
    const pen = prepareCanvas(canvas, side, side);
    pen.clearRect(0, 0, side, side);
    if (!picture) return;
    const { Tk } = this.store.layers[one.layer];
    const sinks = new Set(this.store.sinks(one, this.state.seq).map((j) => Math.floor((j * picture.columns) / Tk)));
    const { canvas: raster } = drawRaster(
      picture,
      this.state.scale,
      "to",
      this.state.hideSinks && sinks.size ? (c) => sinks.has(c) : null,
    );
    pen.imageSmoothingEnabled = picture.columns > side;
    pen.imageSmoothingQuality = "high";
    pen.drawImage(raster, 0, 0, side, side);
  }

  csv() {
    const metrics = this.store.header.metrics;
    const rows = this.store.heads.map(
      (one) => [one.name, ...metrics.map(({ values }) => values[one.layer][one.head] ?? "")],
    );
    return [["head", ...metrics.map(({ name }) => name)], ...rows];
  }

  svg() {
    const canvases = [...this.grid.querySelectorAll(".thumb canvas")];
    for (const canvas of canvases) this.paint(canvas);
    const { side } = this;
    const columns = Math.max(...this.store.layers.map(({ heads }) => heads), 1);
    const sheet = svgSheet(columns * (side + 14) + 10, Math.ceil(canvases.length / columns) * (side + 28) + 10);
    canvases.forEach((canvas, n) => {
      const [x, y] = [10 + (n % columns) * (side + 14), 10 + Math.floor(n / columns) * (side + 28)];
      sheet.append(
        draw("image", { href: canvas.toDataURL(), x, y, width: side, height: side }),
        svgText(x, y + side + 14, canvas.one.name, { size: 11 }),
      );
    });
    return sheet;
  }
}
