// Tokens as text. All of it is in the page, so that scrolling never waits and the browser's own search finds it; single
// tokens, with their colours, are made of what is in sight only.
import {html} from "pages/html.js";
import {h, useEffect, useMemo, useRef, useState} from "pages/vendor/preact.js";
import {figure, tokenColour} from "pages/format.js";
import {chunked, messagesOf, pathTo, unitsOf} from "pages/sequence.js";

const CHUNK = 160; // units that are made or left together
const HEADER = 52; // pixels of the window that the header covers
const NEAR = "1200px"; // beyond the window's edge

/**
 * @typedef {{view: any, step: number, path: number[], column: any, range: any, start: number, pinned: number,
 *   onToken: (step: number, at: number) => void}} Shown what tokens of one step are shown with; start: of what was sampled
 */

/** @param {{units: any[], shown: Shown}} props */
function Chunk({units, shown}) {
  const place = useRef(/** @type {any} */ (null));
  const [near, setNear] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver(([entry]) => setNear(entry.isIntersecting), {rootMargin: NEAR});
    observer.observe(place.current);
    return () => observer.disconnect();
  }, []);
  const text = useMemo(() => units.map((unit) => unit.text).join(""), [units]);
  return html`<span class="chunk" ref=${place}>${near ? units.map((unit) => h(Token, {unit, shown})) : text}</span>`;
}

/** @param {{unit: any, shown: Shown}} props */
function Token({unit, shown}) {
  const {column, range, start, pinned, view, step} = shown;
  const sampled = unit.at >= start;
  const values = view.steps[step].columns;
  const value = sampled && column ? values[column.name]?.[unit.at - start] : null;
  const masked = sampled && values.mask && !values.mask[unit.at - start];
  const style = value === null || value === undefined ? null : {backgroundColor: tokenColour(column.scale, value, range)};
  const picture = view.pictures?.[unit.id];
  if (picture) return h("img", {class: `picture${pinned === unit.at ? " pinned" : ""}`, "data-at": unit.at, src: picture, alt: "image"});
  return h("span", {class: `t${sampled ? " s" : ""}${masked ? " masked" : ""}${pinned === unit.at ? " pinned" : ""}`, "data-at": unit.at, style}, unit.text);  // escaped by the server
}

/** @param {{from: number, to: number, shown: Shown}} props */
export function Text({from, to, shown}) {
  const {view, path} = shown;
  const chunks = useMemo(() => {
    const pieces = from < shown.start && shown.start < to ? [[from, shown.start], [shown.start, to]] : [[from, to]];
    return pieces.flatMap(([a, b]) => chunked(unitsOf(view.segments, path, view.texts, a, b), CHUNK));
  }, [view, path, from, to]);
  return chunks.map((units) => html`<${Chunk} key=${units[0]?.at} units=${units} shown=${shown} />`);
}

/** @param {{message: any, shown: Shown}} props */
function MessageBlock({message, shown}) {
  const sampled = message.end > shown.start;
  const bare = message.parts.every((/** @type {any} */ part) => part.kind === "template") ? "bare" : "";
  return html`<div class=${`message ${bare} ${sampled ? "reply" : ""} role-${message.role.replace(/\W/g, "") || "none"}`}>
    <div class="role">${message.role || "text"}</div>
    <div class="body">${message.parts.map((/** @type {any} */ part) => {
      const text = html`<${Text} from=${part.start} to=${part.end} shown=${shown} key=${part.start} />`;
      if (part.kind === "template") return html`<span class="template">${text}</span>`;
      if (part.kind === "text") return text;
      return html`<details class=${part.kind} open=${part.kind === "call" || shown.pinned >= part.start && shown.pinned < part.end}>
        <summary>${part.kind === "thought" ? "thought" : "tool call"} <span class="faint">${part.end - part.start} tokens</span></summary><div>${text}</div></details>`;
    })}</div></div>`;
}

/** Says whether a message is but the line end behind a shared one. @param {any} message @param {Shown} shown */
function isBlank(message, {view, path}) {
  return message.parts.every((/** @type {any} */ part) => part.kind === "template")
    && unitsOf(view.segments, path, view.texts, message.start, message.end).every((unit) => unit.text.trim() === "");
}

