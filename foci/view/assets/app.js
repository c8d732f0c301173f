// The page: views of one record, the panels beside them, and the switches above.

import { button, choice, make, perFrame, toggle } from "./dom.js";
import { State } from "./state.js";
import { chosenHeads, focusOf, ranked } from "./focus.js";
import { Picker } from "./picker.js";
import { Ranked, spoken } from "./ranked.js";
import { TextView } from "./text.js";
import { HeadsView } from "./heads.js";
import { MapView } from "./map.js";
import { LinesView } from "./lines.js";
import { AlignView } from "./align.js";
import { ImageView } from "./image.js";
import { StepsView } from "./steps.js";
import { ComputeView } from "./compute.js";
import { RolloutView } from "./rollout.js";
import { copied } from "./exporting.js";
import { helpDialog, listen } from "./keys.js";
import { isDark, percent } from "./colors.js";

// Every view: its name in the address, its title, its class, and the records for which it is there.
const VIEWS = [
  ["text", "Text", TextView, () => true],
  ["heads", "Heads", HeadsView, () => true],
  ["map", "Map", MapView, () => true],
  ["lines", "Lines", LinesView, () => true],
  ["align", "Alignment", AlignView, (store) => store.layers.some((layer) => !layer.self)],
  ["image", "Image", ImageView, (store) => store.head.labels.some((labels) => labels.grid)],
  ["steps", "Steps", StepsView, (store) => store.head.prompt !== null || store.layers.some((layer) => !layer.self)],
  ["compute", "How it is computed", ComputeView, () => true],
  ["rollout", "Rollout", RolloutView, (store) => store.layers.some((layer) => layer.self)],
];

const ASIDE = new Set(["compute", "rollout"]);
const PLACE = new Set(["x", "y", "zoom"]);

