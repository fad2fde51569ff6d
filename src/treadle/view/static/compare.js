// Several runs over one another: a line with a band for runs that differ in their seed only, and what else differs.
import {html} from "pages/html.js";
import {useEffect, useState} from "pages/vendor/preact.js";
import {get, useAnswer, useVersion} from "pages/api.js";
import {Chart, COLOURS} from "pages/charts.js";
import {band, counted} from "pages/format.js";
import {Problems, SettingName, Waiting, useChoice} from "pages/parts.js";
import {panelsOf, pointsOf, shortName} from "pages/run.js";
import {link} from "pages/sequence.js";

const FIRST = ["Reward", "Success in training", "Sampled tokens per trajectory", "Steps per trajectory", "Entropy",
  "Log-prob gap, engine and learner", "KL to the reference", "Clipped and corrected", "Gradient norm"];

/** @param {any[][]} runs rows of each run @param {string} name @param {string} kind @param {number} [temperature] */
function bandOf(runs, name, kind, temperature) {
  return band(runs.map((rows) => pointsOf(rows.filter((row) => row.kind === kind && (temperature === undefined || row.temperature === temperature)), name)));
}

/** Returns what a legend calls runs that differ in their seed only. @param {{runs: string[]}} group */
const nameOf = ({runs}) => runs.length > 1 ? `${runs[0]} and ${counted(runs.length - 1, "more seed")}` : runs[0];

/** @param {{query: URLSearchParams}} props */
export function ComparePage({query}) {
  const keys = query.getAll("run");
  const path = keys.map((key) => `run=${encodeURIComponent(key)}`).join("&");
  const version = useVersion();
  const {data, error} = useAnswer(keys.length ? `compare?${path}` : null, version);
  const [rows, setRows] = useState(/** @type {Record<string, any[]>} */ ({}));
  const [smooth, setSmooth] = useChoice("smooth", "1");
  useEffect(() => {
    let current = true;
    Promise.all(keys.map((key) => get(`runs/${encodeURIComponent(key)}/metrics`).then((found) => [key, found.rows], () => [key, []])))
      .then((found) => current && setRows(Object.fromEntries(found)));
    return () => { current = false; };
  }, [path, version]);
  if (!keys.length) return html`<p class="empty">Choose runs in the <a href="#/">list</a> first.</p>`;
  if (!data) return error ? html`<${Problems} error=${error} />` : html`<${Waiting} />`;
  const groups = data.groups.map((/** @type {any} */ group) => ({...group, rows: group.runs.map((/** @type {string} */ key) => rows[key] || [])}));
  const updates = Object.values(rows).flat().filter((row) => row.kind === "update");
  const names = panelsOf(updates).panels.filter((panel) => FIRST.includes(panel.title)).map((panel) => ({...panel, name: panel.own[0]}));
  const series = (/** @type {string} */ name, /** @type {string} */ kind, /** @type {number | undefined} */ temperature = undefined) => groups.map((/** @type {any} */ group, /** @type {number} */ n) => {
    const {mean, low, high} = bandOf(group.rows, name, kind, temperature);
    return {label: nameOf(group), points: mean, colour: n, dots: kind === "evaluation" && group.runs.length === 1,
      ...(group.runs.length > 1 ? {low, high} : {})};
  }).filter((/** @type {any} */ s) => s.points.length);
  const isShared = (/** @type {any} */ row) => !row.values.includes(null);
  const shared = data.differences.filter(isShared), some = data.differences.filter((/** @type {any} */ row) => !isShared(row));
  const evaluations = Object.values(rows).flat().filter((row) => row.kind === "evaluation");
  const temperatures = [...new Set(evaluations.map((row) => row.temperature))].sort((a, b) => b - a);
  return html`
    <div class="head"><h1>Overlay</h1><span class="grow"></span>
      <label class="control">smooth <input type="range" min="1" max="31" step="2" value=${smooth} onInput=${(/** @type {any} */ e) => setSmooth(e.target.value)} /></label></div>
    <${Problems} problems=${data.problems} />
    <ul class="groups-key">${groups.map((/** @type {any} */ group, /** @type {number} */ n) => html`<li><i style=${{background: `var(${COLOURS[n % COLOURS.length]})`}}></i>
      ${group.runs.map((/** @type {string} */ key, /** @type {number} */ m) => html`${m ? ", " : ""}<a href=${link(["run", key])}>${key}</a>`)}
      ${group.runs.length > 1 ? html` <span class="faint">mean of ${group.runs.length} runs, lowest to highest as a band</span>` : ""}
      ${group.settings.map((/** @type {string} */ setting) => html` <code>${setting}</code>`)}
      </li>`)}
      ${data.hidden > 0 && html`<li><button class="inline" onClick=${() => document.getElementById("differences")?.scrollIntoView({behavior: "smooth"})}>${counted(data.hidden, "more setting")} that ${data.hidden === 1 ? "differs" : "differ"}</button></li>`}</ul>
    <div class="charts">
      ${temperatures.map((t) => html`<${Chart} key=${t} title=${`Held-out success, ${t === 0 ? "greedy" : `T = ${t}`}`}
        series=${series("success", "evaluation", t)} share />`)}
      ${names.map((panel) => html`<${Chart} key=${panel.title} title=${panel.title} help=${shortName(panel.name)} smooth=${Number(smooth)} share=${panel.share}
        series=${series(panel.name, "update")} />`)}
    </div>
    ${evaluations.length > 0 && keys.length > 1 && html`<p><a href=${link(["evaluations"], {before: keys[0], after: keys[1]})}>held-out tasks, task by task: gained and lost</a></p>`}
    <section id="differences"><h2>Settings that differ</h2>
      ${shared.length === 0 ? html`<p class="faint">No setting that all of them have.</p>` : html`<${Differences} runs=${data.runs} rows=${shared} />`}
      ${some.length > 0 && html`<details><summary>${counted(some.length, "setting")} that only some of them have</summary><${Differences} runs=${data.runs} rows=${some} /></details>`}
    </section>`;
}

/** @param {{runs: string[], rows: any[]}} props */
function Differences({runs, rows}) {
  return html`<div class="scroll"><table class="plain settings several"><thead><tr><th></th>${runs.map((key) => html`<th>${key}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr><td><${SettingName} path=${row.path} /></td>
      ${row.values.map((/** @type {string | null} */ value) => html`<td title=${value}>${!value ? html`<span class="faint">–</span>` : html`<code>${value}</code>`}</td>`)}</tr>`)}</tbody></table></div>`;
}
