// The first line of the page: title, view tabs, copy menu, theme and help.

import { button, draw, make } from "./dom.js";

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
    const title = brandLink ? "Back to the start page" : null;
    return make(brandLink ? "a" : "span", { class: "brand", href: brandLink, title }, logo(), "foci");
  }

  title() {
    const { header, layers, heads } = this.store;
    const many = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
    const positions = Math.max(...layers.map((layer) => layer.Tk));
    const about = [many(layers.length, "layer"), many(heads.length, "head"), many(positions, "position")].join(" · ");
    const name = make("h1", {}, header.title || "Attention");
    return make("div", { class: "title" }, name, make("span", { class: "about" }, about));
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
