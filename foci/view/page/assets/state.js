// The state of the page, kept in the URL fragment, so a link opens the same view.

// Each part of the state: its short name in the URL, its default, and how it is written and read.
const text = { write: String, read: (value) => value.slice(0, 200) };
const flag = { write: (value) => (value ? "1" : "0"), read: (value) => value === "1" };
const number = {
  write: (value) => String(Math.round(value * 1000) / 1000),
  read: (value) => (Number.isFinite(Number(value)) ? Number(value) : 0),
};
const precise = { write: (value) => String(Number(value.toPrecision(4))), read: number.read };
const numbers = {
  write: (value) => value.join("."),
  read: (value) => value.split(".").filter((part) => /^\d+$/.test(part)).map(Number).slice(0, 64),
};
const names = { write: (value) => value.join("~"), read: (value) => value.split("~").filter(Boolean).slice(0, 64) };
const oneOf = (...options) => ({ write: String, read: (value) => (options.includes(value) ? value : options[0]) });

const PARTS = {
  view: ["v", "text", oneOf("text", "compare", "heads", "map", "lines", "align", "image", "sound", "steps", "compute", "rollout")],
  seq: ["b", 0, number],
  heads: ["h", [], names],
  chosen: ["t", [], numbers],
  direction: ["d", "to", oneOf("to", "from")],
  words: ["w", false, flag],
  hideSinks: ["s", false, flag],
  scale: ["c", "linear", oneOf("linear", "log", "rank")],
  metric: ["m", "", text],
  sorted: ["o", false, flag],
  reduce: ["r", "mean", oneOf("mean", "max")],
  x: ["x", -1, number],
  y: ["y", -1, number],
  zoom: ["z", 0, number],
  step: ["n", 0, number],
  find: ["q", "", text],
  // The number of the denoising step from 1, 0 for the mean; the frame of a video; the weight of the last color of an
  // image, 0 for the largest one shown; how strongly it is colored.
  denoise: ["k", 0, number],
  frame: ["f", 0, number],
  peak: ["p", 0, precise],
  opacity: ["a", 1, number],
  theme: ["e", "", oneOf("", "light", "dark")],
};

export class State {
  constructor(changes = {}) {
    this.listeners = [];
    for (const [name, [, initial]] of Object.entries(PARTS)) this[name] = initial;
    // The token under the pointer is not part of the URL.
    this.hover = null;
    Object.assign(this, changes);
    // A page may have an initial view of its own; the URL overrides it.
    this.read(document.documentElement.dataset.state ?? "");
    this.defaults = Object.fromEntries(Object.keys(PARTS).map((name) => [name, this[name]]));
    this.read(location.hash);
    window.addEventListener("hashchange", () => {
      if (location.hash === this.written) return;
      Object.assign(this, this.defaults);
      this.read(location.hash);
      this.notify(new Set(Object.keys(PARTS)));
    });
  }

  on(listener) {
    this.listeners.push(listener);
  }

  set(changes) {
    const changed = new Set(Object.keys(changes).filter((name) => !isEqual(this[name], changes[name])));
    if (!changed.size) return;
    Object.assign(this, changes);
    this.write();
    this.notify(changed);
  }

  notify(changed) {
    for (const listener of this.listeners) listener(changed);
  }

  hash() {
    const parts = [];
    for (const [name, [short, , how]] of Object.entries(PARTS)) {
      if (!isEqual(this[name], this.defaults[name])) parts.push(`${short}=${encodeURIComponent(how.write(this[name]))}`);
    }
    return parts.length ? `#${parts.join("&")}` : "";
  }

  read(hash) {
    const parameters = new URLSearchParams(hash.replace(/^#/, ""));
    for (const [name, [short, , how]] of Object.entries(PARTS)) {
      if (parameters.has(short)) this[name] = how.read(parameters.get(short));
    }
  }

  write() {
    clearTimeout(this.timer);
    // Browsers limit how often the URL may change.
    this.timer = setTimeout(() => {
      this.written = this.hash();
      try {
        history.replaceState(null, "", this.written || location.pathname + location.search);
      } catch {
        // An iframe in a notebook has no URL of its own.
      }
    }, 150);
  }
}

function isEqual(a, b) {
  if (Array.isArray(a) && Array.isArray(b)) return a.length === b.length && a.every((item, i) => item === b[i]);
  return a === b;
}
