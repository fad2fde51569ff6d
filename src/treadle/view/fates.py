"""What became of a step, in words. docs/runs.md has all reasons in one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from treadle.core.errors import Cause
from treadle.core.types import DropReason, StepState
from treadle.view.models import Fate
from treadle.view.texts import clipped

_MOST_OF_REASON = 200  # characters


class Explanation(NamedTuple):
    """A sentence about an outcome, and the settings that decide it."""

    text: str
    settings: tuple[str, ...] = ()


REASONS: Mapping[DropReason, Explanation] = {
    DropReason.FAILED: Explanation(
        "Not trained: its attempt, or too many of its group, ended without a reward, and no reward is not 0.",
        ("training.min_group_size",),
    ),
    DropReason.RESAMPLED: Explanation(
        "Not trained: the run was interrupted before a checkpoint held this step, and sampled its batch again.",
        ("orchestration.checkpoint_every",),
    ),
    DropReason.REFUSED: Explanation(
        "Not trained: the learner's model cannot take its trajectory; the warning says why.",
        ("rollout.max_input_tokens", "rollout.max_completion_tokens"),
    ),
    DropReason.CANCELLED: Explanation(
        "Not trained: its caller did not wait for the answer, so that it never reached the agent.",
        ("rollout.agent_timeout",),
    ),
    DropReason.STALE: Explanation(
        "Not trained: it holds tokens of a policy that was too old by the time of its update.",
        ("orchestration.max_staleness", "orchestration.stale_policy"),
    ),
    DropReason.FILTERED: Explanation(
        "Not trained: all advantages of its group are 0, and dynamic sampling leaves such groups out.",
        ("algorithm.dynamic_sampling",),
    ),
    DropReason.ROLLED_BACK: Explanation(
        "Not trained: the weights that sampled it were lost when the run went back to a checkpoint.",
        ("orchestration.checkpoint_every",),
    ),
    DropReason.OVERLONG: Explanation(
        "Not trained: its trajectory was cut off at a limit, and such attempts, or groups with too few others, are "
        "dropped.",
        ("rewards.overlong", "rollout.max_completion_tokens", "rollout.max_steps"),
    ),
    DropReason.DAMAGED: Explanation("Not trained: its tokens were found damaged on disk when the run was resumed."),
    DropReason.UNUSED: Explanation(
        "Not trained: it still waited for an update when the run was finished.", ("orchestration.updates",)
    ),
}
_STATES: Mapping[StepState, Explanation] = {
    StepState.TRAINED: Explanation("Trained."),
    StepState.EVALUATED: Explanation("Played in an evaluation, which trains nothing.", ("evaluation.every",)),
    StepState.RECORDED: Explanation(
        "Recorded and durable; no checkpoint holds it yet.", ("orchestration.checkpoint_every",)
    ),
}
_LIMITS: Mapping[Cause, tuple[str, ...]] = {
    Cause.TIMEOUT: ("rollout.trajectory_timeout", "rollout.agent_timeout", "rollout.environment_timeout"),
    Cause.CONTEXT: ("rollout.max_input_tokens",),
}


def failure_settings(cause: str, message: str) -> tuple[str, ...]:
    """Return the settings that decide about such a failure; of several limits, those that the message names."""
    if cause not in list(Cause):
        return ()
    limits = _LIMITS.get(Cause(cause), ())
    named = tuple(path for path in limits if path in message)
    return (*(named or limits), "failures.causes")


def explain(state: str, reason: str | None) -> Explanation:
    """Explain a state of the ledger; one that this version does not know, by its name alone."""
    try:
        return REASONS[DropReason(reason)] if reason is not None else _STATES[StepState(state)]
    except (ValueError, KeyError):
        return Explanation(f"{state}: {reason}" if reason else state)


def fate(
    step: Mapping[str, Any], trajectory: Mapping[str, Any], update: int | None, trainable: int | None = None
) -> Fate:
    """Explain what became of a step.

    step, trajectory: rows of the ledger. update: the one that trained its group, if known. trainable: how many of its
    sampled tokens may be trained; None where its tokens cannot be read.
    """
    text, settings = explain(step["state"], step["reason"])
    if step["state"] == StepState.TRAINED:
        text = _trained(step, trajectory, update, trainable)
    elif step["state"] == StepState.RECORDED and update is not None:
        text = f"In the batch of update {update}, which no checkpoint holds yet: a run resumed before makes it again."
    elif step["reason"] == DropReason.FAILED and trajectory["failure_cause"]:
        message = trajectory["failure_message"] or ""
        why = clipped(message, _MOST_OF_REASON)  # the trajectory's page has all of it
        text = f"Not trained: its attempt has no reward: {trajectory['failure_cause']}: {why}"
        settings = failure_settings(trajectory["failure_cause"], message)
    elif step["reason"] == DropReason.REFUSED and trajectory["warning"]:
        text = f"Not trained: the learner's model cannot take its trajectory: {clipped(trajectory['warning'])}"
    return Fate(state=step["state"], reason=step["reason"], text=text, settings=list(settings))


def _trained(step: Mapping[str, Any], trajectory: Mapping[str, Any], update: int | None, trainable: int | None) -> str:
    where = "" if update is None else f" in update {update}"
    tokens = f"{trainable} of its {step['completion_tokens']} sampled tokens" if trainable is not None else "its tokens"
    advantage = trajectory["advantage"]
    if advantage is None:
        return f"Trained{where}: {tokens} are in the loss."
    if advantage == 0:
        return f"Trained{where}: {tokens} are in the loss, but with advantage 0 they push nothing either way."
    way = "more" if advantage > 0 else "less"
    return f"Trained{where}: {tokens} are in the loss, made {way} likely by an advantage of {advantage:+.3g}."
