// Entry point of the page in a notebook's frame; notebook.js loads it and connects it to the kernel.

import { make } from "./dom.js";
import { decodePayload } from "./payload.js";
import { Store } from "./store.js";
import { Remote } from "./remote.js";
import { App } from "./app.js";
import { chosenHeads } from "./focus.js";

// payload: bytes; ask(question, parts): the promise of a Response; selected: the selection of Python; changed(selected).
async function openRecord({ payload, ask, selected, changed }) {
  const { header, arrays } = await decodePayload(payload);
  const store = new Store(header, arrays, new Remote(ask, header.layers));
  const app = new App(store);
  const select = (next) => app.state.set(toState(store, next));
  Object.assign(app.state, toState(store, selected));
  app.state.on((parts) => {
    if (["heads", "chosen", "direction", "view"].some((name) => parts.has(name))) changed(fromState(store, app.state));
  });
  app.start(document.body);
  changed(fromState(store, app.state));
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
  return { select, setTheme: (theme) => app.state.set({ theme }) };
}

// A head of null is the mean of the layer's heads.
function toState(store, { layer, head, selection, direction, view }) {
  const { label, names } = store.layers[layer];
  const shown = { heads: [names[head] ?? label], chosen: [...selection], direction };
  // An empty view is the one that the page chooses.
  return view ? { ...shown, view } : shown;
}

function fromState(store, state) {
  const heads = chosenHeads(store, state);
  const [{ layer, head }] = heads;
  const { direction, view } = state;
  return { layer, head: heads.length > 1 ? null : head, selection: [...state.chosen], direction, view };
}

window.openRecord = openRecord;
