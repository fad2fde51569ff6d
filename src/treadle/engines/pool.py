"""`EnginePool`: several engines in separate processes, as one.

session -> the engine with the fewest open sessions, which then caches its prefixes -> its process
                ^---------- moved while that process is down, and its call repeated -----------'
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from treadle.core.engine import Completion, ComponentStatus, Engine
from treadle.core.errors import EngineEnded, EngineError
from treadle.core.images import PromptImage
from treadle.core.trainer import WeightsDestination, WeightSource
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.staging import Staged


class Member(Engine, Protocol):
    """An engine in a separate process, which may end and be replaced: `RemoteEngine`, or a fake."""

    @property
    def is_down(self) -> bool:
        """Whether no process is running now."""

    @property
    def failure(self) -> str | None:
        """Why it will not be restarted; None while it may be."""

    @property
    def route(self) -> Any:
        """Handle for direct calls from other processes; None if unsupported."""

    async def update_weights(self, stage: Callable[[], Awaitable[Staged]], version: int) -> None:
        """Serve the weights returned by `stage` as this version. Raises EngineError."""

    async def sleep(self) -> None:
        """Free memory until weights are published or `wake` is called. Raises EngineError."""

    async def wake(self) -> None:
        """Serve the latest published weights again. Raises EngineError."""


class EnginePool:
    """Spreads sessions over engines: an `Engine`.

    A session stays on its engine, which caches its prefixes. Sessions that are all opened together, as in synchronous
    training, are dealt out in turn, so that engines in lock-step sample the same bits every time.

    While an engine's process is down, its sessions and unanswered calls move to others. The process is restarted with
    the latest published weights (`RemoteEngine`), and gets new sessions. If no other engine is up, calls wait.
    """

    def __init__(self, engines: Sequence[Member]) -> None:
        self._engines = engines
        self._sessions: dict[str, Member] = {}

    def open_session(self, session: str) -> None:
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        engine = self._least_busy()
        engine.open_session(session)
        self._sessions[session] = engine

    def close_session(self, session: str) -> None:
        if engine := self._sessions.pop(session, None):
            engine.close_session(session)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Sample one completion; on another engine if the session's has ended. Raises EngineError.

        A call fails after as many processes ended during it as there are engines, but at least two: it may be what
        kills them.
        """
        for losses in count(1):
            engine = self._engine(session)
            try:
                return await engine.generate(
                    prompt_ids, sampling, session=session, cache_salt=cache_salt, images=images
                )
            except EngineEnded:
                if losses >= max(2, len(self._engines)):
                    raise
        raise AssertionError("unreachable")

    def route(self, session: str) -> Any:
        """Return the handle for direct calls to the session's engine from other processes; None if unsupported.

        Valid while that engine's process lives; after it has ended, callers use `generate` here.
        """
        return self._sessions[session].route

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        return await self._least_busy().score(ids, temperature=temperature, images=images)

    async def update_weights(self, staged: Staged, version: int) -> None:
        """Have every engine load staged weights, which must stay available until the next ones are staged.

        Engines fetch them while sampling, and swap between two tokens. Raises EngineError if all ended, or if one
        refuses.
        """

        async def stage() -> Staged:
            return staged

        usable = self._usable()
        results = await asyncio.gather(*(e.update_weights(stage, version) for e in usable), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, EngineEnded) or len(errors) == len(usable):
                raise error
        if not usable:
            self._least_busy()  # raises EngineError

    async def sleep(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self._usable()))

    async def wake(self) -> None:
        await asyncio.gather(*(engine.wake() for engine in self._usable()))

    def status(self) -> list[ComponentStatus]:
        return [
            replace(component, name=str(number))
            for number, engine in enumerate(self._engines)
            for component in engine.status()
        ]

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def _engine(self, session: str) -> Member:
        """Return the session's engine; if it is down and another is up, move the session there."""
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        engine = self._sessions[session]
        if engine.is_down and (other := self._least_busy()) is not engine:
            engine.close_session(session)
            other.open_session(session)
            self._sessions[session] = engine = other
        return engine

    def _usable(self) -> list[Member]:
        """Return the engines that are up or will be again."""
        return [engine for engine in self._engines if engine.failure is None]

    def _least_busy(self) -> Member:
        """Return the engine with the fewest sessions, preferring live ones. Raises EngineError if none is left."""
        if not (usable := self._usable()):
            raise EngineError("no engine is left: " + "; ".join(engine.failure or "" for engine in self._engines))
        sessions = list(self._sessions.values())
        return min(usable, key=lambda engine: (engine.is_down, sessions.count(engine)))


@dataclass(frozen=True, slots=True)
class PoolSync:
    """Publishes to a pool's engines. destination: where they fetch weights, which stay there as long as needed."""

    source: WeightSource
    pool: EnginePool
    destination: WeightsDestination[Staged]

    async def publish(self, version: int) -> None:
        """Make every engine serve the source's weights as this version. Raises EngineError, or the source's errors.

        Retries once: weights are lost with the process that staged them. If that has ended, the source's own error
        reports it.
        """
        try:
            await self.pool.update_weights(await self.source.stage(self.destination), version)
        except EngineError:
            await self.pool.update_weights(await self.source.stage(self.destination), version)
