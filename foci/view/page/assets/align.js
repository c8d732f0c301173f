// The alignment of two texts: the cross-attention weights of each query, with the largest one marked.

import { cssColor, draw, make, onPress } from "./dom.js";
import { textColor, formatPercent, createScale, shade } from "./colors.js";
import { getUnits } from "./focus.js";
import { clipText } from "./tokens.js";
import { focusCsv } from "./export.js";

const MAX_UNITS = 80;

export class AlignView {
  constructor({ store, state }) {
    Object.assign(this, { store, state });
    this.note = make("span", { class: "count" });
    this.frame = make("div", { class: "alignframe", tabindex: "0", "aria-label": "Alignment" });
    this.element = make(
      "section",
      { class: "view align", "aria-label": "Alignment" },
      make("div", { class: "tools" }, this.note),
      this.frame,
    );
  }

  update(focus) {
    const { store, state } = this;
    const [rows, columns] = [
      getUnits(store, state, focus.layer, "queries"),
      getUnits(store, state, focus.layer, "keys"),
    ];
    const [R, C] = [Math.min(rows.count, MAX_UNITS), Math.min(columns.count, MAX_UNITS)];
    const matrix = this.matrix(focus, rows, columns, R);
    const cut = rows.count > MAX_UNITS || columns.count > MAX_UNITS;
    const { queries, keys } = focus.layer;
    const rest = cut ? ` The first ${MAX_UNITS} of each are shown; the map shows all.` : "";
    const axes = `Rows are queries of “${queries}”, columns are keys of “${keys}”. A frame marks the largest weight of a row.`;
    this.note.textContent = axes + rest;
    this.frame.replaceChildren(this.sheet(focus, rows, columns, matrix, R, C));
  }

  matrix(focus, rows, columns, R) {
    const { store, state } = this;
    return Array.from({ length: R }, (_, u) => {
      const weights = new Float32Array(columns.of.length);
      for (const one of focus.heads) {
        for (let i = rows.start[u]; i < rows.stop[u]; i++) {
          store.addRow(weights, one, i, state.seq, 1 / focus.heads.length / (rows.stop[u] - rows.start[u]));
        }
      }
      const units = new Float32Array(columns.count);
      weights.forEach((w, j) => {
        if (!(state.hideSinks && focus.sinks.has(j))) units[columns.of[j]] += w;
      });
      return units;
    });
  }

  sheet(focus, rows, columns, matrix, R, C) {
    // As large as the frame; before it is on the page, as wide as on a usual screen.
    const frame = this.frame.clientWidth || 690;
    const [left, top] = [Math.min(140, Math.round(0.3 * frame)), 116];
    const room = Math.max(120, frame - left - 94);
    const cell = Math.max(14, Math.min(38, room / C), Math.min(52, room / C, 500 / R));
    const [width, height] = [left + C * cell + 60, top + R * cell + 24];
    const sheet = draw("svg", {
      xmlns: "http://www.w3.org/2000/svg",
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": "Alignment matrix; the table beside it lists the weights of the selected word",
    });
    const scale = createScale(this.state.scale, matrix.flatMap((row) => [...row]), 1 / columns.count);
    this.scale = scale;
    const size = Math.min(cell > 38 ? 15 : 13, cell * 0.62);
    const soft = cssColor("--soft");
    sheet.append(
      draw("text", { x: left, y: 14, "font-size": 11, "font-weight": 600, fill: soft }, "keys →"),
      draw("text", { x: 12, y: top - 8, "font-size": 11, "font-weight": 600, fill: soft }, "queries ↓"),
    );
    for (let j = 0; j < C; j++) {
      const [x, y] = [left + (j + 0.6) * cell, top - 8];
      sheet.append(
        draw(
          "text",
          { x, y, "font-size": size, fill: cssColor("--ink"), transform: `rotate(-48 ${x} ${y})` },
          clipText(columns.label(j), 14),
        ),
      );
    }
    matrix.forEach(
      (row, i) => sheet.append(this.row(focus, rows, columns, row, i, { cell, left, top, size, C, scale })),
    );
    return sheet;
  }

  row(focus, rows, columns, row, i, { cell, left, top, size, C, scale }) {
    const { state } = this;
    const y = top + i * cell;
    const chosen = focus.to && focus.picks.includes(i);
    const best = row.indexOf(Math.max(...row));
    const group = draw("g", {
      class: "alignrow",
      onpointerenter: () => state.set({ hover: rows.start[i], direction: "to" }),
      onpointerleave: () => state.set({ hover: null }),
      ...onPress(() => state.set({
        chosen: state.chosen[0] === rows.start[i] && state.direction === "to" ? [] : [rows.start[i]],
        direction: "to",
        hover: null,
      })),
    });
    group.append(
      draw("rect", {
        x: 4,
        y,
        width: left + C * cell - 4,
        height: cell,
        fill: chosen ? cssColor("--line") : "transparent",
      }),
    );
    group.append(
      draw(
        "text",
        {
          x: left - 9,
          y: y + cell * 0.66,
          "text-anchor": "end",
          "font-size": size,
          "font-weight": chosen ? 600 : 400,
          fill: cssColor("--ink"),
        },
        clipText(rows.label(i), Math.floor(left / 8.7)),
      ),
    );
    for (let j = 0; j < C; j++) {
      const t = scale.of(row[j]);
      group.append(
        draw(
          "rect",
          {
            x: left + j * cell + 1,
            y: y + 1,
            width: cell - 2,
            height: cell - 2,
            rx: 3,
            fill: shade("to", t),
            stroke: t > 0.06 ? "none" : cssColor("--faint"),
          },
          draw("title", {}, `${rows.label(i)} attends to ${columns.label(j)}: ${formatPercent(row[j])}`),
        ),
      );
      if (cell >= 24 && row[j] >= 0.05) {
        group.append(
          draw(
            "text",
            {
              x: left + (j + 0.5) * cell,
              y: y + cell * 0.62,
              "text-anchor": "middle",
              "font-size": Math.min(10.5, cell * 0.38),
              fill: textColor("to", t),
              "pointer-events": "none",
            },
            (100 * row[j]).toFixed(0),
          ),
        );
      }
    }
    if (best >= 0 && best < C && row[best] > 0) {
      group.append(
        draw("rect", {
          x: left + best * cell + 1,
          y: y + 1,
          width: cell - 2,
          height: cell - 2,
          rx: 3,
          fill: "none",
          stroke: cssColor("--ink"),
          "stroke-width": 1.6,
          "pointer-events": "none",
        }),
      );
    }
    return group;
  }

  legend() {
    return this.scale ? { scale: this.scale, title: "attention weight" } : null;
  }

  svg() {
    return this.frame.firstElementChild.cloneNode(true);
  }

  csv(focus) {
    if (focus.picks.length) return focusCsv(focus);
    const { store, state } = this;
    const [rows, columns] = [
      getUnits(store, state, focus.layer, "queries"),
      getUnits(store, state, focus.layer, "keys"),
    ];
    const links = this.matrix(focus, rows, columns, rows.count).map((row, i) => {
      const best = row.indexOf(Math.max(...row));
      return [rows.text(i), columns.text(best), row[best]];
    });
    return [["query", "key with the largest weight", "weight"], ...links];
  }
}
