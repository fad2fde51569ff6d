// One run: what became of its steps, its curves, evaluations and failures.
import {html} from "pages/html.js";
import {useMemo, useState} from "pages/vendor/preact.js";
import {useAnswer, useNow, useRows, useVersion} from "pages/api.js";
import {Chart} from "pages/charts.js";
import {counted, duration, figure, percent} from "pages/format.js";
import {DoesNow, Facts, Problems, StatePill, Tabs, Waiting, useChoice} from "pages/parts.js";
import {link} from "pages/sequence.js";

/** Panels of metrics, by name or pattern; what no panel has comes behind them. zero: shown even while all values are 0. */
export const PANELS = [
  {title: "Reward", names: ["reward_mean", "shaped_reward_mean"], zero: true},
  {title: "Reward by component", names: [/^reward_.+_mean$/], zero: true},
  {title: "Success in training", names: ["success", /^pass_at_/], share: true, zero: true},
  {title: "Sampled tokens per trajectory", names: ["completion_tokens_mean", "completion_tokens_max"]},
  {title: "Steps per trajectory", names: ["steps_mean", "steps_max"]},
  {title: "Entropy", names: ["entropy"], zero: true},
  {title: "Log-prob gap, engine and learner", names: ["logprob_gap_mean", "logprob_gap_max", /^logprob_gap_lag_/]},
  {title: "Log-prob gap as KL, engine to learner", names: ["logprob_gap_kl"]},
  {title: "KL to the reference", names: ["kl"]},
  {title: "Clipped and corrected", names: ["clip_fraction", "correction_masked_fraction", "value_clip_fraction"]},
  {title: "Ratio", names: ["ratio_min", "ratio_mean", "ratio_max"]},
  {title: "Staleness in versions", names: ["staleness_mean", "staleness_max", "trained_staleness_mean", "token_staleness_mean"]},
  {title: "Attempts of one version", names: ["one_version"], share: true},
  {title: "Versions that sampled", names: ["versions"]},
  {title: "Dropped steps by reason", names: [/^dropped_/]},
  {title: "Attempts that failed", names: ["failed", /^failed_/, "refused", "warnings"]},
  {title: "Groups without a signal", names: ["zero_advantage_groups", "equal_reward_groups"], share: true},
  {title: "Tokens computed and trained", names: ["packed_tokens", "trainable_tokens"]},
  {title: "Gradient norm", names: ["gradient_norm"], zero: true},
  {title: "Learning rate", names: ["learning_rate"]},
  {title: "How attempts end", names: [/^ended_/], share: true},
  {title: "How completions end", names: [/^last_stop_/], share: true},
  {title: "The engine's share of an attempt", names: ["engine_share"], share: true},
  {title: "Environment metrics", names: [/^env\//], zero: true},
];
const NEVER = /^(kind|update|version|wall_seconds|cpu_seconds|seconds_)/;

/** @param {any[]} rows @param {string} name @returns {[number, number | null][]} */
export function pointsOf(rows, name) {
  return rows.filter((row) => typeof row[name] === "number").map((row) => [row.update, row[name]]);
}

/**
 * Returns the panels that have anything to show, with the names of their metrics.
 * @param {any[]} updates rows of kind update
 */
export function panelsOf(updates) {
  const names = [...new Set(updates.flatMap((row) => Object.keys(row)))].filter((name) => !NEVER.test(name));
  const left = new Set(names);
  const found = [];
  for (const panel of PANELS) {
    const own = names.filter((name) => left.has(name) && panel.names.some((n) => typeof n === "string" ? n === name : n.test(name))
      && updates.some((row) => typeof row[name] === "number"));
    if (!own.some((name) => panel.zero || updates.some((row) => row[name]))) continue;
    own.forEach((name) => left.delete(name));
    found.push({...panel, own});
  }
  return {panels: found, rest: [...left].filter((name) => updates.some((row) => typeof row[name] === "number"))};
}

/**
 * Returns the filter of groups that goes with a metric: those of `failed_engine` have an attempt that failed by the engine.
 * @param {string} name
 * @returns {Record<string, string>}
 */
export function filterOf(name) {
  const [, kind, value] = /^(dropped|failed|ended)_(.+)$/.exec(name) || [];
  if (kind) return {[/** @type {Record<string, string>} */ ({dropped: "reason", failed: "cause", ended: "status"})[kind]]: value};
  const preset = /** @type {Record<string, string>} */ ({failed: "failed", warnings: "warning", zero_advantage_groups: "zero_advantage", equal_reward_groups: "zero_advantage"})[name];
  return preset ? {preset} : name === "refused" ? {reason: name} : {};
}

/** @param {any[]} updates seconds of each update by phase; the rest is what evaluations and checkpoints take */
function secondsByPhase(updates) {
  const names = ["seconds_rollout", "seconds_update", "seconds_publish"].filter((name) => updates.some((row) => row[name]));
  const series = names.map((name) => ({label: name.replace("seconds_", ""), points: pointsOf(updates, name)}));
  /** @type {[number, number][]} */
  const rest = [];
  updates.forEach((row, n) => {
    if (n === 0) return;
    const passed = row.wall_seconds - updates[n - 1].wall_seconds;
    rest.push([row.update, Math.max(0, passed - names.reduce((sum, name) => sum + (row[name] || 0), 0))]);
  });
  return [...series, {label: "evaluation, checkpoints, waiting", points: rest}];
}

/** @param {{run: string, rows: any[]}} props */
function Evaluations({run, rows}) {
  if (!rows.length) return null;
  const passes = [...new Set(rows.flatMap((row) => Object.keys(row.pass_at || {})))];
  const kinds = [...new Set(rows.flatMap((row) => Object.keys(row.by || {})))];
  return html`<section><h2>Held-out tasks ${rows.length > 1 && html`<a class="beside" href=${link(["evaluations"], {before: run})}>task by task: gained and lost</a>`}</h2><div class="scroll"><table class="plain"><thead><tr><th>update</th><th>T</th><th>tasks</th>
    <th>success</th>${passes.map((k) => html`<th>pass@${k}</th>`)}${passes.length > 0 && html`<th>pass@k tasks</th>`}<th>reward</th><th>steps</th><th>failed</th>
    ${kinds.map((kind) => html`<th>${kind}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr><td>${row.update}</td><td>${row.temperature || "greedy"}</td><td>${row.tasks}</td>
      <td>${percent(row.success)}</td>${passes.map((k) => html`<td>${percent(row.pass_at?.[k])}</td>`)}${passes.length > 0 && html`<td>${figure(row.pass_tasks)}</td>`}<td>${figure(row.reward_mean)}</td>
      <td>${figure(row.steps_mean)}</td><td>${row.failed}</td>${kinds.map((kind) => html`<td>${percent(row.by?.[kind])}</td>`)}</tr>`)}
    </tbody></table></div></section>`;
}

/** @param {{run: string, counts: any}} props */
function Account({run, counts}) {
  const total = (/** @type {string} */ split) => counts.splits.find((/** @type {any} */ s) => s.split === split)?.steps || 1;
  return html`<section><h2>What became of every step <span class="beside faint">the rules: docs/runs.md</span></h2><ul class="account">${counts.states.map((/** @type {any} */ row) => html`
    <li><a href=${link(["run", run, "groups"], {split: row.split, reason: row.reason})}>
      <span class="share ${row.state}"><span style=${{width: `${Math.max(1, 100 * row.count / total(row.split))}%`}}></span></span>
      <b>${figure(row.count)}</b> ${row.split === "train" ? "training" : "held-out"}: ${row.state}${row.reason ? `, ${row.reason}` : ""}</a>
      <div class="faint">${row.text}</div></li>`)}</ul>
    ${counts.failures.length > 0 && html`<h3>Failures</h3><ul class="failures">${counts.failures.map((/** @type {any} */ row) => html`
      <li><b>${figure(row.count)}×</b> <a href=${link(["run", run, "trajectory", row.trajectory_id])}>${row.cause}</a> <span>${row.message}</span></li>`)}</ul>`}
    </section>`;
}

/** @param {{run: string}} props */
export function RunPage({run}) {
  const {data: detail, error} = useAnswer(`runs/${encodeURIComponent(run)}`, useVersion(run));
  const {data: counts, error: uncounted} = useAnswer(`runs/${encodeURIComponent(run)}/counts`, useVersion(run, 20));
  const metrics = useRows(run);
  const now = useNow()[run];
  const [smooth, setSmooth] = useChoice("smooth", "1");
  const [log, setLog] = useChoice("log");
  const [all, setAll] = useState(false);
  const updates = useMemo(() => metrics.rows.filter((row) => row.kind === "update"), [metrics.rows]);
  const evaluations = useMemo(() => metrics.rows.filter((row) => row.kind === "evaluation"), [metrics.rows]);
  const {panels, rest} = useMemo(() => panelsOf(updates), [updates]);
  const tabs = html`<div class="bar-row run-bar"><${Tabs} run=${run} here="" /><span class="grow"></span>
    <label class="control">smooth <input type="range" min="1" max="31" step="2" value=${smooth} onInput=${(/** @type {any} */ e) => setSmooth(e.target.value)} /></label>
    <label class="control"><input type="checkbox" checked=${Boolean(log)} onChange=${() => setLog(log ? "" : "true")} /> log</label></div>`;
  if (!detail) return html`${tabs}${error ? html`<${Problems} error=${error} />` : html`<${Waiting} />`}`;
  const pick = (/** @type {number} */ update, name = "") => { location.hash = link(["run", run, "groups"], {update, split: "train", ...filterOf(name)}); };
  const pickEvaluation = (/** @type {number} */ update) => { location.hash = link(["run", run, "groups"], {update, split: "held_out"}); };
  const help = (/** @type {string[]} */ names) => names.map((name) => `${name}: ${detail.metrics[name]?.help || ""}`).join("\n");
  const held = evaluationSeries(evaluations);
  return html`
    ${tabs}<div class="head"><h1>${detail.name}</h1><${StatePill} state=${detail.state} /></div>
    <p class="faint lead">${detail.about || detail.recipe}</p>
    <${DoesNow} now=${now} whole />
    <${Problems} error=${metrics.error} problems=${[...detail.problems, uncounted]} />
    <${Facts} items=${[
      detail.state !== "recorded" && ["updates", html`${detail.update}<span class="faint"> of ${detail.updates}</span>`],
      ["held-out, last", detail.last ? percent(detail.last.success) : "–"],
      ["best", detail.best ? html`${percent(detail.best.success)}<span class="faint"> at ${detail.best.update}</span>` : "–"],
      ["reward", figure(detail.reward)], ["per update", duration(detail.seconds_per_update)], ["total time", duration(detail.wall_seconds)],
      ...(counts?.splits || []).map((/** @type {any} */ s) => [s.split === "train" ? "training" : "held-out",
        html`${counted(s.trajectories, "attempt")}<span class="faint">, ${figure(s.completion_tokens)} tokens</span>`]),
    ]} />
    ${updates.length === 0 && html`<p class="empty">${detail.no_update}</p>`}
    <div class="charts">
      ${held.length > 0 && html`<${Chart} title="Held-out success" series=${held} share log=${Boolean(log)} onPick=${pickEvaluation} />`}
      ${panels.map((panel) => html`<${Chart} key=${panel.title} title=${panel.title} help=${help(panel.own)} share=${panel.share} log=${Boolean(log)}
        smooth=${Number(smooth)} onPick=${pick} series=${panel.own.map((name) => ({label: shortName(name), name, points: pointsOf(updates, name)}))} />`)}
      ${updates.length > 1 && html`<${Chart} title="Seconds per update by phase" stacked series=${secondsByPhase(updates)} onPick=${pick}
        help="Phases of asynchronous runs overlap." />`}
      ${all && rest.map((name) => html`<${Chart} key=${name} title=${name} help=${help([name])} log=${Boolean(log)} smooth=${Number(smooth)} onPick=${pick}
        series=${[{label: name, points: pointsOf(updates, name)}]} />`)}
    </div>
    ${rest.length > 0 && html`<p><button class="quiet" onClick=${() => setAll(!all)}>${all ? "fewer curves" : counted(rest.length, "more curve")}</button></p>`}
    <${Evaluations} run=${run} rows=${evaluations} />
    ${counts?.states.length > 0 && html`<${Account} run=${run} counts=${counts} />`}`;
}

/** @param {any[]} rows */
export function evaluationSeries(rows) {
  const temperatures = [...new Set(rows.map((row) => row.temperature))];
  const sampled = temperatures.map((t) => ({
    label: t ? `all tasks, T ${t}` : "all tasks, greedy", dots: true,
    points: pointsOf(rows.filter((row) => row.temperature === t), "success"),
  }));
  const kinds = [...new Set(rows.flatMap((row) => Object.keys(row.by || {})))].slice(0, 5);
  const main = rows.filter((row) => row.temperature === temperatures[0]);
  const by = kinds.length < 2 ? [] : kinds.map((kind) => ({
    label: kind, dash: true, points: main.filter((row) => typeof row.by?.[kind] === "number").map((row) => [row.update, row.by[kind]]),
  }));
  return /** @type {any[]} */ ([...sampled, ...by]);
}

/** @param {string} name */
export function shortName(name) {
  return name.replace(/^(env\/|dropped_|failed_|ended_|last_stop_|logprob_gap_(?!kl))/, "").replace(/^pass_at_/, "pass@").replace(/_/g, " ");
}
