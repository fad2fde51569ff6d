"""Values of each sampled token, from the run's shards and from the traces of its updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.core.trainer import StepTrace
from treadle.core.types import Step
from treadle.view.models import Column

COLUMNS = (
    Column(
        name="logprob",
        label="log-prob, engine",
        help="log-probability under the distribution that the token was sampled from",
        scale="low",
    ),
    Column(
        name="learner_logprob",
        label="log-prob, learner",
        help="log-probability by the learner, before the update",
        scale="low",
    ),
    Column(
        name="ratio",
        label="ratio",
        help="probability by the learner over the one that the loss compares with",
        scale="around_one",
    ),
    Column(name="clipped", label="clipped", help="whether the loss bounded the ratio", scale="flag"),
    Column(
        name="advantage",
        label="advantage",
        help="what the loss weighs the token with; none if masked",
        scale="diverging",
    ),
    Column(name="mask", label="mask", help="whether the token may be trained", scale="flag"),
    Column(name="version", label="version", help="of the policy that sampled the token", scale="steps"),
    Column(
        name="entropy",
        label="entropy",
        help="of the distribution that the token is drawn from, by the learner, in nats",
        scale="high",
    ),
    Column(name="reward", label="token reward", help="given for this very token", scale="diverging"),
)
"""All columns. Traces are recorded for a share of the groups only."""

_OPTIONAL = frozenset({"reward"})  # columns that most environments do not give


def step_columns(step: Step, advantage: float | None, trace: StepTrace | None) -> dict[str, list[Any]]:
    """Return name -> a value for each sampled token, for the recorded columns. advantage: the trajectory's mean."""
    mask = step.mask.tolist()
    columns: dict[str, list[Any]] = {
        "logprob": _rounded(step.logprobs),
        "mask": mask,
        "version": step.policy_versions.tolist(),
    }
    if trace is not None:
        columns["learner_logprob"] = _rounded(trace.logprobs)
        columns["entropy"] = _rounded(trace.entropy)
        columns["advantage"] = [a if m else None for a, m in zip(_rounded(trace.advantage), mask, strict=True)]
        if trace.ratio is not None:
            columns["ratio"] = _rounded(trace.ratio)
        if trace.clipped is not None:
            columns["clipped"] = trace.clipped.tolist()
    elif advantage is not None:
        columns["advantage"] = [advantage if m else None for m in mask]
    if step.given.tokens is not None:
        columns["reward"] = step.given.tokens.tolist()
    return columns


def columns_of(recorded: Iterable[str], split: str) -> list[Column]:
    """Return the columns to show, given the names of those that some step has.

    In training, a column that could have been recorded is shown as missing.
    """
    there = set(recorded)
    missing = {column.name for column in COLUMNS} - there - _OPTIONAL if split == "train" else set()
    return [
        column.model_copy(update={"is_recorded": column.name in there})
        for column in COLUMNS
        if column.name in there | missing
    ]


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
