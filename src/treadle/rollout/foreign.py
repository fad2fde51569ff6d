"""Calling foreign code (environments, agent programs): whatever it does is attributed once, here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from treadle.core.errors import Cause, TrajectoryFailure
from treadle.core.metrics import Measures
from treadle.core.types import Failure, Status

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended, as its trajectory will say it: a reward, or a failure; what its environment measured."""

    status: Status
    reward: float | None
    failure: Failure | None = None
    warning: str = ""
    metrics: Measures = field(default_factory=Measures)

    @classmethod
    def failed(cls, error: TrajectoryFailure, warning: str = "") -> Outcome:
        """The attempt could not be judged."""
        return cls(Status.FAILED, None, Failure(error.cause, error.message), warning)


async def guarded(
    call: Callable[[], Awaitable[T]], cause: Cause, timeout: float, what: str, *, grace: float = 0.0
) -> T:
    """Call foreign code and await it for at most `timeout` seconds.

    Whatever it raises becomes a TrajectoryFailure of this cause, once, here; what it raised is chained. Code that knows
    better raises TrajectoryFailure itself (an environment whose verifier failed: `Cause.VERIFIER`).
    grace: seconds that code whose time is over has to clean up.
    """

    async def called() -> T:  # also what is raised before there is anything to await
        try:
            return await call()
        except SystemExit as error:  # asyncio would let it end the run
            raise TrajectoryFailure(cause, f"{what} tried to exit the process ({error})") from error

    work = asyncio.ensure_future(called())
    try:
        done, _pending = await asyncio.wait({work}, timeout=timeout)
    finally:
        work.cancel()  # of no effect if it is done
    if not done:
        if grace:
            await asyncio.wait({work}, timeout=grace)
        raise TrajectoryFailure(Cause.TIMEOUT, f"{what} took longer than {timeout:g} s")
    error = work.exception() if not work.cancelled() else asyncio.CancelledError("cancelled itself")
    if isinstance(error, TrajectoryFailure):
        raise error
    if error is not None:
        raise TrajectoryFailure(cause, raised(what, error)) from error
    return work.result()


def raised(what: str, error: BaseException) -> str:
    """Text that any file, terminal and database takes: foreign messages may hold lone surrogates."""
    return f"{what} raised {type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
