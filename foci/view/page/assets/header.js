// The first line of the page: title, view tabs, copy menu, theme and help.

import { button, draw, make } from "./dom.js";
import { STACK_TITLES, groupByStack } from "./picker.js";

// What a position of a sequence is, by the kind of its labels.
const UNITS = { tokens: "token", patches: "patch", frames: "frame", positions: "position" };

export class Header {
  // actions: brandLink, copy(kind), copyLink(), flipTheme(), help()
  constructor(store, state, views, actions) {
    Object.assign(this, { store, state, views, actions });
    this.tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
    this.tabs.append(...views.map(([name, title], n) => this.tab(name, title, n)));
    this.element = make("header", { class: "top" }, this.brand(), this.title(), this.tabs, this.icons());
  }

  brand() {
    const { brandLink } = this.actions;
    if (!brandLink) return make("span", { class: "brand" }, logo(), "foci");
    const title = "Enter another text, or open another file";
    return make(
      "span",
      { class: "brands" },
      make("a", { class: "brand", href: brandLink, title }, logo(), "foci"),
      make("a", { class: "newtext", href: brandLink, title }, "New text"),
    );
  }

  title() {
    const { header, layers, heads } = this.store;
    const lengths = new Map(layers.map((layer) => [layer.keys, [layer.Tk, UNITS[this.store.labels(layer, "keys").kind]]]));
    const read = [...lengths].map(([name, [count, what]]) => `${lengths.size > 1 ? `${name}: ` : ""}${many(count, what)}`);
    const parts = [describeLayers(this.store), many(heads.length, "head"), read.join(", ")];
    const about = (lengths.size > 1 ? parts.slice(0, 2) : parts).join(" · ");
    const name = make("h1", { title: header.title }, header.title || "Attention");
    return make("div", { class: "title" }, name, make("span", { class: "about", title: parts.join(" · ") }, about));
  }

  tab(name, title, n) {
    return button(title, {
      role: "tab",
      id: `tab-${name}`,
      "aria-controls": "stage",
      "data-view": name,
      title: `${title} (${n + 1})`,
      onclick: () => this.state.set({ view: name }),
      onkeydown: (event) => this.key(event, n),
    });
  }

  key(event, n) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (n + step + this.views.length) % this.views.length;
    this.state.set({ view: this.views[next][0] });
    this.tabs.children[next].focus();
  }

  icons() {
    const { flipTheme, help } = this.actions;
    const icon = (sign, name, key, onclick) =>
      button(sign, { class: "icon", title: `${name} (${key})`, "aria-label": name, onclick });
    const icons = [this.copyMenu(), icon("◐", "Light or dark theme", "t", flipTheme), icon("?", "Keyboard shortcuts", "?", help)];
    return make("div", { class: "icons" }, ...icons);
  }

  copyMenu() {
    const { copy, copyLink } = this.actions;
    const menu = make("details", { class: "menu" }, make("summary", { title: "Copy this view" }, "Copy"));
    const closing = (work) => () => {
      menu.open = false;
      work();
    };
    const kinds = ["png", "svg", "csv"].map((kind) =>
      button(`as ${kind.toUpperCase()}`, { "data-copy": kind, onclick: closing(() => copy(kind)) }),
    );
    const link = button("link to this view", { onclick: closing(copyLink) });
    menu.append(make("div", { class: "menu-items" }, ...kinds, link));
    return menu;
  }

  update() {
    for (const tab of this.tabs.children) {
      const isOn = tab.dataset.view === this.state.view;
      tab.setAttribute("aria-selected", String(isOn));
      tab.tabIndex = isOn ? 0 : -1;
    }
  }
}

function many(count, what) {
  const plural = what.endsWith("ch") ? `${what}es` : `${what}s`;
  return `${count.toLocaleString("en")} ${count === 1 ? what : plural}`;
}

// "6 layers", or "4 encoder + 4 decoder + 4 cross-attention layers".
function describeLayers(store) {
  const stacks = [...groupByStack(store)];
  if (stacks.length === 1) return many(store.layers.length, "layer");
  const parts = stacks.map(([stack, { length }]) => `${length} ${(STACK_TITLES[stack] ?? stack).toLowerCase()}`);
  return `${parts.join(" + ")} layers`;
}

// The logo: two rings around a point.
function logo() {
  const rings = [[10, 1.6, 0.35], [6, 1.8, 0.65], [2.4, 0, 1]].map(([r, width, opacity]) =>
    draw("circle", {
      cx: 12,
      cy: 12,
      r,
      fill: width ? "none" : "currentColor",
      stroke: "currentColor",
      "stroke-width": width,
      opacity,
    }),
  );
  return draw("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, ...rings);
}
