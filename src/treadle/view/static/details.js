// Smaller pages: settings, tokens by packing and breaks, text search, one task over time.
import {html} from "pages/html.js";
import {useEffect, useState} from "pages/vendor/preact.js";
import {useAnswer, useVersion} from "pages/api.js";
import {Chart} from "pages/charts.js";
import {counted, figure} from "pages/format.js";
import {SideBySide} from "pages/group.js";
import {Problems, SettingName, Tabs, Waiting, useChoice} from "pages/parts.js";
import {link} from "pages/sequence.js";

/** @param {{run: string, query: URLSearchParams}} props */
export function ConfigPage({run, query}) {
  const {data, error} = useAnswer(`runs/${encodeURIComponent(run)}`, useVersion(run));
  const [search, setSearch] = useChoice("search");
  const [changed, setChanged] = useChoice("changed");
  const key = query.get("key");
  const tabs = html`<div class="bar-row run-bar"><${Tabs} run=${run} here="config" /><span class="grow"></span>
    <label class="control"><input type="checkbox" checked=${Boolean(changed)} onChange=${() => setChanged(changed ? "" : "true")} /> changed only</label>
    <input type="search" placeholder="setting" aria-label="search settings" value=${search} onInput=${(/** @type {any} */ e) => setSearch(e.target.value)} /></div>`;
  useEffect(() => { if (key && data) document.getElementById(`set-${key}`)?.scrollIntoView({block: "center"}); }, [key, data]);
  if (!data) return html`${tabs}${error ? html`<${Problems} error=${error} />` : html`<${Waiting} />`}`;
  const rows = data.settings.filter((/** @type {any} */ row) => (!changed || !row.is_default || row.path === key) &&
    `${row.path} ${row.value} ${row.help}`.toLowerCase().includes(search.toLowerCase()));
  return html`${tabs}
    <${Problems} problems=${data.problems} />
    <div class="scroll"><table class="plain settings"><tbody>${rows.map((/** @type {any} */ row) => html`
      <tr id=${`set-${row.path}`} class=${row.path === key ? "selected" : ""}><td><${SettingName} path=${row.path} /></td>
        <td><code class=${row.is_default ? "faint" : "own"}>${row.value}</code></td><td class="faint">${row.help}</td></tr>`)}</tbody></table></div>`;
}

/** @param {{rows: any[]}} props tokens of each update */
function TokensByUpdate({rows}) {
  const of = (/** @type {string} */ name) => rows.map((row) => [row.update, row[name]]);
  const ways = [["step", "step"], ["chain", "chain"], ["tree", "tree, within trajectories"], ["group_tree", "tree, within groups"]];
  return html`<div class="charts">
    <${Chart} title="Tokens computed, by packing" series=${ways.map(([name, label]) => ({label, points: of(name)}))} />
    <${Chart} title="Tokens computed again because of breaks" series=${[{label: "tokens", points: of("extra_tokens"), colour: 1}]} /></div>`;
}

