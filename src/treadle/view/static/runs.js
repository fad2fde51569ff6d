// All runs: what each is, how far it is, and what it has reached.
import {html} from "pages/html.js";
import {useAnswer, useNow, useVersion} from "pages/api.js";
import {duration, figure, percent} from "pages/format.js";
import {DoesNow, Problems, Sparkline, StatePill, Waiting, useChoice, useSelection} from "pages/parts.js";
import {link} from "pages/sequence.js";

/** @param {{done: number, all: number}} props */
function Progress({done, all}) {
  const share = all ? Math.min(1, done / all) : 0;
  return html`<span class="progress" title=${`${done} of ${all} updates`}>
    <span class="bar"><span style=${{width: `${100 * share}%`}}></span></span>${done}<span class="faint"> / ${all}</span></span>`;
}

/** @param {{held: any}} props */
function HeldOut({held}) {
  return held ? html`${percent(held.success)} <span class="faint">at ${held.update}</span>` : html`<span class="faint">–</span>`;
}

const PROBLEMS = "with problems";  // what their own pages warn of, or an error that ended them
const PRESETS = ["", "in progress", "finished", "stopped", PROBLEMS];

export function RunsPage() {
  const {data, error} = useAnswer("runs", useVersion());
  const now = useNow();
  const [marked, setMarked] = useChoice("chosen", "[]");
  const [search, setSearch] = useChoice("search");
  const [preset, setPreset] = useChoice("state");
  const chosen = /** @type {string[]} */ (JSON.parse(marked));
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = (data?.runs || []).filter((/** @type {any} */ run) => !preset || (preset === PROBLEMS ? run.problems.length || now[run.key]?.has_failed : run.state === preset))
    .filter((/** @type {any} */ run) => words.every((word) => `${run.name} ${run.recipe} ${run.state} seed ${run.seed}`.toLowerCase().includes(word)));
  const open = (/** @type {number} */ at) => { location.hash = link(["run", rows[at].key]); };
  const [at] = useSelection(rows.length, open);
  if (!data) return error ? html`<${Problems} error=${error} />` : html`<${Waiting} />`;
  const toggle = (/** @type {string} */ key) =>
    setMarked(JSON.stringify(chosen.includes(key) ? chosen.filter((own) => own !== key) : [...chosen, key]));
  return html`
    <div class="head"><h1>Runs</h1>
      ${data.runs.length > 1 && html`<span class="presets">${PRESETS.map((name) => html`<button class="chip ${preset === name ? "on" : ""}" aria-pressed=${preset === name}
        onClick=${() => setPreset(name)}>${name || "all"}</button>`)}</span>`}
      <span class="grow"></span>
      <input type="search" placeholder="search" value=${search} aria-label="search runs"
        onInput=${(/** @type {any} */ event) => setSearch(event.target.value)} />
      <a class="button ${chosen.length < 2 ? "off" : ""}" aria-disabled=${chosen.length < 2}
        href=${chosen.length < 2 ? null : `#/compare?${chosen.map((key) => `run=${encodeURIComponent(key)}`).join("&")}`}>
        overlay ${chosen.length || ""}</a>
    </div>
    ${data.runs.length > 0 && rows.length === 0 && html`<p class="empty">No matching runs.</p>`}
    ${data.runs.length === 0 && html`<p class="empty">No runs in ${data.roots.join(", ")} yet. <code>treadle train demo</code> starts one.</p>`}
    <div class="runs">
      ${rows.map((/** @type {any} */ run, /** @type {number} */ index) => html`
        <article class="run card ${index === at ? "selected" : ""}" key=${run.key}>
          <label class="choose" title="overlay with others"><input type="checkbox" checked=${chosen.includes(run.key)}
            onChange=${() => toggle(run.key)} aria-label=${`choose ${run.name}`} /></label>
          <div class="what"><a class="name" href=${link(["run", run.key])}>${run.name}</a>
            <div class="faint about">${run.recipe}${run.seed === null ? "" : `, seed ${run.seed}`}</div></div>
          <${StatePill} state=${run.state} />
          ${run.state === "recorded" ? html`<span></span>` : html`<${Progress} done=${run.update} all=${run.updates} />`}
          <${Sparkline} values=${run.rewards} label="training reward" />
          <dl><div><dt>reward</dt><dd>${figure(run.reward)}</dd></div>
            <div><dt>held-out, last</dt><dd><${HeldOut} held=${run.last} /></dd></div>
            <div><dt>best</dt><dd><${HeldOut} held=${run.best} /></dd></div>
            <div><dt>per update</dt><dd>${duration(run.seconds_per_update)}</dd></div></dl>
          ${run.state !== "finished" && html`<${DoesNow} now=${now[run.key]} />`}
          <${Problems} problems=${run.problems} />
        </article>`)}
    </div>
    <p class="faint foot">${data.roots.join(", ")} · treadle ${data.version}</p>`;
}
