// The sliders of the layer, of the denoising step of a diffusion model and of the frame of a video.

import { labelled, make, slider } from "./dom.js";
import { describeHeads } from "./focus.js";
import { listFrames } from "./gridmaps.js";

// A slider over these layers; its first position is their mean.
export class LayerSlider {
  constructor(store, state, layers) {
    Object.assign(this, { store, state, layers });
    // Weights that are asked for one by one are too many for the mean of all layers.
    const canAverage = layers.every((layer) => !store.remote || store.hasEntries(layer));
    this.slider = slider("Layer", canAverage ? 0 : 1, layers.length, 1, (n) => this.choose(n));
    this.value = make("output", { class: "value" });
    this.row = labelled("layer", this.slider, this.value);
  }

  choose(n) {
    const { state, focus } = this;
    if (n === 0) return state.set({ heads: this.similarLayers(focus.layer).map((layer) => layer.label) });
    const next = this.layers[n - 1];
    const named = /H\d+(#\d+)?$/.exec(state.heads[0] ?? "") && focus?.heads.length === 1;
    state.set({ heads: [named ? next.names[Math.min(focus.heads[0].head, next.heads - 1)] : next.label] });
  }

  // The layers with the same queries and keys, whose weights can be averaged.
  similarLayers(layer) {
    return this.layers.filter((other) => ["queries", "keys", "Tq", "Tk"].every((name) => other[name] === layer[name]));
  }

  // The layers whose mean is selected; none if the selected heads are those of one layer.
  averagedLayers({ layer, heads }) {
    return new Set(heads.map((one) => one.layer)).size > 1 ? this.similarLayers(layer) : [];
  }

  // Shows the selected layer; returns whether there is anything to choose.
  update(focus) {
    this.focus = focus;
    this.row.hidden = this.layers.length < 2;
    this.slider.value = String(this.averagedLayers(focus).length ? 0 : this.layers.indexOf(focus.layer) + 1);
    this.value.textContent = describeHeads(focus.heads, this.store);
    return !this.row.hidden;
  }
}

export class StepsAndFrames {
  constructor(store, state) {
    Object.assign(this, { store, state });
    this.step = slider("Denoising step", 0, store.header.steps.length, 1, (denoise) => state.set({ denoise }));
    this.frame = slider("Frame", 0, 0, 1, (frame) => state.set({ frame }));
    const rows = [["denoising step", this.step], ["frame", this.frame]];
    this.values = rows.map(() => make("output", { class: "value" }));
    this.rows = rows.map(([name, input], n) => labelled(name, input, this.values[n]));
  }

  // Shows the chosen step, and the frame of these images; returns whether there is anything to choose.
  update(images) {
    const { steps, totalSteps } = this.store.header;
    const { denoise, frame } = this.state;
    const frames = Math.max(0, ...images.map(({ segments }) => listFrames(segments).length));
    const [stepRow, frameRow] = this.rows;
    stepRow.hidden = !steps.length;
    frameRow.hidden = frames < 2;
    this.step.value = String(denoise);
    this.values[0].textContent = denoise ? `${steps[denoise - 1] + 1} of ${totalSteps}` : `mean of ${totalSteps}`;
    this.frame.max = String(Math.max(0, frames - 1));
    this.frame.value = String(frame);
    this.values[1].textContent = `${Math.min(frame, frames - 1) + 1} of ${frames}`;
    return this.rows.some((row) => !row.hidden);
  }
}
