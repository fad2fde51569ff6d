"""What became of a step, in words."""

from __future__ import annotations

import ast
import threading
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from treadle.core.errors import Cause
from treadle.core.types import DropReason, StepState
from treadle.view import models
from treadle.view.texts import clipped

_READING = threading.Lock()
_MOST_OF_REASON = 200  # characters


class _Rule(NamedTuple):
    """Holds a sentence about a reason, the settings that decide it, and where the source does."""

    text: str
    settings: tuple[str, ...]
    rule: str


RULES: Mapping[DropReason, _Rule] = {
    DropReason.FAILED: _Rule(
        "Not trained: its attempt, or too many of its group, ended without a reward, and no reward is not 0.",
        ("training.min_group_size",),
        "core.outcomes.reject_reason",
    ),
    DropReason.RESAMPLED: _Rule(
        "Not trained: the run was interrupted before a checkpoint held this step, and sampled its batch again.",
        ("orchestration.checkpoint_every",),
        "core.outcomes.interrupted_reason",
    ),
    DropReason.REFUSED: _Rule(
        "Not trained: the learner's model cannot take its trajectory; the warning says why.",
        ("rollout.max_input_tokens", "rollout.max_completion_tokens"),
        "packing.checks.split_untrainable",
    ),
    DropReason.CANCELLED: _Rule(
        "Not trained: its caller did not wait for the answer, so that it never reached the agent.",
        ("rollout.agent_timeout",),
        "core.outcomes.was_played",
    ),
    DropReason.STALE: _Rule(
        "Not trained: it holds tokens of a policy that was too old by the time of its update.",
        ("orchestration.max_staleness", "orchestration.stale_policy"),
        "core.outcomes.without_stale",
    ),
    DropReason.FILTERED: _Rule(
        "Not trained: all advantages of its group are 0, and dynamic sampling leaves such groups out.",
        ("algorithm.dynamic_sampling",),
        "algorithms.dynamic_sampling.has_zero_advantage",
    ),
    DropReason.ROLLED_BACK: _Rule(
        "Not trained: the weights that sampled it were lost when the run went back to a checkpoint.",
        ("orchestration.checkpoint_every",),
        "core.outcomes.interrupted_reason",
    ),
    DropReason.OVERLONG: _Rule(
        "Not trained: its trajectory was cut off at a limit, and such attempts, or groups with too few others, are "
        "dropped.",
        ("rewards.overlong", "rollout.max_completion_tokens", "rollout.max_steps"),
        "core.outcomes.reject_reason",
    ),
    DropReason.DAMAGED: _Rule(
        "Not trained: its tokens were found damaged on disk when the run was resumed.",
        (),
        "orchestration.store.resume.roll_back",
    ),
    DropReason.UNUSED: _Rule(
        "Not trained: it still waited for an update when the run was finished.",
        ("orchestration.updates",),
        "orchestration.store.ledger.Ledger.commit_checkpoint",
    ),
}
_LIMITS: Mapping[Cause, tuple[str, ...]] = {
    Cause.TIMEOUT: ("rollout.trajectory_timeout", "rollout.agent_timeout", "rollout.environment_timeout"),
    Cause.CONTEXT: ("rollout.max_input_tokens",),
}


def failure_settings(cause: str, message: str) -> list[str]:
    """Return the settings that decide about attempts with such a failure; of limits, those that the message names."""
    limits = _LIMITS.get(Cause(cause), ()) if cause in list(Cause) else None
    if limits is None:
        return []
    named = [path for path in limits if path in message]
    return [*(named or limits), "failures.causes"]


_STATES: Mapping[StepState, _Rule] = {
    StepState.TRAINED: _Rule("Trained.", (), "orchestration.store.ledger.Ledger.commit_checkpoint"),
    StepState.EVALUATED: _Rule(
        "Played in an evaluation, which trains nothing.", ("evaluation.every",), "core.outcomes.outcome_when_recorded"
    ),
    StepState.RECORDED: _Rule(
        "Recorded and durable; no checkpoint holds it yet.",
        ("orchestration.checkpoint_every",),
        "core.outcomes.outcome_when_recorded",
    ),
}


def all_rules() -> models.Rules:
    """Return every way in which a step can end, each with the function that decides it.

    One thread at a time: CPython's parser of its own syntax trees is not safe in several.
    """
    with _READING:
        return _all_rules()


@cache
def _all_rules() -> models.Rules:
    named: list[tuple[StepState, DropReason | None, _Rule]] = [(s, None, rule) for s, rule in _STATES.items()]
    named += [(StepState.DROPPED, reason, rule) for reason, rule in RULES.items()]
    found = []
    for state, reason, rule in named:
        name = f"treadle.{rule.rule}"
        found.append(
            models.Rule(
                state=state,
                reason=reason,
                text=rule.text,
                settings=list(rule.settings),
                rule=name,
                source=_source(name),
            )
        )
    return models.Rules(rules=found)


def _source(name: str) -> str:
    """Return the source of a function or method, without importing its module, which may need what is not installed."""
    place, (_, *parts) = files("treadle"), name.split(".")
    while (place / parts[0]).is_dir():
        place /= parts.pop(0)
    text = (place / f"{parts.pop(0)}.py").read_text()
    found: ast.AST = ast.parse(text)
    for part in parts:
        found = next(node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == part)
    return ast.get_source_segment(text, found) or ""


def rule_of(state: str, reason: str | None) -> _Rule:
    """Return the rule of a state in the ledger; of one that this version does not know, its name alone."""
    try:
        return RULES[DropReason(reason)] if reason is not None else _STATES[StepState(state)]
    except (ValueError, KeyError):
        return _Rule(f"{state}: {reason}" if reason else state, (), "")


def fate(
    step: Mapping[str, Any], trajectory: Mapping[str, Any], update: int | None, trainable: int | None = None
) -> models.Fate:
    """Return what became of a step. step, trajectory: rows of the ledger. update: that trained its group, if known.

    trainable: how many of its sampled tokens may be trained; None where its tokens cannot be read.
    """
    rule = rule_of(step["state"], step["reason"])
    text, settings = rule.text, rule.settings
    if step["state"] == StepState.TRAINED:
        text = _trained(step, trajectory, update, trainable)
    elif step["state"] == StepState.RECORDED and update is not None:
        text = f"In the batch of update {update}, which no checkpoint holds yet: a run resumed before makes it again."
    elif step["reason"] == DropReason.FAILED and trajectory["failure_cause"]:
        why = clipped(trajectory["failure_message"] or "", _MOST_OF_REASON)  # the trajectory's page has all of it
        text = f"Not trained: its attempt has no reward: {trajectory['failure_cause']}: {why}"
        settings = tuple(failure_settings(trajectory["failure_cause"], trajectory["failure_message"] or ""))
    elif step["reason"] == DropReason.REFUSED and trajectory["warning"]:
        text = f"Not trained: the learner's model cannot take its trajectory: {clipped(trajectory['warning'])}"
    return models.Fate(
        state=step["state"], reason=step["reason"], text=text, settings=list(settings), rule=f"treadle.{rule.rule}"
    )


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
