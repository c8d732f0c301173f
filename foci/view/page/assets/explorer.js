// Entry point of the explorer: a start page with input, model and progress; then the same page as in a saved file.

import { button, make } from "./dom.js";
import { decodePayload } from "./payload.js";
import { Store } from "./store.js";
import { Remote } from "./remote.js";
import { App } from "./app.js";

const ROOT = document.documentElement.dataset.root;
const EXAMPLES = [
  "Jane is hungry, and she's really craving pasta from Italy.",
  "The animal didn't cross the street because it was too tired.",
  "The keys to the old cabinet in the hall are on the table.",
];
const POLL_MILLISECONDS = 300;

class StartPage {
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
      placeholder: "a directory, or a Hugging Face model name",
      autocomplete: "off",
      spellcheck: "false",
    });
    this.names = make("datalist", { id: "models" });
    this.chips = make("div", { class: "modelchips" });
    this.go = button("Run", { class: "primary", onclick: () => this.runText() });
    this.file = make("input", {
      type: "file",
      accept: ".foci,image/*,audio/*",
      class: "visually-hidden",
      "aria-label": "Open a file",
      onchange: () => this.runFile(this.file.files[0]),
    });
    this.bar = make("progress", { max: "1", value: "0", "aria-label": "Progress" });
    this.status = make("p", { class: "progress", role: "status" });
    this.problem = make("p", { class: "problem", role: "alert", hidden: true });
    const open = button("Open a file", { class: "quiet", onclick: () => this.file.click() });
    const examples = make(
      "div",
      { class: "examples" },
      ...EXAMPLES.map((text) => button(text, { class: "example", onclick: () => (this.text.value = text) })),
    );
    this.working = make("div", { class: "working", hidden: true }, this.bar, this.status);
    const card = make(
      "div",
      { class: "startcard" },
      make("h1", {}, "foci"),
      make("p", { class: "lead" }, "See what a model attends to."),
      this.text,
      examples,
      make("label", { class: "modelrow" }, make("span", {}, "Model"), this.model, this.names),
      this.chips,
      make("div", { class: "buttons" }, this.go, open, this.file),
      this.working,
      this.problem,
      make(
        "p",
        { class: "note" },
        "Everything stays on this machine. Untrained vectors show how attention works, not what a text means; they read 512 words.",
      ),
    );
    this.element = make("div", { class: "startpage" }, card);
    // Restores the last input.
    this.text.value = sessionStorage.getItem("text") ?? this.text.value;
    this.model.value = sessionStorage.getItem("model") ?? "";
    this.listen();
  }

  listen() {
    this.text.addEventListener(
      "keydown",
      (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.runText(),
    );
    this.model.addEventListener("keydown", (event) => event.key === "Enter" && this.runText());
    this.element.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.element.classList.add("over");
    });
    this.element.addEventListener("dragleave", () => this.element.classList.remove("over"));
    this.element.addEventListener("drop", (event) => {
      event.preventDefault();
      this.element.classList.remove("over");
      if (event.dataTransfer.files.length) this.runFile(event.dataTransfer.files[0]);
    });
  }

  async loadModels() {
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

  runText() {
    sessionStorage.setItem("text", this.text.value);
    sessionStorage.setItem("model", this.model.value);
    this.send("api/text", JSON.stringify({ text: this.text.value, model: this.model.value }), "application/json");
  }

  runFile(file) {
    if (!file) return;
    if (file.name.endsWith(".foci")) this.send("api/file", file, "application/octet-stream");
    else if (file.type.startsWith("image/")) this.send(
      `api/image?${new URLSearchParams({ model: this.modelFor("images") })}`,
      file,
      "application/octet-stream",
    );
    else if (file.type.startsWith("audio/")) this.send(
      `api/sound?${new URLSearchParams({ model: this.modelFor("sounds") })}`,
      file,
      "application/octet-stream",
    );
    else this.showProblem(`file must be an image, a sound or a .foci file, got ${file.name}`);
  }

  // The selected model, or a model that ships with foci if the selected one takes another kind of input.
  modelFor(what) {
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
    this.status.textContent = "uploading";
    try {
      const response = await fetch(ROOT + address, { method: "POST", body, headers: { "Content-Type": type } });
      const answer = await response.json();
      if (!response.ok) throw new Error(answer.error);
      await this.followJob(answer.job);
    } catch (problem) {
      this.showProblem(problem.message);
    }
  }

  // Polls a job until it has a record or an error.
  async followJob(job) {
    for (;;) {
      const state = await (await fetch(`${ROOT}api/jobs/${job}`)).json();
      if (state.error) throw new Error(state.error);
      this.bar.value = state.fraction;
      this.status.textContent = state.message;
      if (state.record) return location.assign(`${ROOT}records/${state.record}`);
      await new Promise((done) => setTimeout(done, POLL_MILLISECONDS));
    }
  }

  showProblem(reason) {
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
  const { header, arrays } = await decodePayload(await response.arrayBuffer());
  const remote = new Remote((question, parts) => fetch(`${base}${question}?${new URLSearchParams(parts)}`), header.layers);
  const app = new App(new Store(header, arrays, remote), { brandLink: ROOT });
  document.title = `${header.title} · foci`;
  app.start(document.body);
}

async function open() {
  const { record } = document.documentElement.dataset;
  if (record) await openRecord(record);
  else {
    const start = new StartPage();
    document.body.append(start.element);
    await start.loadModels();
    if (location.pathname !== ROOT) start.showProblem("This record is no longer available: run the model again.");
  }
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

open().catch((problem) => {
  document.body.append(
    make("p", { class: "failed", role: "alert" }, `This page could not be opened: ${problem.message}`),
  );
  throw problem;
});
