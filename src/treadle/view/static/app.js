// The frame around every page: routes, keyboard, theme.
import {html} from "pages/html.js";
import {render, useEffect, useState} from "pages/vendor/preact.js";
import {embedded, has, useServerProblem} from "pages/api.js";
import {visible} from "pages/format.js";
import {address, kept} from "pages/parts.js";
import {link, routeOf} from "pages/sequence.js";
import {ComparePage} from "pages/compare.js";
import {EvaluationsPage} from "pages/evaluations.js";
import {GroupPage} from "pages/group.js";
import {GroupsPage} from "pages/groups.js";
import {RunPage} from "pages/run.js";
import {RunsPage} from "pages/runs.js";
import {ConfigPage, SearchPage, TaskPage, TokensPage} from "pages/details.js";
import {TimelinePage} from "pages/timeline.js";
import {TrajectoryPage} from "pages/trajectory.js";

const THEMES = ["auto", "light", "dark"];
const KEYS = [
  ["/", "search"], ["j k", "next and previous line, or step"], ["Enter", "open the line"],
  ["n p", "next and previous trajectory or group"], ["u", "up: to the group, the run, all runs"],
  ["t", "light, dark, or as the system"], ["?", "these keys"],
];

/** @param {{parts: string[], query: URLSearchParams}} route */
function pageOf({parts, query}) {
  const [kind, key, what, id] = parts;
  if (kind === "compare") return html`<${ComparePage} query=${query} />`;
  if (kind === "evaluations") return html`<${EvaluationsPage} query=${query} />`;
  if (kind !== "run" || !key) return html`<${RunsPage} />`;
  if (what === "groups") return html`<${GroupsPage} run=${key} query=${query} key=${key} />`;
  if (what === "group" && id) return html`<${GroupPage} run=${key} id=${id} key=${id} />`;
  if (what === "trajectory" && id) return html`<${TrajectoryPage} run=${key} id=${id} query=${query} key=${id} />`;
  if (what === "task" && id) return html`<${TaskPage} run=${key} id=${id} query=${query} />`;
  if (what === "search") return html`<${SearchPage} run=${key} query=${query} />`;
  if (what === "config") return html`<${ConfigPage} run=${key} query=${query} />`;
  if (what === "timeline") return html`<${TimelinePage} run=${key} query=${query} key=${key} />`;
  if (what === "tokens") return html`<${TokensPage} run=${key} />`;
  return html`<${RunPage} run=${key} key=${key} />`;
}

/** @param {{parts: string[]}} props */
function Crumbs({parts}) {
  const [kind, key, what, id] = parts;
  const crumbs = [];
  if (kind === "compare") crumbs.push({label: "overlay", href: null});
  if (kind === "evaluations") crumbs.push({label: "task by task", href: null});
  if (kind === "run" && key) crumbs.push({label: key, href: embedded ? null : link(["run", key])});
  if (what) {
    const own = {groups: "groups", group: id, trajectory: id, task: id, search: "search", config: "settings", tokens: "tokens", timeline: "timeline"}[what];
    if (what === "trajectory") {
      const group = id.replace(/\.\d+$/, "");
      const there = has(`runs/${encodeURIComponent(key)}/groups/${encodeURIComponent(group)}`);
      crumbs.push({label: group, href: there ? link(["run", key, "group", group], kept()) : null});
    }
    crumbs.push({label: own || what, href: null});
  }
  return html`<nav class="crumbs" aria-label="where">
    ${crumbs.map((crumb) => html`<span class="sep">/</span>${crumb.href
      ? html`<a href=${crumb.href}>${crumb.label}</a>` : html`<span class="here">${crumb.label}</span>`}`)}
  </nav>`;
}

/** @returns {[string, () => void]} */
function useTheme() {
  const [theme, setTheme] = useState(/** @returns {string} */ () => {
    try { return localStorage.getItem("treadle-theme") || "auto"; } catch { return "auto"; }
  });
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("treadle-theme", theme); } catch { /* a file opened from disk may have none */ }
    dispatchEvent(new Event("themechange"));
  }, [theme]);
  return [theme, () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])];
}

/** @type {Map<string, [number, number]>} address -> how far the page, and the table in it, were scrolled when it was left */
const places = new Map();

const table = () => document.querySelector(".lines");

