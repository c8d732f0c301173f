// The model's answer, beside the tools of a view.

import { make } from "./dom.js";
import { clipText, printable } from "./tokens.js";

export function createAnswer({ header: { answer } }) {
  if (!answer) return null;
  return make(
    "span",
    { class: "answer", title: printable(answer).slice(0, 2000) },
    make("span", { class: "label" }, "answer: "),
    make("bdi", {}, clipText(printable(answer), 90)),
  );
}
