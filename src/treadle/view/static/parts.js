// Small parts that several pages share.
import {html} from "pages/html.js";
import {useEffect, useRef, useState} from "pages/vendor/preact.js";
import {embedded} from "pages/api.js";
import {figure, signed} from "pages/format.js";
import {link, routeOf} from "pages/sequence.js";

/** Returns the address of what is shown: in an exported file, at first, what it opens at. */
export function address() {
  return location.hash || (embedded ? `#/${embedded.route}` : "");
}

/**
 * Returns what links to groups and trajectories take along: the filter of the table that led here, and the colour of tokens, and
 * whether the template's own are shown.
 * @returns {{list: string, colour: string, show: string}}
 */
export function kept() {
  const {parts, query} = routeOf(address());
  return {list: (parts[2] === "groups" ? query.toString() : query.get("list")) || "", colour: query.get("colour") || "", show: query.get("show") || ""};
}

/**
 * Keeps a choice in the page's address, so that it is there again when the page is, and follows the address.
 * @param {string} name @param {string} [usual] what stands for no choice
 * @returns {[string, (next: string) => void]}
 */
export function useChoice(name, usual = "") {
  const read = () => routeOf(address()).query.get(name) ?? usual;
  const [value, setValue] = useState(read);
  useEffect(() => {
    const follow = () => setValue(read());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, [name]);
  return [value, (next) => {
    const {parts, query} = routeOf(address());
    if (next === usual) query.delete(name);
    else query.set(name, next);
    history.replaceState(null, "", `${link(parts)}${query.size ? `?${query}` : ""}`);
    setValue(next);
  }];
}

/** @param {{error?: string | null, problems?: (string | null)[]}} props */
export function Problems({error, problems = []}) {
  const all = [error, ...problems].filter(Boolean);
  return all.length ? html`<div class="problems" role="alert">${all.map((text) => html`<p>${text}</p>`)}</div>` : null;
}

/** Draws the name of a setting; on a narrow page it may break after its dots. @param {{path: string}} props */
export function SettingName({path}) {
  return html`<code class="setting">${path.split(".").map((part, n) => html`${n ? html`.<wbr />` : ""}${part}`)}</code>`;
}

/** @param {{what?: string}} props */
export function Waiting({what = "reading"}) {
  return html`<p class="waiting">${what} …</p>`;
}

/** @param {{run: string, here: string}} props */
export function Tabs({run, here}) {
  const tabs = [["", "curves"], ["groups", "groups"], ["timeline", "timeline"], ["tokens", "tokens"], ["config", "settings"]];
  return html`<nav class="tabs" aria-label="run">${tabs.map(([what, label]) => html`
    <a href=${link(what ? ["run", run, what] : ["run", run])} aria-current=${what === here ? "page" : null}>${label}</a>`)}</nav>`;
}

/**
 * Draws an attempt as a cell: filled as far as its reward, crossed out if it has none.
 * @param {{run: string, attempt: any, here?: boolean, lowest?: number, highest?: number}} props
 */
export function AttemptCell({run, attempt, here = false, lowest = 0, highest = 1}) {
  const failed = attempt.reward === null;
  const span = Math.max(highest, 1) - Math.min(lowest, 0);
  const share = failed ? 0 : (attempt.reward - Math.min(lowest, 0)) / span;
  const dropped = Object.keys(attempt.states).some((name) => name.startsWith("dropped") && name !== "dropped: replayed");
  const title = `${attempt.trajectory_id}: ${attempt.failure_message ? `failed: ${attempt.failure_message}` : failed ? attempt.status : `reward ${figure(attempt.reward)}`}` +
    `${attempt.advantage === null ? "" : `, advantage ${signed(attempt.advantage)}`}, ${Object.entries(attempt.states)
      .map(([state, count]) => `${count} ${state}`).join(", ")}`;
  return html`<a class="cell ${failed ? "failed" : ""} ${dropped ? "dropped" : ""} ${here ? "here" : ""}" title=${title}
    aria-label=${title} href=${link(["run", run, "trajectory", attempt.trajectory_id], kept())}>
    <span class="fill" style=${{height: `${Math.round(100 * share)}%`}}></span>${failed ? "×" : ""}</a>`;
}

/** @param {{run: string, attempts: any[], here?: string}} props */
export function AttemptCells({run, attempts, here}) {
  const rewards = attempts.map((a) => a.reward).filter((r) => r !== null);
  const lowest = Math.min(0, ...rewards), highest = Math.max(0, ...rewards);
  return html`<span class="cells">${attempts.map((attempt) => html`<${AttemptCell} run=${run} attempt=${attempt}
    here=${attempt.trajectory_id === here} lowest=${lowest} highest=${highest} />`)}</span>`;
}

/** @param {{values: (number | null)[], label: string}} props */
export function Sparkline({values, label}) {
  const found = values.filter((v) => v !== null).map(Number);
  if (found.length < 2) return html`<span class="faint">–</span>`;
  const low = Math.min(...found), high = Math.max(...found);
  const points = values.map((value, at) => value === null ? null
    : `${(100 * at / (values.length - 1)).toFixed(1)},${(26 - 24 * (value - low) / (high - low || 1)).toFixed(1)}`);
  return html`<svg class="spark" viewBox="-1 0 102 28" preserveAspectRatio="none" role="img" aria-label=${label}>
    <polyline points=${points.filter(Boolean).join(" ")} /></svg>`;
}

/** @param {{state: string}} props */
export function StatePill({state}) {
  return html`<span class="pill state-${state.replace(" ", "-")}">${state === "in progress" ? html`<i class="dot"></i>` : ""}${state}</span>`;
}

/**
 * Says what a run does at this moment, or how it ended.
 * @param {{now: any, whole?: boolean}} props whole: with the last line of its output
 */
export function DoesNow({now, whole = false}) {
  if (!now?.doing) return null;
  const ended = now.state !== "in progress";
  return html`<p class="now">${now.doing}${now.left ? `, ${now.left}` : ""}${whole && now.message && !(ended && now.doing.includes(now.message))
    ? html`<span class="faint"> · ${now.message}</span>` : ""}</p>`;
}

/** @param {{items: [string, any, string?][]}} props label, value and explanation */
export function Facts({items}) {
  return html`<dl class="facts">${items.filter(Boolean).map(([label, value, title]) => html`
    <div title=${title || ""}><dt>${label}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/**
 * Moves a selection with j and k and opens it with Enter.
 * @param {number} count
 * @param {(at: number) => void} open
 * @returns {[number, (at: number) => void]}
 */
export function useSelection(count, open) {
  const [at, setAt] = useState(-1);
  const now = useRef({at, count, open});
  now.current = {at, count, open};
  useEffect(() => {
    /** @param {KeyboardEvent} event */
    const press = (event) => {
      const {tagName} = /** @type {HTMLElement} */ (event.target);
      if (event.metaKey || event.ctrlKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(tagName)) return;
      const {at: own, count: all, open: go} = now.current;
      if (/^[jk]$/.test(event.key)) /** @type {HTMLElement} */ (event.target).blur();
      if (event.key === "j") setAt(Math.min(own + 1, all - 1));
      else if (event.key === "k") setAt(Math.max(own - 1, 0));
      else if (event.key === "Enter" && own >= 0 && !/^(A|BUTTON|SUMMARY)$/.test(tagName)) go(own);
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  return [at, setAt];
}
