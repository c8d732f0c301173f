// The page: header, controls, head picker, the current view, and the list of weights.

import { make, oncePerFrame } from "./dom.js";
import { State } from "./state.js";
import { chosenHeads, computeFocus, findHeads, rankUnits } from "./focus.js";
import { Header } from "./header.js";
import { Controls } from "./controls.js";
import { Picker } from "./picker.js";
import { WeightList, describeFocus } from "./weightlist.js";
import { TextView } from "./text.js";
import { HeadsView } from "./heads.js";
import { MapView } from "./map.js";
import { LinesView } from "./lines.js";
import { AlignView } from "./align.js";
import { ImageView } from "./image.js";
import { SoundView } from "./sound.js";
import { StepsView } from "./steps.js";
import { ComputeView } from "./compute.js";
import { CompareView } from "./compare.js";
import { RolloutView } from "./rollout.js";
import { copyView } from "./export.js";
import { helpDialog, listen } from "./keyboard.js";
import { isDark, formatPercent } from "./colors.js";
import { printable } from "./tokens.js";

// Every view: its name in the URL, its title, its class, and whether a record has it.
const VIEWS = [
  ["compare", "Compare", CompareView, (store) => Boolean(store.header.compare)],
  ["text", "Text", TextView, () => true],
  // Pictures of all heads of a long record would take minutes.
  ["heads", "Heads", HeadsView, (store) => !store.header.onDemand],
  ["map", "Map", MapView, () => true],
  ["lines", "Lines", LinesView, () => true],
  ["align", "Alignment", AlignView, (store) => store.layers.some((layer) => !layer.self)],
  ["image", "Image", ImageView, (store) => store.header.labels.some(hasImages)],
  ["sound", "Sound", SoundView, (store) => store.header.labels.some((labels) => labels.spectrogram)],
  ["steps", "Steps", StepsView, (store) => store.header.prompt !== null || store.layers.some((layer) => !layer.self)],
  ["compute", "How it is computed", ComputeView, () => true],
  ["rollout", "Rollout", RolloutView, (store) => store.layers.some((layer) => layer.self)],
];

function hasImages(labels) {
  return labels.images.some((images) => images.length);
}

const WITHOUT_LIST = new Set(["compare", "heads", "compute", "rollout"]);
// The views that show single denoising steps.
const WITH_STEPS = new Set(["image", "compare"]);
const MAP_POSITION = new Set(["x", "y", "zoom"]);

