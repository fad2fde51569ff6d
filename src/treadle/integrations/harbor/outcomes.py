"""The one table from Harbor's report of a trial and the gateway's record to reward or failure.

    event                                                   result
    the gateway refused one call too many                   stopped and verified: max_steps, with its reward
    the engine failed during a call                         failed (engine): sampled again, by `failures.causes`
    the context was full                                    context, with its reward, or 0
                                                            if Harbor did not verify; or dropped
    the agent timed out, and was verified                   `agent_timed_out`: done, with its reward; or dropped
    a time-out well before the agent's limit                failed (infrastructure): a sandbox's time-out
    sandbox or agent could not be started                   failed (environment): again, by `failures.causes`
    the sandbox died                                        failed (infrastructure): again
    the model's server answered with an error               failed (engine): again
    a missing, empty, wrong or late reward, other keys;     failed (verifier): never again; tasks that repeat this
    a task refused by Harbor                                are left out (`failures.task_limit`)
    the agent raised or exited with an error, and was       done, with its reward
        verified
    any other error of the agent                            failed (agent)
    none of these, and a reward                             done, with its reward

A missing reward is never 0. `failures` sets, by cause, the reward of failures and the number of retries. Other attempts
of the group are not affected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.core.errors import Cause, ContextExceeded, EngineError, StepsExceeded, TrajectoryFailure
from treadle.core.rewards import Reward, is_reward
from treadle.integrations.harbor.config import HarborConfig
from treadle.rollout.drivers.gateway import CallError

VERIFIER = "verifier"
AGENT = "agent_execution"
"""Phases of a trial, as named by `TrialReport.phase`; earlier ones belong to the start."""

_CONTEXT = {"ContextLengthExceededError", "ContextWindowExceededError", "OutputLengthExceededError"}
_MODEL = {
    *("APIConnectionError", "APIError", "APIStatusError", "APITimeoutError", "InternalServerError"),
    *("RateLimitError", "ServiceUnavailableError", "Timeout", "BadGatewayError"),
}
_LOST = {
    *("RuntimeError", "OSError", "ConnectionError", "ConnectionResetError", "BrokenPipeError", "TimeoutError"),
    *("AddTestsDirError", "DownloadVerifierDirError", "MemoryLimitExceededError", "SandboxLikelyOutOfMemoryError"),
}
_GRADABLE = {"NonZeroAgentExitCodeError", "AgentTimeoutError"}
_EARLY = 0.95  # share of the agent's time limit: an earlier time-out is not the agent's


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A worker's report of a trial (`child/treadle_trials.py`).

    exception: name of its class, "" if there was none; phase: phase in which it was raised. rewards: the verifier's.
    agent_seconds, agent_limit: the agent's time and its limit, if the agent failed. recorded: for each segment, a
    digest of each call in the agent's own record. invalid: why Harbor refuses the task.
    """

    exception: str = ""
    message: str = ""
    traceback: str = ""
    phase: str = ""
    rewards: Mapping[str, float] | None = None
    reward_valid: bool | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    agent_seconds: float = 0.0
    agent_limit: float | None = None
    summaries: int = 0
    stopped: bool = False
    recorded: tuple[tuple[str, ...], ...] = ()
    invalid: str = ""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> TrialReport:
        """Parse a worker's answer."""
        if "invalid" in answer:
            return cls(invalid=answer["invalid"])
        exception = answer["exception"] or {"type": "", "message": ""}
        same = ("traceback", "phase", "rewards", "reward_valid", "seconds", "agent_seconds", "agent_limit", "summaries")
        return cls(
            exception=exception["type"],
            message=exception["message"],
            stopped=answer["stopped"],
            recorded=tuple(map(tuple, answer["recorded"])),
            **{name: answer[name] for name in same},
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a trial. ended_by: for `rollout.drivers.outcome_of`; None if it was completed.

    context_exceeded, timed_out: for metrics, independent of the policy applied.
    """

    reward: Reward = field(default_factory=Reward)
    ended_by: TrajectoryFailure | CallError | None = None
    warning: str = ""
    context_exceeded: bool = False
    timed_out: bool = False


def judge(report: TrialReport, refused: CallError | None, config: HarborConfig) -> Verdict:
    """Return the verdict on a trial by the table above. refused: why the gateway refused the last call, if so."""
    if report.invalid:
        return Verdict(ended_by=TrajectoryFailure(Cause.VERIFIER, f"Harbor does not accept the task: {report.invalid}"))
    if isinstance(refused, EngineError):
        return Verdict(ended_by=refused)
    if report.exception in _CONTEXT or (report.phase == AGENT and isinstance(refused, ContextExceeded)):
        full = refused if isinstance(refused, ContextExceeded) else ContextExceeded(0, 0)
        # For a task of several steps, or an agent that exited with an error.
        reward = _reward(report, config)
        verified = reward if isinstance(reward, Reward) else Reward()
        return Verdict(verified, ended_by=full, warning=_exception_text(report), context_exceeded=True)
    timed_out, limit = report.exception == "AgentTimeoutError", report.agent_limit
    if timed_out and limit is not None and report.agent_seconds < _EARLY * limit:
        return Verdict(ended_by=_failure(Cause.INFRASTRUCTURE, report, "a sandbox's time-out, not the agent's"))
    reward = _reward(report, config)
    # The reward of a trial that raised counts if it was verified after the agent had ended.
    gradable = report.exception in _GRADABLE and report.phase in (AGENT, VERIFIER) and isinstance(reward, Reward)
    if report.exception and not gradable:
        return Verdict(ended_by=_failure(_cause(report), report), timed_out=timed_out)
    if isinstance(reward, TrajectoryFailure):
        return Verdict(ended_by=reward)
    if timed_out and config.agent_timed_out == "drop":
        return Verdict(ended_by=_failure(Cause.TIMEOUT, report), timed_out=True)
    stopped = report.stopped and not timed_out and isinstance(refused, StepsExceeded)
    return Verdict(reward, refused if stopped else None, _exception_text(report), timed_out=timed_out)


def _cause(report: TrialReport) -> Cause:
    name = report.exception
    if name == "AgentTimeoutError":
        return Cause.TIMEOUT
    if name in _MODEL:
        return Cause.ENGINE
    if report.phase not in (AGENT, VERIFIER):
        return Cause.ENVIRONMENT
    if name in _LOST:
        return Cause.INFRASTRUCTURE
    return Cause.VERIFIER if report.phase == VERIFIER else Cause.AGENT


def _reward(report: TrialReport, config: HarborConfig) -> Reward | TrajectoryFailure:
    rewards = report.rewards
    if not rewards:
        return TrajectoryFailure(Cause.VERIFIER, "the verifier gave no reward")
    if report.reward_valid is False:
        return TrajectoryFailure(Cause.VERIFIER, f"Harbor says that the reward {dict(rewards)} is not valid")
    if missing := [key for key in config.rewards if key not in rewards]:
        only = f"only {', '.join(map(repr, rewards))}; set driver_options.rewards"
        return TrajectoryFailure(Cause.VERIFIER, f"the verifier gave no reward {missing[0]!r}, {only}")
    if wrong := [key for key in config.rewards if not is_reward(rewards[key])]:
        return TrajectoryFailure(Cause.VERIFIER, f"the verifier's reward {wrong[0]!r} is {rewards[wrong[0]]!r}")
    return Reward({key: rewards[key] for key in config.rewards})


def _failure(cause: Cause, report: TrialReport, why: str = "") -> TrajectoryFailure:
    what = f"{_exception_text(report)}{f' ({why})' if why else ''}"
    return TrajectoryFailure(cause, what, report.traceback)


def _exception_text(report: TrialReport) -> str:
    return f"{report.exception}: {report.message}".rstrip(": ") if report.exception else ""
