// Shows a text of any length: tokens are laid out in lines by their measured widths; only visible lines have elements.

import { make, oncePerFrame, prepareCanvas, cssColor } from "./dom.js";
import { SPECIAL_TOKEN, displayText, isRightToLeft } from "./tokens.js";
import { textColor, shade } from "./colors.js";

const PAD = 3;
const EXTRA_LINES = 6;
// A short text is larger: [most tokens, font size, line height].
const SIZES = [[70, 25, 52], [400, 19, 42], [Infinity, 16, 35]];

export class TextPane {
  // options: name, texts, words, onhover(i or null), onpick(i, add), onmove(i)
  constructor(options) {
    Object.assign(this, options);
    this.keepsSpaces = this.texts.some((text, i) => i > 0 && /^\s/.test(text));
    // If every character is a token, a space is drawn as a space; otherwise a single space gets a sign.
    this.spelled = this.texts.every((text) => [...text].length <= 1 || SPECIAL_TOKEN.test(text));
    this.rightToLeft = isRightToLeft(this.texts);
    this.scroller = make("div", {
      class: "textpane",
      tabindex: "0",
      role: "listbox",
      "aria-multiselectable": "true",
      "aria-label": this.name,
      dir: this.rightToLeft ? "rtl" : "ltr",
    });
    this.sheet = make("div", { class: "sheet" });
    [, this.size, this.line] = SIZES.find(([most]) => this.texts.length <= most);
    this.sheet.style.setProperty("--size", `${this.size}px`);
    this.sheet.style.setProperty("--line-height", `${this.line}px`);
    this.scroller.append(this.sheet);
    this.minimap = make("canvas", { class: "minimap", "aria-hidden": "true" });
    this.element = make("div", { class: "textframe" }, this.scroller, this.minimap);
    this.lines = new Map();
    this.tint = () => 0;
    this.mark = () => "";
    this.direction = "to";
    this.cursor = 0;
    this.refresh = oncePerFrame(() => this.render());
    this.listen();
  }

  listen() {
    this.scroller.addEventListener("scroll", this.refresh, { passive: true });
    this.sheet.addEventListener("pointermove", (event) => this.hover(event));
    this.sheet.addEventListener("pointerleave", () => this.hover(null));
    this.sheet.addEventListener("click", (event) => {
      const i = indexOf(event);
      if (i === null) return;
      this.cursor = i;
      this.onpick(i, event.shiftKey || event.ctrlKey || event.metaKey);
    });
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    const jump = (event) => {
      if (event.buttons !== 1) return;
      const box = this.minimap.getBoundingClientRect();
      const at = ((event.clientY - box.top) / box.height) * this.sheet.offsetHeight;
      this.scroller.scrollTop = at - this.scroller.clientHeight / 2;
    };
    this.minimap.addEventListener("pointerdown", jump);
    this.minimap.addEventListener("pointermove", jump);
    new ResizeObserver(() => this.layout()).observe(this.scroller);
  }

  hover(event) {
    const i = event ? indexOf(event) : null;
    if (i === this.hovered) return;
    this.hovered = i;
    this.onhover(i);
  }