/** @param {{from: number, shown: Shown}} props */
export function Conversation({from, shown}) {
  const step = shown.view.steps[shown.step];
  const end = step.prompt_tokens + step.completion_tokens;
  const messages = useMemo(() => messagesOf(step.spans, from, end).filter((message, n) => n > 0 || from === 0 || !isBlank(message, shown)), [step, from]);
  const at = (/** @type {Event} */ event) => {
    const found = /** @type {HTMLElement} */ (event.target).closest?.("[data-at]");
    return found ? Number(/** @type {HTMLElement} */ (found).dataset.at) : null;
  };
  const pick = (/** @type {Event} */ event) => {
    const token = at(event);
    if (token !== null) shown.onToken(shown.step, token);
  };
  return html`<div class="conversation" onClick=${pick}>${messages.map((message) => html`<${MessageBlock} key=${message.start} message=${message} shown=${shown} />`)}</div>`;
}

/**
 * Shows what is known of the token under the pointer.
 * @param {{view: any}} props
 */
export function Tip({view}) {
  const [tip, setTip] = useState(/** @type {any} */ (null));
  useEffect(() => {
    /** @param {MouseEvent} event */
    const move = (event) => {
      const token = /** @type {HTMLElement} */ (event.target).closest?.("[data-at]");
      const step = token?.closest("[data-step]");
      if (!token || !step) return setTip(null);
      const {left, top, bottom} = token.getClientRects()[0];
      setTip({at: Number(/** @type {HTMLElement} */ (token).dataset.at), step: Number(/** @type {HTMLElement} */ (step).dataset.step),
        left, top, bottom});
    };
    const hide = () => setTip(null);
    document.addEventListener("mouseover", move);
    addEventListener("scroll", hide, {passive: true});
    return () => { document.removeEventListener("mouseover", move); removeEventListener("scroll", hide); };
  }, []);
  if (!tip || !view.steps[tip.step]) return null;
  /** Below the token, or above it, or where it fits. @param {HTMLElement | null} card */
  const place = (card) => {
    if (!card) return;
    const {offsetHeight: height, offsetWidth: width} = card, below = tip.bottom + 6, above = tip.top - height - 6;
    const fits = below + height <= innerHeight - 6 ? below : above >= HEADER ? above : Math.max(HEADER, innerHeight - height - 6);
    card.style.top = `${fits}px`;
    card.style.left = `${Math.max(6, Math.min(tip.left, innerWidth - width - 24))}px`;
  };
  return html`<div class="tip card" ref=${place}>
    <${TokenFacts} view=${view} step=${tip.step} at=${tip.at} /></div>`;
}

/** @param {{view: any, step: number, at: number}} props */
export function TokenFacts({view, step, at}) {
  const own = view.steps[step];
  const [unit] = unitsOf(view.segments, pathTo(view.segments, own.segment), view.texts, at, at + 1);
  if (!unit) return null;
  const offset = at - own.prompt_tokens;
  return html`<div class="token-facts"><code class="text">${JSON.stringify(unit.text)}</code>
    <dl><dt>id</dt><dd>${unit.id}</dd><dt>position</dt><dd>${at}${offset >= 0 ? `, reply ${offset}` : ""}</dd>
    ${offset < 0 ? html`<dt>read</dt><dd>part of the prompt</dd>` : view.columns.map((/** @type {any} */ column) => html`
      <dt title=${column.help}>${column.label}</dt><dd class=${column.is_recorded ? "" : "faint"}>${column.is_recorded ? shownValue(own.columns[column.name]?.[offset], column) : "not recorded"}</dd>`)}
    ${own.columns.alternatives?.[offset] && html`<dt>these</dt><dd>${own.columns.alternatives[offset].map((/** @type {string} */ text) => JSON.stringify(text)).join(" ")}</dd>`}</dl></div>`;
}

/** @param {any} value @param {any} column */
function shownValue(value, column) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (column.scale === "low") return html`${figure(value, 4)} <span class="faint">p ${figure(Math.exp(value), 3)}</span>`;
  return figure(value, 4);
}
