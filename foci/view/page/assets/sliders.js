// The sliders of the denoising step of a diffusion model and of the frame of a video.

import { labelled, make, slider } from "./dom.js";
import { listFrames } from "./gridmaps.js";

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
