"""Detects from metrics of updates that a run learns nothing, and suggests what to try first.

rows of metrics.jsonl -stalls-> {"cut": "98% of the attempts of the last 8 updates end with a reply ..."}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from treadle.record.run_directory import RunDirectory
from treadle.report.callback import Callback, RunStart
from treadle.report.metrics import EvaluationResult

UPDATES = 8
"""Number of last updates to examine; a shorter run only reports failing tools, repeated replies, and no success before
training."""
SHARE = 0.9
"""Share of groups without an advantage, of truncated last replies, or of failing tool calls that means no learning."""
SOLVED = 0.9
"""Mean success above which equal rewards and low entropy are intended, unless the tasks began like this."""
RARE = 0.03
"""Minimum success to learn from: below it, too few groups have a successful attempt."""
FLAT, ROSE = 0.02, 0.05
"""Success is flat if it changed by less than the first; rewards were learned if they rose by the second."""
ENTROPY, ENTROPY_LEFT = 0.02, 0.1
"""Mean entropy (nats) below which it has collapsed, if also below this share of the first updates' entropy."""


def stalls(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return kind -> line, with the number and the first remedy to try, for the last updates.

    rows: rows of metrics.jsonl, in order. Rows between the first and the last `UPDATES` updates have no effect.
    """
    updates = [row for row in rows if row["kind"] == "update"]
    found = _unsolved(rows, updates) | (_failing_tools(updates[-1]) | _repeated(updates[-1]) if updates else {})
    if len(updates) < UPDATES:
        return found
    first, last, of_them = updates[:UPDATES], updates[-UPDATES:], f"of the last {UPDATES} updates"
    solved, taught = _mean("success", last) >= SOLVED, "teacher_kl" in last[-1]
    still, cut = _mean("zero_advantage_groups", last), _mean("last_stop_length", last)
    nothing = all(row.get("reward_mean") == row.get("reward_positive") == 0 for row in last)
    if nothing and not taught and not any(row.get("shaped_reward_mean") for row in last):
        attempts = sum(row.get("trajectories", 0) - row.get("failed", 0) for row in last)
        found["zero"] = (
            f"all {attempts:,} rewards {of_them} are 0, so that nothing is learned; read some attempts "
            "(treadle show RUN), and call the reward function on a correct attempt; if it pays, the policy never "
            "succeeds: try easier tasks or rewards for steps"
        )
    elif still >= SHARE and not taught:
        if not solved:
            found["equal"] = (
                f"{still:.0%} of the groups {of_them} have equal rewards and teach nothing; raise training.group_size, "
                "or choose tasks that are sometimes solved"
            )
        elif _mean("success", first) >= SOLVED:
            found["equal"] = (
                f"{still:.0%} of the groups {of_them} have equal rewards and teach nothing, as the tasks were solved "
                "from the start; choose harder ones"
            )
    elif not taught:
        found |= _flat(updates)
    if cut >= SHARE:
        found["cut"] = (
            f"{cut:.0%} of the attempts {of_them} end with a reply cut off at the token limit; raise "
            "rollout.max_completion_tokens"
        )
    before, now = _mean("entropy", first), _mean("entropy", last)
    if 0 <= now < min(ENTROPY, ENTROPY_LEFT * before) and not solved:
        found["entropy"] = (
            f"entropy fell from {before:.2g} to {now:.2g} nats, so that attempts hardly differ any more; go back to an "
            "earlier checkpoint with half the training.optimizer.learning_rate"
        )
    return found


def _unsolved(rows: Sequence[Mapping[str, Any]], updates: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the line for a run that solved no held-out task before training, and hardly any since."""
    before = [row for row in rows if row["kind"] == "evaluation" and row["update"] == 0 and row["temperature"] > 0]
    if not before or before[0]["success"] != 0 or any((row.get("success") or 0) >= RARE for row in updates[-UPDATES:]):
        return {}
    return {
        "unsolved": f"none of {before[0]['tasks']:,} held-out tasks was solved before training, and a policy learns "
        f"from a success of about {RARE}: {_HOW_TO_BEGIN}"
    }


_HOW_TO_BEGIN = (
    "give it easier tasks, rewards for steps, or demonstrations of whole attempts (docs/environments.md, 'When nothing "
    "is solved')"
)


_STARTS = "rollout.starts, which begins groups in the middle of attempts that succeeded (docs/starts.md)"


def _flat(updates: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the line for rewards that differ, or rise, without success.

    With `rollout.starts`, only attempts from the beginning count: starts keep the success of the others near a target.
    """
    half, begun = UPDATES // 2, any("starts" in row for row in updates)
    whole = [
        {**row, "success": row.get("whole_success"), "reward_mean": None} if "starts" in row else row for row in updates
    ]
    first, last = whole[:half], whole[-half:]
    success, reward = (tuple(_mean(name, part) for part in (first, last)) for name in ("success", "reward_mean"))
    if success[1] >= 0.5 or abs(success[1] - success[0]) >= FLAT or min(success) < 0 or (min(reward) < 0 and not begun):
        return {}
    what = f"success stays at {success[1]:.3f} ({success[0]:.3f} in the first {half} updates)"
    if reward[1] - reward[0] >= ROSE and min(reward) >= 0:
        rose = f"rewards rose from {reward[0]:.2f} to {reward[1]:.2f}, and {what}"
        return {"flat": f"{rose}: the rewarded behavior is not the goal (docs/environments.md, 'Shaping')"}
    if success[1] < RARE:
        begin = "" if begun else f"{_STARTS}, or "
        return {"flat": f"{what}, too rarely to learn from: {begin and 'set '}{begin}{_HOW_TO_BEGIN}"}
    if updates[-1]["update"] - updates[0]["update"] >= 3 * UPDATES:
        ways = "" if begun else "rollout.starts, "
        return {
            "flat": f"{what}, though rewards within groups differ; try {ways}demonstrations of whole attempts, "
            "data.curriculum=informative (docs/starts.md), or twice the training.optimizer.learning_rate"
        }
    return {}


def _repeated(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the line for an update with half of its replies repeating one token."""
    if (share := row.get("repeated_replies") or 0.0) < 0.5:
        return {}
    return {
        "repeated": f"{share:.0%} of the replies of update {row['update']} repeat one token; go back to an earlier "
        "checkpoint (--resume-from) with half the training.optimizer.learning_rate, or, if they did from the start, "
        "give the warm start more steps"
    }


def _failing_tools(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the line for an update with nearly all tool calls failing, which suggests a bug in a tool."""
    calls, errors = (row.get(f"env/tool_{what}") or 0.0 for what in ("calls", "errors"))
    if not calls or errors < SHARE * calls:
        return {}
    what = f"{errors / calls:.0%} of the tool calls of update {row['update']} end in an error"
    return {"tools": f"{what}, which the model reads as text; read one (treadle show RUN): the tools may have a bug"}


def _mean(name: str, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean of a metric over the rows with it; -1 if there are none."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else -1.0


class StallWarnings(Callback):
    """Logs each kind of stall once, when it is first detected."""

    def start(self, run: RunStart) -> None:
        self._log, self._logged = run.log, set[str]()
        self._before: list[Mapping[str, Any]] = []
        self._rows: list[Mapping[str, Any]] = [
            row
            for row in RunDirectory(run.directory).metrics()
            if row["kind"] == "update" and row["update"] <= run.update
        ]

    def update(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        del self._rows[UPDATES:-UPDATES]
        self._look()

    def evaluate(self, result: EvaluationResult) -> None:
        if result.update == 0:
            self._before.append({"kind": "evaluation", **asdict(result)})
            self._look()

    def _look(self) -> None:
        for kind, line in stalls([*self._before, *self._rows]).items():
            if kind not in self._logged:
                self._logged.add(kind)
                self._log(f"warning: {line}")
