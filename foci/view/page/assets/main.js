// Entry point of a saved page, whose data is in the file itself.

import { make } from "./dom.js";
import { decodeBase64, decodePayload } from "./payload.js";
import { Store } from "./store.js";
import { App } from "./app.js";

async function open() {
  const element = document.getElementById("payload");
  const { header, arrays } = await decodePayload(decodeBase64(element.textContent));
  element.remove();
  const app = new App(new Store(header, arrays));
  app.start(document.body);
  // The loading time in milliseconds.
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  return app;
}

open().catch((problem) => {
  document.body.append(
    make("p", { class: "failed", role: "alert" }, `This page could not be opened: ${problem.message}`),
  );
  throw problem;
});
