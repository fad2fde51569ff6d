"""What becomes of failed attempts: retried, graded or dropped; and how many of them stop a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from treadle.core.config import Config
from treadle.core.errors import Cause
from treadle.core.rewards import LARGEST
from treadle.core.types import Failure, Group, Status, Trajectory

_BLAMELESS = (Cause.ENGINE, Cause.INFRASTRUCTURE)  # of these, no task is to blame


class FailurePolicy(Config):
    """Configures what becomes of attempts that failed of one cause."""

    retries: int = Field(0, ge=0, description="further attempts, each with draws of its own")
    backoff: float = Field(1.0, ge=0, description="seconds before the first of them, doubled before each other")
    then: Literal["drop", "grade"] = Field(
        "drop", description="after the last one: drop it (no reward, in no baseline), or grade it"
    )
    reward: float = Field(0.0, ge=-LARGEST, le=LARGEST, description="of an attempt that is graded")


_RETRIED = FailurePolicy(retries=2)


class FailuresConfig(Config):
    """Configures what becomes of failed attempts, by cause, and how many of them stop the run."""

    agent: FailurePolicy = Field(FailurePolicy(), description="the agent program raised")
    environment: FailurePolicy = Field(FailurePolicy(), description="the environment raised")
    verifier: FailurePolicy = Field(FailurePolicy(), description="whatever grades raised")
    engine: FailurePolicy = Field(_RETRIED, description="the inference engine failed")
    infrastructure: FailurePolicy = Field(_RETRIED, description="a machine, container or network failed")
    timeout: FailurePolicy = Field(FailurePolicy(), description="something took too long")
    context: FailurePolicy = Field(FailurePolicy(), description="the first prompt was too long")
    retry_share: float = Field(1.0, ge=0, description="most retries of a run, as a share of all first attempts so far")
    task_limit: int = Field(
        3,
        ge=1,
        description="groups in a row with too few graded attempts before their task is left out; those that engine or "
        "infrastructure failed do not count",
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
        description="most groups sampled for one batch, as a multiple of those trained, before the run stops because "
        "too many are discarded (filtered, overlong, stale)",
    )

    def of(self, cause: Cause) -> FailurePolicy:
        """Return the policy for a cause."""
        found: FailurePolicy = getattr(self, cause.value)
        return found


def fails_by_task(group: Group, size: int, least: int) -> bool:
    """Return whether the group has fewer than `least` attempts that its task did not fail.

    size: places of the group; each counts by its last attempt. Those that engine or infrastructure failed are not its.
    """
    last = {t.attempt % size: t for t in sorted(group.trajectories, key=lambda t: t.attempt)}
    return sum(t.failure is None or t.failure.cause in _BLAMELESS for t in last.values()) < least


class Retries:
    """Decides which failed attempts are retried; counts them against `failures.retry_share`.

    counts: first attempts, and retries, so far.
    """

    def __init__(self, config: FailuresConfig, counts: tuple[int, int] = (0, 0)) -> None:
        self._config = config
        self._first, self._retried = counts

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many first attempts and how many retries there were."""
        return self._first, self._retried

    def take_retry(self, trajectory: Trajectory, number: int) -> float | None:
        """Return the seconds to wait before this attempt is retried, and count the retry; None if it is not retried.

        number: of the retry, from 1, over all failures in this place of the group, of whatever cause.
        """
        self._first += number == 1
        if trajectory.failure is None:
            return None
        policy = self._config.of(trajectory.failure.cause)
        if number > policy.retries or self._retried >= self._config.retry_share * max(self._first, 1):
            return None
        self._retried += 1
        return float(policy.backoff * 2 ** (number - 1))

    def final(self, trajectory: Trajectory) -> Trajectory:
        """Return the attempt as it is recorded if it is the last one: graded, where that is its cause's policy."""
        failure: Failure | None = trajectory.failure
        if failure is None or self._config.of(failure.cause).then == "drop":
            return trajectory
        warning = f"graded after a failure: {failure.cause}: {failure.message}"
        reward = self._config.of(failure.cause).reward
        return replace(trajectory, reward=reward, status=Status.DONE, failure=None, warning=warning)
