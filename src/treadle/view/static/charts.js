// Curves with uPlot: zoom by dragging, back by a double click, a click on a point leads to its update.
import uPlot from "pages/vendor/uPlot.esm.js";
import {html} from "pages/html.js";
import {useEffect, useRef, useState} from "pages/vendor/preact.js";
import {aligned, figure, smoothed} from "pages/format.js";

/** @typedef {{label: string, name?: string, points: [number, number | null][], low?: [number, number][], high?: [number, number][], dots?: boolean, dash?: boolean, colour?: number}} Series */

export const COLOURS = ["--accent", "--warm", "--violet", "--good", "--bad", "--blue", "--faint"];

/** @param {string} name of a colour of the theme */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * @param {{title: string, help?: string, series: Series[], log?: boolean, smooth?: number, share?: boolean,
 *   stacked?: boolean, onPick?: (update: number, name: string) => void, height?: number}} props
 */
export function Chart({title, help = "", series, log = false, smooth = 1, share = false, stacked = false, onPick, height = 190}) {
  const place = useRef(/** @type {HTMLElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const [theme, setTheme] = useState(0);
  const [at, setAt] = useState(/** @type {number | null} */ (null));
  const pick = useRef(onPick);
  pick.current = onPick;
  const latest = useRef(series);
  latest.current = series;
  const data = tableOf(series, smooth, stacked);
  useEffect(() => {
    const redraw = () => setTheme((/** @type {number} */ n) => n + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("themechange", redraw);
    dark.addEventListener("change", redraw);
    return () => { removeEventListener("themechange", redraw); dark.removeEventListener("change", redraw); };
  }, []);
  const shape = JSON.stringify([stacked ? 0 : liesUpon(data.slice(1)), series.map((s) => [s.label, s.colour, Boolean(s.low), s.dots]), log, stacked, theme, height]);
  useEffect(() => {
    const host = /** @type {HTMLElement} */ (place.current);
    const options = optionsOf(series, data, {log, share, stacked, height, width: host.clientWidth || 300});
    options.hooks = {
      setCursor: [(/** @type {any} */ u) => setAt(u.cursor.idx ?? null)],
      ready: [(/** @type {any} */ u) => {
        let down = 0, picking = 0;
        u.over.addEventListener("mousedown", (/** @type {MouseEvent} */ e) => { down = e.clientX; });
        u.over.addEventListener("click", (/** @type {MouseEvent} */ e) => {
          const update = u.data[0][u.posToIdx(e.clientX - u.over.getBoundingClientRect().left)];
          clearTimeout(picking);  // the second click of a double one, which zooms out
          const height = e.clientY - u.over.getBoundingClientRect().top;
          if (e.detail < 2 && Math.abs(e.clientX - down) < 4 && update !== undefined) picking = setTimeout(() => pick.current?.(update, nearest(u, latest.current, update, height)), 250);
        });
      }],
    };
    plot.current = new uPlot(options, data, host);
    const observer = new ResizeObserver(() => plot.current?.setSize({width: host.clientWidth, height}));
    observer.observe(host);
    return () => { observer.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [shape]);
  const content = JSON.stringify(data);
  useEffect(() => { plot.current?.setData(data, plot.current.scales.x.min === undefined || isWhole(plot.current)); }, [content]);
  const last = data[0].length - 1;
  const index = at !== null && at <= last ? at : last;
  return html`<figure class="chart card">
    <figcaption title=${help}><b>${title}</b><span class="faint">${last >= 0 ? ` at ${data[0][index]}` : ""}</span></figcaption>
    <div class="plot" ref=${place}></div>
    <div class="legend">${series.map((s, n) => {
      const [update, value] = lastUntil(s, data[0][index]);
      return html`<span class="key"><i style=${{background: `var(${COLOURS[(s.colour ?? n) % COLOURS.length]})`}}></i>${s.label} <b>${figure(value)}</b>${value !== null && update !== data[0][index]
        ? html` <span class="faint">at ${update}</span>` : ""}</span>`;
    })}</div>
  </figure>`;
}

/**
 * Returns the name of the line that is nearest to a click.
 * @param {any} plot @param {Series[]} series @param {number} update @param {number} height of the click, in pixels from the top
 */
function nearest(plot, series, update, height) {
  const away = (/** @type {Series} */ s) => {
    const value = valueAt(s, update);
    return value === null ? Infinity : Math.abs(plot.valToPos(value, "y") - height);
  };
  const found = series.toSorted((a, b) => away(a) - away(b))[0];
  return found?.name ?? found?.label ?? "";
}

/** @param {any} plot whether it shows all updates, so that it goes on with a run */
function isWhole(plot) {
  const xs = plot.data[0];
  return xs.length === 0 || (plot.scales.x.min <= xs[0] && plot.scales.x.max >= xs.at(-1));
}

/** @param {Series} series @param {number | null | undefined} x */
function valueAt(series, x) {
  const found = series.points.find(([own]) => own === x);
  return found ? found[1] : null;
}

/**
 * Returns a line's last point up to an update: runs end at different ones, and are not all evaluated at the same.
 * @param {Series} series @param {number} update @returns {[number, number | null]}
 */
export function lastUntil(series, update) {
  return series.points.findLast(([own, value]) => own <= update && value !== null) ?? [update, null];
}

/** @param {Series[]} series @param {number} smooth @param {boolean} stacked @returns {any[]} */
function tableOf(series, smooth, stacked) {
  const lines = series.flatMap((s) => s.low && s.high ? [s, {points: s.low}, {points: s.high}] : [s]);
  const [xs, ...columns] = aligned(lines);
  const values = columns.map((column, n) => series.length === lines.length && series[n].dots ? column : smoothed(column, smooth));
  if (stacked) {
    for (let n = 1; n < values.length; n++) values[n] = values[n].map((v, i) => (v ?? 0) + Number(values[n - 1][i] ?? 0));
  }
  return [xs, ...values];
}

/**
 * Returns how many of the columns before each one it lies upon, for most of its length: it is dashed, so that they are seen.
 * @param {(number | null)[][]} columns
 * @returns {number[]}
 */
export function liesUpon(columns) {
  const all = columns.flat().filter((v) => v !== null).map(Number);
  const near = 0.015 * (all.reduce((a, b) => Math.max(a, b), -Infinity) - all.reduce((a, b) => Math.min(a, b), Infinity) || 1);
  return columns.map((own, n) => columns.slice(0, n).filter((other) => {
    const both = own.map((v, at) => v === null || other[at] === null ? null : Math.abs(v - Number(other[at]))).filter((v) => v !== null);
    return both.filter((v) => Number(v) <= near).length > both.length / 2;
  }).length);
}

/** @param {Series[]} series @param {any[]} data @param {{log: boolean, share: boolean, stacked: boolean, height: number, width: number}} how */
function optionsOf(series, data, {log, share, stacked, height, width}) {
  const upon = stacked || series.some((s) => s.low) ? [] : liesUpon(data.slice(1));
  const ink = colour("--faint"), grid = colour("--line");
  const axis = {stroke: ink, grid: {stroke: grid, width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif"};
  /** @type {any[]} */
  const lines = [{}];
  const bands = [];
  series.forEach((s, n) => {
    const stroke = colour(COLOURS[(s.colour ?? n) % COLOURS.length]);
    lines.push({
      label: s.label, stroke, width: s.dots ? 1 : 1.75, spanGaps: true, dash: s.dash ? [5, 4] : upon[n] ? [9, 9 * upon[n]] : undefined,
      points: {show: s.dots ? true : undefined, size: s.dots ? 7 : 5, fill: stroke}, fill: stacked ? `${stroke}55` : undefined,
    });
    if (s.low && s.high) {
      lines.push({stroke: "transparent", points: {show: false}}, {stroke: "transparent", points: {show: false}});
      bands.push({series: [lines.length - 1, lines.length - 2], fill: `${stroke}2e`});
    }
  });
  if (stacked) for (let n = lines.length - 1; n > 1; n--) bands.push({series: [n, n - 1], fill: `${lines[n].stroke}55`});
  if (stacked) lines.forEach((line, n) => { if (n > 1) line.fill = undefined; });
  return /** @type {any} */ ({
    width, height, series: lines, bands, legend: {show: false},
    cursor: {sync: {key: "updates"}, drag: {x: true, y: false}, points: {size: 6}},
    scales: {x: {time: false}, y: {distr: log ? 3 : 1, range: share && !log ? [0, 1] : undefined}},
    axes: [{...axis, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000]}, {...axis, size: 48, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => labels(ticks)}],
  });
}

/** Labels of an axis, with as many digits as tell them apart. @param {(number | null)[]} ticks */
function labels(ticks) {
  for (let digits = 2; digits < 7; digits += 1) {
    const found = ticks.map((v) => v === null ? "" : figure(v, digits)), shown = found.filter((text) => text !== "");
    if (new Set(shown).size === shown.length) return found;
  }
  return ticks.map((v) => v === null ? "" : String(v));
}
