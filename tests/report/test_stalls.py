"""Warnings that nothing is learned: what makes each of them, what does not, and where they are shown."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import tiny
from treadle.record.run_directory import RunDirectory
from treadle.report.callback import RunStart
from treadle.report.metrics import EvaluationResult
from treadle.report.stalls import UPDATES, StallWarnings, stalls

HEALTHY = {
    "kind": "update",
    "reward_mean": 0.25,
    "reward_positive": 0.25,
    "success": 0.25,
    "zero_advantage_groups": 0.3,
    "last_stop_length": 0.0,
    "entropy": 0.3,
    "trajectories": 64,
    "failed": 1,
}
NO_REWARD = {"reward_mean": 0.0, "reward_positive": 0.0, "success": 0.0, "zero_advantage_groups": 1.0}
EQUAL, SOLVED = {"zero_advantage_groups": 0.95}, {"success": 0.97, "reward_mean": 0.97, "reward_positive": 0.97}
EVALUATED = {"kind": "evaluation", "update": 0, "temperature": 1.0, "success": 0.2, "tasks": 64}


def rows(*parts: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of metrics.jsonl: each part so many updates that differ from a healthy one like this."""
    differing = [different for count, different in parts for _ in range(count)]
    return [
        {**HEALTHY, "update": number, "success": 0.25 + 0.01 * number, **different}
        for number, different in enumerate(differing, 1)
    ]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([(30, {})], {}),
        (
            [(1, {"env/tool_calls": 0.5, "env/tool_errors": 0.45})],
            {"tools": "90% of the tool calls of update 1 end in an"},
        ),
        ([(30, {"env/tool_calls": 0.5, "env/tool_errors": 0.4})], {}),
        ([(30, {"env/tool_calls": 0.0, "env/tool_errors": 0.0})], {}),
        ([(UPDATES - 1, NO_REWARD)], {}),
        ([(5, {}), (UPDATES, NO_REWARD)], {"zero": "all 504 rewards of the last 8 updates are 0"}),
        (
            [(30, {**NO_REWARD, "shaped_reward_mean": -0.2, **{"zero_advantage_groups": 0.1}})],
            {"flat": "success stays at 0.000"},
        ),
        ([(30, {**NO_REWARD, "teacher_kl": 0.3})], {}),
        ([(30, {**NO_REWARD, "reward_mean": None, "reward_positive": None, "zero_advantage_groups": None})], {}),
        ([(30, EQUAL)], {"equal": "95% of the groups of the last 8 updates have equal rewards"}),
        ([(30, {"zero_advantage_groups": 0.89})], {}),
        ([(UPDATES, EQUAL), (5, {})], {}),
        ([(UPDATES, {}), (UPDATES, {**EQUAL, **SOLVED, "entropy": 0.001})], {}),
        ([(UPDATES, {**EQUAL, **SOLVED})], {"equal": "solved from the start; choose harder ones"}),
        (
            [(30, {"last_stop_length": 0.9})],
            {"cut": "90% of the attempts of the last 8 updates end with a reply cut off"},
        ),
        ([(10, {}), (10, {"entropy": 0.004})], {"entropy": "entropy fell from 0.3 to 0.004 nats"}),
        ([(10, {}), (10, {"entropy": 0.025})], {}),
        ([(10, {"entropy": 0.04}), (10, {"entropy": 0.01})], {}),
        ([(30, {"entropy": None})], {}),
        (
            [(4, {"success": 0.1, "reward_mean": 0.1}), (4, {"success": 0.11, "reward_mean": 0.4})],
            {"flat": "rewards rose from 0.10 to 0.40, and success stays at 0.110 (0.100 in the first 4 updates)"},
        ),
        ([(4, {"success": 0.1, "reward_mean": 0.1}), (4, {"success": 0.2, "reward_mean": 0.4})], {}),
        ([(4, {"success": 0.1, "reward_mean": 0.1}), (3, {"success": 0.1, "reward_mean": 0.4})], {}),
        ([(8, {"success": 0.01})], {"flat": "success stays at 0.010 (0.010 in the first 4 updates), too rarely"}),
        ([(8, {"success": 0.25})], {}),
        (
            [(8, {"success": 0.01})],
            {"flat": "rollout.starts, which begins groups in the middle of attempts that succeeded"},
        ),
        ([(30, {"success": 0.25})], {"flat": "try rollout.starts, demonstrations of whole attempts, data.curriculum"}),
        ([(30, {"success": 0.25, "starts": 0.5})], {}),  # kept there by the choice of starts
        ([(30, {"success": 0.4, "starts": 0.5, "whole_success": 0.1})], {"flat": "success stays at 0.100"}),
        (
            [(30, {"success": 0.4, "starts": 0.5, "whole_success": 0.1})],
            {"flat": "differ; try demonstrations of whole"},
        ),
        ([(30, {"success": 0.4, "reward_mean": 0.0, "starts": 1.0, "whole_success": None})], {}),
        ([(30, {"success": 0.8})], {}),
        ([(30, {"success": None})], {}),
        ([(1, {"repeated_replies": 0.5})], {"repeated": "50% of the replies of update 1 repeat one token"}),
        ([(1, {"repeated_replies": 0.4})], {}),
    ],
)
def test_each_is_told_from_the_last_updates_alone(
    parts: list[tuple[int, dict[str, Any]]], said: dict[str, str]
) -> None:
    given = [EVALUATED, *rows(*parts)]
    found = stalls(given)
    assert found.keys() == said.keys()
    for kind, text in said.items():
        assert text in found[kind] and "\n" not in found[kind]
    if len(given) > 2 * UPDATES:
        assert stalls([*given[: UPDATES + 1], *given[-UPDATES:]]) == found


def test_a_run_logs_each_kind_once_and_a_resumed_one_knows_its_first_updates(tmp_path: Path) -> None:
    lines: list[str] = []
    logged = rows((12, {}), (15, {**NO_REWARD, "entropy": 0.001}))
    with closing(RunDirectory.create(tmp_path / "run", tiny())) as run:
        for part in (logged[:23], logged[23:]):
            warnings = StallWarnings()
            warnings.start(RunStart(run.path, tiny(), part[0]["update"] - 1, lines.append, repr))
            for row in part:
                run.log(row)
                warnings.update(row)
            *equal, zero, entropy = lines  # of the last eight updates, seven at first
            assert len(equal) == (part[0]["update"] == 1)
            assert zero.startswith("warning: all 504 rewards") and entropy.startswith(
                "warning: entropy fell from 0.3 to"
            )
            lines.clear()


def test_no_success_before_training_is_said_at_once_and_no_more_when_there_is_some(tmp_path: Path) -> None:
    lines: list[str] = []
    warnings = StallWarnings()
    with closing(RunDirectory.create(tmp_path / "run", tiny())) as run:
        warnings.start(RunStart(run.path, tiny(), 0, lines.append, repr))
        for temperature in (1.0, 0.0):
            warnings.evaluate(EvaluationResult(0, temperature, 64, 0, 0.0, 0.0, 2.0, {}, {}))
    assert lines == [lines[0]] and lines[0].startswith("warning: none of 64 held-out tasks was solved before training")
    before = {**EVALUATED, "success": 0.0}
    assert stalls([before, *rows((4, {"success": 0.0}))]).keys() == {"unsolved"}
    assert not stalls([before, *rows((4, {"success": 0.05}))])
    assert not stalls([{**before, "temperature": 0.0}])
    assert not stalls([{**before, "success": None}])
