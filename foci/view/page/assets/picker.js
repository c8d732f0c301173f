// Every head as a small square, colored by a metric; selects one head, several, or a whole layer.

import { make, button } from "./dom.js";
import { shade } from "./colors.js";
import { chosenHeads } from "./focus.js";

export const STACK_TITLES = {
  encoder: "Encoder",
  decoder: "Decoder",
  cross: "Cross-attention",
  vision: "Vision",
  text: "Text",
  audio: "Audio",
  alignment: "Alignment",
};

// Layers grouped by stack, in the order of their first layers.
export function groupByStack(store) {
  const stacks = new Map();
  for (const layer of store.layers) stacks.set(layer.stack, [...(stacks.get(layer.stack) ?? []), layer]);
  return stacks;
}

// The selected metric, else the first.
export function getMetric(store, state) {
  const { metrics } = store.header;
  return metrics.find(({ name }) => name === state.metric) ?? metrics[0] ?? null;
}

export function getMetricRange(metric) {
  const all = metric ? metric.values.flat().filter((value) => value !== null) : [];
  return all.length ? [Math.min(...all), Math.max(...all)] : [0, 0];
}

// The value scaled to 0..1 within the record; null without a value.
export function getMetricLevel(metric, one) {
  const value = metric?.values[one.layer][one.head] ?? null;
  if (value === null) return null;
  const [low, high] = getMetricRange(metric);
  // Values that are displayed alike have the same color.
  return formatMetric(high) === formatMetric(low) ? 0.5 : (value - low) / (high - low);
}

export function formatMetric(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// The name of a metric as people read it.
export function spellMetric(name) {
  return name.replaceAll("_", " ");
}

export class Picker {
  constructor(store, state) {
    Object.assign(this, { store, state, cells: new Map() });
    const { metrics } = store.header;
    this.select = make(
      "select",
      { "aria-label": "Color heads by", onchange: () => state.set({ metric: this.select.value }) },
      ...metrics.map(({ name }) => make("option", { value: name }, spellMetric(name))),
    );
    this.description = make("p", { class: "note" });
    this.grid = make("div", { class: "headgrid" });
    this.scale = make("div", { class: "metric-scale", "aria-hidden": "true" });
    const bar = metrics.length ? make("label", { class: "row" }, make("span", {}, "color by"), this.select) : null;
    this.element = make(
      "nav",
      { class: "panel left", "aria-label": "Heads" },
      make("h2", {}, "Heads"),
      bar,
      this.description,
      this.scale,
      this.grid,
    );
    this.build();
  }

  build() {
    for (const [stack, layers] of groupByStack(this.store)) {
      if (stack) this.grid.append(make("h3", {}, STACK_TITLES[stack] ?? stack));
      this.grid.append(...layers.map((layer) => this.rowOf(layer)));
    }
  }

  rowOf(layer) {
    const whole = button(`L${layer.index}`, {
      class: "layername",
      title: `${layer.name}: mean of its ${layer.heads} heads`,
      onclick: () => this.state.set({ heads: [layer.label] }),
    });
    const cells = make("div", { class: "cells" });
    const shared = layer.heads / layer.kvHeads;
    for (const one of this.store.heads.filter((other) => other.layer === layer.number)) {
      const cell = button("", {
        class: "cell",
        "aria-label": one.name,
        onclick: (event) => this.choose(one, event.shiftKey || event.ctrlKey || event.metaKey),
        onkeydown: (event) => this.key(event, one),
      });
      // Query heads that share a key/value head form a group.
      if (shared > 1 && one.head % shared === 0 && one.head) cell.classList.add("group-start");
      this.cells.set(one, cells.appendChild(cell));
    }
    if (shared > 1) cells.title = `${layer.heads} query heads share ${layer.kvHeads} key/value heads`;
    return make("div", { class: "layerrow" }, whole, cells);
  }

  choose(one, add) {
    const names = this.state.heads;
    if (!add) return this.state.set({ heads: [one.name] });
    const kept = chosenHeads(this.store, this.state).map((other) => other.name);
    const next = kept.includes(one.name) ? kept.filter((name) => name !== one.name) : [...kept, one.name];
    this.state.set({ heads: next.length ? next : names });
  }

  key(event, one) {
    const { heads } = this.store;
    const layer = this.store.layers[one.layer];
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: layer.heads, ArrowUp: -layer.heads }[event.key];
    const next = step && heads[one.order + step];
    if (!next) return;
    event.preventDefault();
    this.cells.get(next).focus();
    this.choose(next, event.shiftKey);
  }

  update() {
    const metric = getMetric(this.store, this.state);
    const chosen = new Set(chosenHeads(this.store, this.state));
    if (metric) {
      this.select.value = metric.name;
      this.description.textContent = metric.description;
      const [low, high] = getMetricRange(metric);
      const strip = make("span", { class: "strip" });
      for (let i = 0; i < 24; i++) {
        const piece = make("span");
        piece.style.backgroundColor = shade("from", 0.06 + (0.9 * i) / 23);
        strip.append(piece);
      }
      const alike = formatMetric(low) === formatMetric(high);
      this.scale.replaceChildren(...(alike ? [`${formatMetric(low)} in every head`] : [formatMetric(low), strip, formatMetric(high)]));
    }
    for (const [one, cell] of this.cells) {
      const level = getMetricLevel(metric, one);
      cell.style.backgroundColor = level === null ? "" : shade("from", 0.06 + 0.9 * level);
      cell.setAttribute("aria-pressed", String(chosen.has(one)));
      cell.tabIndex = chosen.has(one) ? 0 : -1;
      const value = metric ? ` · ${spellMetric(metric.name)} ${formatMetric(metric.values[one.layer][one.head])}` : "";
      cell.title = one.name + value;
    }
  }
}
