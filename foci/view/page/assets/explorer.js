// The explorer's front door: a text or a file, a model, and a bar while it runs; then the same page as in a file.

import { button, make } from "./dom.js";
import { unpack } from "./payload.js";
import { Store } from "./store.js";
import { Remote } from "./remote.js";
import { App } from "./app.js";

const ROOT = document.documentElement.dataset.root;
const EXAMPLES = [
  "Jane is hungry, and she's really craving pasta from Italy.",
  "The animal didn't cross the street because it was too tired.",
  "The keys to the old cabinet in the hall are on the table.",
];
const OFTEN = 300;

class FrontDoor {
  constructor() {
    this.takes = {};
    this.text = make(
      "textarea",
      { rows: "4", "aria-label": "Text", placeholder: "Type a text, or drop an image, a sound or a .foci file here" },
      EXAMPLES[0],
    );
    this.model = make("input", {
      list: "models",
      "aria-label": "Model",
      placeholder: "a folder, or a name on Hugging Face",
      autocomplete: "off",
      spellcheck: "false",
    });
    this.names = make("datalist", { id: "models" });
    this.chips = make("div", { class: "modelchips" });
    this.go = button("Look", { class: "primary", onclick: () => this.look() });
    this.file = make("input", {
      type: "file",
      accept: ".foci,image/*,audio/*",
      class: "unseen",
      "aria-label": "Open a file",
      onchange: () => this.take(this.file.files[0]),
    });
    this.bar = make("progress", { max: "1", value: "0", "aria-label": "How far it is" });
    this.told = make("p", { class: "doing", role: "status" });
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    const open = button("Open a file", { class: "quiet", onclick: () => this.file.click() });
    const examples = make(
      "div",
      { class: "examples" },
      ...EXAMPLES.map((text) => button(text, { class: "example", onclick: () => (this.text.value = text) })),
    );
    this.working = make("div", { class: "working", hidden: true }, this.bar, this.told);
    const card = make(
      "div",
      { class: "door" },
      make("h1", {}, "foci"),
      make("p", { class: "lead" }, "See where a model looks."),
      this.text,
      examples,
      make("label", { class: "modelrow" }, make("span", {}, "Model"), this.model, this.names),
      this.chips,
      make("div", { class: "doing-row" }, this.go, open, this.file),
      this.working,
      this.problem,
      make(
        "p",
        { class: "note" },
        "Everything stays on this machine. Untrained vectors show how attention works, not what a text means.",
      ),
    );
    this.element = make("div", { class: "doorway" }, card);
    // What was looked at last stays at hand.
    this.text.value = sessionStorage.getItem("text") ?? this.text.value;
    this.model.value = sessionStorage.getItem("model") ?? "";
    this.listen();
  }

  listen() {
    this.text.addEventListener(
      "keydown",
      (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.look(),
    );
    this.model.addEventListener("keydown", (event) => event.key === "Enter" && this.look());
    this.element.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.element.classList.add("over");
    });
    this.element.addEventListener("dragleave", () => this.element.classList.remove("over"));
    this.element.addEventListener("drop", (event) => {
      event.preventDefault();
      this.element.classList.remove("over");
      if (event.dataTransfer.files.length) this.take(event.dataTransfer.files[0]);
    });
  }

  async start() {
    const { models, takes } = await (await fetch(`${ROOT}api/models`)).json();
    this.takes = takes;
    this.names.append(...models.map((name) => make("option", { value: name })));
    this.chips.append(
      ...models.slice(0, 8).map(
        (name) => button(name, { class: "modelchip", onclick: () => (this.model.value = name) }),
      ),
    );
    if (!this.model.value) this.model.value = models[1] ?? models[0];
  }

  look() {
    sessionStorage.setItem("text", this.text.value);
    sessionStorage.setItem("model", this.model.value);
    this.send("api/look", JSON.stringify({ text: this.text.value, model: this.model.value }), "application/json");
  }

  take(file) {
    if (!file) return;
    if (file.name.endsWith(".foci")) this.send("api/open", file, "application/octet-stream");
    else if (file.type.startsWith("image/")) this.send(
      `api/view?${new URLSearchParams({ model: this.fitting("images") })}`,
      file,
      "application/octet-stream",
    );
    else if (file.type.startsWith("audio/")) this.send(
      `api/hear?${new URLSearchParams({ model: this.fitting("sounds") })}`,
      file,
      "application/octet-stream",
    );
    else this.fail(`expected an image, a sound or a .foci file, received ${file.name}`);
  }

  /** The model that was chosen; where it is known to take something else, one that ships and takes this. */
  fitting(what) {
    const taken = this.takes[this.model.value];
    const other = Object.keys(this.takes).find((name) => this.takes[name] === what);
    if (taken && taken !== what && other) this.model.value = other;
    return this.model.value;
  }

  async send(address, body, type) {
    this.problem.hidden = true;
    this.working.hidden = false;
    this.go.disabled = true;
    this.bar.removeAttribute("value");
    this.told.textContent = "sending";
    try {
      const response = await fetch(ROOT + address, { method: "POST", body, headers: { "Content-Type": type } });
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error);
      await this.watch(answer.job);
    } catch (problem) {
      this.fail(problem.message);
    }
  }

  // Asks how far it is until there is a record or a reason.
  async watch(job) {
    for (;;) {
      const state = await (await fetch(`${ROOT}api/jobs/${job}`)).json();
      if (state.error) throw new Error(state.error);
      this.bar.value = state.fraction;
      this.told.textContent = state.told;
      if (state.record) return location.assign(`${ROOT}records/${state.record}`);
      await new Promise((done) => setTimeout(done, OFTEN));
    }
  }

  fail(reason) {
    this.working.hidden = true;
    this.go.disabled = false;
    this.problem.textContent = reason;
    this.problem.hidden = false;
  }
}

async function openRecord(name) {
  const base = `${ROOT}api/records/${name}/`;
  const response = await fetch(`${base}data`);
  if (!response.ok) throw new Error((await response.json()).error);
  const { head, arrays } = await unpack(await response.arrayBuffer());
  const app = new App(new Store(head, arrays, new Remote(base, head.layers)), { brandLink: ROOT });
  document.title = `${head.title} · foci`;
  app.start(document.body);
}

async function open() {
  const { record } = document.documentElement.dataset;
  if (record) await openRecord(record);
  else {
    const door = new FrontDoor();
    document.body.append(door.element);
    await door.start();
    if (location.pathname !== ROOT) door.fail("This record is no longer here: look again.");
  }
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

open().catch((problem) => {
  document.body.append(
    make("p", { class: "failed", role: "alert" }, `This page could not be opened: ${problem.message}`),
  );
  throw problem;
});