export class App {
  constructor(store, { brandLink = null } = {}) {
    this.store = store;
    this.state = new State(defaults(store));
    this.tame();
    this.views = VIEWS.filter(([, , , fits]) => fits(store));
    this.made = new Map();
    this.picker = new Picker(store, this.state);
    this.ranked = new Ranked(store, this.state);
    this.stage = make("div", { class: "stage", id: "stage", role: "tabpanel" });
    this.toast = make("div", { class: "toast", role: "status", "aria-live": "polite" });
    this.speech = make("div", { class: "unseen", "aria-live": "polite" });
    this.help = helpDialog();
    this.element = make("div", { class: "app" }, this.header(brandLink), this.controls(), make("div", { class: "columns" }, this.picker.element, make("main", { class: "middle" }, this.stage), this.ranked.element), this.footer(), this.toast, this.speech, this.help);
    this.refresh = perFrame(() => this.update());
    this.state.on((changed) => {
      this.changed = new Set([...(this.changed ?? []), ...changed]);
      if (changed.has("theme")) this.applyTheme();
      if (changed.has("view")) this.arrive();
      this.refresh();
    });
    store.remote?.whenNews(this.refresh);
    this.keys();
    this.applyTheme();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redrawAll());
  }

  // An address may be old or written by hand: what does not fit this record is dropped.
  tame() {
    const { state, store } = this;
    state.seq = Math.min(Math.max(Math.round(state.seq), 0), store.head.sequences - 1);
    state.heads = state.heads.filter((name) => store.byName.has(name) || store.layers.some((layer) => layer.label === name));
    if (!VIEWS.find(([name, , , fits]) => name === state.view && fits(store))) state.view = "text";
  }

  start(parent) {
    parent.append(this.element);
    this.arrive();
    this.update();
  }

  header(brandLink) {
    const { head, layers, heads } = this.store;
    const brand = make(brandLink ? "a" : "span", { class: "brand", href: brandLink, title: brandLink ? "Look at something else" : null }, mark(), "foci");
    const tokens = Math.max(...layers.map((layer) => layer.Tk));
    const about = `${layers.length} layer${layers.length > 1 ? "s" : ""} · ${heads.length.toLocaleString("en")} heads · ${tokens.toLocaleString("en")} positions`;
    this.tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
    this.views.forEach(([name, title], n) => this.tabs.append(button(title, { role: "tab", id: `tab-${name}`, "aria-controls": "stage", "data-view": name, title: `${title} (${n + 1})`, onclick: () => this.state.set({ view: name }), onkeydown: (event) => this.tabKey(event, n) })));
    const copy = make("details", { class: "menu" }, make("summary", { title: "Copy what is shown" }, "Copy"), make("div", { class: "menu-items" }, ...["png", "svg", "csv"].map((kind) => button(`as ${kind.toUpperCase()}`, { "data-copy": kind, onclick: () => this.copy(kind, copy) })), button("link to this view", { onclick: () => this.copyLink(copy) })));
    const theme = button("◐", { class: "icon", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: () => this.flipTheme() });
    const help = button("?", { class: "icon", title: "Keys (?)", "aria-label": "Keys", onclick: () => this.help.showModal() });
    const title = make("div", { class: "title" }, make("h1", {}, head.title || "Attention"), make("span", { class: "about" }, about));
    return make("header", { class: "top" }, brand, title, this.tabs, make("div", { class: "icons" }, copy, theme, help));
  }

  tabKey(event, n) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (n + step + this.views.length) % this.views.length;
    this.state.set({ view: this.views[next][0] });
    this.tabs.children[next].focus();
  }

  controls() {
    const { state, store } = this;
    this.direction = choice("Direction", [["to", "where it looks", "d"], ["from", "who looks at it", "d"]], () => state.direction, (value) => this.turn(value));
    this.scale = choice("Colours", [["linear", "linear"], ["log", "log"], ["rank", "rank"]], () => state.scale, (value) => state.set({ scale: value }));
    this.words = toggle("words", "Words instead of sub-words (w)", () => state.words, () => state.set({ words: !state.words }));
    this.words.hidden = !store.head.labels.some((labels) => labels.words);
    this.sinks = toggle("hide sinks", "A sink takes a tenth of a head’s attention or more, and five times an even share (s)", () => state.hideSinks, () => state.set({ hideSinks: !state.hideSinks }));
    this.sinkShare = make("span", { class: "sinkshare" });
    const parts = [make("span", { class: "label" }, "tint by"), this.direction, make("span", { class: "label" }, "colours"), this.scale, this.words, this.sinks, this.sinkShare];
    if (store.head.sequences > 1) parts.unshift(make("span", { class: "label" }, "sequence"), this.sequences());
    return make("div", { class: "controls", role: "toolbar", "aria-label": "How to look" }, ...parts);
  }

  sequences() {
    const options = Array.from({ length: this.store.head.sequences }, (_, b) => make("option", { value: String(b) }, String(b)));
    this.sequence = make("select", { "aria-label": "Sequence", onchange: () => this.state.set({ seq: Number(this.sequence.value), chosen: [], hover: null }) }, ...options);
    return this.sequence;
  }

  footer() {
    const { head } = this.store;
    const notes = [];
    if (head.total > head.sequences) notes.push(`The first ${head.sequences} of ${head.total} sequences are here.`);
    if (head.unseen.length) notes.push(`Not seen: ${head.unseen.slice(0, 3).join("; ")}${head.unseen.length > 3 ? ` and ${head.unseen.length - 3} more` : ""}.`);
    return notes.length ? make("footer", { class: "bottom" }, ...notes.map((note) => make("p", {}, note))) : null;
  }

  // Turned around, the same tokens stay chosen where the text looks at itself.
  turn(direction) {
    const { state, store } = this;
    if (direction === state.direction) return;
    const layer = store.layers[chosenHeads(store, state)[0].layer];
    const shift = layer.Tk - layer.Tq;
    const moved = layer.self ? state.chosen.map((i) => (direction === "from" ? i + shift : i - shift)).filter((i) => i >= 0) : [];
    state.set({ direction, chosen: moved, hover: null });
  }

  view() {
    const { view } = this.state;
    if (!this.made.has(view)) {
      const [, , View] = VIEWS.find(([name]) => name === view);
      this.made.set(view, new View({ store: this.store, state: this.state }));
    }
    return this.made.get(view);
  }

  arrive() {
    this.current?.leave?.();
    this.current = this.view();
    this.stage.replaceChildren(this.current.element);
    this.stage.setAttribute("aria-labelledby", `tab-${this.state.view}`);
    this.current.arrive?.();
    this.element.classList.toggle("wide", ASIDE.has(this.state.view));
  }

  update() {
    const changed = this.changed;
    this.changed = null;
    // A map that is moved asks nothing new.
    if (changed && this.focus && [...changed].every((name) => PLACE.has(name))) return this.current.update(this.focus, changed);
    const focus = focusOf(this.store, this.state);
    this.focus = focus;
    this.picker.update();
    this.current.update(focus, changed);
    this.ranked.update(focus, this.current.legend?.() ?? null);
    for (const part of [this.direction, this.scale, this.words, this.sinks]) part.refresh();
    if (this.sequence) this.sequence.value = String(this.state.seq);
    for (const tab of this.tabs.children) {
      const isOn = tab.dataset.view === this.state.view;
      tab.setAttribute("aria-selected", String(isOn));
      tab.tabIndex = isOn ? 0 : -1;
    }
    this.sinkShare.textContent = sinkWords(focus, this.state.hideSinks);
    this.speak(focus);
  }

  // What somebody who does not see the page hears after each choice.
  speak(focus) {
    const { columns } = spoken(focus);
    const links = ranked(focus.units, 3).map((u) => `${focus.targets.label(u)} ${percent(focus.units[u])}`);
    const text = focus.picks.length ? `${columns}: ${links.join(", ")}` : "";
    if (this.speech.textContent !== text) this.speech.textContent = text;
  }

  keys() {
    const { state, store } = this;
    const step = (by) => {
      const at = chosenHeads(store, state)[0].order;
      state.set({ heads: [store.heads[(at + by + store.heads.length) % store.heads.length].name] });
    };
    const layerStep = (by) => {
      const one = chosenHeads(store, state)[0];
      const next = store.layers[(one.layer + by + store.layers.length) % store.layers.length];
      state.set({ heads: [next.names[Math.min(one.head, next.heads - 1)]] });
    };
    const actions = {
      "[": () => step(-1),
      "]": () => step(1),
      "{": () => layerStep(-1),
      "}": () => layerStep(1),
      d: () => this.turn(state.direction === "to" ? "from" : "to"),
      w: () => !this.words.hidden && state.set({ words: !state.words }),
      s: () => state.set({ hideSinks: !state.hideSinks }),
      c: () => state.set({ scale: { linear: "log", log: "rank", rank: "linear" }[state.scale] }),
      t: () => this.flipTheme(),
      p: () => state.view === "steps" && this.current.toggle(),
      "/": () => {
        state.set({ view: "text" });
        this.current.focusSearch();
      },
      "?": () => this.help.showModal(),
      Escape: () => state.set({ chosen: [], hover: null, find: "" }),
    };
    this.views.forEach(([name], n) => (actions[String(n + 1)] = () => state.set({ view: name })));
    listen(actions);
  }

  flipTheme() {
    this.state.set({ theme: isDark() ? "light" : "dark" });
  }

  applyTheme() {
    if (this.state.theme) document.documentElement.dataset.theme = this.state.theme;
    else delete document.documentElement.dataset.theme;
    this.redrawAll();
  }

  redrawAll() {
    for (const view of this.made.values()) view.repaint?.();
    this.changed = new Set([...(this.changed ?? []), "theme"]);
    this.refresh();
  }

  async copy(kind, menu) {
    menu.open = false;
    this.say(await copied(kind, this.current, this.focus));
  }

  async copyLink(menu) {
    menu.open = false;
    try {
      await navigator.clipboard.writeText(location.href.split("#")[0] + this.state.hash());
      this.say("Link copied");
    } catch {
      this.say("The address bar has the link");
    }
  }

  say(text) {
    this.toast.textContent = text;
    this.toast.classList.add("on");
    clearTimeout(this.sayTimer);
    this.sayTimer = setTimeout(() => this.toast.classList.remove("on"), 2500);
  }
}

