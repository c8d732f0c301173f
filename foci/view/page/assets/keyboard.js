// Keyboard shortcuts and the dialog that lists them.

import { button, make } from "./dom.js";

const HELP = [
  ["1 … 9", "switch to a view, from left to right"],
  ["← → ↑ ↓", "move in the text, over the map, over an image, between heads"],
  ["Enter, Space", "select; with Shift: add to the selection"],
  ["Esc", "clear the selection, or close this list"],
  ["[ and ]", "previous head, next head"],
  ["{ and }", "the same head of the previous or next layer"],
  ["d", "selected token as query (attends to) or as key (attended by)"],
  ["w", "words or tokens"],
  ["s", "hide or show attention sinks"],
  ["c", "linear, log or rank color scale"],
  ["/", "find in the text; Enter: next, Shift+Enter: previous"],
  ["+ − 0", "map: zoom in, zoom out, show everything"],
  ["p", "play the generation steps"],
  ["t", "light or dark theme"],
  ["?", "this list"],
];

export function helpDialog() {
  const rows = HELP.map(
    ([key, what]) => make("tr", {}, make("th", { scope: "row" }, make("kbd", {}, key)), make("td", {}, what)),
  );
  const dialog = make(
    "dialog",
    { class: "help", "aria-label": "Keyboard shortcuts" },
    make("h2", {}, "Keyboard shortcuts"),
    make("table", {}, make("tbody", {}, ...rows)),
    make(
      "p",
      { class: "note" },
      "Pointer: hover to preview, click to select, Shift-click to add, double-click a thumbnail for its map, wheel to zoom.",
    ),
    button("Close", { class: "primary", onclick: () => dialog.close() }),
  );
  return dialog;
}

// actions: functions without arguments, by key.
export function listen(actions) {
  document.addEventListener("keydown", (event) => {
    const { target } = event;
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    // An open dialog has its own keys: Esc closes it.
    if (document.querySelector("dialog[open]")) return;
    if (target.matches?.("input, select, textarea") && event.key !== "Escape") return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
