// The keyboard: everything that the pointer does, and a list of it.

import { button, make } from "./dom.js";

const HELP = [
  ["1 … 9", "the views, from left to right"],
  ["← → ↑ ↓", "move in the text, over the map, over an image, between heads"],
  ["Enter, Space", "choose what the keys are on; with Shift: add it"],
  ["Esc", "choose nothing"],
  ["[ and ]", "the head before, the head after"],
  ["{ and }", "the same head of the layer before or after"],
  ["d", "where it looks, or who looks at it"],
  ["w", "words or tokens"],
  ["s", "hide or show sinks"],
  ["c", "linear, log or rank colours"],
  ["/", "find in the text; Enter: next, Shift+Enter: previous"],
  ["+ − 0", "map: nearer, farther, everything"],
  ["p", "play the steps of a generation"],
  ["t", "light or dark"],
  ["?", "this list"],
];

export function helpDialog() {
  const rows = HELP.map(
    ([key, what]) => make("tr", {}, make("th", { scope: "row" }, make("kbd", {}, key)), make("td", {}, what)),
  );
  const dialog = make(
    "dialog",
    { class: "help", "aria-label": "Keys" },
    make("h2", {}, "Keys"),
    make("table", {}, make("tbody", {}, ...rows)),
    make(
      "p",
      { class: "note" },
      "Pointer: hover to look, click to keep, Shift-click to add, double-click a thumbnail for its map, wheel to zoom.",
    ),
    button("Close", { class: "primary", onclick: () => dialog.close() }),
  );
  return dialog;
}

// actions: by key, each without arguments.
export function listen(actions) {
  document.addEventListener("keydown", (event) => {
    const { target } = event;
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.matches?.("input, select, textarea") && event.key !== "Escape") return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
