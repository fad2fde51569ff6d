// Attempts at one task, side by side from the token at which they part, and the tree of all of them: a group's, or those of
// several evaluations.
import {html} from "pages/html.js";
import {useMemo, useState} from "pages/vendor/preact.js";
import {embedded, useAnswer, useVersion} from "pages/api.js";
import {counted, figure, signed} from "pages/format.js";
import {AttemptCells, Problems, Waiting, kept} from "pages/parts.js";
import {alike, breaksOf, link, partsAt, pathTo, unitsOf} from "pages/sequence.js";
import {Cost, Tree} from "pages/tree.js";

/** @param {{run: string, view: any, attempts: any[], from: number, when: any}} props attempts: of one group, all the same */
function Siblings({run, view, attempts, from, when}) {
  const [open, setOpen] = useState(false);
  const fold = attempts.length > 1 && html`<button class="fold" aria-expanded=${open} onClick=${() => setOpen(!open)}>${attempts.length} × identical</button>
    <${AttemptCells} run=${run} attempts=${attempts} />`;
  return (open ? attempts : attempts.slice(0, 1)).map((attempt, n) => html`<${Sibling} key=${attempt.trajectory_id} run=${run} view=${view} attempt=${attempt}
    from=${from} when=${when} fold=${n === 0 && fold} />`);
}

/** @param {{run: string, view: any, attempt: any, from: number, when: any, fold: any}} props */
function Sibling({run, view, attempt, from, when, fold}) {
  const steps = view.steps.filter((/** @type {any} */ s) => s.trajectory_id === attempt.trajectory_id);
  const last = steps.at(-1);
  const runs = useMemo(() => last ? textRuns(view, last, from) : [], [view, last, from]);
  return html`<article class="sibling card"><header>${when}
      <a href=${link(["run", run, "trajectory", attempt.trajectory_id], kept())}><b>${attempt.trajectory_id}</b></a>
      <span class=${attempt.reward === null ? "bad" : ""}>${attempt.reward === null ? "no reward" : `reward ${figure(attempt.reward)}`}</span>
      ${attempt.advantage !== null && html`<span class=${attempt.advantage > 0 ? "good" : attempt.advantage < 0 ? "bad" : "faint"}>${signed(attempt.advantage)}</span>`}
      <div class="faint">${attempt.status}, ${counted(attempt.steps, "step")}, ${counted(attempt.completion_tokens, "token")}, ${Object.entries(attempt.states)
        .map(([state, count]) => `${count} ${state}`).join(", ")}</div>
      ${attempt.failure_cause && html`<div class="bad">${attempt.failure_cause}: ${attempt.failure_message}</div>`}${fold}</header>
    ${last && from > 0 && html`<p class="faint shared">first ${counted(from, "token")} shared</p>`}
    <div class="body">${runs.map((piece) => piece.kind === "picture" ? html`<img class="picture" src=${piece.text} alt="image" />` : html`<span class=${piece.kind}>${piece.text}</span>`)}</div></article>`;
}

/** @param {any} view @param {any} step @param {number} from */
function textRuns(view, step, from) {
  /** @type {{kind: string, text: string}[]} */
  const runs = [];
  const special = new Set(view.special);
  for (const index of pathTo(view.segments, step.segment)) {
    const segment = view.segments[index];
    const sampled = segment.sampled.length > 0;
    for (const unit of unitsOf(view.segments, [index], view.texts, from, Infinity)) {
      const kind = special.has(unit.id) ? "template" : sampled ? "s" : "read";
      const last = runs.at(-1);
      const picture = view.pictures?.[unit.id];
      if (picture) runs.push({kind: "picture", text: picture});
      else if (last && last.kind === kind) last.text += unit.text;
      else runs.push({kind, text: unit.text});
    }
  }
  return runs;
}

/** @param {{run: string, id: string}} props */
export function GroupPage({run, id}) {
  const {data: view, error} = useAnswer(`runs/${encodeURIComponent(run)}/groups/${encodeURIComponent(id)}`, useVersion(run, 10));
  const {list} = kept();
  const {data: around} = useAnswer(list ? `runs/${encodeURIComponent(run)}/groups?${list}&limit=1&around=${encodeURIComponent(id)}` : null);
  if (!view) return error ? html`<${Problems} error=${error} />` : html`<${Waiting} />`;
  const {group} = view, {previous, next} = list ? around || {} : view;
  return html`
    <div class="head"><h1>${group.group_id}</h1><${AttemptCells} run=${run} attempts=${group.attempts} /><span class="grow"></span>
      ${!embedded && html`<a rel="prev" class=${`button ${previous ? "" : "off"}`} href=${previous && link(["run", run, "group", previous], kept())} title=${list ? "previous of the list (p)" : "previous (p)"}>←</a>
      <a rel="next" class=${`button ${next ? "" : "off"}`} href=${next && link(["run", run, "group", next], kept())} title=${list ? "next of the list (n)" : "next (n)"}>→</a>
      <a class="button" href=${`export/${encodeURIComponent(run)}/group/${encodeURIComponent(id)}`} title="one HTML file that opens without a server">export</a>`}</div>
    <p class="lead">${group.question}</p>
    <p class="faint">${embedded ? group.task_id : html`<a href=${link(["run", run, "task", group.task_id], {split: group.split})}>${group.task_id}</a>`}, ${group.split === "train" ? "training" : "held-out"}, ${group.when}${view.ground_truth === null ? "" : html` · ground truth <code>${typeof view.ground_truth === "string" ? view.ground_truth : JSON.stringify(view.ground_truth)}</code>`}</p>
    <${Problems} problems=${view.problems} />
    <${SideBySide} run=${run} view=${view} groups=${[group]} />`;
}

/** @param {{run: string, view: any, groups: any[]}} props view: the tree of the groups' attempts */
export function SideBySide({run, view, groups}) {
  const from = partsAt(view);
  const drawn = new Set(view.steps.map((/** @type {any} */ s) => s.trajectory_id));
  const folds = groups.flatMap((group) => alike(view, group.attempts.filter((/** @type {any} */ attempt) => groups.length === 1 || drawn.has(attempt.trajectory_id)))
    .map((attempts) => ({group, attempts})));
  const update = (/** @type {any} */ group) => html`<a class="when" href=${link(["run", run, "group", group.group_id])}>${group.when}${/^e\d+g(r\d+)?-/.test(group.group_id) ? ", greedy" : ""}</a>`;
  return html`
    <h2>Prefix tree</h2>
    <${Tree} segments=${view.segments} names=${view.steps.map((/** @type {any} */ s) => `${s.trajectory_id} step ${s.step}`)}
      breaks=${breaksOf(view)} onPick=${(/** @type {number} */ call) => {
        const step = view.steps[call];
        location.hash = link(["run", run, "trajectory", step.trajectory_id], {step: step.step, ...kept()});
      }} /><${Cost} cost=${view.cost} of="group" />
    <h2>Side by side${from === Infinity ? html`<span class="faint"> identical, token for token</span>` : ""}</h2>
    <div class="siblings">${folds.map(({group, attempts}) => html`<${Siblings} key=${attempts[0].trajectory_id} run=${run} view=${view}
      attempts=${attempts} from=${from === Infinity ? 0 : from} when=${groups.length > 1 ? update(group) : ""} />`)}</div>`;
}
