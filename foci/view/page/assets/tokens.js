// Makes tokens displayable: characters that are invisible or change the text direction are replaced by signs.

const SIGNS = { "\n": "↵", "\r": "␍", "\t": "⇥", "\u2028": "↵", "\u2029": "↵", "\x7f": "␡" };
// Control characters, direction marks, invisible joiners outside of a script, and surrogates.
const HIDDEN = new RegExp(
  "[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
    "\\ufeff\\ufff9-\\ufffb]|[\\u{e0000}-\\u{e007f}]",
  "gu",
);
const STACKED_MARKS = /(\p{M}{3})\p{M}+/gu;
const MAX_LENGTH = 48;
// Tokens that a tokenizer adds: [CLS], <s>, <|endoftext|>.
export const SPECIAL_TOKEN = /^(\[[A-Z]+\d*\]|<[^<>\s]+>)$/;

// Whether a token separates words or texts: a special token, punctuation or white space.
export function isDelimiter(text) {
  return SPECIAL_TOKEN.test(text.trim()) || !/[\p{L}\p{N}]/u.test(text);
}

function visibleSign(character) {
  if (character in SIGNS) return SIGNS[character];
  const code = character.codePointAt(0);
  if (code < 32) return String.fromCharCode(0x2400 + code);
  return `⟨${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

export function printable(text) {
  return text.replace(HIDDEN, visibleSign).replace(STACKED_MARKS, "$1");
}

// A token in running text: spaces stay, invisible characters become signs, long tokens are cut.
export function displayText(text) {
  const short = text.length > 4 * MAX_LENGTH ? text.slice(0, 4 * MAX_LENGTH) : text;
  const plain = printable(short);
  if (plain === "") return "∅";
  return [...plain].length > MAX_LENGTH ? `${[...plain].slice(0, MAX_LENGTH).join("")}…` : plain;
}

// A token in a table or on an axis: without surrounding spaces, never empty.
export function label(text) {
  const trimmed = displayText(text.replace(/^ +| +$/g, ""));
  return trimmed === "∅" && text.length ? "␣".repeat(Math.min(text.length, 8)) : trimmed;
}

export function clipText(text, most) {
  const all = [...text];
  return all.length > most ? `${all.slice(0, most - 1).join("")}…` : text;
}

export function isRightToLeft(texts) {
  const sample = texts.slice(0, 400).join("");
  const left = (sample.match(/[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/g) ?? []).length;
  return left > (sample.match(/\p{L}/gu) ?? []).length / 2;
}

// Groups tokens into units: single tokens, or words if the labels have word numbers.
// start[u] and stop[u] are the positions of unit u; of[i] is the unit of position i.
export function groupUnits(texts, words) {
  const of = new Int32Array(texts.length);
  const start = [];
  for (let i = 0; i < texts.length; i++) {
    const joins = words && i > 0 && words[i] !== null && words[i] !== undefined && words[i] === words[i - 1];
    if (!joins) start.push(i);
    of[i] = start.length - 1;
  }
  const stop = start.map((_, u) => (u + 1 < start.length ? start[u + 1] : texts.length));
  const text = (u) => (stop[u] - start[u] === 1 ? texts[start[u]] : texts.slice(start[u], stop[u]).join(""));
  return { count: start.length, start, stop, of, text, label: (u) => label(text(u)) };
}
