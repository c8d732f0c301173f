// The page: views of one record, the panels beside them, and the switches above.

import { make, perFrame } from "./dom.js";
import { State } from "./state.js";
import { chosenHeads, focusOf, headsNamed, ranked } from "./focus.js";
import { Header } from "./header.js";
import { Controls } from "./controls.js";
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
import { printable } from "./tokens.js";

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

const ASIDE = new Set(["heads", "compute", "rollout"]);
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
    this.header = new Header(store, this.state, this.views, {
      brandLink,
      copy: (kind) => this.copy(kind),
      copyLink: () => this.copyLink(),
      flipTheme: () => this.flipTheme(),
      help: () => this.help.showModal(),
    });
    this.controls = new Controls(store, this.state, (direction) => this.turn(direction));
    this.element = make(
      "div",
      { class: "app" },
      this.header.element,
      this.controls.element,
      make(
        "div",
        { class: "columns" },
        this.picker.element,
        make("main", { class: "middle" }, this.stage),
        this.ranked.element,
      ),
      this.footer(),
      this.toast,
      this.speech,
      this.help,
    );
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
    state.heads = state.heads.filter(
      (name) => store.byName.has(name) || store.layers.some((layer) => layer.label === name),
    );
    if (!VIEWS.find(([name, , , fits]) => name === state.view && fits(store))) state.view = "text";
  }

  start(parent) {
    parent.append(this.element);
    this.arrive();
    this.update();
  }

  footer() {
    const { head } = this.store;
    const sentence = (note) => `${note.slice(0, 1).toUpperCase()}${note.slice(1)}.`;
    const notes = head.notes.map((note) => sentence(printable(note)));
    if (head.total > head.sequences) notes.push(`The first ${head.sequences} of ${head.total} sequences are here.`);
    const more = head.unseen.length > 3 ? ` and ${head.unseen.length - 3} more` : "";
    if (head.unseen.length) {
      notes.push(`Not seen: ${head.unseen.slice(0, 3).join("; ")}${more}.`);
    }
    return notes.length ? make("footer", { class: "bottom" }, ...notes.map((note) => make("p", {}, note))) : null;
  }

  // Turned around, the same tokens stay chosen where the text looks at itself.
  turn(direction) {
    const { state, store } = this;
    if (direction === state.direction) return;
    const layer = store.layers[chosenHeads(store, state)[0].layer];
    const shift = layer.Tk - layer.Tq;
    const moved = state.chosen.map((i) => (direction === "from" ? i + shift : i - shift)).filter((i) => i >= 0);
    state.set({ direction, chosen: layer.self ? moved : [], hover: null });
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
    if (changed && this.focus && [...changed].every((name) => PLACE.has(name))) {
      return this.current.update(this.focus, changed);
    }
    const focus = focusOf(this.store, this.state);
    this.focus = focus;
    this.picker.update();
    this.current.update(focus, changed);
    this.ranked.update(focus, this.current.legend?.() ?? null);
    this.header.update();
    this.controls.update(focus);
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
      w: () => this.controls.hasWords && state.set({ words: !state.words }),
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

  async copy(kind) {
    this.say(await copied(kind, this.current, this.focus));
  }

  async copyLink() {
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

// The head and the word that every view of the record begins with.
function defaults(store) {
  const { head, query } = store.head.first;
  const keys = store.labels(store.layers[headsNamed(store, head)[0].layer], "keys");
  return {
    // Patches by their numbers are no text that anybody reads: an image is looked at as one.
    view: keys.grid ? "image" : "text",
    heads: [head],
    chosen: [query],
    words: store.head.labels.some((labels) => labels.words),
  };
}
