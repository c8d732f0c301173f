// Color ramps with monotonic lightness, readable without color vision: warm for weights on keys, cool for weights from
// queries. Up to eight heads side by side have the colors of Okabe and Ito.

const RAMPS = {
  light: {
    to: ["#ffffff", "#fee4be", "#fdae78", "#f06a5c", "#c43c75", "#7d2482", "#3e0f73"],
    from: ["#ffffff", "#d9efe6", "#9fd8cf", "#55b3bd", "#2f86ad", "#295a94", "#22306b"],
  },
  dark: {
    to: ["#15171c", "#3a1a4f", "#7b2b78", "#bf3f74", "#ee6a5d", "#fdae78", "#fcecae"],
    from: ["#15171c", "#1d3054", "#27567f", "#2f83a2", "#4fb0b4", "#99d8c4", "#e6f7e4"],
  },
};

export const HEAD_COLORS = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f"];

const DECADES = 4;
// The multiple of a uniform weight that has the full color, so that uniform attention is pale everywhere.
const FULL_COLOR_FACTOR = 3;

export function isDark() {
  const forced = document.documentElement.dataset.theme;
  return forced ? forced === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

const tables = new Map();

// 256 colors of a ramp as r, g, b bytes.
export function ramp(direction) {
  const key = `${isDark() ? "dark" : "light"} ${direction}`;
  if (!tables.has(key)) {
    const stops = RAMPS[isDark() ? "dark" : "light"][direction].map(channels);
    const table = new Uint8Array(256 * 3);
    for (let i = 0; i < 256; i++) {
      const place = (i / 255) * (stops.length - 1);
      const low = Math.min(Math.floor(place), stops.length - 2);
      for (let c = 0; c < 3; c++) {
        table[3 * i + c] = Math.round(stops[low][c] + (stops[low + 1][c] - stops[low][c]) * (place - low));
      }
    }
    tables.set(key, table);
  }
  return tables.get(key);
}

export function shade(direction, t) {
  const table = ramp(direction);
  // NaN has the color of 0.
  const at = 3 * Math.round(255 * Math.min(Math.max(t || 0, 0), 1));
  return `rgb(${table[at]}, ${table[at + 1]}, ${table[at + 2]})`;
}

// A dark or a light text color, whichever is readable on the background.
export function textColor(direction, t) {
  const table = ramp(direction);
  // NaN has the color of 0.
  const at = 3 * Math.round(255 * Math.min(Math.max(t || 0, 0), 1));
  const light = (0.299 * table[at] + 0.587 * table[at + 1] + 0.114 * table[at + 2]) / 255;
  return light > 0.55 ? "#17181c" : "#fbfaf6";
}

// Maps weights to 0..1: { mode, largest, of(weight), ticks }. Ranks come from a sorted sample of the weights.
// `uniform` is the weight of uniform attention, `largest` the largest weight if it is known.
export function createScale(mode, weights, uniform, largest = null) {
  let top = largest ?? 0;
  if (largest === null) for (const w of weights) if (w > top) top = w;
  if (!(top > 0)) return { mode, largest: 0, of: () => 0, ticks: [[0, "0"]] };
  top = Math.max(top, Math.min(1, FULL_COLOR_FACTOR * uniform));
  if (mode === "log") return logScale(top);
  if (mode === "rank") return rankScale(weights, top);
  return { mode, largest: top, of: (w) => w / top, ticks: [0, 0.5, 1].map((t) => [t, formatPercent(t * top)]) };
}

function logScale(top) {
  const of = (w) => (w > 0 ? Math.max(0, 1 + Math.log10(w / top) / DECADES) : 0);
  const ticks = Array.from({ length: DECADES + 1 }, (_, i) => [i / DECADES, formatTick(top * 10 ** (i - DECADES))]);
  return { mode: "log", largest: top, of, ticks };
}

// Exact, unlike formatPercent, which cuts off small weights.
function formatTick(weight) {
  return weight >= 1e-4 ? formatPercent(weight) : `${Number((100 * weight).toPrecision(1))}%`;
}

function rankScale(weights, top) {
  const step = Math.max(1, Math.floor(weights.length / 20000));
  const sample = [];
  for (let i = 0; i < weights.length; i += step) if (weights[i] > 0) sample.push(weights[i]);
  const sorted = Float32Array.from(sample).sort();
  const of = (w) => {
    if (!(w > 0)) return 0;
    let [low, high] = [0, sorted.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < w) low = middle + 1;
      else high = middle;
    }
    return sorted.length > 1 ? low / (sorted.length - 1) : 1;
  };
  return { mode: "rank", largest: top, of, ticks: [[0, "smallest"], [0.5, "median"], [1, "largest"]] };
}

// Two or three significant digits: 0.123 is 12.3%.
export function formatPercent(weight) {
  if (Number.isNaN(weight)) return "NaN";
  if (!(weight > 0)) return "0";
  const value = 100 * weight;
  if (value >= 99.95) return "100%";
  if (value >= 10) return `${value.toFixed(1)}%`;
  if (value >= 0.01) return `${Number(value.toPrecision(2))}%`;
  return "<0.01%";
}
