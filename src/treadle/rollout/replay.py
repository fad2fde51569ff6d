"""Replaying an interrupted attempt: its player restarts, and gets the recorded answers to the same requests.

    Session -> Replay.answer -> AnsweredCall    the same request as before: no engine is called
                             -> None            no recorded call is left: the engine continues
                             -> (cancelled)     another request: the attempt is played again without a record
    Session -> Replay.give_up -> (cancelled)    also if the engine cannot continue with the recorded version

Every draw is keyed by its call, so that the following tokens equal those of an uninterrupted attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NoReturn

from treadle.core.engine import Completion
from treadle.core.types import Ids, SamplingParams


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredCall:
    """A call answered by the engine. number: index of the call in its attempt. request: digest (`request_digest`)."""

    number: int
    request: bytes
    completion: Completion


def request_digest(prompt: Ids, sampling: SamplingParams) -> bytes:
    """Return a digest of a request, excluding its seed, which follows from the call's number."""
    asked = blake2b(repr(replace(sampling, seed=0)).encode(), digest_size=16)
    asked.update(prompt.tobytes())
    return asked.digest()


class Replay:
    """The recorded calls of one attempt, and the recorder of its further ones.

    recorded: the first calls, without a gap. keep: starts making a call durable, and returns an awaitable for that.
    count: number of recorded calls. diverged_at: number of the call at which the attempt diverged from them; None so
    far.
    is_outdated: whether the engine's version differs; otherwise the call was not the recorded one.
    on_divergence: called on divergence; must cancel the attempt.
    """

    def __init__(self, recorded: Sequence[AnsweredCall], keep: Callable[[AnsweredCall], Awaitable[None]]) -> None:
        self._left, self.count, self._keep = {call.number: call for call in recorded}, len(recorded), keep
        self._writing: Awaitable[None] | None = None
        self.diverged_at: int | None = None
        self.is_outdated = False
        self.on_divergence: Callable[[], object] = lambda: None

    async def answer(self, number: int, request: bytes) -> AnsweredCall | None:
        """Return the recorded call; None if there is none, once the calls before it are durable: at most one answer per
        attempt is ever lost. Never returns if the request is not the recorded one.

        Concurrent calls may arrive in another order.
        """
        if number >= self.count:
            if self._writing is not None:
                await self._writing
            return None
        for candidate in (number, *sorted(self._left)):
            if candidate in self._left and self._left[candidate].request == request:
                return self._left.pop(candidate)
        return await self.give_up(number)

    async def give_up(self, number: int, outdated: bool = False) -> NoReturn:
        """Have the attempt played again without its recorded calls. Never returns. outdated: see `is_outdated`."""
        if self.diverged_at is None:
            self.diverged_at, self.is_outdated = number, outdated
            self.on_divergence()
        await asyncio.get_running_loop().create_future()  # until it is cancelled
        raise AssertionError("unreachable")

    def keep(self, call: AnsweredCall) -> None:
        """Begin to make an answered call durable."""
        self._writing = self._keep(call)
