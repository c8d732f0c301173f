// An image whose patches are bright or colored by attention weight; the others are dark.

import { choice, cssColor, draw, make, onPress, prepareCanvas, oncePerFrame } from "./dom.js";
import { formatPercent, createScale, shade } from "./colors.js";
import { label } from "./tokens.js";
import { createAnswer } from "./answer.js";
import { focusCsv, svgSheet } from "./export.js";

// The darkness of a patch with weight 0.
const MAX_DARKNESS = 0.62;
const [DARK, LIGHT] = ["#0b0c10", "#6b5733"];

export class ImageView {
  constructor({ store, state }) {
    Object.assign(this, { store, state, mode: "light" });
    this.canvas = make("canvas", {
      class: "image",
      tabindex: "0",
      role: "img",
      "aria-label": "Image: arrow keys move over its patches, Enter selects",
    });
    this.modes = choice("Draw attention as", [
      ["light", "light", "Patches with large weights are bright, the others dark"],
      ["color", "color", "Patches with large weights are dark red, the others pale"],
    ], () => this.mode, (value) => {
      this.mode = value;
      this.modes.refresh();
      state.notify(new Set(["mode"]));
    });
    this.note = make("span", { class: "count" });
    this.chips = make("div", { class: "chips" });
    this.frame = make("div", { class: "imageframe" }, this.canvas);
    this.element = make(
      "section",
      { class: "view imageview", "aria-label": "Image" },
      make(
        "div",
        { class: "tools" },
        make("span", { class: "label" }, "attention as"),
        this.modes,
        this.note,
        createAnswer(store),
      ),
      this.frame,
      this.chips,
    );
    this.redraw = oncePerFrame(() => this.render());
    new ResizeObserver(this.redraw).observe(this.frame);
    this.canvas.addEventListener("pointermove", (event) => this.pointed(this.patchAt(event)));
    this.canvas.addEventListener("pointerleave", () => state.set({ hover: null }));
    this.canvas.addEventListener("click", (event) => this.pick(this.patchAt(event), event.shiftKey));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.cursor = 0;
  }

  // The axis of the layer that is an image, and its labels.
  labelled(layer) {
    const side = this.store.labels(layer, "keys").grid ? "keys" : "queries";
    return { side, labels: this.store.labels(layer, side) };
  }

  direction() {
    const { layer } = this.focus;
    return layer.self ? this.state.direction : this.labelled(layer).side === "queries" ? "to" : "from";
  }

  pointed(patch) {
    if (patch !== null && patch !== this.state.hover) this.state.set({ hover: patch, direction: this.direction() });
  }

  pick(patch, add) {
    if (patch === null) return;
    const { chosen } = this.state;
    const added = add ? [...chosen, patch] : [patch];
    const next = chosen.includes(patch) ? chosen.filter((other) => other !== patch) : added;
    this.state.set({ chosen: next, direction: this.direction(), hover: null });
  }

  key(event) {
    const { labels } = this.labelled(this.focus.layer);
    const [rows, columns] = labels.grid;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (step) {
      this.cursor = Math.min(Math.max(this.cursor + step, 0), rows * columns - 1);
      this.pointed(this.cursor + labels.leading);
    } else if (event.key === "Enter" || event.key === " ") this.pick(this.cursor + labels.leading, event.shiftKey);
    else return;
    event.preventDefault();
  }

  patchAt(event) {
    const { labels } = this.labelled(this.focus.layer);
    const [rows, columns] = labels.grid;
    const box = this.canvas.getBoundingClientRect();
    const [r, c] = [
      Math.floor(((event.clientY - box.top) / box.height) * rows),
      Math.floor(((event.clientX - box.left) / box.width) * columns),
    ];
    return r >= 0 && c >= 0 && r < rows && c < columns ? labels.leading + r * columns + c : null;
  }

  picture(name, labels) {
    return this.store.cached(`image ${name} ${this.state.seq}`, () => {
      const canvas = document.createElement("canvas");
      if (!labels.image) return null;
      const [, height, width] = this.store.arrays.shape(`image.${name}`);
      const bytes = this.store.arrays.raw(`image.${name}`).planes[0].subarray(
        this.state.seq * height * width * 3,
        (this.state.seq + 1) * height * width * 3,
      );
      [canvas.width, canvas.height] = [width, height];
      const pen = canvas.getContext("2d");
      const image = pen.createImageData(width, height);
      for (let i = 0; i < width * height; i++) {
        image.data[4 * i] = bytes[3 * i];
        image.data[4 * i + 1] = bytes[3 * i + 1];
        image.data[4 * i + 2] = bytes[3 * i + 2];
        image.data[4 * i + 3] = 255;
      }
      pen.putImageData(image, 0, 0);
      return canvas;
    });
  }

