"""`VLLMEngine`: token ids in, token ids out, over one or several vLLM servers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, MutableSequence, Sequence
from itertools import count
from typing import Any

import numpy as np

from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.status import ComponentStatus
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.vllm.calls import COLDEST, check_call, sample
from treadle.engines.vllm.publication import Publication
from treadle.engines.vllm.server import Server, ServerLost, left

_LOOK = 0.2  # seconds between looks at whether a server has been started again
_HEALTH_PERIOD = 5.0  # seconds between health checks
_HEALTH_MISSES = 3  # failed ones in a row after which a server is given up
_SILENCE = 150.0  # seconds that an engine may take to answer, amid a long prefill or while it loads weights
_SILENCES = 2  # times in a row that it takes longer after which its server is given up


class VLLMEngine:
    """Samples on vLLM servers. Sessions stay on the server that has their prefixes, until it is lost.

    Calls that a lost server had not answered are made again on another one. One that was started for this engine is
    started again, by number, and joins once it serves the admitted weights; calls wait for it where no other is left.

    stop_token_ids: tokens that end a completion (they are part of it); nothing else does, whatever the model's own
    configuration says. expert_layers: those whose experts completions report (`calls.sample`). on_close: called last.

    Invariant: a completion that is returned was sampled by admitted weights (see `Publication`).
    """

    def __init__(
        self,
        servers: MutableSequence[Server],
        publication: Publication,
        *,
        stop_token_ids: Sequence[int],
        expert_layers: Sequence[int] | None = None,
        restart: Callable[[int], Awaitable[Server]] | None = None,
        notify: Callable[[str], None] = lambda line: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._servers, self._publication = servers, publication
        self._stop, self._on_close = sorted(stop_token_ids), on_close
        self._expert_layers = expert_layers
        self._restart, self._notify = restart, notify
        self._sessions: dict[str, Server | None] = {}  # None until its first call
        self._closed = False
        create_task = asyncio.get_running_loop().create_task
        self._kept = {n: create_task(self._keep(n)) for n in range(len(servers))}  # those that serve, or will again
        self._watches = [create_task(self._watch_health()), *self._kept.values()]

    def open_session(self, session: str) -> None:
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        self._sessions[session] = None

    def close_session(self, session: str) -> None:
        self._sessions.pop(session, None)

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        """Sample one completion. Cancelling aborts it on the server.

        Raises EngineError: unknown session, a prompt that leaves no room for `max_tokens`, sampling that vLLM would
        change silently, a request that the server refuses, no server left.
        """
        self._check_open(session)
        check_call(len(prompt_ids), sampling, min(server.context for server in self._servers))
        for losses in count(1):
            await self._publication.admission.settled()
            server = await self._server(session)
            try:
                return await sample(
                    server,
                    self._publication.admission,
                    prompt_ids,
                    sampling,
                    self._stop,
                    cache_salt,
                    self._expert_layers,
                )
            except ServerLost:  # then try another server; a call that ends one after the other may be the reason
                if losses >= max(2, len(self._servers)):
                    raise
        raise AssertionError("unreachable")

    def route(self, session: str) -> Any:
        """Return what makes the session's calls in another process; None if they are to be made here.

        It is for as long as its server lasts: who finds that it is lost calls `generate` here.
        """
        self._check_open(session)
        server = self._settled_on(session)
        return None if server is None or server.process is None else server.process.route

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        """Return the log-probability of ids[1:], each given what precedes it: int32[T] -> float32[T - 1].

        Raises EngineError: no server left, more ids than the context, or a temperature at which vLLM does not sample.
        """
        if temperature < COLDEST:
            raise EngineError(f"vLLM scores at temperatures of at least {COLDEST}, not at {temperature}")
        admission = self._publication.admission
        await admission.settled()
        while (server := self._least_busy()) is None:
            await self._until_some_are_left()
        return await server.score(np.asarray(ids), temperature, admission.now.salt(None))

    def status(self) -> list[ComponentStatus]:
        """Return what each server does, as it said some seconds ago."""
        sessions = list(self._sessions.values())
        return [self._status(server, sessions.count(server)) for server in self._servers]

    def _status(self, server: Server, sessions: int) -> ComponentStatus:
        metrics = None if server.is_lost else server.metrics
        return ComponentStatus(
            "engine",
            server.url,
            running=None if metrics is None else metrics.running,
            waiting=None if metrics is None else metrics.waiting,
            sessions=sessions,
            cache=None if metrics is None else metrics.cache,
            version=self._publication.admission.now.version,
            error=str(server.error()) if server.is_lost else "",
        )

    async def close(self) -> None:
        """End the servers that were started for this engine; calls that wait fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for watch in self._watches:
            watch.cancel()
        await asyncio.wait(self._watches)
        await asyncio.gather(*(server.close() for server in self._servers))
        self._publication.close()
        self._on_close()

    def _check_open(self, session: str) -> None:
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")

    async def _server(self, session: str) -> Server:
        """Return the session's server; another one if that is lost, once there is one."""
        while (server := self._settled_on(session)) is None:
            await self._until_some_are_left()
            self._check_open(session)
        return server

    def _settled_on(self, session: str) -> Server | None:
        """Return the session's server; another one if that is lost; None if all are."""
        server = self._sessions.get(session)
        if server is None or server.is_lost:
            server = self._sessions[session] = self._least_busy()
        return server

    def _least_busy(self) -> Server | None:
        """Return the server with the fewest open sessions; None if all are lost."""
        sessions = list(self._sessions.values())
        return min(left(self._servers), key=sessions.count, default=None)

    async def _until_some_are_left(self) -> None:
        """Wait for a server to be started again, if all are lost. Raises EngineError, naming all, if none will be."""
        while not left(self._servers):
            if self._closed or self._publication.is_refused or all(keeping.done() for keeping in self._kept.values()):
                raise EngineError("no server is left: " + "; ".join(str(server.error()) for server in self._servers))
            await asyncio.sleep(_LOOK)

    async def _watch_health(self) -> None:
        """Give up servers that stopped answering: a machine that is switched off closes no connection."""
        misses: defaultdict[Server, int] = defaultdict(int)
        while True:
            await asyncio.sleep(_HEALTH_PERIOD)
            looked = left(self._servers)
            for server, well in zip(looked, await asyncio.gather(*(s.is_well() for s in looked)), strict=True):
                misses[server] = 0 if well else misses[server] + 1
                if misses[server] >= _HEALTH_MISSES:
                    server.lose(f"it failed {_HEALTH_MISSES} health checks in a row")

    async def _keep(self, number: int) -> None:
        """Watch the server of a number, and put another one in its place whenever it is lost."""
        while True:
            server = self._servers[number]
            watches = [asyncio.ensure_future(watch(server)) for watch in (_watch_engine, _watch_metrics)]
            try:
                await server.end()
            finally:
                for watch in watches:
                    watch.cancel()
            if self._closed:
                return
            if self._restart is None or self._publication.is_refused:
                await server.close()  # calls that it holds elsewhere fail, too
                return
            self._notify(f"{server.error()}; starting it again")
            await server.close()
            try:
                another = await self._restart(number)
            except (EngineError, OSError) as error:
                self._notify(f"vLLM server {number} was started again in vain: {error}")
                return
            try:
                await self._publication.join(another, number)
            except BaseException as error:
                await another.close()
                if not isinstance(error, EngineError):
                    raise
                self._notify(f"vLLM server {number} was started again in vain: {error}")
                return
            self._notify(f"{another} was started again")


async def _watch_engine(server: Server) -> None:
    """Give the server up if its engine falls silent while the process in front of it goes on: one that is stopped."""
    silences = 0
    while silences < _SILENCES:
        await asyncio.sleep(_HEALTH_PERIOD)
        silences = 0 if await server.engine_answers(_SILENCE) else silences + 1
    server.lose(f"its engine did not answer for {_SILENCES * _SILENCE:g} s; it may be stopped")


async def _watch_metrics(server: Server) -> None:
    """Follow what the server has to do."""
    while not server.is_lost:
        await server.read_metrics()
        await asyncio.sleep(_HEALTH_PERIOD)
