"""The outcome table, row by row."""

from dataclasses import replace
from typing import Any

import pytest

from treadle.core.config import build
from treadle.core.errors import Cause, ContextExceeded, EngineError, StepsExceeded, TrajectoryFailure
from treadle.integrations.harbor.config import HarborConfig
from treadle.integrations.harbor.outcomes import AGENT, VERIFIER, TrialReport, judge

WELL = TrialReport(rewards={"reward": 1.0}, seconds={"agent_execution": 3.0})
LATE = replace(WELL, exception="AgentTimeoutError", phase=VERIFIER, agent_seconds=60.0, agent_limit=60.0)
STEPS, CONTEXT, ENGINE = StepsExceeded(8), ContextExceeded(9000, 8000), EngineError("no GPU")


def raised(name: str, phase: str, **more: Any) -> TrialReport:
    return TrialReport(name, "text", "traceback", phase, **more)


def ended(report: TrialReport, refused: Any = None, **settings: Any) -> str:
    """What the verdict says: the cause of a failure, or what else ended it; then the reward, if it counts."""
    verdict = judge(report, refused, build(HarborConfig, settings))
    match verdict.ended_by:
        case TrajectoryFailure(cause=cause):
            return str(cause)
        case None:
            return f"done {verdict.reward.total():g}"
        case limit:
            return f"{type(limit).__name__} {verdict.reward.total():g}"


@pytest.mark.parametrize(
    ("report", "refused", "settings", "expected"),
    [
        (WELL, None, {}, "done 1"),
        (WELL, STEPS, {}, "done 1"),  # refused, but the agent came to its end by itself
        (replace(WELL, stopped=True), STEPS, {}, "StepsExceeded 1"),
        (replace(WELL, stopped=True, rewards=None), STEPS, {}, "verifier"),
        (WELL, ENGINE, {}, "EngineError 0"),
        (raised("InternalServerError", AGENT), None, {}, "engine"),
        (raised("ServiceUnavailableError", AGENT), None, {}, "engine"),
        (raised("ContextLengthExceededError", AGENT), CONTEXT, {}, "ContextExceeded 0"),
        (raised("ContextLengthExceededError", AGENT), None, {}, "ContextExceeded 0"),
        (LATE, None, {}, "done 1"),
        (LATE, None, {"agent_timed_out": "drop"}, "timeout"),
        (replace(LATE, rewards=None), None, {}, "timeout"),
        (replace(LATE, agent_seconds=10.0), None, {}, "infrastructure"),
        (replace(LATE, agent_seconds=10.0, agent_limit=None), None, {}, "done 1"),
        (raised("RuntimeError", "environment_setup"), None, {}, "environment"),
        (raised("EnvironmentStartTimeoutError", "environment_setup"), None, {}, "environment"),
        (raised("AgentSetupTimeoutError", "agent_setup"), None, {}, "environment"),
        (raised("RuntimeError", AGENT), None, {}, "infrastructure"),
        (raised("AddTestsDirError", VERIFIER), None, {}, "infrastructure"),
        (raised("DownloadVerifierDirError", VERIFIER), None, {}, "infrastructure"),
        (raised("RewardFileNotFoundError", VERIFIER), None, {}, "verifier"),
        (raised("RewardFileEmptyError", VERIFIER), None, {}, "verifier"),
        (raised("VerifierOutputParseError", VERIFIER), None, {}, "verifier"),
        (raised("VerifierTimeoutError", VERIFIER), None, {}, "verifier"),
        (raised("FileNotFoundError", VERIFIER), None, {}, "verifier"),
        (raised("KeyError", AGENT), None, {}, "agent"),
        (raised("NonZeroAgentExitCodeError", VERIFIER, rewards={"reward": 1.0}), None, {}, "done 1"),
        (raised("NonZeroAgentExitCodeError", AGENT), None, {}, "agent"),
        (TrialReport(), None, {}, "verifier"),
        (TrialReport(rewards={}), None, {}, "verifier"),
        (TrialReport(rewards={"reward": float("nan")}), None, {}, "verifier"),
        (TrialReport(rewards={"reward": 1.0}, reward_valid=False), None, {}, "verifier"),
        (TrialReport(rewards={"a": 1.0, "b": 2.0}), None, {}, "verifier"),
        (TrialReport(rewards={"a": 1.0, "b": 2.0}), None, {"rewards": ["a"]}, "done 1"),
        (TrialReport(rewards={"a": 1.0, "b": 2.0}), None, {"rewards": ["a", "b"]}, "done 3"),
        (TrialReport(rewards={"reward": 0.0}), None, {}, "done 0"),
        (TrialReport(invalid="FileNotFoundError: no task.toml"), None, {}, "verifier"),
    ],
)
def test_every_row_of_the_table(report: TrialReport, refused: Any, settings: dict[str, Any], expected: str) -> None:
    assert ended(report, refused, **settings) == expected


def test_a_missing_key_is_named_with_those_that_are_there() -> None:
    verdict = judge(TrialReport(rewards={"correct": 1.0}), None, HarborConfig())
    assert "no reward 'reward', only 'correct'; set driver_options.rewards" in str(verdict.ended_by)


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.CONTEXT])
def test_only_a_row_that_says_so_is_a_full_context(cause: Cause) -> None:
    """Whatever else Harbor's classes are called, no unknown one poses as a reward."""
    assert ended(raised(f"Unknown{cause}Error", AGENT, rewards={"reward": 1.0})) == "agent"
