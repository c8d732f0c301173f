// The module of the widget: a frame with the page, whose questions go to the kernel as messages. STYLE and runPage, the
// style and the script of the page, are written above this text.

const SHELL = `<!doctype html><html lang="en"><head><meta charset="utf-8"><style>${STYLE}</style></head><body></body></html>`;
const PARTS = ["layer", "head", "selection", "direction", "view"];

// A color in any notation as [red, green, blue, alpha] from 0 to 255.
function readColor(text) {
  const pen = new OffscreenCanvas(1, 1).getContext("2d");
  pen.fillStyle = text;
  pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
}

// Whether the notebook is dark, by the first background that is not transparent.
function findTheme(element) {
  for (let one = element; one; one = one.parentElement ?? one.getRootNode().host) {
    const [r, g, b, alpha] = readColor(getComputedStyle(one).backgroundColor);
    if (alpha > 127) return 0.2126 * r + 0.7152 * g + 0.0722 * b < 128 ? "dark" : "light";
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

// The kernel's answers by the number of their question.
function connect(model) {
  const waiting = new Map();
  let count = 0;
  const receive = (message, buffers) => {
    const answer = waiting.get(message.id);
    waiting.delete(message.id);
    answer?.(new Response(buffers[0], { status: message.error ? 400 : 200 }));
  };
  model.on("msg:custom", receive);
  const ask = (question, parts) =>
    new Promise((done) => {
      waiting.set(++count, done);
      model.send({ id: count, question, parts });
    });
  return { ask, stop: () => model.off("msg:custom", receive) };
}

function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.title = "attention weights";
  frame.allow = "clipboard-write";
  const line = "1px solid rgba(128, 128, 128, 0.35)";
  // Every other size would change when the page inside is drawn.
  Object.assign(frame.style, { display: "block", boxSizing: "border-box", width: "100%", border: line, borderRadius: "8px" });
  const resize = () => (frame.style.height = `${model.get("height")}px`);
  const { ask, stop } = connect(model);
  const read = () => Object.fromEntries(PARTS.map((name) => [name, model.get(name)]));
  let [page, isReporting] = [null, false];
  const changed = (selected) => {
    const different = PARTS.filter((name) => JSON.stringify(model.get(name)) !== JSON.stringify(selected[name]));
    if (!different.length) return;
    isReporting = true;
    for (const name of different) model.set(name, selected[name]);
    isReporting = false;
    model.save_changes();
  };
  const select = () => isReporting || page?.select(read());
  // A notebook that moves the frame loads it again.
  const load = async () => {
    const { contentDocument: inside, contentWindow: scope } = frame;
    inside.documentElement.dataset.theme = findTheme(el);
    inside.documentElement.dataset.state = `e=${findTheme(el)}`;
    const script = inside.createElement("script");
    script.textContent = `(${runPage})()`;
    inside.head.append(script);
    try {
      page = await scope.openRecord({ payload: model.get("payload"), ask, selected: read(), changed });
    } catch (problem) {
      inside.body.textContent = `This record could not be opened: ${problem.message}`;
      throw problem;
    }
  };
  const theme = new MutationObserver(() => page?.setTheme(findTheme(el)));
  theme.observe(document.body, { attributes: true });
  frame.addEventListener("load", load);
  frame.srcdoc = SHELL;
  resize();
  el.append(frame);
  model.on("change:height", resize);
  for (const name of PARTS) model.on(`change:${name}`, select);
  return () => {
    stop();
    theme.disconnect();
    model.off("change:height", resize);
    for (const name of PARTS) model.off(`change:${name}`, select);
    frame.remove();
  };
}

export default { render };
