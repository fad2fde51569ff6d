// Pure functions on a trajectory's tree of segments: sequences, units of text, messages, and where to draw what.

/** @typedef {{parent: number, depth: number, ids: number[], steps: number[], sampled: number[], joined: [number, number, string][]}} Segment */
/** @typedef {{at: number, count: number, text: string, id: number}} Unit */
/** @typedef {{start: number, end: number, role: string, kind: string}} Span */
/** @typedef {{role: string, start: number, end: number, parts: Span[]}} Message */

/**
 * Returns the indices of the segments of a sequence, root first.
 * @param {Segment[]} segments
 * @param {number} leaf
 */
export function pathTo(segments, leaf) {
  const path = [];
  for (let at = leaf; at >= 0; at = segments[at].parent) path.push(at);
  return path.reverse();
}

/**
 * Returns the units of text of tokens [from, to) of a sequence: a token each, or several that are one character.
 * @param {Segment[]} segments
 * @param {number[]} path
 * @param {Record<number, string>} texts
 * @param {number} from
 * @param {number} to
 * @returns {Unit[]}
 */
export function unitsOf(segments, path, texts, from, to) {
  const units = [];
  for (const index of path) {
    const {depth, ids, joined} = segments[index];
    if (depth >= to || depth + ids.length <= from) continue;
    const whole = new Map(joined.map(([start, count, text]) => [start, {count, text}]));
    for (let at = Math.max(0, from - depth); at < Math.min(ids.length, to - depth); at++) {
      const found = whole.get(at);
      const count = found && depth + at + found.count <= to ? found.count : 1;
      units.push({at: depth + at, count, id: ids[at], text: count > 1 && found ? found.text : texts[ids[at]] ?? `[${ids[at]}]`});
      at += count - 1;
    }
  }
  return units;
}

/**
 * Returns the units in chunks of at most `size`, if possible cut behind a line's end.
 * @param {Unit[]} units
 * @param {number} size
 * @returns {Unit[][]}
 */
export function chunked(units, size) {
  const chunks = [];
  let start = 0;
  while (start < units.length) {
    let end = Math.min(start + size, units.length);
    if (end < units.length) {
      for (let at = end; at > start + size / 2; at--) {
        if (units[at - 1].text.includes("\n")) { end = at; break; }
      }
    }
    chunks.push(units.slice(start, end));
    start = end;
  }
  return chunks;
}

/**
 * Returns the messages of tokens [from, to): spans in a row with the same role.
 * @param {Span[]} spans
 * @param {number} from
 * @param {number} to
 * @returns {Message[]}
 */
export function messagesOf(spans, from, to) {
  /** @type {Message[]} */
  const messages = [];
  for (const span of spans) {
    const start = Math.max(span.start, from), end = Math.min(span.end, to);
    if (start >= end) continue;
    const last = messages.at(-1);
    if (last && last.role === span.role) {
      last.end = end;
      last.parts.push({...span, start, end});
    } else {
      messages.push({role: span.role, start, end, parts: [{...span, start, end}]});
    }
  }
  return messages;
}

/**
 * Returns a lane for each segment, so that no two overlap: the first child of a segment goes on in its lane.
 * @param {Segment[]} segments in depth-first order
 * @returns {{lanes: number[], count: number, width: number}}
 */
export function lanesOf(segments) {
  /** @type {number[]} */
  const lanes = [];
  const hasChild = new Set();
  let count = 0, width = 0;
  segments.forEach((segment, index) => {
    const first = segment.parent >= 0 && !hasChild.has(segment.parent);
    lanes[index] = first ? lanes[segment.parent] : count++;
    hasChild.add(segment.parent);
    width = Math.max(width, segment.depth + segment.ids.length);
  });
  return {lanes, count, width};
}

/**
 * Returns a lane for each interval, the first that is free: of [0, 2], [1, 3], [2, 4] it is 0, 1, 0.
 * @param {[number, number][]} intervals by their beginning
 * @returns {number[]}
 */
export function lanesInTime(intervals) {
  /** @type {number[]} */
  const ends = [];
  return intervals.map(([start, end]) => {
    const free = ends.findIndex((last) => last <= start);
    const lane = free < 0 ? ends.length : free;
    ends[lane] = end;
    return lane;
  });
}

const UNSPACED = "\\p{sc=Han}\\p{sc=Hiragana}\\p{sc=Katakana}\\p{sc=Thai}\\p{sc=Lao}\\p{sc=Khmer}\\p{sc=Myanmar}";
const LETTER = `(?![${UNSPACED}])[\\p{L}\\p{N}\\p{M}_]`;
/** Ends and beginnings of texts between which a word or a number goes on: "4" and "78", "3" and ".14", "3." and "14", "-" and "5". */
const INSIDE = [
  [new RegExp(`${LETTER}$`, "u"), new RegExp(`^${LETTER}`, "u")],
  [/\p{N}$/u, /^[.,:/-]\p{N}/u],
  [/\p{N}[.,:/-]$/u, /^\p{N}/u],
  [/(^|[^\p{L}\p{N}])[-+.]$/u, /^\p{N}/u],
];

