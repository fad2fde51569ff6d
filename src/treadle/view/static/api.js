// What the pages ask the server for; in an exported file, the answers that it carries.
import {useEffect, useRef, useState} from "pages/vendor/preact.js";

/** @type {{route: string, answers: Record<string, any>} | null} */
export const embedded = (() => {
  const element = document.getElementById("embedded");
  return element ? JSON.parse(element.textContent || "null") : null;
})();

/**
 * Returns the answer to a path, with its text; rejects with an Error that says what to do.
 * @param {string} path
 * @param {AbortSignal} [signal]
 * @returns {Promise<{text: string, data: any}>}
 */
async function ask(path, signal) {
  if (embedded) {
    if (!(path in embedded.answers)) throw new Error("This file holds one trajectory or group; the rest is in the run.");
    return {text: path, data: embedded.answers[path]};
  }
  let response;
  try {
    response = await fetch(`api/${path}`, {signal});
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The server does not answer: is `treadle view` still running?");
  }
  const text = await response.text();
  if (response.ok) return {text, data: JSON.parse(text)};
  throw new Error(problemOf(text, response.status));
}

/** @param {string} text @param {number} status */
function problemOf(text, status) {
  if (status === 403) return "This link is no longer valid: open the one that `treadle view` printed last.";
  try {
    const detail = JSON.parse(text).detail;
    return typeof detail === "string" ? detail : detail.map((/** @type {any} */ d) => `${d.loc.at(-1)}: ${d.msg}`).join("; ");
  } catch {
    return text;
  }
}

/** @param {string} path @returns {Promise<any>} */
export async function get(path) {
  return (await ask(path)).data;
}

/**
 * Follows the answer to a path; asks anew when `version` changes, and keeps what it has meanwhile.
 * @param {string | null} path
 * @param {string} [version]
 * @returns {{data: any, error: string | null}}
 */
export function useAnswer(path, version = "") {
  const [state, setState] = useState({path, data: null, error: null});
  const text = useRef("");
  useEffect(() => {
    if (path === null) return undefined;
    const controller = new AbortController();
    ask(path, controller.signal).then(
      (answer) => {
        if (controller.signal.aborted) return;
        const same = answer.text === text.current && state.path === path && state.data !== null;
        text.current = answer.text;
        if (!same) setState({path, data: answer.data, error: null});
      },
      (error) => controller.signal.aborted || setState({path, data: null, error: error.message}),
    );
    return () => controller.abort();
  }, [path, version]);
  return state.path === path ? state : {data: null, error: null};
}

const SECONDS = 2, PATIENCE = 10;
/** @typedef {{state: string, doing: string, left: string, message: string, has_failed: boolean}} Now */
/** @type {Record<string, {version: string, now: Now}>} */
let runs = {};
/** @type {Record<string, {version: string}> | null} as the first look saw them: what pages have asked for by then is of these */
let first = null;
let problem = "", returns = 0;
/** @type {Set<() => void>} */
const followers = new Set();

async function look() {
  if (!document.hidden) {
    try {
      const found = (await ask("changes", AbortSignal.timeout(PATIENCE * 1000))).data.runs;
      runs = found;
      first ??= found;
      if (problem) returns += 1;
      problem = "";
    } catch (error) {
      const {name, message} = /** @type {Error} */ (error);
      problem = name === "TimeoutError" ? `The server has not answered for ${PATIENCE} s.` : message;
    }
    followers.forEach((follower) => follower());
  }
  setTimeout(look, SECONDS * 1000);
}
if (!embedded) look();

/**
 * Returns what `read` returns, after each look at the server anew.
 * @template T
 * @param {() => T} read a text or a number
 * @returns {T}
 */
function useLook(read) {
  const [value, setValue] = useState(read);
  useEffect(() => {
    const follow = () => setValue(read());
    follow();
    followers.add(follow);
    return () => { followers.delete(follow); };
  }, [read]);
  return value;
}

const readProblem = () => problem, readNow = () => JSON.stringify(Object.fromEntries(Object.entries(runs).map(([key, run]) => [key, run.now])));

/** Returns why the server cannot be asked, in a sentence; empty while it can. */
export function useServerProblem() {
  return useLook(readProblem);
}

/** @returns {Record<string, Now>} what each run does */
export function useNow() {
  return JSON.parse(useLook(readNow));
}

/**
 * Returns whether a page can be opened: in an exported file, those that it carries.
 * @param {string} path
 */
export function has(path) {
  return !embedded || path in embedded.answers;
}

/** @param {string} [key] */
function versionOf(key) {
  const keys = Object.keys({...first, ...runs}).filter((own) => key === undefined || own === key);
  const changed = keys.filter((own) => runs[own]?.version !== first?.[own]?.version);
  return [returns, ...changed.map((own) => `${own} ${runs[own]?.version}`)].join();
}

/**
 * Returns a text that changes whenever a run does, or any run without a key.
 * @param {string} [key]
 * @param {number} [seconds] at most this often, for what takes the server long
 * @returns {string}
 */
export function useVersion(key, seconds = 0) {
  const [version, setVersion] = useState(() => versionOf(key));
  useEffect(() => {
    let timer = 0, last = Date.now();
    const follow = () => { timer = 0; last = Date.now(); setVersion(versionOf(key)); };
    const follower = () => {
      if (timer) return;
      timer = setTimeout(follow, Math.max(0, last + 1000 * seconds - Date.now()));
    };
    follow();
    followers.add(follower);
    return () => { followers.delete(follower); clearTimeout(timer); };
  }, [key, seconds]);
  return version;
}

/**
 * Returns all rows of a run's metrics.jsonl or intervals.jsonl; only new ones are fetched.
 * @param {string} key
 * @param {"metrics" | "intervals"} [file]
 * @returns {{rows: any[], error: string | null}}
 */
export function useRows(key, file = "metrics") {
  const version = useVersion(key);
  const [state, setState] = useState({key, generation: "", rows: [], error: null});
  useEffect(() => {
    let current = true;
    const had = state.key === key ? state : {generation: "", rows: []};
    get(`runs/${encodeURIComponent(key)}/${file}?generation=${had.generation}&after=${had.rows.length}`).then(
      (found) => current && setState({
        key, generation: found.generation, rows: [...had.rows.slice(0, found.start), ...found.rows], error: null,
      }),
      (error) => current && setState({...state, key, error: error.message}),
    );
    return () => { current = false; };
  }, [key, version]);
  return state.key === key ? state : {rows: [], error: null};
}