function sinkWords({ picks, to, sinks, sinkShare }, hidden) {
  if (!picks.length || !to) return "";
  if (!sinks.size) return "no sinks in this head";
  return `${percent(sinkShare)} of this look is ${hidden ? "hidden in sinks" : "in sinks"}`;
}

// Two rings around a point: what is in focus.
function mark() {
  const icon = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  icon.setAttribute("viewBox", "0 0 24 24");
  icon.setAttribute("aria-hidden", "true");
  for (const [r, width, opacity] of [[10, 1.6, 0.35], [6, 1.8, 0.65], [2.4, 0, 1]]) {
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    for (const [name, value] of Object.entries({ cx: 12, cy: 12, r, fill: width ? "none" : "currentColor", stroke: "currentColor", "stroke-width": width, opacity })) ring.setAttribute(name, value);
    icon.append(ring);
  }
  return icon;
}

// A head worth looking at first: between two texts the last layer's mean; else one that looks somewhere sharply, and
// not at the first token. And a word to look from.
function defaults(store) {
  const across = store.layers.findLast((layer) => !layer.self);
  const one = across ? null : tellingHead(store);
  const layer = across ?? store.layers[one.layer];
  const texts = store.texts(layer, "queries", 0);
  const last = texts.slice(0, 120).findLastIndex((text) => /\p{L}{3,}/u.test(text) && !/^\s*[<[]/.test(text));
  return { heads: [across ? across.label : one.name], chosen: [last < 0 ? Math.min(texts.length, 120) - 1 : last], words: store.head.labels.some((labels) => labels.words) };
}

function tellingHead(store) {
  const values = (name) => store.head.measures.find((measure) => measure.name === name)?.values;
  const [heaviest, previous] = [values("heaviest"), values("previous token")];
  const inSinks = (one) => store.sinks(one, 0).reduce((sum, j) => sum + store.received(one, 0)[j], 0);
  const worth = (one) => (heaviest?.[one.layer][one.head] ?? 0) * (1 - inSinks(one)) ** 2 * (1 - (previous?.[one.layer][one.head] ?? 0));
  return store.heads.reduce((best, one) => (worth(one) > worth(best) ? one : best), store.heads[0]);
}
