// A small map for each head of the selected layer, or for each layer if their mean is selected. Pressing one shows it alone.

import { make, prepareCanvas } from "./dom.js";
import { addUnitWeights } from "./focus.js";
import { drawGrid } from "./gridmaps.js";

const MAX_HEAD_MAPS = 64;

export class HeadMaps {
  // drawMap(canvas, valueAt) draws one map; valueAt(position) is the weight of a position.
  constructor({ store, state, layerSlider, drawMap }) {
    Object.assign(this, { store, state, layerSlider, drawMap });
    this.element = make("div", { class: "headmaps", role: "group", "aria-label": "Heads" });
  }

  // Several maps take up room whether or not anything is selected.
  update(focus, isShown) {
    this.focus = focus;
    this.element.hidden = !isShown || this.list().length < 2;
  }

  list() {
    const { store, focus } = this;
    const headsOf = ({ number }) => store.heads.filter((one) => one.layer === number);
    const averaged = this.layerSlider.averagedLayers(focus);
    const maps = averaged.length
      ? averaged.map((layer) => ({ name: layer.label, label: layer.label, heads: headsOf(layer) }))
      : headsOf(focus.layer).map((one) => ({ name: one.name, label: one.name.replace(/^.*H/, "H"), heads: [one] }));
    return maps.slice(0, MAX_HEAD_MAPS);
  }

  render(isColored) {
    this.element.classList.toggle("idle", !isColored);
    if (this.element.hidden || !isColored) return;
    this.askForWeights();
    const maps = this.list();
    const key = maps.map(({ name }) => name).join();
    if (this.key !== key) {
      this.key = key;
      this.maps = maps.map((map) => this.createMap(map));
      this.element.replaceChildren(...this.maps.map(({ element }) => element));
    }
    for (const map of this.maps) this.draw(map);
  }

  askForWeights() {
    const { store, state, focus } = this;
    if (!store.remote || store.hasEntries(focus.layer)) return;
    for (const u of focus.picks) {
      for (let i = focus.sources.start[u]; i < focus.sources.stop[u]; i++) {
        store.remote.askAllHeads(focus.layer.number, focus.to, i, state.seq);
      }
    }
  }

  createMap({ name, label, heads }) {
    const canvas = make("canvas", { "aria-hidden": "true" });
    // A second press shows the mean of all heads again.
    const choose = () => this.state.set({ heads: [this.isAlone(heads) ? this.focus.layer.label : name] });
    const element = make("button", { type: "button", class: "headmap", title: `${name}: show it alone`, onclick: choose },
      canvas, make("span", {}, label));
    return { heads, canvas, element };
  }

  isAlone(heads) {
    return this.focus.heads.length === 1 && this.focus.heads[0] === heads[0];
  }

  draw({ heads, canvas, element }) {
    const { store, state, focus } = this;
    const weights = new Float32Array(focus.targets.of.length);
    for (const u of focus.picks) addUnitWeights(weights, store, state, heads, focus.sources, u, focus.to);
    const isSink = (position) => focus.to && state.hideSinks && focus.sinks.has(position);
    this.drawMap(canvas, (position) => (isSink(position) ? 0 : weights[position]));
    element.setAttribute("aria-pressed", String(this.isAlone(heads)));
  }
}

export function drawSmallGrid(canvas, grid, [width, height], scale, direction) {
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  drawGrid(prepareCanvas(canvas, width, height), grid, width, height, scale, direction);
}
