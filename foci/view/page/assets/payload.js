// Decodes the payload of a record: a JSON header and named arrays, which are decoded on first use.
// foci/view/page/payload.py and arrays.py encode it.

const WIDTH = { f4: 4, f2: 2, u1: 1, u2: 2, u3: 3, u4: 4, log16: 2, log8: 1 };

export function decodeBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

export async function decodePayload(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return { header, arrays: new Arrays(header.arrays, new Uint8Array(buffer, 4 + length)) };
}

// A table from code to weight: the largest code is 1, and 0 is 0.
function createLogTable(steps, largest) {
  const table = new Float32Array(largest + 1);
  for (let code = 1; code <= largest; code++) table[code] = Math.exp((code - largest) / steps);
  return table;
}

export const LOG16 = createLogTable(2048, 65535);
const LOG8 = createLogTable(16, 255);

function decodeHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -24 * fraction;
}

export class Arrays {
  constructor(table, bytes) {
    this.table = table;
    this.bytes = bytes;
    this.decoded = new Map();
  }

  has(name) {
    return name in this.table;
  }

  // { kind, shape, count, planes }: a plane has all first bytes, all second bytes, and so on.
  raw(name) {
    const { kind, shape, at } = this.table[name];
    const count = shape.reduce((a, b) => a * b, 1);
    const planes = [];
    for (let i = 0; i < WIDTH[kind]; i++) planes.push(this.bytes.subarray(at + i * count, at + (i + 1) * count));
    return { kind, shape, count, planes };
  }

  shape(name) {
    return this.table[name].shape;
  }

  // Decoded numbers from `start` to `stop`: a whole array is cached, a part is decoded on each call.
  floats(name, start = 0, stop = null) {
    const whole = stop === null;
    if (whole && this.decoded.has(name)) return this.decoded.get(name);
    const raw = this.raw(name);
    const end = whole ? raw.count : stop;
    const values = this.decode(name, raw, start, end);
    if (whole) this.decoded.set(name, values);
    return values;
  }

  decode(name, { kind, shape, planes }, start, stop) {
    const [a, b, c, d] = planes;
    const values = new Float32Array(stop - start);
    if (kind === "log8") {
      const peaks = this.floats(`${name}.peak`);
      const perHead = shape.slice(1).reduce((x, y) => x * y, 1);
      for (let i = start; i < stop; i++) values[i - start] = peaks[Math.floor(i / perHead)] * LOG8[a[i]];
    } else if (kind === "log16") {
      for (let i = start; i < stop; i++) values[i - start] = LOG16[a[i] | (b[i] << 8)];
    } else if (kind === "f2") {
      for (let i = start; i < stop; i++) values[i - start] = decodeHalf(a[i] | (b[i] << 8));
    } else if (kind === "f4") {
      const bits = new Uint32Array(values.buffer);
      for (let i = start; i < stop; i++) bits[i - start] = a[i] | (b[i] << 8) | (c[i] << 16) | (d[i] << 24);
    } else {
      for (let i = start; i < stop; i++) values[i - start] = a[i] + (b ? b[i] * 256 : 0) + (c ? c[i] * 65536 : 0);
    }
    return values;
  }
}
