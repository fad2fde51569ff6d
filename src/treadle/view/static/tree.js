// The exact prefix tree: each shared prefix once, tokens from left to right, a lane for each branch.
import {html} from "pages/html.js";
import {useState} from "pages/vendor/preact.js";
import {counted, figure} from "pages/format.js";
import {lanesOf} from "pages/sequence.js";

const LANE = 17, BAR = 9; // pixels

/**
 * @param {{segments: any[], names: string[], breaks?: {segment: number, cause: string, extra: number}[],
 *   onPick?: (call: number) => void, here?: number}} props names: of the sequences, by index
 */
export function Tree({segments, names, breaks = [], onPick, here = -1}) {
  const [over, setOver] = useState(-1);
  if (!segments.length) return null;
  const {lanes, count, width} = lanesOf(segments);
  const height = count * LANE + 6;
  const x = (/** @type {number} */ token) => (1000 * token / width);
  const y = (/** @type {number} */ lane) => lane * LANE + 4;
  const broken = new Map(breaks.map((b) => [b.segment, b]));
  const own = over >= 0 ? segments[over] : null;
  return html`<div class="tree">
    <div class="tree-scroll"><svg viewBox=${`0 0 1000 ${height}`} preserveAspectRatio="none" style=${{height: `${height}px`}} role="img"
      aria-label=${`prefix tree of ${names.length} sequences`} onMouseLeave=${() => setOver(-1)}>
      ${segments.map((s, n) => s.parent >= 0 && lanes[n] !== lanes[s.parent] && html`<path class=${`link ${broken.has(n) ? "break" : ""}`}
        vector-effect="non-scaling-stroke" d=${`M${x(s.depth)} ${y(lanes[s.parent]) + BAR / 2}V${y(lanes[n]) + BAR / 2}`} />`)}
      ${segments.map((s, n) => html`<rect key=${n} x=${x(s.depth)} y=${y(lanes[n])} height=${BAR} width=${Math.max(x(s.ids.length) - 0.6, 0.8)}
        class=${`${s.sampled.length ? "sampled" : "read"} ${broken.has(n) ? "break" : ""} ${n === over ? "over" : ""} ${s.steps.includes(here) ? "here" : ""}`}
        onMouseEnter=${() => setOver(n)} onClick=${() => onPick?.(s.sampled[0] ?? s.steps[0])} />`)}
    </svg></div>
    <p class="tree-note">${own ? html`tokens ${figure(own.depth)} to ${figure(own.depth + own.ids.length - 1)} (${counted(own.ids.length, "token")}):
      ${own.sampled.length ? `sampled by ${list(own.sampled, names)}` : "read"}${own.steps.length > own.sampled.length
        ? `${own.sampled.length ? ", read" : ""} by ${list(own.steps.filter((/** @type {number} */ s) => !own.sampled.includes(s)), names)}` : ""}
      ${broken.has(over) ? html` · <b class="warm">break: ${broken.get(over)?.cause}, ${counted(broken.get(over)?.extra || 0, "token")} computed again</b>` : ""}`
      : html`<span class="key"><i class="sampled"></i>sampled</span> <span class="key"><i class="read"></i>read</span>
        ${breaks.length > 0 && html`<span class="key"><i class="break"></i>behind a break</span>`}
        <span class="faint">${counted(names.length, "sequence")}, ${counted(segments.reduce((sum, s) => sum + s.ids.length, 0), "token")} in the tree</span>`}</p>
  </div>`;
}

/** @param {number[]} calls @param {string[]} names */
function list(calls, names) {
  const shown = calls.slice(0, 6).map((call) => names[call]).join(", ");
  return calls.length > 6 ? `${shown} and ${calls.length - 6} more` : shown;
}

/** @param {{cost: any, of: string}} props */
export function Cost({cost, of}) {
  if (!cost || !cost.step) return null;
  const used = cost[cost.used] || cost.tree;
  return html`<p class="cost">Training ${cost.used ? "computes" : "would compute"} <b>${counted(used, "token")}</b> of this ${of} (packing ${cost.used || "tree"})${used < cost.step ? html`; step by step it would be ${figure(cost.step)}: <b>${figure(cost.step / used, 3)}× fewer</b>.` : "."} <span class="faint">step ${figure(cost.step)} · chain ${figure(cost.chain)} · tree ${figure(cost.tree)}</span></p>`;
}
