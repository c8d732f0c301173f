// A saved page: everything is in the file.

import { make } from "./dom.js";
import { fromText, unpack } from "./payload.js";
import { Store } from "./store.js";
import { App } from "./app.js";

async function open() {
  const element = document.getElementById("payload");
  const { head, arrays } = await unpack(fromText(element.textContent));
  element.remove();
  const app = new App(new Store(head, arrays));
  app.start(document.body);
  // When it was ready to be looked at, in milliseconds.
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  return app;
}

open().catch((problem) => {
  document.body.append(
    make("p", { class: "failed", role: "alert" }, `This page could not be opened: ${problem.message}`),
  );
  throw problem;
});
