// What the pages' pure functions return for a few values; tests/view/test_browser.py says what it must be.
async () => {
  const {visible, scaleOf, figure, smoothed, band, aligned, tokenColour, rangeOf, duration, tally} = await import("/static/format.js");
  const {unitsOf, chunked, messagesOf, lanesOf, routeOf, link, pathTo, lanesInTime, alike, breaksOf, phasesOf, stretchesOf, isMidWord} =
    await import("/static/sequence.js");
  const {lastUntil, liesUpon} = await import("/static/charts.js");
  const {filterOf, panelsOf} = await import("/static/run.js");
  const zeros = panelsOf([{update: 1, reward_mean: 0, success: 0, entropy: 0, failed: 0, kl: null, more: 0}, {update: 2, reward_mean: 0, shaped_reward_mean: null}]);
  const gaps = {update: 1, logprob_gap_kl: 1e-9, kl: null, kl_coef: 0};
  const segments = [
    {parent: -1, depth: 0, ids: [1, 2], steps: [0, 1], sampled: [], joined: [[0, 2, "é"]]},
    {parent: 0, depth: 2, ids: [3], steps: [0], sampled: [0], joined: []},
    {parent: 0, depth: 2, ids: [4, 5], steps: [1], sampled: [1], joined: []},
  ];
  const texts = {1: "a", 2: "b", 3: "c", 4: "d\n", 5: "e"};
  const spans = [
    {start: 0, end: 3, role: "user", kind: "text"},
    {start: 3, end: 5, role: "user", kind: "call"},
    {start: 5, end: 9, role: "tool", kind: "text"},
  ];
  return {
    visible: visible("a\u202eb\x1b[1m\n\t🧵\ud800"),
    figures: [0.41234, 12345.6, 3.14e-6, null, NaN, 7].map((value) => figure(value)),
    duration: duration(4000),
    zeros: [zeros.panels.map((panel) => [panel.title, panel.own]), zeros.rest],
    kl: [[gaps], [{...gaps, kl: 0.1}]].map((rows) => panelsOf(rows).panels.map((panel) => [panel.title, panel.own])),
    last: [5, 2, 0].map((update) => lastUntil({label: "", points: [[1, 0.2], [3, 0.5], [4, null]]}, update)),
    inside: [["47", "8"], ["3", ".14"], ["3.", "14"], ["x -", "5"], ["foo_", "bar"], ["3", "."], ["a", " b"], ["中", "文"], ["", "5"], ["1\n", "2"]]
      .map(([before, after]) => isMidWord(before, after)),
    smoothed: smoothed([1, null, 3, 5], 3),
    band: band([[[1, 2], [2, 4]], [[2, 6], [3, 1]]]),
    aligned: aligned([{points: [[2, 5]]}, {points: [[1, 3]]}]),
    units: unitsOf(segments, pathTo(segments, 2), texts, 0, 4).map((u) => [u.at, u.count, u.text]),
    cut: unitsOf(segments, pathTo(segments, 2), texts, 1, 3).map((u) => u.text),
    chunks: chunked(unitsOf(segments, [2], texts, 0, 9), 1).length,
    messages: messagesOf(spans, 2, 6).map((m) => [m.role, m.start, m.end, m.parts.length]),
    lanes: lanesOf(segments),
    at_once: lanesInTime([[0, 2], [1, 3], [2, 4], [2.5, 2.6]]),
    alike: alike({steps: [["a", 1], ["b", 1], ["c", 2], ["d", 1]].map(([trajectory_id, segment]) => ({trajectory_id, segment, prompt_tokens: 2}))},
      [["a", 1], ["b", 1], ["c", 1], ["d", 0], ["e", 1], ["f", 1]].map(([trajectory_id, reward]) => ({trajectory_id, reward, status: "done"})))
      .map((same) => same.map((attempt) => attempt.trajectory_id).join("")),
    breaks: breaksOf({segments, steps: [
      {segment: 1, relation: {kind: "opens"}},
      {segment: 2, relation: {kind: "break", shared: 2, cause: "changed", extra_tokens: 1}},
    ]}),
    stretches: stretchesOf([{started: 1004, seconds: 2}, {started: 1000, seconds: 4}, {started: 9000, seconds: 3}]),
    intervals: phasesOf([
      {update: 1, phase: "update", started: 1004, seconds: 2},
      {update: 1, phase: "rollout", started: 1000, seconds: 4},
      {update: 2, phase: "rollout", started: 9000, seconds: 3},
    ]),
    tally: tally([{done: 1}, {done: 1, failed: 1}]),
    filters: ["dropped_stale", "failed_engine", "ended_max_steps", "failed", "refused", "entropy"].map(filterOf),
    upon: liesUpon([[0, 1, 2], [0, 1, 2], [5, 5, 5], [0, 1, null]]),
    scale: ["low", "steps", "flag"].map((scale) => scaleOf(scale, rangeOf([1, 2])).map(({label}) => label)),
    routes: ["#/run/a%20b/groups?x=1", "#/run/%E0%A4%A"].map((hash) => routeOf(hash).parts),
    link: link(["run", "a/b"], {update: 3, search: "", step: null}),
    colours: [
      tokenColour("low", 0, rangeOf([])),
      tokenColour("diverging", -1, rangeOf([2, -1])),
      tokenColour("flag", null, rangeOf([])),
    ],
  };
}
