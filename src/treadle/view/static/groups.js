// The table of groups: filtered and sorted by the server, and only the lines in sight are drawn.
import {html} from "pages/html.js";
import {useEffect, useRef, useState} from "pages/vendor/preact.js";
import {get, useVersion} from "pages/api.js";
import {counted, figure, tally} from "pages/format.js";
import {AttemptCells, Problems, Tabs, kept, useSelection} from "pages/parts.js";
import {link} from "pages/sequence.js";

const LINE = 52; // pixels
const PAGE = 100; // lines asked for at a time
const PRESETS = [["", "all"], ["mixed", "mixed rewards"], ["zero_advantage", "zero advantage"], ["unsolved", "unsolved"],
  ["failed", "failed"], ["dropped", "dropped"], ["stale", "stale"], ["warning", "warnings"], ["blocked", "blocked the loop"]];
const HAVING = [["reason", "dropped:"], ["cause", "failed by"], ["status", "ended:"]];
const COLUMNS = [["group", "group"], ["update", "update"], ["task", "task"], ["reward", "rewards"], ["steps", "steps"],
  ["tokens", "tokens"], ["failed", "ended"]];

/** @param {number[]} values */
const mean = (values) => values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;

/** @param {{run: string, row: any, top: number, selected: boolean}} props */
function Line({run, row, top, selected}) {
  const graded = row.attempts.map((/** @type {any} */ a) => a.reward).filter((/** @type {any} */ r) => r !== null);
  const failed = row.attempts.find((/** @type {any} */ a) => a.failure_cause);
  const components = componentsOf(row.attempts);
  return html`<div class="line ${selected ? "selected" : ""}" style=${{transform: `translateY(${top}px)`}} role="row">
    <a class="id" href=${link(["run", run, "group", row.group_id], kept())}>${row.group_id}</a>
    <span class="num">${row.update ?? html`<span class="faint" title=${row.when}>–</span>`}</span>
    <span class="task" title=${row.question}><span class="question">${row.question || row.task_id}</span><span class="faint">${row.task_id}</span></span>
    <span class="attempts"><${AttemptCells} run=${run} attempts=${row.attempts} /><span class="mean"><b>${figure(mean(graded), 2)}</b>
      ${components.map(([name, value]) => html`<span class="faint" title=${`mean of ${name}`}>${name} ${figure(value, 2)}</span>`)}</span></span>
    <span class="num">${figure(mean(row.attempts.map((/** @type {any} */ a) => a.steps)), 2)}</span>
    <span class="num">${figure(row.attempts.reduce((/** @type {number} */ sum, /** @type {any} */ a) => sum + a.completion_tokens, 0))}</span>
    <span class="ended">${failed ? html`<span class="bad" title=${failed.failure_message}>${failed.failure_cause}: ${failed.failure_message}</span>`
      : html`<span>${tally(row.attempts.map((/** @type {any} */ a) => ({[a.status]: 1}))).map(([name, count]) => `${count} ${name}`).join(", ")}</span>`}
      <span class="states">${tally(row.attempts.map((/** @type {any} */ a) => a.states)).map(([name, count]) => html`<span class=${name.startsWith("dropped") ? "warm" : "faint"}>${counted(count, "step")} ${name}</span>`)}</span></span>
  </div>`;
}

/** @param {any[]} attempts @returns {[string, number | null][]} the mean of each component but the reward's plain rest */
function componentsOf(attempts) {
  const names = [...new Set(attempts.flatMap((a) => Object.keys(a.components)))].filter((name) => name !== "reward");
  return names.map((name) => [name, mean(attempts.filter((a) => a.reward !== null).map((a) => a.components[name] ?? 0))]);
}

