// One trajectory: what the model saw and wrote, step by step, token by token, and what became of it.
import {html} from "pages/html.js";
import {useEffect, useMemo, useRef, useState} from "pages/vendor/preact.js";
import {embedded, get, useAnswer, useVersion} from "pages/api.js";
import {counted, duration, figure, rangeOf, scaleOf, signed} from "pages/format.js";
import {AttemptCells, Facts, Problems, Waiting, kept, useChoice, useSelection} from "pages/parts.js";
import {breaksOf, link, pathTo} from "pages/sequence.js";
import {Calls} from "pages/timeline.js";
import {Conversation, Tip, TokenFacts} from "pages/tokens.js";
import {Cost, Tree} from "pages/tree.js";

/** @param {{run: string, fate: any}} props */
export function Fate({run, fate}) {
  return html`<p class=${`fate ${fate.state}`}>${fate.text}
    ${fate.settings.map((/** @type {string} */ path) => embedded ? html` <code>${path}</code>`
      : html` <a href=${link(["run", run, "config"], {key: path})} title="the setting that decides"><code>${path}</code></a>`)}</p>`;
}

/** @param {{relation: any, onStep: (step: number) => void}} props */
function RelationLine({relation, onStep}) {
  const base = relation.base === null ? null : html`<button class="inline" onClick=${() => onStep(relation.base)}>step ${relation.base}</button>`;
  if (relation.kind === "break") {
    return html`<p class="relation break"><b>Break</b> from ${base} at token ${figure(relation.shared)}: ${relation.cause}. <b>${counted(relation.extra_tokens, "token")} computed again.</b> <span class="swap"><del>${relation.was}</del> → <ins>${relation.now}</ins></span></p>`;
  }
  if (relation.kind === "fork") return html`<p class="relation">Fork of ${base} after ${counted(relation.shared, "shared token")}.</p>`;
  if (relation.kind === "opens") return html`<p class="relation">Opens a conversation: shares nothing with the steps before it.</p>`;
  return null;
}

/**
 * Draws where the conversation was made shorter: what the next segment goes on from, and what that cost.
 * @param {{view: any, number: number, onStep: (step: number) => void}} props
 */
function Compaction({view, number, onStep}) {
  const at = view.compactions.findIndex((/** @type {any} */ c) => c.step === number);
  if (at < 0) return null;
  const {summary, before, after, calls, sampled, read} = view.compactions[at];
  return html`<p class="compaction"><b>Segment ${at + 1}</b> ${summary === null ? "shortened by environment or agent"
    : html`from the summary of <button class="inline" onClick=${() => onStep(summary)}>step ${summary}</button>`}: ${counted(after, "token")} in place of ${figure(before)}.${" "}
    <span class="faint">Cost: ${calls ? `${counted(calls, "call")}, ${counted(sampled, "token")} sampled, ` : ""}${figure(read)} read.</span></p>`;
}

