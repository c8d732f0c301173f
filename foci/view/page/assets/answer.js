// What the model answered, beside the tools of a view.

import { make } from "./dom.js";
import { clipped, printable } from "./tokens.js";

export function answerOf({ head: { answer } }) {
  if (!answer) return null;
  return make(
    "span",
    { class: "answer", title: printable(answer).slice(0, 2000) },
    make("span", { class: "label" }, "it says "),
    make("bdi", {}, clipped(printable(answer), 90)),
  );
}
