"""Replaying recorded calls: an attempt's player gets the recorded answers to the same requests.

    Session -> Replay.context -> Step           a step of the attempt's `Prefix`, with the same prompt: context
            -> Replay.answer -> AnsweredCall    the same request as before a kill: no engine is called
                             -> None            no recorded call is left: the engine continues
                             -> (cancelled)     another request: the attempt is played again without a record
    Session -> Replay.give_up -> (cancelled)    also if the engine cannot continue with the recorded version

Two kinds of attempts begin with recorded calls, and both restart their player (`reset` and all):

    interrupted     with its own calls, by address (`rollout.attempt.CallLog`); they are its own steps, and trained
    prefixed        with the first k steps of another attempt (`Prefix`: prefix starts, forks); they are context: steps
                    0 to k - 1 of the new trajectory are copies with `DropReason.REPLAYED`, and `Trajectory.start` says
                    whose; its own calls are numbered from k

Every draw is keyed by its call, so that the following tokens equal those of an uninterrupted attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NoReturn

import numpy as np

from treadle.core.engine import Completion
from treadle.core.errors import DataError
from treadle.core.images import PromptImage
from treadle.core.types import DropReason, Ids, SamplingParams, Start, Step
from treadle.rendering.identity import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredCall:
    """A call answered by the engine. number: index of the call in its attempt. request: digest (`request_digest`)."""

    number: int
    request: bytes
    completion: Completion


CHANGED = ": it is not deterministic, or was changed (replayable = False on it: no starts)"


def request_digest(prompt: Ids, images: Sequence[PromptImage], sampling: SamplingParams) -> bytes:
    """Return a digest of a request, excluding its seed, which follows from the call's number."""
    asked = blake2b(repr(replace(sampling, seed=0)).encode(), digest_size=16)
    asked.update(prompt.tobytes())
    for image in images:
        asked.update(image.processed.encode())
    return asked.digest()


def _asks(step: Step, prompt: Prompt) -> bool:
    """Return whether a recorded step has this prompt, and the same pictures in it."""
    pictures = [[image.processed for image in images] for images in (step.images, prompt.images)]
    return np.array_equal(step.prompt_ids, prompt.ids) and pictures[0] == pictures[1]


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first steps of a recorded attempt at a task, as context of another attempt at it. Created by `Prefix.of`.

    start: recorded with the new attempt. steps: as recorded. after: the recorded attempt's next step, whose prompt
    shows the environment's answer to the last one; None without one.

    >>> runner.start(group_id, task, addresses, prefixes={0: Prefix.of("g000012.3", trajectory.steps, 2)})
    """

    start: Start
    steps: tuple[Step, ...]
    after: Step | None = None

    @classmethod
    def of(cls, source: str, steps: Sequence[Step], count: int) -> Prefix:
        """Return the first `count` of an attempt's steps, replayed ones of its own included.

        Raises DataError for another number of steps, and for steps that no replay repeats: without ids, without an
        answer, or beside calls of other models.
        """
        if not 0 < count <= len(steps):
            raise DataError(f"{source} has {len(steps)} steps; a prefix has 1 to that many, got {count}")
        for number, step in enumerate(steps[:count]):
            cancelled = step.dropped is DropReason.CANCELLED
            if cancelled or step.is_text or step.calls:
                why = (
                    "was cancelled" if cancelled else "has no ids" if step.is_text else "goes with other models' calls"
                )
                raise DataError(f"{source} cannot be replayed up to step {count}: step {number} {why}")
        after = steps[count] if count < len(steps) else None
        return cls(Start(source, count), tuple(steps[:count]), after)


class Replay:
    """The recorded calls of one attempt, and the recorder of its further ones.

    recorded: the attempt's own first calls, after its prefix, without a gap. keep: starts making a call durable, and
    returns an awaitable for that; None: nothing is kept. prefix: steps of another attempt with which it begins.

    first: number of the first call of its own. count: number of recorded calls, the prefix's included. diverged_at:
    number of the call at which the attempt diverged from them; None so far. lost_start: why it cannot begin with the
    prefix; "" if it can, so far.
    is_outdated: whether the engine's version differs; otherwise the call was not the recorded one.
    on_divergence: called on divergence; must cancel the attempt.
    """

    def __init__(
        self,
        recorded: Sequence[AnsweredCall] = (),
        keep: Callable[[AnsweredCall], Awaitable[None]] | None = None,
        prefix: Prefix | None = None,
    ) -> None:
        self._left, self._keep, self.prefix = {call.number: call for call in recorded}, keep, prefix
        self._context = {} if prefix is None else dict(enumerate(prefix.steps))
        self.first = len(self._context)
        self.count = self.first + len(recorded)
        self._writing: Awaitable[None] | None = None
        self.diverged_at: int | None = None
        self.is_outdated, self.lost_start = False, ""
        self.on_divergence: Callable[[], object] = lambda: None

    async def context(self, number: int, prompt: Prompt) -> Step | None:
        """Return the prefix's step with this prompt; None after the prefix. Never returns if the prompt is another one:
        observations differ.

        Concurrent calls may arrive in another order.
        """
        for candidate in (number, *sorted(self._context)) if number < self.first else ():
            if candidate in self._context and _asks(self._context[candidate], prompt):
                return self._context.pop(candidate)
        after = None if self.prefix is None else self.prefix.after
        if number < self.first or (number == self.first and after is not None and not _asks(after, prompt)):
            await self.lose_start(
                number, f"did not repeat its observations when recorded replies were replayed{CHANGED}"
            )
        return None

    async def lose_start(self, number: int, why: str) -> NoReturn:
        """Have the attempt played again without its prefix. Never returns. why: of its player, for the record."""
        self.lost_start = why
        await self.give_up(number)

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
        if self._keep is not None:
            self._writing = self._keep(call)
