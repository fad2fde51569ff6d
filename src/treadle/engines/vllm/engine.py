"""`VLLMEngine`: token ids in, token ids out, over one or several vLLM servers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, MutableSequence, Sequence
from itertools import count
from typing import Any

import numpy as np

from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.status import ComponentStatus
from treadle.core.types import Floats, Ids, SamplingParams, StopReason
from treadle.engines.vllm.publication import Publication
from treadle.engines.vllm.server import Server, ServerLost

_COLDEST = 0.01  # lowest temperature above 0 at which vLLM samples
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
    configuration says. on_close: called last.

    Invariant: a completion that is returned was sampled by admitted weights (see `Publication`).
    """

    def __init__(
        self,
        servers: MutableSequence[Server],
        publication: Publication,
        *,
        stop_token_ids: Sequence[int],
        restart: Callable[[int], Awaitable[Server]] | None = None,
        notify: Callable[[str], None] = lambda line: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._servers, self._publication = servers, publication
        self._stop, self._on_close = sorted(stop_token_ids), on_close
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
        self._check(len(prompt_ids), sampling, session)
        for losses in count(1):
            await self._publication.settled()  # a completion that begins now is of the new weights
            server = await self._server(session)
            body = {
                "token_ids": np.asarray(prompt_ids).tolist(),
                "sampling_params": _sampling_body(sampling, self._stop),
                "cache_salt": self._publication.salt(cache_salt),
            }
            try:
                answer = await server.post("/inference/v1/generate", body)
                break
            except ServerLost:  # then try another server; a call that ends one after the other may be the reason
                if losses >= max(2, len(self._servers)):
                    raise
        await self._publication.settled()  # one that ends now may hold tokens of weights that are not admitted yet
        return self._completion(answer["choices"][0], sampling)

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        """Return the log-probability of ids[1:], each given what precedes it: int32[T] -> float32[T - 1].

        Raises EngineError: no server left, more ids than the context, or a temperature at which vLLM does not sample.
        """
        if temperature < _COLDEST:
            raise EngineError(f"vLLM scores at temperatures of at least {_COLDEST}, not at {temperature}")
        await self._publication.settled()
        return await (await self._least_busy()).score(np.asarray(ids), temperature, self._publication.salt(None))

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
            version=self._publication.version,
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

    def _check(self, prompt: int, sampling: SamplingParams, session: str) -> None:
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        context = min(server.context for server in self._servers)
        if prompt + sampling.max_tokens > context:  # vLLM would silently cut the completion short
            raise EngineError(
                f"prompt of {prompt} + max_tokens {sampling.max_tokens} exceeds the servers' context of {context}"
            )
        if 0 < sampling.temperature < _COLDEST:
            told = sampling.temperature
            raise EngineError(f"told temperature {told}, vLLM samples at {_COLDEST}; use 0 or at least that")

    async def _server(self, session: str) -> Server:
        """Return the session's server; another one if that is lost."""
        server = self._sessions.get(session)
        if server is None or server.is_lost:
            server = await self._least_busy()
            if session not in self._sessions:
                raise EngineError(f"session {session!r} was closed while its call waited")
            self._sessions[session] = server
        return server

    async def _least_busy(self) -> Server:
        """Return the server with the fewest open sessions; if every one is lost, wait for one to be started again.

        Raises EngineError, naming all, if none will be.
        """
        while not (left := [server for server in self._servers if not server.is_lost]):
            coming = [keeping for keeping in self._kept.values() if not keeping.done()]
            if not coming or self._closed:
                break
            await asyncio.sleep(_LOOK)
        if not left:
            raise EngineError("no server is left: " + "; ".join(str(server.error()) for server in self._servers))
        sessions = list(self._sessions.values())
        return min(left, key=sessions.count)

    def _completion(self, choice: Mapping[str, Any], sampling: SamplingParams) -> Completion:
        ids = np.array(choice["token_ids"], np.int32)
        logprobs = np.array([entry["logprob"] for entry in choice["logprobs"]["content"]], np.float32)
        return Completion(
            token_ids=ids,
            logprobs=np.zeros_like(logprobs) if sampling.temperature == 0 else np.minimum(logprobs, 0.0),
            stop_reason=StopReason(choice["finish_reason"]),
            policy_versions=self._publication.spans(choice["weight_versions"] or []),
        )

    async def _watch_health(self) -> None:
        """Give up servers that stopped answering: a machine that is switched off closes no connection."""
        misses: defaultdict[Server, int] = defaultdict(int)
        while True:
            await asyncio.sleep(_HEALTH_PERIOD)
            left = [server for server in self._servers if not server.is_lost]
            for server, well in zip(left, await asyncio.gather(*(s.is_well() for s in left)), strict=True):
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
            if self._restart is None or self._closed or self._publication.is_refused:
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


def _sampling_body(sampling: SamplingParams, stop_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return vLLM's sampling parameters. Everything that could have a default on the server is set."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "seed": sampling.seed,
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,  # which would be the server's idea of it
        "stop_token_ids": list(stop_token_ids),
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
