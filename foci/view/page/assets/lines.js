// Two columns of tokens and a line for each weight, as thick as the weight is large.

import { button, cssColor, draw, make, onPress } from "./dom.js";
import { HEAD_COLORS, formatPercent, shade } from "./colors.js";
import { chosenHeads, rankUnits, getUnits } from "./focus.js";
import { clipText } from "./tokens.js";
import { focusCsv, svgSheet } from "./export.js";

const ROW = 24;
// The width of a name in the legend of several heads.
const LEGEND_WIDTH = 104;
const WINDOW = 120;
const MAX_WIDTH = 760;
// Without a selection, the largest weights of the window are drawn: at most MAX_LINES, none below MIN_WEIGHT.
const MAX_LINES = 500;
const MIN_WEIGHT = 0.02;

export class LinesView {
  constructor({ store, state }) {
    Object.assign(this, { store, state, start: 0 });
    this.note = make("span", { class: "count" });
    this.back = button("←", { title: "Earlier tokens", onclick: () => this.shift(-WINDOW) });
    this.ahead = button("→", { title: "Later tokens", onclick: () => this.shift(WINDOW) });
    this.tools = make("div", { class: "tools" }, make("div", { class: "choice" }, this.back, this.ahead), this.note);
    this.frame = make("div", {
      class: "linesframe",
      tabindex: "0",
      "aria-label": "Lines between two columns of tokens",
    });
    this.element = make("section", { class: "view lines", "aria-label": "Lines" }, this.tools, this.frame);
    new ResizeObserver(() => this.focus && this.update(this.focus)).observe(this.element);
  }

  shift(by) {
    this.start = Math.max(0, this.start + by);
    this.update(this.focus);
  }

  // Sets the positions of the two columns.
  setWidth(heads) {
    this.width = Math.max(300, Math.min(MAX_WIDTH, this.element.clientWidth - 40));
    this.left = Math.round(this.width * 0.32);
    this.right = this.width - this.left;
    const names = heads.length > 1 ? Math.min(heads.length, HEAD_COLORS.length) : 0;
    this.perLine = Math.max(1, Math.floor((this.width - 24) / LEGEND_WIDTH));
    // The legend of the heads is above the columns.
    this.top = 44 + 16 * Math.ceil(names / this.perLine);
  }

  update(focus) {
    this.focus = focus;
    const { store, state } = this;
    const heads = chosenHeads(store, state);
    this.setWidth(heads);
    const [rows, columns] = [
      getUnits(store, state, focus.layer, "queries"),
      getUnits(store, state, focus.layer, "keys"),
    ];
    const longest = Math.max(rows.count, columns.count);
    const follows = state.hover === null && focus.picks.length && focus.picks[0] !== this.followed;
    if (follows) {
      this.followed = focus.picks[0];
      this.start = Math.max(0, this.followed - WINDOW / 2);
    }
    this.start = Math.min(this.start, Math.max(0, longest - WINDOW));
    this.back.disabled = this.start === 0;
    this.ahead.disabled = this.start + WINDOW >= longest;
    this.tools.hidden = longest <= WINDOW;
    this.frame.replaceChildren(this.sheet(focus, heads, rows, columns));
    if (follows) this.reveal(this.followed - this.start);
  }

  // Scrolls to a row of the window unless it is visible.
  reveal(row) {
    const { scrollTop, clientHeight } = this.frame;
    const y = this.top + row * ROW;
    if (y < scrollTop || y + ROW > scrollTop + clientHeight) this.frame.scrollTop = y - clientHeight / 2;
  }

  // Weights as [query unit, key unit, weight, head], within the window.
  links(focus, heads, rows, columns) {
    const { store, state, start } = this;
    const stop = start + WINDOW;
    const found = [];
    let outside = 0;
    const sinks = state.hideSinks ? focus.sinks : new Set();
    const only = focus.picks.length ? new Set(focus.picks) : null;
    const add = (i, j, weight, h) => {
      if (i >= start && i < stop && j >= start && j < stop) found.push([i, j, weight, h]);
      else outside += weight;
    };
    heads.forEach((one, h) => {
      const queries = only && focus.to ? [...only] : range(start, Math.min(stop, rows.count));
      for (const u of queries) {
        const weights = new Float32Array(columns.of.length);
        for (let i = rows.start[u]; i < rows.stop[u]; i++) {
          store.addRow(weights, one, i, state.seq, 1 / (rows.stop[u] - rows.start[u]));
        }
        const units = new Float32Array(columns.count);
        weights.forEach((w, j) => {
          if (!sinks.has(j)) units[columns.of[j]] += w;
        });
        for (const k of rankUnits(units, only ? 64 : 8)) {
          if ((!only || focus.to || only.has(k)) && units[k] >= (only ? 0.003 : MIN_WEIGHT)) add(u, k, units[k], h);
        }
      }
    });
    found.sort((a, b) => b[2] - a[2]);
    return { links: found.slice(0, MAX_LINES), outside };
  }

