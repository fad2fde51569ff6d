// Pure functions from values to texts and colours.

const STEERS = /(?![\n\t])\p{Cc}|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|\p{Cs}/gu;

/**
 * Returns a text with control characters and marks that turn the direction of writing as escapes, as
 * `treadle.core.text.escape_text` does; line ends and tabs stay.
 * @param {string} text
 */
export function visible(text) {
  return text.replace(STEERS, (found) => {
    const code = found.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/**
 * Returns a number for reading: "0.412", "12,345", "3.1e-6"; a dash where there is none.
 * @param {number | null | undefined} value
 * @param {number} [digits] significant ones of what is below 1000
 */
export function figure(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value)) return size < 1e15 ? value.toLocaleString("en") : value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

/** @param {number | null | undefined} value a share between 0 and 1 */
export function percent(value) {
  return value === null || value === undefined ? "–" : `${Number((100 * value).toFixed(1))}%`;
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${figure(seconds, 2)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

/** @param {number} count @param {string} one @param {string} [many] */
export function counted(count, one, many = `${one}s`) {
  return `${figure(count)} ${count === 1 ? one : many}`;
}

/** @param {number | null} value */
export function signed(value) {
  return value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + figure(value);
}

/**
 * Returns the sums of some counts by name: of {done: 1}, {done: 1, failed: 1} it is [["done", 2], ["failed", 1]].
 * @param {Record<string, number>[]} counts
 * @returns {[string, number][]}
 */
export function tally(counts) {
  /** @type {Record<string, number>} */
  const found = {};
  for (const own of counts) for (const [name, count] of Object.entries(own)) found[name] = (found[name] || 0) + count;
  return Object.entries(found);
}

/**
 * Returns the moving average over `width` values, centred; windows are shorter at the ends, and gaps count nothing.
 * @param {(number | null)[]} values
 * @param {number} width
 * @returns {(number | null)[]}
 */
export function smoothed(values, width) {
  if (width <= 1) return values;
  const half = Math.floor(width / 2);
  return values.map((own, at) => {
    if (own === null || own === undefined) return null;
    const near = values.slice(Math.max(0, at - half), at + half + 1).filter((v) => v !== null && v !== undefined);
    return near.reduce((/** @type {number} */ sum, v) => sum + Number(v), 0) / near.length;
  });
}

/**
 * Returns a table's columns for a chart: all x that any series has, and each series' value there or null.
 * @param {{points: [number, number | null][]}[]} series
 * @returns {(number | null)[][]}
 */
export function aligned(series) {
  const xs = [...new Set(series.flatMap((s) => s.points.map(([x]) => x)))].sort((a, b) => a - b);
  return [xs, ...series.map((s) => {
    const found = new Map(s.points);
    return xs.map((x) => found.get(x) ?? null);
  })];
}

/**
 * Returns mean, lowest and highest of several runs at the updates that all of them have.
 * @param {[number, number | null][][]} runs
 * @returns {{mean: [number, number][], low: [number, number][], high: [number, number][]}}
 */
export function band(runs) {
  const [xs, ...columns] = aligned(runs.map((points) => ({points})));
  const mean = [], low = [], high = [];
  for (let at = 0; at < xs.length; at++) {
    const values = columns.map((column) => column[at]);
    if (values.some((value) => value === null)) continue;
    const numbers = /** @type {number[]} */ (values);
    const x = Number(xs[at]);
    mean.push([x, numbers.reduce((a, b) => a + b, 0) / numbers.length]);
    low.push([x, Math.min(...numbers)]);
    high.push([x, Math.max(...numbers)]);
  }
  return /** @type {any} */ ({mean, low, high});
}

/**
 * Returns the colour behind a token: transparent where there is nothing to say.
 * @param {string} scale of the column: low, high, around_one, diverging, steps or flag
 * @param {any} value
 * @param {{largest: number, levels: any[]}} range of the column in this trajectory
 */
export function tokenColour(scale, value, range) {
  if (value === null || value === undefined) return "transparent";
  const mix = (/** @type {string} */ name, /** @type {number} */ share) =>
    share < 0.02 ? "transparent" : `color-mix(in srgb, var(${name}) ${Math.round(100 * Math.min(share, 1))}%, transparent)`;
  if (scale === "low") return mix("--warm", 0.75 * (1 - Math.exp(value)));
  if (scale === "high") return mix("--violet", range.largest ? 0.6 * value / range.largest : 0);
  if (scale === "around_one") return mix(value < 1 ? "--bad" : "--good", value > 0 ? Math.abs(Math.log(value)) : 1);
  if (scale === "diverging") return mix(value < 0 ? "--bad" : "--good", range.largest ? 0.6 * Math.abs(value) / range.largest : 0);
  if (scale === "flag") return value ? mix("--accent", 0.3) : "transparent";
  const at = range.levels.indexOf(value);
  return mix(["--accent", "--warm", "--violet", "--good", "--bad"][at % 5], 0.22 + 0.12 * (Math.floor(at / 5) % 3));
}

/**
 * Returns a few values of a column with their colours, for reading: `p 1`, `p 0.5`, `p 0` of log-probabilities.
 * @param {string} scale
 * @param {{largest: number, levels: any[]}} range
 * @returns {{label: string, colour: string}[]}
 */
export function scaleOf(scale, range) {
  const {largest, levels} = range;
  const values = /** @type {Record<string, any[][]>} */ ({
    low: [1, 0.5, 0.1, 0].map((p) => [Math.log(p), `p ${p}`]),
    high: [0, largest / 2, largest].map((v) => [v, figure(v, 2)]),
    around_one: [0.5, 0.8, 1, 1.25, 2].map((v) => [v, String(v)]),
    diverging: [-largest, -largest / 2, 0, largest / 2, largest].map((v) => [v, figure(v, 2)]),
    flag: [[true, "yes"], [false, "no"]],
    steps: levels.slice(0, 12).map((v) => [v, String(v)]),
  })[scale] || [];
  return values.map(([value, label]) => ({label, colour: tokenColour(scale, value, range)}));
}

/**
 * Returns what `tokenColour` needs to know of a column.
 * @param {Iterable<any>} values
 */
export function rangeOf(values) {
  let largest = 0;
  const levels = new Set();
  for (const value of values) {
    if (value === null || value === undefined) continue;
    largest = Math.max(largest, Math.abs(value));
    if (levels.size < 100) levels.add(value);
  }
  return {largest, levels: [...levels].sort((a, b) => a - b)};
}
