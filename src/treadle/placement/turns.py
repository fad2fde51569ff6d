"""Colocated mode: learner ranks and engines take turns on the same devices.

    train, stage, save, ... -> learner's turn: engines sleep -> ranks reload -> the call
    generate, publish       -> engines' turn:  ranks offload -> engines wake: weights, load, proof, cache -> the call

The turn passes on demand, so that the loop need not know. Only for synchronous runs: nothing is sampled while the
learner works, and a call of one side waits for the other side's to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from treadle.core.engine import Completion
from treadle.core.images import PromptImage
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.pool import EnginePool, Member
from treadle.engines.staging import Staged
from treadle.training.rank_group import Calls, RankGroup

Side = Literal["learner", "engines"]


class Turns:
    """Decides which side has the devices. The learner begins.

    offload, reload: called when the learner's turn ends and begins. sleep, wake: the same for the engines, once there
    are some.
    """

    def __init__(self, offload: Callable[[], Awaitable[None]], reload: Callable[[], Awaitable[None]]) -> None:
        self._offload, self._reload = offload, reload
        self.sleep: Callable[[], Awaitable[None]] | None = None
        self.wake: Callable[[], Awaitable[None]] | None = None
        self._whose: Side | None = "learner"  # None while the turn passes
        self._asleep = False
        self._calls = 0  # running calls of the side in turn
        self._passing, self._idle = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def of(self, side: Side, wake: bool = True) -> AsyncIterator[None]:
        """Hold a side's turn inside the block, shared with its other calls. wake: engines need the latest weights."""
        if self._whose != side or (side == "engines" and wake and self._asleep):
            await self._pass_to(side, wake)
        # No await since the turn was confirmed.
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._idle.set()

    async def _pass_to(self, side: Side, wake: bool) -> None:
        async with self._passing:
            while self._whose != side and self._calls:
                self._idle.clear()
                await self._idle.wait()
            if self._whose != side:
                self._whose = None
                if side == "engines":
                    await self._offload()
                else:
                    if self.sleep is not None:
                        await self.sleep()
                        self._asleep = True
                    await self._reload()
                self._whose = side
            if side == "engines" and wake and self._asleep:
                assert self.wake is not None
                await self.wake()
                self._asleep = False

    def woken(self) -> None:
        """Note that engines have received weights, which wakes them."""
        self._asleep = False


class ColocatedTrainer(RankGroup):
    """A trainer that makes each call of its ranks in the learner's turn."""

    def __init__(self, processes: Calls) -> None:
        super().__init__(processes)
        self.turns = Turns(self.offload, self.reload)

    async def offload(self) -> None:
        await super()._call("offload")

    async def reload(self) -> None:
        await super()._call("reload")

    async def _call(self, name: str, *arguments: Any) -> Any:
        async with self.turns.of("learner"):
            return await super()._call(name, *arguments)


class ColocatedPool(EnginePool):
    """Makes each call of the engines in their turn. Workers' calls go through the run's process, too."""

    def __init__(self, engines: Sequence[Member], turns: Turns) -> None:
        super().__init__(engines)
        self._turns = turns
        turns.sleep, turns.wake = self.sleep, self.wake

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        async with self._turns.of("engines"):
            return await super().generate(prompt_ids, sampling, session=session, cache_salt=cache_salt, images=images)

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        async with self._turns.of("engines"):
            return await super().score(ids, temperature=temperature, images=images)

    async def update_weights(self, staged: Staged, version: int) -> None:
        async with self._turns.of("engines", wake=False):
            await super().update_weights(staged, version)
            self._turns.woken()

    def route(self, session: str) -> Any:
        return None