export class App {
  constructor(store, { brandLink = null } = {}) {
    this.store = store;
    this.state = new State(defaults(store));
    this.dropInvalidState();
    this.views = VIEWS.filter(([, , , fits]) => fits(store));
    this.made = new Map();
    this.picker = new Picker(store, this.state);
    this.weightList = new WeightList(store, this.state);
    this.stage = make("div", { class: "stage", id: "stage", role: "tabpanel" });
    this.toast = make("div", { class: "toast", role: "status", "aria-live": "polite" });
    this.announcement = make("div", { class: "visually-hidden", "aria-live": "polite" });
    this.help = helpDialog();
    this.header = new Header(store, this.state, this.views, {
      brandLink,
      copy: (kind) => this.copy(kind),
      copyLink: () => this.copyLink(),
      flipTheme: () => this.flipTheme(),
      help: () => this.help.showModal(),
    });
    this.controls = new Controls(store, this.state, (direction) => this.setDirection(direction));
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
        this.weightList.element,
      ),
      this.footer(),
      this.toast,
      this.announcement,
      this.help,
    );
    // Shift-click adds to the selection; the browser would select text as well.
    this.element.addEventListener("mousedown", (event) => {
      if (event.shiftKey && !event.target.closest("input, select")) event.preventDefault();
    });
    this.refresh = oncePerFrame(() => this.update());
    this.state.on((changed) => {
      this.changed = new Set([...(this.changed ?? []), ...changed]);
      if (changed.has("theme")) this.applyTheme();
      if (changed.has("view")) this.enterView();
      this.refresh();
    });
    store.remote?.onAnswer(this.refresh);
    this.keys();
    this.applyTheme();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redrawAll());
  }

  // The URL may be old or edited: values that do not fit this record are dropped.
  dropInvalidState() {
    const { state, store } = this;
    state.seq = Math.min(Math.max(Math.round(state.seq), 0), store.header.sequences - 1);
    state.heads = state.heads.filter(
      (name) => store.byName.has(name) || store.layers.some((layer) => layer.label === name),
    );
    state.denoise = Math.min(Math.max(Math.round(state.denoise), 0), store.header.steps.length);
    if (!VIEWS.find(([name, , , fits]) => name === state.view && fits(store))) state.view = "text";
  }

  start(parent) {
    parent.append(this.element);
    this.enterView();
    this.update();
  }

  footer() {
    const { header } = this.store;
    const sentence = (note) => `${note.slice(0, 1).toUpperCase()}${note.slice(1)}.`;
    const notes = header.notes.map((note) => sentence(printable(note)));
    if (header.total > header.sequences) notes.push(`Showing the first ${header.sequences} of ${header.total} sequences.`);
    const more = header.notRecorded.length > 3 ? ` and ${header.notRecorded.length - 3} more` : "";
    if (header.notRecorded.length) {
      notes.push(`Not recorded: ${header.notRecorded.slice(0, 3).join("; ")}${more}.`);
    }
    return notes.length ? make("footer", { class: "bottom" }, ...notes.map((note) => make("p", {}, note))) : null;
  }

  // In self-attention the same tokens stay selected.
  setDirection(direction) {
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

  enterView() {
    this.current?.leave?.();
    this.current = this.view();
    this.stage.replaceChildren(this.current.element);
    this.stage.setAttribute("aria-labelledby", `tab-${this.state.view}`);
    this.current.enter?.();
    this.element.classList.toggle("wide", WITHOUT_LIST.has(this.state.view));
  }

  update() {
    const changed = this.changed;
    this.changed = null;
    // Moving the map does not change the selection.
    if (changed && this.focus && [...changed].every((name) => MAP_POSITION.has(name))) {
      return this.current.update(this.focus, changed);
    }
    const { denoise, view } = this.state;
    this.store.setStep(WITH_STEPS.has(view) ? this.store.header.steps[denoise - 1] ?? null : null);
    const focus = computeFocus(this.store, this.state);
    this.focus = focus;
    this.picker.update();
    this.current.update(focus, changed);
    this.weightList.update(focus, this.current.legend?.() ?? null);
    this.header.update();
    this.controls.update(focus);
    this.announce(focus);
  }

  // The text that a screen reader announces after each selection.
  announce(focus) {
    const { columns } = describeFocus(focus);
    const links = rankUnits(focus.units, 3).map((u) => `${focus.targets.label(u)} ${formatPercent(focus.units[u])}`);
    const text = focus.picks.length ? `${columns}: ${links.join(", ")}` : "";
    if (this.announcement.textContent !== text) this.announcement.textContent = text;
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
      d: () => this.setDirection(state.direction === "to" ? "from" : "to"),
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
    this.showToast(await copyView(kind, this.current, this.focus));
  }

  async copyLink() {
    try {
      await navigator.clipboard.writeText(location.href.split("#")[0] + this.state.hash());
      this.showToast("Link copied");
    } catch {
      this.showToast("Not copied: the link is in the address bar");
    }
  }

  showToast(text) {
    this.toast.textContent = text;
    this.toast.classList.add("on");
    clearTimeout(this.toastTimer);
    this.toastTimer = setTimeout(() => this.toast.classList.remove("on"), 2500);
  }
}

// The initial head and query, which all views of the record share.
function defaults(store) {
  const { head, query, direction } = store.header.initial;
  const layer = store.layers[findHeads(store, head)[0].layer];
  const [queries, keys] = ["queries", "keys"].map((side) => store.labels(layer, side));
  return {
    // An image opens in the image view, a recording in the sound view.
    view: hasImages(keys) || hasImages(queries) ? "image" : keys.spectrogram ? "sound" : "text",
    heads: [head],
    chosen: [query],
    direction,
    words: store.header.labels.some((labels) => labels.words),
  };
}
