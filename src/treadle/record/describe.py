"""A recorded step as plain data: `describe` names each fact once, and everything else is derived from it.

rollout_store.step_row                a row of a Parquet shard
trajectory_files.as_record, atif      records of `treadle export-traces`
shown_steps                           steps in `treadle show` and `treadle view`
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.core.outcomes import rejection, was_played
from treadle.core.support import Probabilities
from treadle.core.trainer import StepTrace
from treadle.core.types import Step
from treadle.packing.breaks import Relation, relations
from treadle.packing.compactions import Compaction, compactions, recorded_calls
from treadle.packing.flat import PackedCall
from treadle.record.image_files import name_of
from treadle.rendering.grammars import with_support
from treadle.rendering.texts import MessageTexts, TokenTexts

_NAMED = 8  # possible tokens up to which their texts are shown
_SHOWN = (
    *("stop_reason", "temperature", "dropped", "reward", "shaping", "state_key", "started", "seconds", "waited"),
    *("summary", "withheld", "calls", "chat", "images"),
)


def describe(step: Step) -> dict[str, Any]:
    """Return all fields of a step by name, with its sampling parameters and reward components; arrays stay arrays."""
    others = "sampling", "given", "support", "probabilities", "images"
    own = {f.name: getattr(step, f.name) for f in fields(step) if f.name not in others}
    return {
        **own,
        "support_sizes": None if step.support is None else step.support.counts,
        "support_ids": None if step.support is None else step.support.ids,
        **probability_columns(step.probabilities),
        **asdict(step.sampling),
        "components": dict(step.given.components),
        "token_rewards": step.given.tokens,
        "calls": [asdict(call) for call in step.calls],
        "chat": None if step.chat is None else asdict(step.chat),
        "images": [{**asdict(image), "url": name_of(image.url)} for image in step.images],
    }


def probability_columns(probabilities: Probabilities | None) -> dict[str, Any]:
    if probabilities is None:
        return {"probability_sizes": None, "probability_ids": None, "probabilities": None}
    of = probabilities.of
    return {"probability_sizes": of.counts, "probability_ids": of.ids, "probabilities": probabilities.values}


def shown_steps(
    steps: Sequence[Step], texts: TokenTexts, advantage: float | None, traces: Iterable[StepTrace] = ()
) -> tuple[list[dict[str, Any]], list[Compaction]]:
    """Return the steps of a trajectory for display, and its compactions.

    advantage: mean over the trajectory. traces: traces of its steps; the last one of a step counts.
    """
    related, traced = step_relations(steps, texts), {trace.step: trace for trace in traces}
    if texts.grammars is not None:
        steps = [with_support(step, texts.grammars) for step in steps]
    shown = [
        _shown(number, step, relation, advantage, traced.get(number), texts)
        for number, (step, relation) in enumerate(zip(steps, related, strict=True))
    ]
    return shown, [] if isinstance(texts, MessageTexts) else compactions(recorded_calls(steps), related)


def packed_calls(steps: Sequence[Step], texts: TokenTexts, trajectory: int = 0) -> list[PackedCall]:
    return [PackedCall(*texts.call(step), first=0, trajectory=trajectory) for step in steps]


def step_relations(steps: Sequence[Step], texts: TokenTexts) -> list[Relation]:
    causes, played = [step.break_cause for step in steps], [was_played(step) for step in steps]
    return relations(packed_calls(steps, texts), texts.decode, causes, played)


def _shown(
    number: int, step: Step, relation: Relation, advantage: float | None, trace: StepTrace | None, texts: TokenTexts
) -> dict[str, Any]:
    facts = describe(step)
    return {
        "step": number,
        "prompt_tokens": step.prompt_tokens,
        "completion_tokens": step.completion_tokens,
        "relation": asdict(relation),
        **{name: facts[name] for name in _SHOWN},
        "components": step.given.by_name,  # with the sum of the token rewards
        "rejection": rejection(step),
        "versions": np.unique(step.policy_versions).tolist(),
        # The update that computed the learner's columns.
        "update": None if trace is None else trace.update,
        "columns": {} if step.is_text else _columns(step, None if step.dropped else advantage, trace, texts),
    }


def _columns(step: Step, advantage: float | None, trace: StepTrace | None, texts: TokenTexts) -> dict[str, list[Any]]:
    """Return name -> values of all sampled tokens, for the recorded columns."""
    mask = step.mask.tolist()
    columns: dict[str, list[Any]] = {
        "logprob": _rounded(step.logprobs),
        "mask": mask,
        "policy_version": step.policy_versions.tolist(),
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
    if step.support is not None:
        counts = step.support.counts.tolist()
        columns["possible"] = [count or None for count in counts]
        columns["alternatives"] = [
            [texts.of(int(ident)) for ident in step.support.of_token(token)] if 0 < count <= _NAMED else None
            for token, count in enumerate(counts)
        ]
    if step.given.tokens is not None:
        columns["reward"] = step.given.tokens.tolist()
    return columns


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
