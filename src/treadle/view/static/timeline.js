// What happened when: the calls of an attempt, and the engine, the environments and the learner of a run.
import {html} from "pages/html.js";
import {useEffect, useMemo, useRef, useState} from "pages/vendor/preact.js";
import {useAnswer, useRows, useVersion} from "pages/api.js";
import {colour} from "pages/charts.js";
import {counted, duration, figure, percent} from "pages/format.js";
import {Problems, Tabs, Waiting} from "pages/parts.js";
import {lanesInTime, link, phasesOf, stretchesOf} from "pages/sequence.js";

const LANE = 16, BAR = 11; // pixels
const RUN_LANE = 46, FULL = RUN_LANE - 8;
const LANES = ["engine", "environments", "learner", "evaluations"];
const PARTS = 600; // of the time in sight, in which calls are counted
const PHASES = [["warm start", "the warm start"], ["update", "the learner's updates"], ["publish", "publishing weights"], ["checkpoint", "checkpoints"], ["evaluation", "evaluations"]];
const WIDTH = 1000; // of the drawing, in its own units

/**
 * Draws the calls of an attempt from left to right, those at the same time below one another: pale while a call waits for
 * the engine, full while it is sampled. Between them are the agent and the environment.
 * @param {{steps: any[], seconds: number, here: number, onStep: (step: number) => void}} props seconds: of the attempt
 */
export function Calls({steps, seconds, here, onStep}) {
  const calls = steps.filter((step) => step.began !== null).sort((a, b) => a.began - b.began);
  const sampling = steps.reduce((sum, step) => sum + step.seconds, 0);
  if (!calls.length) {
    return html`<p class="faint">${duration(sampling)} of ${duration(seconds)} were calls. When each began is not recorded in this run.</p>`;
  }
  const ends = calls.map((step) => step.began + step.seconds);
  const width = Math.max(seconds, ...ends) || 1;
  const lanes = lanesInTime(calls.map((step, n) => [step.began, ends[n]]));
  const height = (Math.max(...lanes) + 1) * LANE;
  const waited = calls.reduce((sum, step) => sum + (step.waited || 0), 0);
  const x = (/** @type {number} */ time) => 1000 * time / width;
  return html`<div class="calls"><svg viewBox=${`0 0 1000 ${height}`} preserveAspectRatio="none" style=${{height: `${height}px`}} role="img"
      aria-label=${`${calls.length} calls over ${duration(width)}`}>${calls.map((step, n) => html`
      <g class=${step.step === here ? "here" : ""} onClick=${() => onStep(step.step)}>
        <title>step ${step.step}: after ${duration(step.began)}, waited ${duration(step.waited)}, sampled ${duration(step.seconds - (step.waited || 0))}</title>
        <rect class="waits" x=${x(step.began)} y=${lanes[n] * LANE + 2} width=${Math.max(x(step.seconds), 1.5)} height=${BAR} />
        <rect class="samples" x=${x(step.began + (step.waited || 0))} y=${lanes[n] * LANE + 2} width=${Math.max(x(step.seconds - (step.waited || 0)), 1.5)} height=${BAR} /></g>`)}
    </svg><p class="tree-note"><span class="key"><i class="samples"></i>sampled ${duration(sampling - waited)}</span> <span class="key"><i class="waits"></i>waited ${duration(waited)}</span>
      <span class="faint">of ${duration(width)}; the rest is the agent and the environment</span></p></div>`;
}

/**
 * Draws when the attempts of an update called the engine: a line for each, pale while a call waits, full while it is sampled.
 * @param {{run: string, update: number}} props
 */