/** @param {{run: string, query: URLSearchParams}} props */
export function GroupsPage({run, query}) {
  const version = useVersion(run);
  const filter = /** @type {Record<string, any>} */ ({split: query.get("split") || "", preset: query.get("preset") || "", search: query.get("search") || "",
    reason: query.get("reason") || "", cause: query.get("cause") || "", status: query.get("status") || "",
    update: query.get("update") || "", sort: query.get("sort") || "group",
    component: query.get("component") || "", descending: query.get("descending") !== "false"});
  const change = (/** @type {any} */ to) => {
    const next = {...filter, ...to};
    location.hash = link(["run", run, "groups"], {...next, sort: next.sort === "group" ? "" : next.sort,
      component: next.sort === "component" ? next.component : "", descending: next.descending ? "" : "false"});
  };
  const path = new URLSearchParams(Object.entries(filter).filter(([, v]) => v !== "").map(([k, v]) => [k, String(v)])).toString();
  const table = usePages(`runs/${encodeURIComponent(run)}/groups?${path}`, version);
  const scroller = useRef(/** @type {HTMLElement | null} */ (null));
  const [view, setView] = useState({top: 0, height: 800});
  const [at] = useSelection(table.total, (index) => {
    const row = table.row(index);
    if (row) location.hash = link(["run", run, "group", row.group_id], kept());
  });
  useEffect(() => {
    const element = /** @type {HTMLElement} */ (scroller.current);
    const measure = () => setView({top: element.scrollTop, height: element.clientHeight});
    measure();
    element.addEventListener("scroll", measure, {passive: true});
    addEventListener("resize", measure);
    return () => { element.removeEventListener("scroll", measure); removeEventListener("resize", measure); };
  }, []);
  useEffect(() => {
    const element = scroller.current;
    if (!element || at < 0) return;
    if (at * LINE < element.scrollTop) element.scrollTop = at * LINE;
    if ((at + 1) * LINE > element.scrollTop + element.clientHeight) element.scrollTop = (at + 1) * LINE - element.clientHeight;
  }, [at]);
  const first = Math.max(0, Math.floor(view.top / LINE) - 10), last = Math.min(table.total, Math.ceil((view.top + view.height) / LINE) + 10);
  table.want(first, last);
  const lines = [];
  for (let index = first; index < last; index++) lines.push({index, row: table.row(index)});
  const components = componentsOf(lines.flatMap(({row}) => row ? row.attempts : [])).map(([name]) => name);
  const sortBy = (/** @type {string} */ sort, /** @type {string} */ label, component = "") => {
    const on = filter.sort === sort && filter.component === component;
    return html`<button class="by" onClick=${() => change({sort, component, descending: on ? !filter.descending : true})}
      >${label}${on ? (filter.descending ? " ↓" : " ↑") : ""}</button>`;
  };
  return html`
    <div class="bar-row run-bar"><${Tabs} run=${run} here="groups" /><span class="grow"></span>
      <a class="button" href=${link(["run", run, "search"], {update: filter.update})}>search text</a>
      <input type="search" placeholder="task, id or failure" aria-label="search groups" value=${filter.search}
        onChange=${(/** @type {any} */ e) => change({search: e.target.value})} /></div>
    <div class="bar-row filters">
      <select aria-label="split" value=${filter.split} onChange=${(/** @type {any} */ e) => change({split: e.target.value})}>
        <option value="">training and held-out</option><option value="train">training</option><option value="held_out">held-out</option></select>
      <input class="narrow" type="number" min="0" placeholder="update" aria-label="update" value=${filter.update}
        onChange=${(/** @type {any} */ e) => change({update: e.target.value})} />
      <span class="presets">${PRESETS.map(([name, label]) => html`<button class="chip ${filter.preset === name ? "on" : ""}" aria-pressed=${filter.preset === name}
        onClick=${() => change({preset: name})}>${label}</button>`)}
        ${HAVING.filter(([name]) => filter[name]).map(([name, label]) => html`<button class="chip on" title="remove this filter" onClick=${() => change({[name]: ""})}>${label} ${filter[name]} ×</button>`)}</span>
      <span class="faint total">${table.total >= 0 ? counted(table.total, "group") : ""}</span>
    </div>
    <${Problems} error=${table.error} />
    <div class="table card" role="table" aria-label="groups" aria-rowcount=${table.total}>
      <div class="line header" role="row">${COLUMNS.map(([name, label]) => html`<span class="column ${name}">${sortBy(name, label)}${name === "reward"
        && components.map((component) => html` · ${sortBy("component", component, component)}`)}</span>`)}</div>
      <div class="lines" ref=${scroller}><div style=${{height: `${Math.max(0, table.total) * LINE}px`}}>
        ${lines.map(({index, row}) => row ? html`<${Line} key=${row.group_id} run=${run} row=${row} top=${index * LINE} selected=${index === at} />`
          : html`<div class="line pending" key=${index} style=${{transform: `translateY(${index * LINE}px)`}}>…</div>`)}
      </div>${table.total === 0 && html`<p class="empty">${/split|preset|search|update|reason|cause|status/.test(path) ? "No matching groups." : "No groups are recorded yet."}</p>`}</div>
    </div>`;
}

/**
 * Reads a table page by page, as far as lines are wanted; after a change of the run, those again.
 * @param {string} path @param {string} version
 */
function usePages(path, version) {
  const [, redraw] = useState(0);
  const store = useRef({path: "", version: "", total: -1, pages: /** @type {Map<number, any[]>} */ (new Map()), asked: new Set(), error: /** @type {string | null} */ (null)});
  const own = store.current;
  if (own.path !== path) store.current = {path, version, total: -1, pages: new Map(), asked: new Set(), error: null};
  else if (own.version !== version) { own.version = version; own.asked = new Set(); }
  const ask = (/** @type {number} */ page) => {
    const now = store.current;
    if (now.asked.has(page)) return;
    now.asked.add(page);
    get(`${path}&offset=${page * PAGE}&limit=${PAGE}`).then((found) => {
      if (store.current !== now) return;
      now.total = found.total;
      now.pages.set(page, found.rows);
      now.error = null;
      redraw((/** @type {number} */ n) => n + 1);
    }, (error) => {
      if (store.current !== now) return;
      now.error = error.message;
      redraw((/** @type {number} */ n) => n + 1);
    });
  };
  useEffect(() => ask(0), [path, version]);
  return {
    total: store.current.total, error: store.current.error,
    row: (/** @type {number} */ index) => store.current.pages.get(Math.floor(index / PAGE))?.[index % PAGE],
    want: (/** @type {number} */ from, /** @type {number} */ to) => {
      for (let page = Math.floor(from / PAGE); page * PAGE < to; page++) ask(page);
    },
  };
}
