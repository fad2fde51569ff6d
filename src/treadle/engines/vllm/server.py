"""One vLLM server over HTTP: calls, health, and what it means that a server is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from treadle.core.errors import EngineError
from treadle.core.types import Floats, Ids
from treadle.engines.vllm.admission import Admitted
from treadle.engines.vllm.launch import Started

_METRICS = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_METRIC = r"^vllm:%s(?:\{.*\})? (\S+)$"
_TELLING = 30.0  # seconds for a process that makes calls to answer
_EXCERPT = 500  # characters of an answer that an error shows


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Holds what vLLM's own metrics say. running, waiting: calls. cache: share of the blocks that are in use."""

    running: int
    waiting: int
    cache: float

    @classmethod
    def parse(cls, text: str) -> ServerMetrics | None:
        """Return those in a text of Prometheus' format; None where one of its metrics is missing."""
        found = {name: [float(value) for value in re.findall(_METRIC % name, text, re.MULTILINE)] for name in _METRICS}
        if not all(found.values()):
            return None
        running, waiting, cache = (found[name] for name in _METRICS)  # one value for each engine of the server
        return cls(int(sum(running)), int(sum(waiting)), max(cache))


class ServerLost(EngineError):
    """Says that a server is lost for good; an idempotent call may be made on another one."""