  key(event) {
    const step = { ArrowRight: this.rightToLeft ? -1 : 1, ArrowLeft: this.rightToLeft ? 1 : -1 }[event.key];
    if (event.key === "Enter" || event.key === " ") {
      this.onpick(this.cursor, event.shiftKey || event.ctrlKey || event.metaKey);
    }
    else if (step) this.move(this.cursor + step);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") this.move(
      this.nextLine(event.key === "ArrowDown" ? 1 : -1),
    );
    else if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(this.texts.length - 1);
    else if (event.key === "PageDown" || event.key === "PageUp") this.move(
      this.nextLine(event.key === "PageDown" ? 12 : -12),
    );
    else return;
    event.preventDefault();
  }

  move(i) {
    this.cursor = Math.min(Math.max(i, 0), this.texts.length - 1);
    this.reveal(this.cursor);
    this.onmove(this.cursor);
    this.render();
  }

  nextLine(step) {
    const line = this.lineOf(this.cursor);
    const to = Math.min(Math.max(line + step, 0), this.starts.length - 1);
    return Math.min(this.starts[to] + this.cursor - this.starts[line], this.endOf(to) - 1);
  }

  // A gap precedes a token that starts with a space or, if no token has spaces, each word.
  hasGap(i) {
    if (i === 0) return false;
    if (this.keepsSpaces) return /^ ./su.test(this.texts[i]) || this.isSpecial(i) || this.isSpecial(i - 1);
    return !(this.words && this.words[i] !== null && this.words[i] === this.words[i - 1]);
  }

  // A special token of the tokenizer: [CLS], <s>. It has no word number.
  isSpecial(i) {
    return SPECIAL_TOKEN.test(this.texts[i]) || (Boolean(this.words) && this.words[i] === null && /\S/.test(this.texts[i]));
  }

  // The displayed text; a leading space is drawn as a gap, outside of the background color.
  tokenText(i) {
    const text = this.texts[i];
    if (text === " ") return this.spelled ? "\u00a0" : "␣";
    return displayText(/^ ./su.test(text) ? text.slice(1) : text);
  }

  layout() {
    const width = this.scroller.clientWidth - 48;
    if (width <= 0) return;
    const style = getComputedStyle(this.sheet);
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = `${this.size}px ${style.fontFamily}`;
    const gap = pen.measureText(" ").width;
    this.sheet.style.setProperty("--gap", `${gap}px`);
    const widths = new Map();
    const widthOf = (i) => {
      const text = this.texts[i];
      if (!widths.has(text)) widths.set(text, pen.measureText(this.tokenText(i)).width);
      return widths.get(text) + (this.hasGap(i) ? gap + 2 * PAD : 0);
    };
    this.starts = this.breakLines(widthOf, width);
    this.sheet.style.height = `${this.starts.length * this.line + 16}px`;
    for (const line of this.lines.values()) line.remove();
    this.lines.clear();
    if (this.wanted !== undefined) this.reveal(this.wanted);
    this.wanted = undefined;
    this.render();
  }

  // The first token of each line; lines break at gaps and spaces, inside a word only if it is longer than a line.
  breakLines(widthOf, width) {
    const starts = [0];
    let [x, gapAt, sinceGap] = [0, 0, 0];
    for (let i = 0; i < this.texts.length; i++) {
      const wide = widthOf(i);
      if (this.hasGap(i) || this.texts[i - 1] === " ") [gapAt, sinceGap] = [i, 0];
      if (i > starts.at(-1) && this.texts[i - 1].includes("\n")) {
        starts.push(i);
        x = 0;
      } else if (i > starts.at(-1) && x + wide > width) {
        const whole = gapAt > starts.at(-1);
        starts.push(whole ? gapAt : i);
        x = whole ? sinceGap : 0;
      }
      x += wide;
      sinceGap += wide;
    }
    return starts;
  }

  lineOf(i) {
    let [low, high] = [0, this.starts.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= i) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  endOf(line) {
    return line + 1 < this.starts.length ? this.starts[line + 1] : this.texts.length;
  }

  reveal(i) {
    if (!this.starts) return;
    const top = this.lineOf(i) * this.line;
    const { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop || top + this.line > scrollTop + clientHeight) this.scroller.scrollTop = top - clientHeight / 2;
  }

  render() {
    if (!this.starts) return;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.line) - EXTRA_LINES);
    const last = Math.min(
      this.starts.length - 1,
      Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / this.line) + EXTRA_LINES,
    );
    for (const [number, line] of this.lines) {
      if (number < first || number > last) {
        line.remove();
        this.lines.delete(number);
      }
    }
    for (let number = first; number <= last; number++) {
      if (!this.lines.has(number)) this.lines.set(number, this.sheet.appendChild(this.lineElement(number)));
    }
    for (const line of this.lines.values()) for (const token of line.children) this.paint(token);
    this.drawMinimap();
  }

  lineElement(number) {
    const line = make("div", { class: "line", role: "presentation" });
    line.style.top = `${number * this.line + 8}px`;
    for (let i = this.starts[number]; i < this.endOf(number); i++) {
      const token = make(
        "span",
        { class: "token", role: "option", "data-i": String(i), id: `${this.id}-${i}` },
        this.tokenText(i),
      );
      if (i > this.starts[number] && this.hasGap(i)) token.classList.add("gap");
      else if (i > this.starts[number]) token.classList.add("joined");
      if (i + 1 < this.endOf(number) && !this.hasGap(i + 1)) token.classList.add("joins");
      line.append(token);
    }
    return line;
  }

  paint(token) {
    const i = Number(token.dataset.i);
    const t = this.tint(i);
    const mark = this.mark(i);
    // Repainted only if something changed: most tokens of a long text have no color.
    const runs = mark.includes("c") ? [this.mark(i - 1).includes("c"), this.mark(i + 1).includes("c")] : [false, false];
    const look = `${t > 0.004 ? Math.round(t * 255) : 0} ${mark} ${runs} ${this.direction} ${i === this.cursor}`;
    if (token.look === look) return;
    token.look = look;
    const tinted = t > 0.004;
    token.style.backgroundColor = tinted ? shade(this.direction, t) : "";
    token.style.color = tinted ? textColor(this.direction, t) : "";
    token.classList.toggle("chosen", mark.includes("c"));
    token.classList.toggle("onward", runs[1]);
    token.classList.toggle("further", runs[0]);
    token.classList.toggle("found", mark.includes("f"));
    token.classList.toggle("sink", mark.includes("s"));
    token.classList.toggle("new", mark.includes("n"));
    token.classList.toggle("later", mark.includes("l"));
    token.classList.toggle("cursor", i === this.cursor);
    token.setAttribute("aria-selected", String(mark.includes("c")));
    if (i === this.cursor) this.scroller.setAttribute("aria-activedescendant", token.id);
  }

  update({ tint, mark, direction }) {
    this.tint = tint;
    this.mark = mark;
    if (direction !== this.direction) this.repaint();
    this.direction = direction;
    this.refresh();
  }

  repaint() {
    for (const line of this.lines.values()) for (const token of line.children) token.look = null;
  }

  // The whole text as a strip: each row shows some lines in the color of their largest weight.
  drawMinimap() {
    const whole = this.starts.length * this.line;
    const height = this.scroller.clientHeight;
    this.minimap.hidden = whole <= height + this.line;
    if (this.minimap.hidden) return;
    const width = 56;
    const pen = prepareCanvas(this.minimap, width, height);
    pen.clearRect(0, 0, width, height);
    const rows = Math.min(this.starts.length, Math.floor(height / 2));
    const tall = Math.min(height / rows, 6);
    const scale = rows * tall;
    const found = new Set();
    for (let row = 0; row < rows; row++) {
      const from = this.starts[Math.floor((row * this.starts.length) / rows)];
      const to = this.endOf(Math.floor(((row + 1) * this.starts.length) / rows) - 1);
      let most = 0;
      for (let i = from; i < to; i++) {
        const t = this.tint(i);
        if (t > most) most = t;
        if (this.mark(i).includes("f")) found.add(row);
      }
      pen.fillStyle = most > 0.004 ? shade(this.direction, most) : cssColor("--faint");
      pen.fillRect(6, row * tall, width - 18, Math.max(tall - 1, 1));
    }
    pen.fillStyle = cssColor("--find");
    for (const row of found) pen.fillRect(width - 9, row * tall, 5, Math.max(tall, 2));
    pen.strokeStyle = cssColor("--soft");
    const top = (this.scroller.scrollTop / (whole + 16)) * scale;
    pen.strokeRect(2.5, top + 0.5, width - 5, Math.max((height / whole) * scale, 8));
  }
}

function indexOf(event) {
  const token = event.target.closest?.("[data-i]");
  return token ? Number(token.dataset.i) : null;
}
