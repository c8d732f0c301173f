// The attention of the selected tokens in every layer, averaged over heads. Shown below a text if there is room.

import { make, cssColor, prepareCanvas } from "./dom.js";
import { textColor, formatPercent, createScale, shade } from "./colors.js";
import { clipText } from "./tokens.js";

const MOST = 64;
const [LEFT, TOP, ROW] = [84, 74, 22];

export class LayerStrip {
  constructor(store, state) {
    Object.assign(this, { store, state });
    this.canvas = make("canvas", { class: "layerstrip", role: "img" });
    this.title = make("h3", {});
    this.element = make("div", { class: "stripframe" }, this.title, this.canvas);
    this.canvas.addEventListener("click", (event) => {
      const row = this.rowAt(event);
      if (row) state.set({ heads: [row.label] });
    });
    this.canvas.addEventListener("pointermove", (event) => this.showWeight(event));
  }

  // The layers with the same stack, queries and keys as the selected one, and with every weight.
  layersFor(focus) {
    const alike = (layer) => layer.exact && ["stack", "Tq", "Tk"].every((name) => layer[name] === focus.layer[name]);
    return this.store.layers.filter(alike).slice(0, 40);
  }

  update(focus, room) {
    this.layers = this.layersFor(focus);
    const tall = TOP + this.layers.length * ROW + 10;
    const fits = focus.targets.count <= MOST && this.layers.length > 1 && room >= tall + 50;
    this.element.hidden = !focus.picks.length || !fits;
    if (this.element.hidden) return;
    this.focus = focus;
    const who = focus.picks.map((u) => `“${clipText(focus.sources.label(u), 16)}”`).slice(0, 2).join(" + ");
    this.title.textContent = focus.to ? `${who} attends to, by layer` : `${who} is attended to by, by layer`;
    this.title.append(make("span", { class: "axis" }, "mean of each layer’s heads; each row has its own color scale"));
    this.rows = this.layers.map((layer) => this.rowOf(focus, layer));
    this.draw(tall);
  }

  // The mean weights of a layer's heads, by unit of the other side.
  rowOf({ sources, targets, picks, to }, layer) {
    const units = new Float32Array(targets.count);
    const weights = new Float32Array(to ? layer.Tk : layer.Tq);
    for (const u of picks) {
      for (let i = sources.start[u]; i < sources.stop[u]; i++) {
        for (let h = 0; h < layer.heads; h++) {
          const one = { layer: layer.number, head: h };
          if (to) {
            this.store.addRow(weights, one, i, this.state.seq, 1 / layer.heads / (sources.stop[u] - sources.start[u]));
          }
          else this.store.addColumn(weights, one, i, this.state.seq, 1 / layer.heads);
        }
      }
    }
    const hidden = this.state.hideSinks && to ? this.focus.sinks : new Set();
    weights.forEach((w, j) => {
      if (!hidden.has(j)) {
        units[targets.of[j]] += to ? w : w / (targets.stop[targets.of[j]] - targets.start[targets.of[j]]);
      }
    });
    return units;
  }

  draw(tall) {
    const { targets, to, layer: chosen } = this.focus;
    const width = Math.max(this.element.clientWidth - 48, 200);
    this.cell = Math.min(46, (width - LEFT - 30) / targets.count);
    const pen = prepareCanvas(this.canvas, width, tall);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${tall}px`;
    pen.clearRect(0, 0, width, tall);
    const family = getComputedStyle(this.canvas).fontFamily;
    pen.textBaseline = "middle";
    const direction = to ? "to" : "from";
    this.rows.forEach((units, n) => {
      const scale = createScale(this.state.scale, units, this.focus.uniform);
      const y = TOP + n * ROW;
      pen.font = `${this.layers[n] === chosen ? "600 " : ""}11px ${family}`;
      pen.fillStyle = this.layers[n] === chosen ? cssColor("--ink") : cssColor("--soft");
      pen.textAlign = "right";
      pen.fillText(this.layers[n].label, LEFT - 10, y + ROW / 2);
      pen.textAlign = "center";
      pen.font = `10px ${family}`;
      units.forEach((w, u) => {
        const t = scale.of(w);
        const x = LEFT + u * this.cell;
        pen.fillStyle = shade(direction, t);
        pen.fillRect(x, y, this.cell - 1, ROW - 2);
        pen.fillStyle = textColor(direction, t);
        if (this.cell > 26 && w >= 0.1) pen.fillText((100 * w).toFixed(0), x + this.cell / 2, y + ROW / 2);
      });
    });
    pen.font = `11px ${family}`;
    pen.fillStyle = cssColor("--soft");
    pen.textAlign = "left";
    for (let u = 0; u < targets.count && this.cell >= 9; u++) {
      pen.save();
      pen.translate(LEFT + (u + 0.5) * this.cell, TOP - 8);
      pen.rotate(-Math.PI / 3.6);
      pen.fillText(clipText(targets.label(u), 11), 0, 0);
      pen.restore();
    }
    this.canvas.setAttribute("aria-label", this.title.textContent);
  }

  placeAt(event) {
    const box = this.canvas.getBoundingClientRect();
    return [
      Math.floor((event.clientY - box.top - TOP) / ROW),
      Math.floor((event.clientX - box.left - LEFT) / this.cell),
    ];
  }

  rowAt(event) {
    return this.layers?.[this.placeAt(event)[0]];
  }

  showWeight(event) {
    const [n, u] = this.placeAt(event);
    const weight = this.rows?.[n]?.[u];
    if (weight === undefined) this.canvas.title = "";
    else this.canvas.title = `${this.layers[n].label}, ${this.focus.targets.label(u)}: ${formatPercent(weight)}`;
  }
}