function CallsOfUpdate({run, update}) {
  const {data, error} = useAnswer(`runs/${encodeURIComponent(run)}/calls?update=${update}`);
  const place = useRef(/** @type {any} */ (null));
  const [over, setOver] = useState(/** @type {any} */ (null));
  const span = data ? data.calls.reduce((/** @type {number} */ last, /** @type {any} */ c) => Math.max(last, c[2] + c[4]), 0) || 1 : 1;
  const line = data && data.attempts.length > 100 ? 5 : 9;
  useEffect(() => {
    if (!place.current) return undefined;
    const canvas = place.current, scale = devicePixelRatio || 1;
    const draw = () => {
      canvas.width = canvas.clientWidth * scale;
      canvas.height = data.attempts.length * line * scale;
      const pen = canvas.getContext("2d"), x = canvas.width / span;
      const sampled = colour("--accent"), waited = colour("--warm");
      for (const [attempt, , began, waits, seconds] of data.calls) {
        const y = attempt * line * scale, height = (line - 2) * scale;
        pen.fillStyle = waited;
        pen.fillRect(began * x, y, (waits || 0) * x, height);
        pen.fillStyle = sampled;
        pen.fillRect((began + (waits || 0)) * x, y, Math.max((seconds - (waits || 0)) * x, 1), height);
      }
    };
    draw();
    addEventListener("resize", draw);
    addEventListener("themechange", draw);
    return () => { removeEventListener("resize", draw); removeEventListener("themechange", draw); };
  }, [data, line]);
  if (!data) return error ? html`<${Problems} error=${error} />` : html`<${Waiting} />`;
  const at = (/** @type {MouseEvent} */ event) => {
    const box = place.current.getBoundingClientRect();
    const attempt = Math.floor((event.clientY - box.top) / line), time = span * (event.clientX - box.left) / box.width;
    return {attempt, call: data.calls.find((/** @type {any} */ c) => c[0] === attempt && c[2] <= time && time <= c[2] + c[4])};
  };
  const name = over && data.attempts[over.attempt];
  return html`<h2>Attempts of update ${update}<span class="faint"> <a href=${link(["run", run, "groups"], {update, split: "train"})}>its groups</a></span></h2>
    <${Problems} problems=${data.problems} />
    ${data.calls.length === 0 ? html`<p class="empty">${data.unknown ? `When its ${counted(data.unknown, "call")} began is not recorded in this run.` : "No call is on record."}</p>` : html`
    <p class="tree-note">${name ? html`<b>${name}</b>, reward ${figure(data.rewards[over.attempt])}${over.call ? `: step ${over.call[1]}, after ${duration(over.call[2])}, ${over.call[3] === null ? "" : `waited ${duration(over.call[3])}, `}took ${duration(over.call[4])}` : ": in its environment or agent"}`
      : html`<span class="key"><i class="samples"></i>in the engine</span> <span class="key"><i class="waits"></i>waiting for it</span> <span class="faint">${counted(data.attempts.length, "attempt")}, ${counted(data.calls.length, "call")} over ${duration(span)}; blank is the environment or the agent</span>`}</p>
    <div class="attempts-time"><canvas ref=${place} style=${{height: `${data.attempts.length * line}px`}} onMouseMove=${(/** @type {MouseEvent} */ e) => setOver(at(e))}
      onMouseLeave=${() => setOver(null)} onClick=${(/** @type {MouseEvent} */ e) => {
        const {attempt, call} = at(e);
        if (data.attempts[attempt]) location.hash = link(["run", run, "trajectory", data.attempts[attempt]], {step: call ? call[1] : ""});
      }}></canvas></div>`}`;
}

/**
 * Draws how many calls of training there were at once, and how many attempts between their calls.
 * @param {{data: any, spans: any[], x: (time: number) => number}} props
 */
