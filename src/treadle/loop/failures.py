"""Handling of failed attempts: retries, grades or drops; and the share of failures that stops a run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from pydantic import Field

from treadle.core.config import Config
from treadle.core.errors import Cause
from treadle.core.outcomes import as_played
from treadle.core.rewards import LARGEST
from treadle.core.types import DropReason, Failure, Group, Status, Trajectory

_BLAMELESS = (Cause.ENGINE, Cause.INFRASTRUCTURE)  # no task is to blame for these
# retries of blameless failures: the next attempt often works, whereas a task's own failure tends to repeat
_RETRIES = 2


class FailurePolicy(Config):
    """Handling of attempts that failed for one cause."""

    retries: int | None = Field(
        None,
        ge=0,
        description="further attempts, each with new draws; default: 2 for engine and infrastructure, else none",
    )
    backoff: float = Field(1.0, ge=0, description="delay before the first retry in seconds; doubles each time")
    grade: float | None = Field(
        None,
        ge=-LARGEST,
        le=LARGEST,
        description="reward after the last failed attempt; default: none, it is dropped and in no baseline",
    )


class FailuresConfig(Config):
    """Handling of failed attempts, and the share of them that stops the run."""

    causes: dict[Cause, FailurePolicy] = Field(
        default_factory=dict,
        description="handling of failed attempts, by cause (agent, environment, verifier, engine, infrastructure, "
        "timeout, context): {engine: {retries: 3, backoff: 10}, verifier: {grade: 0}}",
    )
    task_limit: int = Field(
        3,
        ge=1,
        description="consecutive groups with too few graded attempts before their task is left out; engine and "
        "infrastructure failures do not count",
    )
    max_failed_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="stop, after a checkpoint, if more than this share of a batch's trajectories failed",
    )
    max_sampled: float = Field(
        8.0,
        ge=1,
        description="limit on groups sampled for one batch, as a multiple of trained ones, before the run ends because "
        "too many are discarded (filtered, overlong, stale)",
    )

    def retry_delay(self, trajectory: Trajectory, number: int) -> float | None:
        """Return the seconds to wait before this attempt is retried; None if it is not.

        number: number of the retry, from 1, over all failures in this place of the group, whatever their cause.
        """
        if trajectory.failure is None:
            return None
        cause = trajectory.failure.cause
        policy = self.causes.get(cause, FailurePolicy())
        retries = (_RETRIES if cause in _BLAMELESS else 0) if policy.retries is None else policy.retries
        return policy.backoff * 2.0 ** (number - 1) if number <= retries else None

    def final(self, trajectory: Trajectory) -> Trajectory:
        """Return the last attempt for recording: graded if it failed and its cause's policy says so."""
        failure: Failure | None = trajectory.failure
        if failure is None or (reward := self.causes.get(failure.cause, FailurePolicy()).grade) is None:
            return trajectory
        warning = f"graded after a failure: {failure.cause}: {failure.message}"
        return replace(trajectory, reward=reward, status=Status.GRADED, failure=None, warning=warning)


def of_one_version(trajectory: Trajectory) -> Trajectory:
    """Return a pinned attempt unchanged, or failed if several policy versions sampled it: none of its steps is trained,
    even if its failure is graded.
    """
    views = [as_played(t) for t in (trajectory, *trajectory.copies)]
    versions = {v for view in views for v in (view.oldest_version, view.newest_version) if v is not None}
    if len(versions) < 2:
        return trajectory
    message = (
        f"policy versions {min(versions)} to {max(versions)} sampled it, and training.lora.pin_attempts keeps an "
        "attempt to one; its engine must do so"
    )

    def failed(t: Trajectory) -> Trajectory:
        steps = tuple(replace(step, dropped=step.dropped or DropReason.FAILED) for step in t.steps)
        failure = t.failure or Failure(Cause.ENGINE, message)
        return replace(t, steps=steps, reward=None, status=Status.FAILED, failure=failure)

    return replace(failed(trajectory), copies=tuple(map(failed, trajectory.copies)))


def has_not_failed(trajectory: Trajectory) -> bool:
    """Return whether an attempt was played to its end; a failed one may still have a reward (`grade`)."""
    return trajectory.status not in (Status.FAILED, Status.GRADED)


async def reward_together(
    graded: list[Trajectory],
    reward: Callable[[Sequence[Trajectory]], Awaitable[list[Trajectory]]],
    failures: FailuresConfig,
) -> list[Trajectory]:
    """Apply `reward` to a group's attempts, and return them for recording.

    A failing reward function is retried as often as attempts are; the attempts are not replayed.
    """
    for number in itertools.count(1):
        made = await reward(graded)
        pauses = [failures.retry_delay(trajectory, number) for trajectory in made]
        if not (again := [pause for pause in pauses if pause is not None]):
            break
        graded = [replace(t, metrics=tried.metrics) for t, tried in zip(graded, made, strict=True)]
        await asyncio.sleep(max(again))
    return [failures.final(trajectory) for trajectory in made]


def fails_by_task(group: Group, size: int, least: int) -> bool:
    """Return whether the group has fewer than `least` attempts not failed by the task.

    size: places of the group; each counts by its last attempt. Engine and infrastructure failures do not count against
    the task.
    """
    last = {t.attempt % size: t for t in sorted(group.trajectories, key=lambda t: t.attempt)}
    return sum(t.failure is None or t.failure.cause in _BLAMELESS for t in last.values()) < least
