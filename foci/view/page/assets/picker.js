// Every head as a small square, coloured by a measure: the way to choose one, several, or a whole layer.

import { make, button } from "./dom.js";
import { shade } from "./colors.js";
import { chosenHeads } from "./focus.js";

export const STACK_TITLES = {
  encoder: "Encoder",
  decoder: "Decoder",
  cross: "Decoder looks at encoder",
  vision: "Vision",
};

// Layers by their stack, stacks in the order of their first layers.
export function byStack(store) {
  const stacks = new Map();
  for (const layer of store.layers) stacks.set(layer.stack, [...(stacks.get(layer.stack) ?? []), layer]);
  return stacks;
}

// Which way a measure is interesting: heads at the top of the list.
export function measureOf(store, state) {
  const { measures } = store.head;
  return measures.find(({ name }) => name === state.measure) ?? measures[0] ?? null;
}

export function boundsOf(measure) {
  const all = measure ? measure.values.flat().filter((value) => value !== null) : [];
  return all.length ? [Math.min(...all), Math.max(...all)] : [0, 0];
}

// 0..1 within the record; what has no such score is null.
export function levelOf(measure, one) {
  const value = measure?.values[one.layer][one.head] ?? null;
  if (value === null) return null;
  const [low, high] = boundsOf(measure);
  // What reads alike looks alike.
  return formatted(high) === formatted(low) ? 0.5 : (value - low) / (high - low);
}

export function formatted(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export class Picker {
  constructor(store, state) {
    Object.assign(this, { store, state, cells: new Map() });
    const { measures } = store.head;
    this.select = make(
      "select",
      { "aria-label": "Colour heads by", onchange: () => state.set({ measure: this.select.value }) },
      ...measures.map(({ name }) => make("option", { value: name }, name)),
    );
    this.about = make("p", { class: "note" });
    this.grid = make("div", { class: "headgrid" });
    this.scale = make("div", { class: "measure-scale", "aria-hidden": "true" });
    const bar = measures.length ? make("label", { class: "row" }, make("span", {}, "colour by"), this.select) : null;
    this.element = make(
      "nav",
      { class: "panel left", "aria-label": "Heads" },
      make("h2", {}, "Heads"),
      bar,
      this.about,
      this.scale,
      this.grid,
    );
    this.build();
  }

  build() {
    for (const [stack, layers] of byStack(this.store)) {
      if (stack) this.grid.append(make("h3", {}, STACK_TITLES[stack] ?? stack));
      this.grid.append(...layers.map((layer) => this.rowOf(layer)));
    }
  }

  rowOf(layer) {
    const whole = button(`L${layer.index}`, {
      class: "layername",
      title: `${layer.name}: the mean of its ${layer.heads} heads`,
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
      // Heads that share their keys stand together.
      if (shared > 1 && one.head % shared === 0 && one.head) cell.classList.add("group-start");
      this.cells.set(one, cells.appendChild(cell));
    }
    if (shared > 1) cells.title = `${layer.heads} heads share ${layer.kvHeads} sets of keys`;
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
    const measure = measureOf(this.store, this.state);
    const chosen = new Set(chosenHeads(this.store, this.state));
    if (measure) {
      this.select.value = measure.name;
      this.about.textContent = measure.about;
      const [low, high] = boundsOf(measure);
      const strip = make("span", { class: "strip" });
      for (let i = 0; i < 24; i++) {
        const piece = make("span");
        piece.style.backgroundColor = shade("from", 0.06 + (0.9 * i) / 23);
        strip.append(piece);
      }
      const alike = formatted(low) === formatted(high);
      this.scale.replaceChildren(...(alike ? [`${formatted(low)} in every head`] : [formatted(low), strip, formatted(high)]));
    }
    for (const [one, cell] of this.cells) {
      const level = levelOf(measure, one);
      cell.style.backgroundColor = level === null ? "" : shade("from", 0.06 + 0.9 * level);
      cell.setAttribute("aria-pressed", String(chosen.has(one)));
      cell.tabIndex = chosen.has(one) ? 0 : -1;
      const value = measure ? ` · ${measure.name} ${formatted(measure.values[one.layer][one.head])}` : "";
      cell.title = one.name + value;
    }
  }
}
