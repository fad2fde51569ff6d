"""Training attempts as text, for trackers: a few of those with learner's values in traces/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle.core.draws import Stream, task_uniforms
from treadle.core.outcomes import rejection
from treadle.core.text import escape_text, redacted
from treadle.core.types import Group, Ids, Step, Trajectory, common_prefix

MOST = 4  # maximum attempts per batch
LONGEST = 4000  # maximum characters of a prompt, and of its continuation


@dataclass(frozen=True, slots=True)
class Sample:
    """An attempt as read and written by the model, escaped and without keys; long texts are cut in the middle.

    reward: None if the attempt failed. prompt: of its first call. completion: everything after it.
    """

    trajectory: str
    task: str
    reward: float | None
    prompt: str
    completion: str


def sample_attempts(groups: Sequence[Group], seed: int, share: float, decode: Callable[[Ids], str]) -> list[Sample]:
    """Return the first attempts of a batch's first traced group; none without one.

    seed: the run's seed. share: share of traced groups (`orchestration.traced_groups`).
    """
    epochs, positions = [group.epoch for group in groups], [group.position for group in groups]
    draws = task_uniforms(seed, Stream.TRACE, epochs, positions)
    traced = [group for group, draw in zip(groups, draws, strict=True) if draw < share]
    return [_sample(trajectory, decode) for group in traced[:1] for trajectory in group.trajectories[:MOST]]


def _sample(trajectory: Trajectory, decode: Callable[[Ids], str]) -> Sample:
    steps = trajectory.steps
    prompt = decode(steps[0].prompt_ids) if steps else ""
    before = steps[0].prompt_ids if steps else None
    completion = ""
    for step in steps:
        assert before is not None
        ids = step.full_ids
        completion += decode(ids[common_prefix(before, ids) :]) + _note(step)
        before = ids
    if trajectory.failure is not None:
        completion += f"\n[{trajectory.failure.cause}: {trajectory.failure.message}]"
    return Sample(trajectory.trajectory_id, trajectory.task_id, trajectory.reward, _shown(prompt), _shown(completion))


def _note(step: Step) -> str:
    """Return remarks that a reader of a step's text needs, as in `treadle show`."""
    notes = [f"not handed out: {step.withheld} tool calls"] if step.withheld else []
    notes += [f"rejected: {why}"] if (why := rejection(step)) else []
    return "".join(f"\n[{note}]\n" for note in notes)


def _shown(text: str) -> str:
    text = redacted(text)
    if len(text) > LONGEST:
        left_out = len(text) - LONGEST
        text = f"{text[: LONGEST // 2]}\n[... {left_out:,} characters left out ...]\n{text[-LONGEST // 2 :]}"
    return escape_text(text)