/** @param {{run: string, view: any, number: number, column: any, range: any, pin: any, onToken: any, onStep: any, selected: boolean}} props */
function Step({run, view, number, column, range, pin, onToken, onStep, selected}) {
  const step = view.steps[number];
  const [whole, setWhole] = useState(false);
  const path = useMemo(() => pathTo(view.segments, step.segment), [view, number]);
  const pinned = pin && pin.step === number ? pin.token : -1;
  const shown = {view, step: number, path, column, range, start: step.prompt_tokens, pinned, onToken};
  const from = whole || pinned >= 0 && pinned < step.relation.shared ? 0 : step.relation.shared;
  const components = Object.entries(step.components).filter(([name]) => name !== "reward");
  return html`<section class="step ${selected ? "selected" : ""} ${step.fate.reason === "rejected" ? "rejected" : ""}" id=${`step-${number}`} data-step=${number}>
    <header><h2>Step ${number}${step.summary ? ", summary" : ""}</h2>
      ${step.counted ? html`<span>${figure(step.counted.read)} read, ${figure(step.counted.written)} written</span>`
        : html`<span>${figure(step.prompt_tokens)} read<span class="faint">${step.relation.shared ? ` (${figure(step.prompt_tokens - step.relation.shared)} new)` : ""}</span>, ${figure(step.completion_tokens)} sampled</span>`}
      <span>${step.stop_reason}</span><span>T ${figure(step.temperature)}</span>
      <span>reward ${figure(step.reward)}${step.shaping ? ` ${signed(step.shaping)} shaping` : ""}${components.length
        ? html` <span class="faint">(${components.map(([name, value]) => `${name} ${figure(/** @type {any} */ (value))}`).join(", ")})</span>` : ""}</span>
      <span>${duration(step.seconds)}${step.waited ? html`<span class="faint"> (waited ${duration(step.waited)})</span>` : ""}</span>${step.versions.length > 0 && html`<span>version ${step.versions.length > 1 ? `${step.versions[0]}–${step.versions.at(-1)}` : step.versions[0]}</span>`}
    </header>
    ${number > 0 || step.relation.kind !== "opens" ? html`<${RelationLine} relation=${step.relation} onStep=${onStep} />` : ""}
    <${Fate} run=${run} fate=${step.fate} />
    ${step.relation.shared > 0 && html`<button class="quiet shared" aria-expanded=${whole} onClick=${() => setWhole(!whole)}>${whole
      ? "hide what is shared" : `${counted(step.relation.shared, step.counted ? "piece" : "token")} shared with step ${step.relation.base}`}</button>`}
    <${Conversation} from=${from} shown=${shown} />
    ${step.withheld > 0 && html`<p class="call faint">${counted(step.withheld, "tool call")} not handed out: the agent asked for one at a time</p>`}
    ${step.calls.map((/** @type {any} */ call) => html`<p class="call"><b>${call.model}</b> <span class="faint">${figure(call.prompt_tokens)} read, ${figure(call.completion_tokens)} written, ${duration(call.seconds)}, not trained:</span> ${call.reply}</p>`)}
  </section>`;
}

/** @param {{run: string, view: any, pin: any, onClose: () => void}} props */
function Pinned({run, view, pin, onClose}) {
  const step = view.steps[pin.step];
  const [experts, setExperts] = useState(/** @type {any} */ (null));
  const offset = pin.token - step.prompt_tokens;
  useEffect(() => setExperts(null), [pin.step, pin.token]);
  const ask = () => get(`runs/${encodeURIComponent(run)}/trajectories/${encodeURIComponent(view.attempt.trajectory_id)}/experts?step=${pin.step}&token=${offset}`)
    .then((found) => setExperts(found.layers), (error) => setExperts(error.message));
  return html`<div class="pin card"><button class="quiet close" aria-label="close" onClick=${onClose}>×</button>
    <h3>Token ${pin.token} of step ${pin.step}</h3><${TokenFacts} view=${view} step=${pin.step} at=${pin.token} />
    ${step.has_experts && offset >= 0 && (experts ? html`<p class="experts">${typeof experts === "string" ? experts
      : experts.map((/** @type {number[]} */ layer, /** @type {number} */ n) => html`<span>layer ${n}: ${layer.join(" ")}</span>`)}</p>`
      : html`<button onClick=${ask}>experts</button>`)}</div>`;
}