/** Scrolls to where a page was left, once it is long enough again; a new page begins at its top. @param {string} hash */
function usePlaces(hash) {
  const path = hash.split("?")[0];
  useEffect(() => { if (!routeOf(hash).query.has("step")) scrollTo(0, 0); }, [path]);
  useEffect(() => {
    const [page, inTable] = routeOf(hash).query.has("step") ? [0, 0] : places.get(hash) || [0, 0];
    const until = Date.now() + 5000;
    let timer = 0;
    const stop = () => clearInterval(timer);
    const go = () => {
      if (page) scrollTo(0, page);
      if (table()) /** @type {Element} */ (table()).scrollTop = inTable;
      if (Math.abs(scrollY - page) < 2 && Math.abs((table()?.scrollTop || 0) - inTable) < 2 || !page && !inTable || Date.now() > until) return stop();
      return undefined;
    };
    timer = setInterval(go, 50);
    go();
    const moves = ["wheel", "keydown", "pointerdown"];
    for (const name of moves) addEventListener(name, stop, {passive: true});
    return () => { stop(); for (const name of moves) removeEventListener(name, stop); };
  }, [hash]);
}

function App() {
  const [hash, setHash] = useState(address);
  const [theme, nextTheme] = useTheme();
  const [help, setHelp] = useState(false);
  const problem = useServerProblem();
  const route = routeOf(hash);
  useEffect(() => {
    history.scrollRestoration = "manual";
    /** @param {HashChangeEvent} event */
    const follow = ({oldURL}) => {
      if (oldURL) places.set(new URL(oldURL).hash, [scrollY, table()?.scrollTop || 0]);
      setHash(location.hash);
    };
    addEventListener("hashchange", follow);
    setHash(address());  // it may have changed since the first render, before anyone listened
    return () => removeEventListener("hashchange", follow);
  }, []);
  usePlaces(hash);
  useEffect(() => {
    const last = route.parts.at(-1);
    document.title = last ? `${visible(last)} · Treadle` : "Treadle";
  }, [hash]);
  useEffect(() => {
    /** @param {KeyboardEvent} event */
    const press = (event) => {
      const target = /** @type {HTMLElement} */ (event.target);
      if (event.key === "Escape") { setHelp(false); target.blur(); }
      if (event.metaKey || event.ctrlKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(target.tagName)) return;
      if (event.key === "?") setHelp((/** @type {boolean} */ on) => !on);
      else if (event.key === "t") nextTheme();
      else if (event.key === "u" && !embedded) location.hash = up(route.parts, kept());
      else if (event.key === "/") {
        const field = /** @type {HTMLElement | null} */ (document.querySelector("input[type=search]"));
        if (!field) return;
        field.focus();
      } else if (event.key === "n" || event.key === "p") {
        const rel = event.key === "n" ? "next" : "prev";
        const found = /** @type {HTMLElement | null} */ (document.querySelector(`a[rel=${rel}]`));
        if (!found) return;
        found.click();
      } else return;
      event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
  return html`
    <header class="top">
      <a class="brand" href=${embedded ? `#/${embedded.route}` : "#/"}><span class="mark" aria-hidden="true"></span>treadle</a>
      <${Crumbs} parts=${route.parts} />
      <span class="grow"></span>
      ${embedded && html`<span class="faint exported">exported</span>`}
      <button class="quiet" onClick=${() => setHelp(!help)} title="keys (?)" aria-label="keys">?</button>
      <button class="quiet" onClick=${nextTheme} title="theme (t)" aria-label="theme">${/** @type {Record<string, string>} */ ({auto: "◐", light: "○", dark: "●"})[theme]}</button>
    </header>
    ${problem && html`<div class="lost" role="alert">${problem} What is below may be old.</div>`}
    <main>${pageOf(route)}</main>
    ${help && html`<div class="veil" onClick=${() => setHelp(false)}><div class="card help" role="dialog" aria-label="keys">
      <h2>Keys</h2><dl>${KEYS.map(([key, does]) => html`<dt><kbd>${key}</kbd></dt><dd>${does}</dd>`)}</dl></div></div>`}`;
}

/** @param {string[]} parts @param {{list: string, colour: string, show: string}} along */
function up([kind, key, what, id], along) {
  if (what === "trajectory") return link(["run", key, "group", id.replace(/\.\d+$/, "")], along);
  if (what === "group") return link(["run", key, "groups"], Object.fromEntries(new URLSearchParams(along.list)));
  return kind === "run" && what ? link(["run", key]) : "#/";
}

render(html`<${App} />`, /** @type {HTMLElement} */ (document.getElementById("app")));