function Activity({data, spans, x}) {
  const area = (/** @type {number} */ lane, /** @type {number[][]} */ values, /** @type {number[][] | null} */ below) => values.map((own, n) => {
    const {start, end} = spans[n], bottom = (lane + 1) * RUN_LANE - 4;
    const at = (/** @type {number} */ part) => x(start + (end - start) * part / own.length).toFixed(2);
    const top = (/** @type {number} */ count) => (bottom - FULL * Math.min(1, count / data.most)).toFixed(2);
    const line = (/** @type {(part: number) => number} */ count) => own.map((_, part) => `${at(part)},${top(count(part))} ${at(part + 1)},${top(count(part))}`);
    const base = (/** @type {number} */ part) => below ? below[n][part] : 0;
    return `M${line((part) => base(part) + own[part]).join(" ")} ${line(base).reverse().map((pair) => pair.split(" ").reverse().join(" ")).join(" ")}Z`;
  }).join("");
  return html`<g class="activity"><path class="phase-sampling" d=${area(0, data.sampling, null)} /><path class="phase-waiting" d=${area(0, data.waiting, data.sampling)} />
    <path class="phase-playing" d=${area(1, data.outside, null)} /></g>`;
}

/** @param {string} phase */
const phaseClass = (phase) => `phase-${phase.replace(" ", "-")}`;

/** @param {{phase: string}} props */
const laneOf = ({phase}) => phase === "evaluation" ? "evaluations" : "learner";

/**
 * Draws a run's seconds: drag to zoom, double-click to go back, click a phase for its update.
 * @param {{run: string, query: URLSearchParams}} props
 */
