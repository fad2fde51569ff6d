// Two evaluations task by task: what was gained, what was lost, and the attempts at each.
import {html} from "pages/html.js";
import {useAnswer, useVersion} from "pages/api.js";
import {counted, percent} from "pages/format.js";
import {AttemptCells, Problems, Waiting} from "pages/parts.js";
import {link} from "pages/sequence.js";

const CHANGES = ["gained", "lost", "unchanged", "ungraded"];

/** @param {{query: URLSearchParams}} props */
export function EvaluationsPage({query}) {
  const before = query.get("before") || "", after = query.get("after") || before;
  const asked = {before, after, first: query.get("first") || "", second: query.get("second") || ""};
  const path = new URLSearchParams(Object.entries(asked).filter(([, value]) => value)).toString();
  const {data: runs} = useAnswer("runs");
  const {data, error} = useAnswer(`tasks?${path}`, useVersion(undefined, 10));
  const chosen = query.get("change") || "";
  const go = (/** @type {any} */ to) => { location.hash = link(["evaluations"], {...asked, change: chosen, ...to}); };
  const rows = (data?.rows || []).filter((/** @type {any} */ row) => !chosen || row.change === chosen);
  const count = (/** @type {string} */ change) => data.rows.filter((/** @type {any} */ row) => row.change === change).length;
  const graded = (data?.rows || []).filter((/** @type {any} */ row) => row.change !== "ungraded");
  const share = (/** @type {number} */ side) => graded.reduce((/** @type {number} */ sum, /** @type {any} */ row) => sum + row.solved[side], 0) / graded.length;
  /** @param {string} run @param {string} name @param {string} evaluation @param {any[]} evaluations @param {string} chosenOne */
  const side = (run, name, evaluation, evaluations, chosenOne) => html`<span class="side">
    <select aria-label=${`${name} run`} value=${run} onChange=${(/** @type {any} */ e) => go({[name]: e.target.value, [evaluation]: ""})}>
      ${(runs?.runs || [{key: run}]).map((/** @type {any} */ own) => html`<option value=${own.key} selected=${own.key === run}>${own.key}</option>`)}</select>
    <select aria-label=${`${name} evaluation`} value=${chosenOne} onChange=${(/** @type {any} */ e) => go({[evaluation]: e.target.value})}>
      ${evaluations.map((own) => html`<option value=${own.name} selected=${own.name === chosenOne}>${own.label}</option>`)}</select></span>`;
  return html`<div class="head"><h1>Task by task</h1></div>
    <div class="bar-row">${side(before, "before", "first", data?.before || [], data?.first || "")} <span class="faint">then</span>
      ${side(after, "after", "second", data?.after || [], data?.second || "")}</div>
    ${!data ? error ? html`<${Problems} error=${error} />` : html`<${Waiting} />` : html`
    <p class="lead">${graded.length === 0 ? "No task has graded attempts in both." : html`Success <b>${percent(share(0))}</b> before, <b>${percent(share(1))}</b> after, on the ${counted(graded.length, "task")} of both: <b class="good">${count("gained")} gained</b>, <b class="bad">${count("lost")} lost</b>, ${count("unchanged")} unchanged.`}
      ${data.only_before + data.only_after > 0 && html`<span class="faint"> Not compared: ${data.only_before} of the first only, ${data.only_after} of the second.</span>`}
      ${count("ungraded") > 0 && html`<span class="faint"> ${counted(count("ungraded"), "task")} without a graded attempt in one of them.</span>`}</p>
    <div class="presets">${["", ...CHANGES].map((change) => html`<button class="chip ${chosen === change ? "on" : ""}" aria-pressed=${chosen === change}
      onClick=${() => go({change})}>${change || "all"} ${change ? count(change) : data.rows.length}</button>`)}</div>
    <div class="scroll"><table class="plain tasks"><thead><tr><th>task</th><th>before</th><th></th><th>after</th><th></th><th></th></tr></thead>
      <tbody>${rows.map((/** @type {any} */ row) => html`<tr><td title=${row.after.question}><span class="question">${row.after.question || row.after.task_id}</span><span class="faint">${row.after.task_id}</span></td>
        <td>${percent(row.solved[0])}</td><td><${AttemptCells} run=${before} attempts=${row.before.attempts} /></td>
        <td>${percent(row.solved[1])}</td><td><${AttemptCells} run=${after} attempts=${row.after.attempts} /></td>
        <td class=${row.change === "gained" ? "good" : row.change === "lost" ? "bad" : "faint"}>${row.change}</td></tr>`)}</tbody></table></div>`}`;
}
