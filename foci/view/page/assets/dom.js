// Creates elements from names, attributes and texts. Texts become text nodes: model output is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";
const LEGEND_COLORS = 48;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// make("p", { class: "note" }, "text", otherElement)
export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function button(label, attributes = {}, ...children) {
  return make("button", { type: "button", ...attributes }, label, ...children);
}

// A group of buttons of which one is pressed; options are [value, label, title].
export function choice(name, options, chosen, choose) {
  const group = make("div", { class: "choice", role: "group", "aria-label": name });
  for (const [value, label, title] of options) {
    group.append(
      button(label, {
        title,
        "data-value": value,
        "aria-pressed": String(value === chosen()),
        onclick: () => choose(value),
      }),
    );
  }
  group.refresh = () => {
    for (const child of group.children) {
      child.setAttribute("aria-pressed", String(child.dataset.value === String(chosen())));
    }
  };
  return group;
}

// A switch: a button that is on or off.
export function toggle(label, title, isOn, flip) {
  const element = button(label, { class: "switch", role: "switch", title, onclick: flip });
  element.refresh = () => element.setAttribute("aria-checked", String(isOn()));
  element.refresh();
  return element;
}

// A range of numbers; choose(value) is called while it moves.
export function slider(name, min, max, step, choose) {
  return make("input", {
    type: "range", min, max, step, "aria-label": name, oninput: (event) => choose(Number(event.target.value)),
  });
}

export function labelled(text, ...controls) {
  return make("span", { class: "labelled" }, make("span", { class: "label" }, text), ...controls);
}

// A legend: a title, a strip of colors and their weights; color(t) for t from 0 to 1.
export function legendParts(title, color, ticks) {
  const strip = make("div", { class: "strip" });
  for (let i = 0; i < LEGEND_COLORS; i++) {
    const cell = make("span");
    cell.style.backgroundColor = color(i / (LEGEND_COLORS - 1));
    strip.append(cell);
  }
  const texts = ticks.map((text) => make("span", {}, text));
  return [make("div", { class: "legend-title" }, title), strip, make("div", { class: "ticks" }, ...texts)];
}

// For elements that are replaced while the pointer is over them: a click is lost if its element is gone when the button
// is released, a press is not. The keyboard still clicks.
export function onPress(choose) {
  return {
    onpointerdown: (event) => event.button === 0 && choose(event),
    onclick: (event) => event.detail === 0 && choose(event),
  };
}

// Runs `work` at most once per frame.
export function oncePerFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

// Sizes a canvas in device pixels and returns its context, scaled to CSS pixels.
export function prepareCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}

export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