export function TimelinePage({run, query}) {
  const {rows: intervals, error} = useRows(run, "intervals");
  const {data: detail} = useAnswer(`runs/${encodeURIComponent(run)}`, useVersion(run));
  const chosen = query.get("update");
  const stretches = useMemo(() => stretchesOf(intervals), [intervals]);
  const phases = useMemo(() => phasesOf(intervals).filter((p) => p.phase !== "rollout").map((p, at) => ({...p, at})), [intervals]);
  const [zoom, setZoom] = useState(/** @type {[number, number] | null} */ (null));
  const [drag, setDrag] = useState(/** @type {[number, number] | null} */ (null));
  const [over, setOver] = useState(/** @type {any} */ (null));
  const place = useRef(/** @type {any} */ (null));
  const end = stretches.reduce((last, {began, ended, start}) => Math.max(last, start + ended - began), 0);
  const [from, to] = zoom || [0, end];
  const version = useVersion(run, 20);
  const {asked, inSight} = useMemo(() => {  // not with each interval of a run that goes on
    const inSight = stretches.map(({began, ended, start}) => ({start: Math.max(from, start), end: Math.min(to, start + ended - began), clock: began - start}))
      .filter((span) => span.start < span.end).slice(0, 100);
    return {inSight, asked: inSight.map((span) => `span=${span.clock + span.start},${span.clock + span.end},${Math.max(1, Math.round(PARTS * (span.end - span.start) / (to - from)))}`)};
  }, [version, zoom, stretches.length === 0]);
  const answer = useAnswer(asked.length ? `runs/${encodeURIComponent(run)}/activity?${asked.join("&")}` : null, version);
  const latest = useRef({activity: /** @type {any} */ (null), spans: /** @type {any[]} */ ([])});
  if (answer.data) latest.current = {activity: answer.data, spans: inSight};
  const {activity, spans} = latest.current;
  const counts = activity?.is_recorded, counting = asked.length > 0 && !activity && !answer.error;
  const lanes = LANES.filter((lane, n) => n < 3 || phases.some((p) => laneOf(p) === lane));
  const x = (/** @type {number} */ time) => WIDTH * (time - from) / (to - from);
  const timeAt = (/** @type {MouseEvent} */ event) => {
    const box = place.current.getBoundingClientRect();
    return from + (to - from) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const phaseAt = (/** @type {MouseEvent} */ event) => phases[Number(/** @type {SVGElement} */ (event.target).dataset.phase)] || null;
  const lift = (/** @type {MouseEvent} */ event) => {
    const time = timeAt(event);
    const clicked = phaseAt(event) || phases.find((p) => p.phase === "update" && p.end >= time);
    if (drag && Math.abs(x(drag[1]) - x(drag[0])) > 8) setZoom([Math.min(...drag), Math.max(...drag)]);
    else if (clicked?.update) location.hash = link(["run", run, "timeline"], {update: clicked.update});
    setDrag(null);
  };
  const seen = phases.filter((phase) => phase.end > from && phase.start < to);
  const total = (/** @type {string} */ phase) => seen.filter((p) => p.phase === phase)
    .reduce((sum, p) => sum + Math.min(p.end, to) - Math.max(p.start, from), 0);
  return html`<div class="bar-row run-bar"><${Tabs} run=${run} here="timeline" /></div><${Problems} error=${error} />
    ${phases.length === 0 ? html`<p class="empty">${detail?.no_update}</p>` : html`
    <h2>Engine, environments and learner</h2>
    <p class="faint lead">${duration(from)} to ${duration(to)} of the run, without pauses between its processes. ${counts
      ? `The engine's height is how many calls of training are sampled at once, the environments' how many attempts are between two calls; full is ${activity.most}.`
      : counting ? "Counting calls …" : "No call is on record yet."}</p>
    <${Problems} error=${answer.error} problems=${activity?.problems || []} />
    <div class="run-time"><div class="names">${lanes.map((name) => html`<span>${name}</span>`)}</div>
      <svg ref=${place} viewBox=${`0 0 ${WIDTH} ${lanes.length * RUN_LANE}`} preserveAspectRatio="none" style=${{height: `${lanes.length * RUN_LANE}px`}}
        role="img" aria-label="timeline" onMouseDown=${(/** @type {MouseEvent} */ e) => setDrag([timeAt(e), timeAt(e)])}
        onMouseMove=${(/** @type {MouseEvent} */ e) => { setOver(phaseAt(e)); if (drag) setDrag([drag[0], timeAt(e)]); }} onMouseUp=${lift}
        onMouseLeave=${() => { setDrag(null); setOver(null); }} onDblClick=${() => setZoom(null)}>
        ${counts && html`<${Activity} data=${activity} spans=${spans} x=${x} />`}
        ${seen.filter((p) => x(p.end) - x(p.start) > 0.2).map((p) => {
          const top = lanes.indexOf(laneOf(p)) * RUN_LANE + RUN_LANE - 4 - FULL;
          return html`<rect class=${phaseClass(p.phase)} x=${x(p.start)} width=${Math.max(x(p.end) - x(p.start) - 0.3, 0.4)} y=${top} height=${FULL} data-phase=${p.at} />`;
        })}
        ${drag && html`<rect class="drag" x=${x(Math.min(...drag))} width=${Math.abs(x(drag[1]) - x(drag[0]))} y="0" height=${lanes.length * RUN_LANE} />`}
      </svg></div>
    <p class="tree-note">${over ? html`${over.update ? `update ${over.update}: ` : "before training: "}<b>${over.phase}</b>, ${duration(over.end - over.start)} from ${duration(over.start)}`
      : html`${counts && html`<span class="key"><i class="phase-sampling"></i>the engine samples: ${percent(activity.busy)} of the time</span> <span class="key"><i class="phase-waiting"></i>calls wait for it</span>
        <span class="key"><i class="phase-playing"></i>between two calls</span> `}${PHASES.filter(([name]) => phases.some((p) => p.phase === name)).map(([name, label]) => html`
        <span class="key"><i class=${phaseClass(name)}></i>${label}: ${percent(total(name) / (to - from))} of the time</span> `)}`}
      ${zoom && html`<button class="quiet" onClick=${() => setZoom(null)}>all of it</button>`}</p>`}
    ${chosen ? html`<${CallsOfUpdate} key=${chosen} run=${run} update=${Number(chosen)} />`
      : phases.length > 0 && html`<p class="faint">A click on a phase shows the attempts of its update.</p>`}`;
}