/** @param {{run: string}} props */
export function TokensPage({run}) {
  const version = useVersion(run);
  const [asked, setAsked] = useState(version);
  const {data, error} = useAnswer(`runs/${encodeURIComponent(run)}/breaks`, asked);
  if (!data) return html`<div class="bar-row run-bar"><${Tabs} run=${run} here="tokens" /></div>${error ? html`<${Problems} error=${error} />` : html`<${Waiting} what="counting every recorded token" />`}`;
  const {packing, relations} = data;
  const ways = [["step", "step: nothing shared"], ["chain", "chain: a step continues the one it extends"], ["tree", "tree, within trajectories"], ["group_tree", "tree, within groups"]];
  return html`<div class="bar-row run-bar"><${Tabs} run=${run} here="tokens" /></div>
    <${Problems} problems=${[relations.no_tokenizer && `Breaks are not counted: ${relations.no_tokenizer}`,
      data.missing_shards.length && `Missing, not counted: ${data.missing_shards.join(", ")}`,
      data.damaged_shards.length && `Damaged, not counted: ${data.damaged_shards.join(", ")}`]} />
    <section><h2>Tokens that training computes</h2>
      <p class="faint">${counted(packing.trajectories, "trajectory", "trajectories")} of ${counted(packing.groups, "group")}
        ${version !== asked && html` <button class="quiet" onClick=${() => setAsked(version)}>the run has gone on: count again</button>`}</p>
      <div class="packing">${ways.map(([way, label]) => html`<div><span>${label}</span>
        <span class="barline"><span style=${{width: `${packing.step ? Math.max(0.5, 100 * packing[way] / packing.step) : 0}%`}}></span></span>
        <b>${figure(packing[way])}</b><span class="faint">${packing.ratios[way] ? `${figure(packing.ratios[way])}× fewer` : ""}</span></div>`)}</div>
      ${data.updates.length > 1 && html`<${TokensByUpdate} rows=${data.updates} />`}</section>
    <section><h2>How steps relate to earlier ones</h2><div class="scroll"><table class="plain"><thead><tr><th></th><th>steps</th><th>opens</th><th>extends</th><th>fork</th><th>break</th><th>computed again</th></tr></thead>
      <tbody>${relations.splits.map((/** @type {any} */ row) => html`<tr><td>${row.split === "train" ? "training" : "held-out"}</td>
        ${["steps", "opens", "extends", "fork", "break", "extra_tokens"].map((name) => html`<td>${figure(row[name])}</td>`)}</tr>`)}</tbody></table></div></section>
    ${relations.breaks.length > 0 && html`<section><h2>Breaks and their price</h2>${relations.breaks.map((/** @type {any} */ row) => html`
      <div class="break-cause card"><h3>${row.cause}<span class="faint"> ${counted(row.count, "break")}, ${counted(row.extra_tokens, "token")} computed again</span></h3>
        <ul>${row.examples.map((/** @type {any} */ e) => html`<li><a href=${link(["run", run, "trajectory", e.trajectory_id], {step: e.step})}>${e.trajectory_id} step ${e.step}</a> at token ${figure(e.shared)}, ${counted(e.extra_tokens, "token")}: <span class="swap"><del>${e.was?.text}</del> → <ins>${e.now?.text}</ins></span></li>`)}</ul></div>`)}</section>`}`;
}

/** @param {{run: string, query: URLSearchParams}} props */
export function SearchPage({run, query}) {
  const update = query.get("update") || "", text = query.get("text") || "";
  const path = text && update !== "" ? `runs/${encodeURIComponent(run)}/search?update=${encodeURIComponent(update)}&text=${encodeURIComponent(text)}` : null;
  const {data, error} = useAnswer(path);
  const change = (/** @type {any} */ to) => { location.hash = link(["run", run, "search"], {update, text, ...to}); };
  return html`<div class="bar-row run-bar"><${Tabs} run=${run} here="search" /><span class="grow"></span>
      <input class="narrow" type="number" min="0" placeholder="update" aria-label="update" value=${update} onChange=${(/** @type {any} */ e) => change({update: e.target.value})} />
      <input type="search" placeholder="text of that update" aria-label="search text" value=${text} onChange=${(/** @type {any} */ e) => change({text: e.target.value})} /></div>
    ${!path ? html`<p class="empty">Enter an update and a text to search everything read and sampled for that update, or in its evaluation.</p>`
      : !data ? error ? html`<${Problems} error=${error} />` : html`<${Waiting} what="searching" />`
      : html`<${Problems} problems=${data.problems} /><p class="faint">${counted(data.found.length, "step")} in ${counted(data.searched, "trajectory", "trajectories")}${data.is_complete ? "" : ", and more"}</p>
        <ul class="found">${data.found.map((/** @type {any} */ found) => html`<li><a href=${link(["run", run, "trajectory", found.trajectory_id], {step: found.step})}>${found.trajectory_id} step ${found.step}</a> <span class="snippet">${found.before}<mark>${found.match}</mark>${found.after}</span></li>`)}</ul>`}`;
}

/** @param {{run: string, id: string, query: URLSearchParams}} props */
export function TaskPage({run, id, query}) {
  const split = query.get("split") || "held_out";
  const {data, error} = useAnswer(`runs/${encodeURIComponent(run)}/task?split=${split}&task_id=${encodeURIComponent(id)}`, useVersion(run, 20));
  if (!data) return error ? html`<${Problems} error=${error} />` : html`<${Waiting} />`;
  return html`<div class="head"><h1>${data.task_id}</h1></div><p class="lead">${data.question}</p>
    <p class="faint">${split === "train" ? "Each time it was trained on" : "In each evaluation"}, the oldest first.</p>
    <${Problems} problems=${data.problems} />
    <${SideBySide} run=${run} view=${data} groups=${data.groups} />`;
}