/** @param {{run: string, id: string, query: URLSearchParams}} props */
export function TrajectoryPage({run, id, query}) {
  const {data: view, error} = useAnswer(`runs/${encodeURIComponent(run)}/trajectories/${encodeURIComponent(id)}`, useVersion(run, 10));
  const [colour, setColour] = useChoice("colour");
  const [shows, setShows] = useChoice("show");
  const pin = query.has("token") ? {step: Number(query.get("step")), token: Number(query.get("token"))} : null;
  const go = (/** @type {any} */ to) => history.replaceState(null, "", link(["run", run, "trajectory", id], {...kept(), ...to}));
  const reread = () => dispatchEvent(new HashChangeEvent("hashchange"));
  const show = (/** @type {number} */ step) => document.getElementById(`step-${step}`)?.scrollIntoView({behavior: "smooth", block: "start"});
  const [selected, select] = useSelection(view?.steps.length || 0, () => {});
  const arrived = useRef(false);
  const column = view?.columns.find((/** @type {any} */ c) => c.name === colour) || null;
  const range = useMemo(() => rangeOf(view && column ? view.steps.flatMap((/** @type {any} */ s) => s.columns[column.name] || []) : []), [view, column]);
  useEffect(() => { if (selected >= 0) show(selected); }, [selected]);
  useEffect(() => {
    if (!view || arrived.current) return;
    arrived.current = true;
    if (query.has("step")) {
      document.getElementById(`step-${query.get("step")}`)?.scrollIntoView({block: "start"});
      setTimeout(() => document.querySelector(".t.pinned")?.scrollIntoView({block: "center"}), 50);
    }
  }, [view]);
  if (!view) return error ? html`<${Problems} error=${error} />` : html`<${Waiting} />`;
  const attempt = view.attempt;
  const recorded = view.columns.filter((/** @type {any} */ c) => c.is_recorded);
  const traced = view.steps.map((/** @type {any} */ s) => s.update).filter((/** @type {any} */ update) => update !== null);
  const valid = pin && view.steps[pin.step] ? pin : null;
  const onToken = (/** @type {number} */ step, /** @type {number} */ token) => { go({step, token}); reread(); };
  const onStep = (/** @type {number} */ step) => { go({step}); select(step); show(step); };
  return html`
    <div class="head"><h1>${attempt.trajectory_id}</h1>
      <span class=${`verdict ${attempt.reward === null ? "bad" : ""}`}>${attempt.reward === null ? "no reward" : `reward ${figure(attempt.reward)}`}, ${attempt.status}</span>
      <span class="grow"></span>
      ${!embedded && html`<a rel="prev" class=${`button ${view.previous ? "" : "off"}`} href=${view.previous && link(["run", run, "trajectory", view.previous], kept())} title="previous (p)">←</a>
      <a rel="next" class=${`button ${view.next ? "" : "off"}`} href=${view.next && link(["run", run, "trajectory", view.next], kept())} title="next (n)">→</a>
      <a class="button" href=${`export/${encodeURIComponent(run)}/trajectory/${encodeURIComponent(id)}`} title="one HTML file that opens without a server">export</a>`}
    </div>
    <p class="lead">${view.group.question}</p>
    <${Problems} problems=${[view.problem, attempt.failure_cause && `${attempt.failure_cause}: ${attempt.failure_message}`, attempt.warning]} />
    ${view.traceback && html`<details class="card traceback"><summary>traceback</summary><pre>${view.traceback}</pre></details>`}
    <div class="columns">
      <aside>
        <${AttemptCells} run=${run} attempts=${view.group.attempts} here=${id} />
        <${Facts} items=${[
          ["task", embedded ? view.group.task_id : html`<a href=${link(["run", run, "task", view.group.task_id], {split: view.split})}>${view.group.task_id}</a>`],
          ["split", view.split === "train" ? "training" : "held-out"],
          ["played by", view.group.played_by || "the recipe's default"],
          ["update", view.group.update ?? view.group.when],
          ["advantage", signed(attempt.advantage), "weight of its trained tokens in the loss"],
          ...(attempt.trained_reward !== null && attempt.trained_reward !== attempt.reward ? [["in training", figure(attempt.trained_reward)]] : []),
          ...Object.entries(attempt.components).filter(([name]) => name !== "reward").map(([name, value]) => [name, figure(/** @type {any} */ (value))]),
          ...Object.entries(view.metrics).map(([name, value]) => [name, figure(/** @type {any} */ (value))]),
          ...(attempt.start_source === null || !attempt.start_steps ? [] : [["began", html`after ${counted(attempt.start_steps, "step")} of ${embedded || !/^[ge]\d+/.test(attempt.start_source) ? attempt.start_source
            : html`<a href=${link(["run", run, "trajectory", attempt.start_source])}>${attempt.start_source}</a>`}`, "those steps are context, and not trained"]]),
          ["sampled", counted(attempt.completion_tokens, "token")], ["time", duration(attempt.seconds)],
          ...(view.ground_truth === null ? [] : [["ground truth", html`<code>${typeof view.ground_truth === "string" ? view.ground_truth : JSON.stringify(view.ground_truth)}</code>`]]),
        ]} />
        ${view.segments.length > 0 && html`<h3>Prefix tree</h3><${Tree} segments=${view.segments} names=${view.steps.map((/** @type {any} */ s) => `step ${s.step}`)}
          breaks=${breaksOf(view)} onPick=${onStep} here=${selected} /><${Cost} cost=${view.cost} of="trajectory" />`}
        ${view.steps.length > 0 && html`<h3>Calls over time</h3><${Calls} steps=${view.steps} seconds=${attempt.seconds} here=${selected} onStep=${onStep} />`}
        ${view.steps.length > 1 && html`<h3>Steps</h3><ol class="steps" start="0">${view.steps.map((/** @type {any} */ s) => html`<li class=${view.compactions.some((/** @type {any} */ c) => c.step === s.step) ? "opens" : ""}>
          <button class=${`inline ${s.step === selected ? "on" : ""} ${s.fate.reason === "rejected" ? "rejected" : ""}`} onClick=${() => onStep(s.step)}><span class=${`dot ${s.fate.state}`} title=${s.fate.text}></span>step ${s.step} <span class="faint">${s.summary ? "summary " : ""}${s.relation.kind === "extends" || s.step === 0 && s.relation.kind === "opens" ? "" : s.relation.kind} ${s.fate.reason || s.fate.state}</span></button></li>`)}</ol>`}
        ${valid && html`<${Pinned} run=${run} view=${view} pin=${valid} onClose=${() => { go({}); reread(); }} />`}
      </aside>
      <div class=${`tokens ${shows === "text" ? "plain-text" : ""}`}>
        ${view.columns.length > 0 && html`<div class="bar-row colours"><span class="presets" role="group" aria-label="what is shown">
          ${[["", "all tokens", "as the model read and wrote them"], ["text", "text", "without the template's own tokens"]].map(([name, label, help]) => html`<button class="chip ${shows === name ? "on" : ""}"
            title=${help} aria-pressed=${shows === name} onClick=${() => setShows(name)}>${label}</button>`)}</span><span class="faint">colour by</span>
          ${[{name: "", label: "nothing", help: ""}, ...recorded].map((/** @type {any} */ c) => html`<button class="chip ${c.name === colour ? "on" : ""}" title=${c.help}
            aria-pressed=${c.name === colour} onClick=${() => setColour(c.name)}>${c.label}</button>`)}
          ${column && html`<span class="scale" aria-label="colour scale">${scaleOf(column.scale, range).map(({label, colour: shade}) => html`<i style=${{background: shade}}></i><span>${label}</span>`)}</span>`}
          ${traced.length > 0 && html`<span class="faint missing">by the learner in update ${[...new Set(traced)].join(", ")}</span>`}
          ${view.not_kept && html`<span class="faint missing">${view.not_kept}</span>`}</div>`}
        ${view.steps.map((/** @type {any} */ s) => html`<${Compaction} view=${view} number=${s.step} onStep=${onStep} /><${Step} key=${s.step} run=${run} view=${view} number=${s.step} column=${column} range=${range}
          pin=${valid} onToken=${onToken} onStep=${onStep} selected=${s.step === selected} />`)}
      </div>
    </div><${Tip} view=${view} />`;
}