class Server:
    """Calls one server, which may be a process that Treadle started.

    Invariant: a server that is lost stays lost. It would come back with outdated weights; another one takes its place.
    """

    def __init__(self, url: str, process: Started | None = None) -> None:
        self.url, self.process = url.rstrip("/"), process
        # a connection of its own for each call: a pooled one may be closed by the server just as it is reused
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=self.url, timeout=httpx.Timeout(None, connect=10.0), limits=limits)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.context = 0  # tokens, prompt and completion together; known once it is connected
        self.metrics: ServerMetrics | None = None  # as it was read last; for people
        self.workers = 0  # processes that hold the model or parts of it; known then if weights are to be broadcast

    def __str__(self) -> str:
        return f"vLLM server {self.url}" + (f" (log: {self.process.log})" if self.process else "")

    @property
    def is_lost(self) -> bool:
        """Return whether the server is lost for good."""
        return self._lost.done()

    async def end(self) -> None:
        """Wait until the server is lost."""
        await asyncio.wait([self._lost])

    def lose(self, reason: str) -> None:
        """Give the server up: its calls fail now, and no more are made."""
        if not self._lost.done():
            self._lost.set_result(reason)

    def error(self) -> ServerLost:
        """Return an error that says why the server is lost."""
        return ServerLost(f"{self} is lost: {self._lost.result()}")

    async def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """Return the answer to an idempotent call, made twice if the connection breaks but the server is well.

        Raises EngineError for any status but 200, ServerLost if the server is or gets lost. Cancelling closes the
        connection, and vLLM aborts what it was doing.
        """
        for last in (False, True):
            try:
                response = await self._unless_lost(self._http.post(path, json=body, params=query))
            except httpx.TransportError as error:
                reason = f"{type(error).__name__} {error}".strip()
                if last or self.is_lost or not await self.is_well():
                    self.lose(reason)
                    raise self.error() from error
                continue
            if response.status_code >= 500 and (self.is_lost or not await self.is_well()):
                self.lose(f"it answered {response.status_code}: {response.text:.{_EXCERPT}}")
                raise self.error()
            if response.status_code != 200:
                raise EngineError(f"{self}: {path} answered {response.status_code}: {response.text:.{_EXCERPT}}")
            return response.json() if response.content else None
        raise AssertionError("unreachable")

    async def get(self, path: str) -> Any:
        """Return the answer to a GET request. Raises EngineError."""
        try:
            response = await self._http.get(path, timeout=30.0)
        except httpx.TransportError as error:
            raise EngineError(f"{self}: {path}: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            raise EngineError(f"{self}: {path} answered {response.status_code}: {response.text:.{_EXCERPT}}")
        return response.json()

    async def is_well(self) -> bool:
        """Return whether the server reports good health within ten seconds. vLLM does not once its engine has died."""
        if self.process is not None and not self.process.running:
            return False
        try:
            response = await self._http.get("/health", timeout=10.0)
        except httpx.TransportError:
            return False
        return response.status_code == 200

    async def read_metrics(self) -> None:
        """Note the server's metrics, or that it does not tell."""
        try:
            response = await self._http.get("/metrics", timeout=10.0)
        except httpx.TransportError:
            self.metrics = None
        else:
            self.metrics = ServerMetrics.parse(response.text)

    async def engine_answers(self, seconds: float) -> bool:
        """Return whether the server's engine answers within so many seconds.

        `/health` is answered by the process in front of it, also while the engine's own is stopped. A connection that
        breaks counts as an answer.
        """
        try:
            await self._http.get("/is_paused", timeout=seconds)
        except httpx.TimeoutException:
            return False
        except httpx.TransportError:
            pass
        return True

    async def score(self, ids: Ids, temperature: float = 1.0, salt: str | None = None) -> Floats:
        """Return the log-probability of ids[1:]: int32[T] -> float32[T - 1]. Raises EngineError.

        It is one call at temperature 1. vLLM scores prompts at no other, so that there it is a call for each token,
        which may use prefixes cached under `salt`.
        """
        if len(ids) + 1 > self.context:  # it samples a token, too
            raise EngineError(f"{len(ids)} tokens to score, and one that vLLM samples, exceed {self.context}")
        if temperature != 1.0:
            calls = (self._score_next(ids[:n], int(ids[n]), temperature, salt) for n in range(1, len(ids)))
            return np.array(await asyncio.gather(*calls), np.float32)
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = await self.post("/inference/v1/generate", {"token_ids": ids.tolist(), "sampling_params": sampling})
        given = answer["prompt_logprobs"] or []
        if len(given) != len(ids):
            raise EngineError(f"{self} returned {len(given)} log-probabilities for {len(ids)} tokens to score")
        scored = zip(given[1:], ids[1:].tolist(), strict=True)
        return np.array([entry[str(token)]["logprob"] for entry, token in scored], np.float32)

    async def _score_next(self, prompt: Ids, token: int, temperature: float, salt: str | None) -> float:
        asked = [token, 0 if token else 1]  # with one more, because the sampled token takes up one of the answers
        sampling = {"max_tokens": 1, "temperature": temperature, "logprobs": 2, "logprob_token_ids": asked}
        body = {"token_ids": prompt.tolist(), "sampling_params": sampling, "cache_salt": salt}
        answer = await self.post("/inference/v1/generate", body)
        [content] = answer["choices"][0]["logprobs"]["content"]
        found = {entry["token_id"]: float(entry["logprob"]) for entry in [*content["top_logprobs"], content]}
        if token not in found:
            raise EngineError(f"{self} returned log-probabilities of {sorted(found)}, not of {token}")
        return found[token]

    async def load(self, update: Mapping[str, Any], label: str) -> None:
        """Have the server load weights, from where `update` says, and report this label.

        Raises EngineError; then it may be half loaded.
        """
        await self.post("/start_weight_update")
        await self.post("/update_weights", {"update_info": update})
        await self.post("/finish_weight_update", {"weight_version": label})

    async def read_context(self) -> None:
        """Learn the context's length. Raises EngineError."""
        [model] = (await self.get("/v1/models"))["data"][:1]
        self.context = int(model["max_model_len"])

    async def hold(self) -> None:
        """Let no call of it begin or return that is made in another process; if that does not answer, it is lost."""
        if self.process is not None:
            await self._told(self.process.hold())

    async def open(self, admitted: Admitted) -> None:
        """Let calls of it go on that are made in another process; if that does not answer, it is lost."""
        if self.process is not None:
            await self._told(self.process.open(admitted))

    async def disconnect(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def close(self) -> None:
        """Fail the calls that wait, close connections, end the process if Treadle started it. Idempotent."""
        self.lose("the engine was closed")
        await self.disconnect()
        if self.process is not None:
            await self.process.stop()

    async def _told(self, telling: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(_TELLING):
                await telling
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"no answer for {_TELLING:g} s"
            self.lose(f"the process that makes rollout workers' calls of it: {reason}")

    async def _unless_lost(self, call: Any) -> httpx.Response:
        """Return the response, or raise ServerLost as soon as the server is given up."""
        work = asyncio.ensure_future(call)
        try:
            await asyncio.wait({work, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise self.error()
            response: httpx.Response = work.result()
            return response
        finally:
            work.cancel()


def left(servers: Sequence[Server]) -> list[Server]:
    """Return the servers that are not lost."""
    return [server for server in servers if not server.is_lost]


async def on_each(servers: Sequence[Server], call: Callable[[Server], Awaitable[object]]) -> None:
    """Call every server that is not lost, concurrently. One that gets lost meanwhile is left behind.

    Raises the first error of the others, and EngineError if all are lost.
    """
    called = left(servers)
    answers = await asyncio.gather(*(call(server) for server in called), return_exceptions=True)
    for server, answer in zip(called, answers, strict=True):
        if isinstance(answer, BaseException) and not server.is_lost:
            raise answer
    if not left(servers):
        raise EngineError("; ".join(str(server.error()) for server in servers))
