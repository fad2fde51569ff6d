"""Values of each sampled token, from the run's shards and from the traces of its updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.core.trainer import StepTrace
from treadle.core.types import Step
from treadle.view.models import Column

COLUMNS = tuple(
    Column(name=name, label=label, scale=scale, help=text)
    for name, label, scale, text in (
        (
            "logprob",
            "log-prob, engine",
            "low",
            "log-probability in the distribution that it was sampled from",
        ),
        ("learner_logprob", "log-prob, learner", "low", "log-probability by the learner, before the update"),
        ("ratio", "ratio", "around_one", "probability by the learner over the one that the loss compares with"),
        ("clipped", "clipped", "flag", "whether the loss bounded the ratio"),
        ("advantage", "advantage", "diverging", "weight of the token in the loss; none if masked"),
        ("mask", "mask", "flag", "whether the token may be trained"),
        ("version", "version", "steps", "of the policy that sampled the token"),
        ("entropy", "entropy", "high", "of the distribution that the token is drawn from, by the learner, in nats"),
        ("reward", "token reward", "diverging", "given for this very token"),
    )
)
"""All columns. Traces are recorded for a share of the groups only."""


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

    In training, a column that could have been recorded is shown as missing; few environments reward single tokens.
    """
    names = set(recorded)
    shown = names | ({column.name for column in COLUMNS} - {"reward"} if split == "train" else set())
    return [c.model_copy(update={"is_recorded": c.name in names}) for c in COLUMNS if c.name in shown]


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