  update(focus) {
    this.focus = focus;
    const { labels, side } = this.labelled(focus.layer);
    if (!labels?.grid) {
      this.note.textContent = "This head has no image patches: select one that has.";
      return;
    }
    const leading = Array.from({ length: labels.leading }, (_, i) => i);
    const texts = this.store.texts(focus.layer, side, this.state.seq);
    const scale = createScale(this.state.scale, focus.units, focus.uniform);
    this.chips.replaceChildren(
      ...leading.map((i) => {
        const chip = make(
          "button",
          {
            type: "button",
            class: "chip",
            "aria-pressed": String(this.state.chosen.includes(i)),
            ...onPress((event) => this.pick(i, event.shiftKey)),
            onpointerenter: () => this.pointed(i),
            onpointerleave: () => this.state.set({ hover: null }),
          },
          `${label(texts[i])} `,
          make("span", { class: "value" }, focus.picks.length ? formatPercent(focus.units[i]) : ""),
        );
        if (focus.picks.length) {
          chip.style.borderColor = shade(focus.to ? "to" : "from", 0.2 + 0.8 * scale.of(focus.units[i]));
        }
        return chip;
      }),
    );
    this.note.textContent = focus.picks.length ? "" : "Point at a patch or at the class token.";
    this.redraw();
  }

  render() {
    if (!this.focus) return;
    const { layer } = this.focus;
    const { side, labels } = this.labelled(layer);
    if (!labels?.grid) return;
    const picture = this.picture(this.store.header.labels.indexOf(labels), labels);
    const ratio = picture ? picture.width / picture.height : labels.grid[1] / labels.grid[0];
    const room = [this.frame.clientWidth - 16, Math.max(240, this.element.clientHeight - 150)];
    const width = Math.min(room[0], room[1] * ratio);
    const height = width / ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = prepareCanvas(this.canvas, width, height);
    pen.imageSmoothingEnabled = !picture || picture.width > 96;
    if (picture) pen.drawImage(picture, 0, 0, width, height);
    else {
      pen.fillStyle = cssColor("--faint");
      pen.fillRect(0, 0, width, height);
    }
    this.paintPatches(pen, width, height, labels);
    this.frameChosen(pen, width, height, labels, side);
  }

  // The color scale of the patches, without the class token.
  scale() {
    const { layer, picks, units, other, uniform } = this.focus;
    const { side, labels } = this.labelled(layer);
    if (!labels?.grid || !picks.length || !(layer.self || side === other)) return null;
    return createScale(this.state.scale, units.subarray(labels.leading), uniform);
  }

  legend() {
    const scale = this.focus ? this.scale() : null;
    const direction = this.focus?.to ? "to" : "from";
    const color = this.mode === "light" ? lightenGrey : null;
    return scale ? { scale, direction, color, title: "attention weight of each patch" } : null;
  }

  paintPatches(pen, width, height, { grid: [rows, columns], leading }) {
    const scale = this.scale();
    if (!scale) return;
    const patches = this.focus.units.subarray(leading);
    const direction = this.focus.to ? "to" : "from";
    const [w, h] = [width / columns, height / rows];
    for (let p = 0; p < rows * columns; p++) {
      const t = Math.min(1, scale.of(patches[p]));
      const [x, y] = [Math.round((p % columns) * w), Math.round(Math.floor(p / columns) * h)];
      const box = [x, y, Math.round(((p % columns) + 1) * w) - x, Math.round((Math.floor(p / columns) + 1) * h) - y];
      const fill = (color, alpha, how = "source-over") => {
        Object.assign(pen, { fillStyle: color, globalAlpha: alpha, globalCompositeOperation: how });
        pen.fillRect(...box);
      };
      if (this.mode === "light") {
        fill(DARK, MAX_DARKNESS * (1 - t));
        // A black patch must brighten too.
        fill(LIGHT, t, "lighten");
      } else fill(shade(direction, t), 0.25 + 0.4 * t);
    }
    Object.assign(pen, { globalAlpha: 1, globalCompositeOperation: "source-over" });
  }

  frameChosen(pen, width, height, { grid: [rows, columns], leading }, side) {
    if (!this.focus.layer.self && side !== this.focus.from) return;
    const [w, h] = [width / columns, height / rows];
    for (const u of this.focus.picks) {
      const p = this.focus.sources.start[u] - leading;
      if (p < 0) continue;
      const box = [(p % columns) * w + 1, Math.floor(p / columns) * h + 1, w - 2, h - 2];
      pen.lineWidth = 4;
      pen.strokeStyle = "#0b0c10";
      pen.strokeRect(...box);
      pen.lineWidth = 2;
      pen.strokeStyle = "#ffd166";
      pen.strokeRect(...box);
      pen.lineWidth = 1;
    }
  }

  svg() {
    const [width, height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    const sheet = svgSheet(width, height);
    sheet.append(draw("image", { href: this.canvas.toDataURL(), width, height }));
    return sheet;
  }

  csv(focus) {
    return focusCsv(focus);
  }
}

// The brightness of a grey patch in the light mode, for the legend.
function lightenGrey(t) {
  const level = Math.round(190 * (1 - MAX_DARKNESS * (1 - t)));
  return `rgb(${level}, ${level}, ${level})`;
}