/**
 * Returns whether a cut between two texts is in the middle of a word or a number.
 * @param {string} before
 * @param {string} after
 */
export function isMidWord(before, after) {
  return INSIDE.some(([end, beginning]) => end.test(before) && beginning.test(after));
}

const LONGEST_WORD = 64, AHEAD = 4;  // tokens

/**
 * Returns the token at which attempts first differ, or at which the word or number begins in which they do; 0 of fewer than two
 * attempts, and infinity where they never differ.
 * @param {{segments: Segment[], steps: any[], apart: Record<string, number>, texts: Record<number, string>, special: number[]}} view
 */
export function partsAt({segments, steps, apart, texts, special}) {
  const names = Object.keys(apart);
  if (names.length < 2) return 0;
  const paths = names.map((name) => pathTo(segments, steps.findLast((step) => step.trajectory_id === name).segment));
  const first = Math.min(...Object.values(apart));
  const ends = paths.map((path) => segments[path[path.length - 1]]);
  if (ends.every(({depth, ids}) => depth + ids.length === first)) return Infinity;
  const read = (/** @type {number[]} */ path, /** @type {number} */ from, /** @type {number} */ to) => unitsOf(segments, path, texts, from, to)
    .map(({at, id, text}) => ({at, text: special.includes(id) ? "\n" : text}));
  const textOf = (/** @type {{text: string}[]} */ units) => units.map(({text}) => text).join("");
  const shared = read(paths[0], Math.max(0, first - LONGEST_WORD), first), after = paths.map((path) => textOf(read(path, first, first + AHEAD)));
  for (let at = shared.length; at > 0; at--) {
    const before = textOf(shared.slice(0, at)), rest = textOf(shared.slice(at));
    if (!after.some((text) => isMidWord(before, rest + text))) return shared[at]?.at ?? first;
  }
  return first;
}

/**
 * Returns the attempts in lists of those that are the same, token for token and call by call, with the same end; in the order
 * of their first ones. Attempts without steps are by themselves.
 * @param {{steps: any[]}} view
 * @param {any[]} attempts of one group
 * @returns {any[][]}
 */
export function alike({steps}, attempts) {
  /** @type {Map<string, any[]>} */
  const found = new Map();
  for (const attempt of attempts) {
    const calls = steps.filter((step) => step.trajectory_id === attempt.trajectory_id).map((step) => `${step.segment} ${step.prompt_tokens}`);
    const key = calls.length ? JSON.stringify([calls, attempt.reward, attempt.status, attempt.failure_cause]) : attempt.trajectory_id;
    found.set(key, [...(found.get(key) || []), attempt]);
  }
  return [...found.values()];
}

const PAUSE = 120; // seconds without any phase after which a run was not going on

/**
 * Returns the stretches in which a run went on, without the pauses between its processes: each from `began` to `ended` by the
 * clock, and from `start` on in seconds of the run.
 * @param {any[]} intervals rows of intervals.jsonl
 * @returns {{began: number, ended: number, start: number}[]}
 */
export function stretchesOf(intervals) {
  /** @type {{began: number, ended: number, start: number}[]} */
  const found = [];
  for (const row of intervals.toSorted((a, b) => a.started - b.started)) {
    const last = found.at(-1), end = row.started + row.seconds;
    if (last && row.started - last.ended <= PAUSE) last.ended = Math.max(last.ended, end);
    else found.push({began: row.started, ended: end, start: last ? last.start + last.ended - last.began : 0});
  }
  return found;
}

/**
 * Returns the phases of a run in seconds since its first one, without the pauses between its processes.
 * @param {any[]} intervals rows of intervals.jsonl
 * @returns {{phase: string, update: number, start: number, end: number}[]}
 */
export function phasesOf(intervals) {
  const stretches = stretchesOf(intervals);
  return intervals.toSorted((a, b) => a.started - b.started).map((row) => {
    const own = /** @type {any} */ (stretches.findLast((stretch) => stretch.began <= row.started));
    const start = own.start + row.started - own.began;
    return {phase: row.phase, update: row.update, start, end: start + row.seconds};
  });
}

/**
 * Returns the breaks of the steps of a view, each with the segment in which its step departs from the one before.
 * @param {{segments: Segment[], steps: any[]}} view
 * @returns {{segment: number, cause: string, extra: number}[]}
 */
export function breaksOf({segments, steps}) {
  return steps.filter((step) => step.relation.kind === "break").map(({segment, relation}) => ({
    segment: pathTo(segments, segment).find((index) => segments[index].depth >= relation.shared) ?? segment,
    cause: relation.cause, extra: relation.extra_tokens,
  }));
}

/**
 * Returns a hash route's parts: "#/run/a%20b/groups?x=1" is {parts: ["run", "a b", "groups"], query: x=1}.
 * @param {string} hash
 */
export function routeOf(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return {parts, query: new URLSearchParams(query)};
}

/**
 * Returns a link: link(["run", key], {update: 3}) is "#/run/KEY?update=3"; what is empty is left out.
 * @param {(string | number)[]} parts
 * @param {Record<string, any>} [query]
 */
export function link(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
}