  sheet(focus, heads, rows, columns) {
    const { start } = this;
    const [lastRow, lastColumn] = [Math.min(start + WINDOW, rows.count), Math.min(start + WINDOW, columns.count)];
    const tall = (Math.max(lastRow, lastColumn) - start) * ROW + this.top + 12;
    const sheet = svgSheet(this.width, tall);
    const { links, outside } = this.links(focus, heads, rows, columns);
    const shows = outside > 0.005 && focus.picks.length;
    const beyond = shows ? ` · ${formatPercent(outside / heads.length)} on tokens outside` : "";
    this.note.textContent = `Tokens ${start} to ${start + WINDOW - 1}${beyond}`;
    sheet.append(...this.headings());
    for (const [i, j, weight, h] of links.reverse()) {
      sheet.append(this.curve(i - start, j - start, weight, heads, h, focus, rows.label(i), columns.label(j)));
    }
    for (let u = start; u < lastRow; u++) sheet.append(this.word(focus, rows, u, u - start, "to"));
    for (let u = start; u < lastColumn; u++) sheet.append(this.word(focus, columns, u, u - start, "from"));
    if (heads.length > 1) sheet.append(...this.legendOf(heads));
    sheet.setAttribute("role", "img");
    sheet.setAttribute("aria-label", "Weights between tokens; the table beside lists those of the selected token.");
    return sheet;
  }

  headings() {
    const [queries, keys] = [[this.left, "queries", "end"], [this.right, "keys", "start"]];
    return [queries, keys].map(([x, text, anchor]) => draw(
      "text",
      { x, y: this.top - 18, "text-anchor": anchor, "font-size": 12, "font-weight": 600, fill: cssColor("--soft") },
      text,
    ));
  }

  // The names of the heads in their colors; further heads share the colors.
  legendOf(heads) {
    return heads.slice(0, HEAD_COLORS.length).map((one, n) => draw(
      "text",
      {
        x: 12 + (n % this.perLine) * LEGEND_WIDTH,
        y: 16 + 16 * Math.floor(n / this.perLine),
        "font-size": 11,
        fill: HEAD_COLORS[n],
      },
      `― ${one.name}`,
    ));
  }

  curve(i, j, weight, heads, h, focus, from, to) {
    const [y0, y1] = [this.top + (i + 0.5) * ROW, this.top + (j + 0.5) * ROW];
    const middle = (this.left + this.right) / 2;
    const color = heads.length > 1 ? HEAD_COLORS[h % 8] : shade(focus.to ? "to" : "from", 0.62);
    const strong = Math.min(1, 0.14 + 1.1 * weight);
    const path = draw("path", {
      d: `M ${this.left + 8} ${y0} C ${middle} ${y0}, ${middle} ${y1}, ${this.right - 8} ${y1}`,
      fill: "none",
      stroke: color,
      "stroke-width": 0.9 + 5 * weight,
      "stroke-opacity": strong.toFixed(3),
      "stroke-linecap": "round",
    });
    path.append(draw("title", {}, `${from} attends to ${to}: ${formatPercent(weight)} (${heads[h].name})`));
    return path;
  }

  word(focus, units, u, n, direction) {
    const { state } = this;
    const left = direction === "to";
    const y = this.top + n * ROW;
    const active = focus.to === left && focus.picks.includes(u);
    const box = left ? { x: 12, width: this.left - 8 } : { x: this.right - 4, width: this.left - 8 };
    const group = draw("g", {
      class: "lineword",
      onpointerenter: () => state.set({ hover: units.start[u], direction }),
      onpointerleave: () => state.set({ hover: null }),
      ...onPress((event) => state.set({
        chosen: this.chosenWith(units.start[u], event.shiftKey),
        direction,
        hover: null,
      })),
    });
    const tinted = focus.to !== left ? Math.min(1, focus.units[u] ?? 0) : 0;
    const tint = tinted > 0.004 ? shade(focus.to ? "to" : "from", 0.5 * tinted) : "transparent";
    group.append(
      draw("rect", {
        ...box,
        y: y + 1,
        height: ROW - 2,
        rx: 4,
        fill: active ? cssColor("--line") : tint,
      }),
    );
    group.append(
      draw(
        "text",
        {
          x: left ? this.left : this.right,
          y: y + ROW * 0.69,
          "text-anchor": left ? "end" : "start",
          "font-size": 14,
          fill: tinted > 0.8 ? "#fff" : cssColor("--ink"),
          "font-weight": active ? 600 : 400,
        },
        clipText(units.label(u), Math.floor((this.left - 16) / 8)),
      ),
    );
    return group;
  }

  // A second click clears the selection.
  chosenWith(i, add) {
    const { chosen } = this.state;
    if (add) return [...new Set([...chosen, i])];
    return chosen[0] === i ? [] : [i];
  }

  svg() {
    return this.frame.firstElementChild.cloneNode(true);
  }

  csv(focus) {
    if (focus.picks.length) return focusCsv(focus);
    const heads = chosenHeads(this.store, this.state);
    const [rows, columns] = [
      getUnits(this.store, this.state, focus.layer, "queries"),
      getUnits(this.store, this.state, focus.layer, "keys"),
    ];
    const { links } = this.links(focus, heads, rows, columns);
    return [
      ["query", "key", "weight", "head"],
      ...links.map(([i, j, weight, h]) => [rows.text(i), columns.text(j), weight, heads[h].name]),
    ];
  }
}

function range(start, stop) {
  return Array.from({ length: Math.max(0, stop - start) }, (_, n) => start + n);
}
