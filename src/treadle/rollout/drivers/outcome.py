"""How an attempt ended: the one table from the cause of its end to its trajectory.

    cause of the end                       status       reward         cause of the failure
    none: it was completed                 done         of its steps
    StepsExceeded, TokensExceeded          max_steps    of its steps
    ContextExceeded after an answer        context      of its steps
    ContextExceeded before any             failed       none           context
    EngineError                            failed       none           engine
    DataError                              failed       none           the user code's
    TrajectoryFailure                      failed       none           its own
    any of the first two without answers   failed       none           the user code's
    rewards with an invalid sum            failed       none           the user code's

Errors of user code, and time limits, have already become a `TrajectoryFailure` (`rollout.isolation`). Any other
exception is a bug or the end of the run, and no driver catches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.core.errors import (
    Cause,
    ContextExceeded,
    DataError,
    EngineError,
    StepsExceeded,
    TokensExceeded,
    TrajectoryFailure,
)
from treadle.core.metrics import Measures
from treadle.core.outcomes import was_played
from treadle.core.rewards import reward_sum
from treadle.core.types import Failure, Status, Step

AttemptError = TrajectoryFailure | ContextExceeded | StepsExceeded | EngineError | DataError

ATTEMPT_ERRORS = (TrajectoryFailure, ContextExceeded, StepsExceeded, EngineError, DataError)
"""Errors that end an attempt, but not the run."""

LIMITS = {StepsExceeded: Status.MAX_STEPS, TokensExceeded: Status.MAX_STEPS, ContextExceeded: Status.CONTEXT}
"""Status of an attempt ended by a limit."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: with a reward or a failure, and the environment's measures.

    warning: a problem without influence on the reward.
    """

    status: Status
    reward: float | None
    failure: Failure | None = None
    warning: str = ""
    metrics: Measures = field(default_factory=Measures)


def outcome_of(steps: Sequence[Step], ended_by: AttemptError | None, cause: Cause) -> Outcome:
    """Return the outcome of an attempt, by the table above.

    steps: as recorded. ended_by: None if the attempt was completed. cause: cause of failures of its user code.
    """
    try:
        if (failure := _failure(steps, ended_by, cause)) is None:
            status = Status.DONE if ended_by is None else LIMITS[type(ended_by)]
            return Outcome(status, reward_sum(step.reward for step in steps))
    except DataError as error:
        failure = TrajectoryFailure(cause, f"the steps' {error}")
    return Outcome(Status.FAILED, None, Failure(failure.cause, failure.message, failure.traceback))


def _failure(steps: Sequence[Step], ended_by: AttemptError | None, cause: Cause) -> TrajectoryFailure | None:
    answered = any(was_played(step) for step in steps)
    match ended_by:
        case TrajectoryFailure():
            return ended_by
        case EngineError():
            return TrajectoryFailure(Cause.ENGINE, str(ended_by))
        case DataError():
            return TrajectoryFailure(cause, str(ended_by))
        case ContextExceeded() if not answered:
            return TrajectoryFailure(Cause.CONTEXT, str(ended_by))
    if not answered and steps and cause is Cause.ENVIRONMENT:
        return TrajectoryFailure(cause, f"the environment used none of the model's {len(steps)} replies")
    if not answered:
        what = f"the {cause} ended without an answer of the model; it must call the client passed to it"
        return TrajectoryFailure(cause, what)
    return None
