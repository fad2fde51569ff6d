"""`VLLMEngine`: token ids in, token ids out, over one or several vLLM servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableSequence, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from treadle.core.engine import Completion, ComponentStatus
from treadle.core.errors import ConfigError, EngineError, TreadleError
from treadle.core.images import PromptImage
from treadle.core.trainer import WeightSource
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.adapters import AdapterPublication, Exported
from treadle.engines.vllm.images import Pictures
from treadle.engines.vllm.launch import VERSION, alternatives, find_python, installed_vllm, on_gpu, tail
from treadle.engines.vllm.publication import LOADING, Probe, Publication
from treadle.engines.vllm.server import (
    COLDEST,
    Server,
    ServerLost,
    Started,
    check_call,
    decode_routing,
    sample,
    serving,
)
from treadle.engines.vllm.transfer import Collective, SharedMemory, Transfer
from treadle.models.vision import blindness, pixels_probe

START_TIMEOUT = 1800.0  # seconds; a server that ends meanwhile is noticed at once
_LOOK = 0.2  # seconds between checks for a restarted server
_HEALTH_PERIOD = 5.0  # seconds between health checks
_SILENCE = 100.0  # seconds for an engine to answer one, during a long prefill or while loading weights
_MISSES = 3  # consecutive failed checks before a server is given up


class VLLMEngine:
    """Samples on vLLM servers. A session stays on the server that caches its prefixes, until that is lost.

    Unanswered calls of a lost server are repeated on another one. A server started for this engine is restarted, and
    joins once it serves the admitted weights; calls wait for it if no other is left.

    stop_token_ids: tokens that end a completion (they are part of it); the model's own configuration is ignored.
    expert_layers: layers with experts reported by completions; probabilities, pictures: see `server.sample`. restart:
    starts the server of a number.
    notify: receives a line about a lost or restarted server. on_close: called last.

    Invariant: every returned completion was sampled by admitted weights (see `Publication`).
    """

    def __init__(
        self,
        servers: MutableSequence[Server],
        publication: Publication | AdapterPublication,
        *,
        stop_token_ids: Sequence[int],
        expert_layers: Sequence[int] | None = None,
        probabilities: int | None = None,
        pictures: Pictures | None = None,
        restart: Callable[[int], Awaitable[Server]] | None = None,
        notify: Callable[[str], None] = lambda line: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._servers, self._publication = servers, publication
        self._stop, self._on_close = sorted(stop_token_ids), on_close
        self._expert_layers, self._probabilities = expert_layers, probabilities
        self._pictures, self._seeing = pictures, asyncio.Lock()
        self._sees = False  # known once the first image was shown
        self._restart, self._notify = restart, notify
        self._sessions: dict[str, Server | None] = {}  # None until its first call
        self._closed = False
        # One per server that serves, or will serve again.
        self._keepers = [asyncio.ensure_future(self._keep(number)) for number in range(len(servers))]

    def open_session(self, session: str) -> None:
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        self._sessions[session] = None

    def close_session(self, session: str) -> None:
        self._sessions.pop(session, None)
        self._publication.forget(session)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Sample one completion. Cancelling aborts it on the server.

        Raises EngineError for an unknown session, a prompt that leaves no room for `max_tokens`, sampling that vLLM
        would silently change, images that its servers do not see, a request refused by the server, or if no server is
        left.
        """
        check_call(len(prompt_ids), sampling, min(server.context for server in self._servers))
        admission = self._publication.admission
        for losses in count(1):
            await admission.settled()
            while (server := self._server_of(session)) is None:
                await self._until_some_serve()
            try:
                await self._look(images)
                with self._publication.adapter(session) as adapter:
                    return await sample(
                        server,
                        admission,
                        prompt_ids,
                        sampling,
                        self._stop,
                        cache_salt,
                        self._expert_layers,
                        adapter,
                        self._probabilities,
                        images,
                        self._pictures,
                    )
            except ServerLost:
                # Try another server, unless this call seems to be the cause.
                if losses >= max(2, len(self._servers)):
                    raise
        raise AssertionError("unreachable")

    def route(self, session: str) -> Any:
        """Return a handle for the session's calls in another process; None to make them here, as for adapters, images
        and recorded probabilities.

        Valid as long as its server: on ServerLost, call `generate` here.
        """
        server = self._server_of(session)
        here = isinstance(self._publication, AdapterPublication) or self._probabilities is not None
        here = here or self._pictures is not None
        if server is None or server.process is None or here:
            return None
        return server.process.route

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        """Return log-probabilities of ids[1:], each given its prefix: int32[T] -> float32[T - 1].

        Raises EngineError if no server is left, for more ids than the context, or for a temperature unsupported by
        vLLM.
        """
        if temperature < COLDEST:
            raise EngineError(f"vLLM scores at temperatures of at least {COLDEST}, not at {temperature}")
        await self._look(images)
        return await self._score(np.asarray(ids), temperature, images)

    async def _score(self, ids: Ids, temperature: float, images: Sequence[PromptImage]) -> Floats:
        admission = self._publication.admission
        await admission.settled()
        while (server := self._least_busy()) is None:
            await self._until_some_serve()
        now = admission.now
        with self._publication.adapter(None) as adapter:
            return await server.score(ids, temperature, now.salt(None), adapter, images, self._pictures, now.label)

    async def _look(self, images: Sequence[PromptImage]) -> None:
        """Probe the first image: its pixels must change what follows. Raises EngineError."""
        if not images or self._pictures is None or self._sees:
            return
        async with self._seeing:
            if not self._sees:
                ids, one, other = pixels_probe(images[0], self._pictures.processor, self._pictures.vocabulary)
                seen, changed = await self._score(ids, 1.0, [one]), await self._score(ids, 1.0, [other])
                if why := blindness(seen, changed, self._pictures.tolerance):
                    raise EngineError(f"vLLM {why}")
                self._sees = True

    def status(self) -> list[ComponentStatus]:
        """Return the load of each server, a few seconds old."""
        sessions, version = list(self._sessions.values()), self._publication.admission.now.version
        status = []
        for server in self._servers:
            load, error = ({}, str(server.error())) if server.is_lost else (server.metrics, "")
            opened = sessions.count(server)
            status.append(ComponentStatus("engine", server.url, sessions=opened, version=version, error=error, **load))
        return status

    async def close(self) -> None:
        """End the servers started for this engine; waiting calls fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.wait(self._keepers)
        await self._publication.close()
        await asyncio.gather(*(server.close() for server in self._servers))
        self._on_close()

    def _server_of(self, session: str) -> Server | None:
        """Return the session's server; another one if that is lost; None if all are."""
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        server = self._sessions[session]
        if server is None or server.is_lost:
            server = self._sessions[session] = self._least_busy()
        return server

    def _least_busy(self) -> Server | None:
        """Return the server with the fewest open sessions; None if all are lost."""
        return min(serving(self._servers), key=list(self._sessions.values()).count, default=None)

    async def _until_some_serve(self) -> None:
        """Wait for a restarted server if all are lost. Raises EngineError, naming all, if none will be restarted."""
        while not serving(self._servers):
            if self._closed or self._publication.is_refused or all(keeper.done() for keeper in self._keepers):
                raise EngineError("no server is left: " + "; ".join(str(server.error()) for server in self._servers))
            await asyncio.sleep(_LOOK)

    async def _keep(self, number: int) -> None:
        """Watch the server of a number, and replace it whenever it is lost."""
        while True:
            server = self._servers[number]
            watch = asyncio.ensure_future(_watch(server))
            try:
                await server.end()
            finally:
                watch.cancel()
            if self._closed:
                return
            if self._restart is None or self._publication.is_refused:
                # Also fails its held calls elsewhere.
                await server.close()
                return
            self._notify(f"{server.error()}; restarting it")
            await server.close()
            try:
                another = await self._restart(number)
                try:
                    await self._publication.join(another, number)
                except BaseException:
                    await another.close()
                    raise
            except (TreadleError, OSError) as error:
                self._notify(f"vLLM server {number} could not be restarted: {error}")
                return
            self._notify(f"{another} was restarted")


async def _watch(server: Server) -> None:
    """Give the server up if it stops answering: a machine was switched off, or a process stopped."""
    misses = 0
    while misses < _MISSES:
        misses = 0 if await server.check(_SILENCE) else misses + 1
        await asyncio.sleep(_HEALTH_PERIOD)
    server.lose(f"it failed {_MISSES} health checks in a row; its engine may be stopped")


async def open_engine(
    config: EngineConfig,
    source: WeightSource,
    *,
    serve: Callable[[int], Started] | None,
    stop_token_ids: Sequence[int],
    probe: Probe | None = None,
    adapters: Exported | None = None,
    pinned: int | None = None,
    top_k: int = 0,
    probabilities: int | None = None,
    pictures: Pictures | None = None,
    notify: Callable[[str], None] = lambda line: None,
    on_close: Callable[[], None] = lambda: None,
) -> tuple[VLLMEngine, Publication | AdapterPublication]:
    """Return an engine with healthy servers, at version 0, and the publication of the source's weights to them.

    serve: starts the server of a number, also again when it is lost; None: servers already run.
    adapters: one of the source, if it publishes any; pinned: see `AdapterPublication`. top_k: training's, of which
    servers must report the kept tokens. probabilities: how many most probable ids to report them of. pictures: writes
    images for them; None: there are none.
    probe, notify, on_close: see `Publication` and `VLLMEngine`.
    Raises EngineError, with the end of the log, for a server that does not start, does not fit this engine or cannot
    take weights; ConfigError without vLLM.
    """

    async def open_server(number: int) -> Server:
        if serve is None:
            server = Server(config.vllm.urls[number])
        else:
            starting = asyncio.ensure_future(asyncio.to_thread(serve, number))
            try:
                process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                # Another one has failed; a thread cannot be cancelled.
                await (await starting).stop()
                raise
            server = Server(process.url, process)
        try:
            await wait_for(server, START_TIMEOUT)
            await _connect(server, source.model.expert_layers, top_k)
            if serve is None and adapters is not None:
                await adapters.check(server)
            elif serve is None and await server.loads_adapters():
                raise EngineError(
                    f"{server} was started for adapters, which whole weights do not fit; use one without --enable-lora"
                )
            if config.vllm.transfer == "collective":
                server.workers = int((await server.get("/get_world_size"))["world_size"])
        except BaseException:
            await server.close()
            raise
        return server

    dtype = getattr(torch, config.dtype_name)
    towers = pictures is not None and pictures.trained
    kind = Collective if config.vllm.transfer == "collective" else SharedMemory
    transfer: Transfer = kind(dtype, towers)
    servers: list[Server] = []
    opening = [asyncio.ensure_future(open_server(number)) for number in range(config.count)]
    try:
        servers += await asyncio.gather(*opening)
        publication: Publication | AdapterPublication
        if adapters is None:
            publication = Publication(servers, transfer, source, in_flight=config.in_flight, probe=probe)
        else:
            publication = AdapterPublication(servers, source, adapters, probe=probe, pinned=pinned)
        await publication.begin(version=0)
    except BaseException:
        for task in opening:
            task.cancel()
        opened = await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in opened if isinstance(server, Server)))
        on_close()
        raise
    engine = VLLMEngine(
        servers,
        publication,
        stop_token_ids=stop_token_ids,
        expert_layers=source.model.expert_layers,
        probabilities=probabilities,
        pictures=pictures,
        restart=None if serve is None else open_server,
        notify=notify,
        on_close=on_close,
    )
    return engine, publication


async def describe_servers(config: EngineConfig, longest: int) -> str:
    """Describe the configured servers for a dry run: running ones, or the ones to start.

    longest: tokens of prompt and completion together. Raises EngineError for a server that does not answer, ConfigError
    for one with a shorter context, or for an interpreter without vLLM.
    """
    for url in config.vllm.urls:
        server = Server(url)
        try:
            await wait_for(server, 0)
            await server.read_context()
        finally:
            await server.close()
        if server.context < longest:
            raise ConfigError(
                f"vLLM server {url} has a context of {server.context} tokens, rollout.max_input_tokens + "
                f"max_completion_tokens are {longest}; lower one of them, or start it with a longer --max-model-len"
            )
    if config.vllm.urls:
        return f"vLLM, {', '.join(config.vllm.urls)} running"
    python = find_python(config.vllm.python)
    _, version, _ = await asyncio.to_thread(installed_vllm, python)
    tested = "" if version == VERSION else f" (tested is {VERSION})"
    where = "on the GPU" if on_gpu() else "on the CPU: there is no GPU here"
    return f"vLLM {version}{tested} of {python}, {config.vllm.count} to be started, {where}"


async def wait_for(server: Server, timeout: float) -> None:
    """Wait until the server is healthy. A process started by Treadle has `timeout` seconds; others must answer at once.

    Raises EngineError, with the end of the log if Treadle started it.
    """
    deadline = time.monotonic() + timeout
    while not await server.is_well():
        if server.process is None:
            raise EngineError(f"{server} does not answer /health; start it, or correct engine.options.servers")
        if not server.process.running:
            raise EngineError(f"{server} ended while it started:\n{tail(server.process.log)}")
        if time.monotonic() > deadline:
            raise EngineError(f"{server} did not start within {timeout:g} s:\n{tail(server.process.log)}")
        await asyncio.sleep(0.2)


async def _connect(server: Server, expert_layers: Sequence[int] | None, top_k: int) -> None:
    """Read the context's length; check that weights are complete, and which distribution log-probabilities refer to.

    expert_layers: layers with experts to report, if any. top_k: see `open_engine`.
    """
    if (await server.get("/weight_info"))["weight_version"] == LOADING:
        raise EngineError(f"{server} is half loaded: a publication to it was interrupted; restart it")
    await server.post("/resume")  # it may have been left paused
    await server.read_context()
    certain = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True}
    if expert_layers is not None:
        certain["routed_experts_prompt_start"] = 1
    # Two tokens: on a CPU, vLLM crashes on a one-token prompt with recurrent layers.
    answer = await server.post("/inference/v1/generate", {"token_ids": [0, 0], "sampling_params": certain})
    [choice] = answer["choices"]
    # The only token left has probability 1.
    if choice["logprobs"]["content"][0]["logprob"] < -1e-3:
        raise EngineError(f"{server} reports raw log-probabilities; start it with --logprobs-mode processed_logprobs")
    if expert_layers is not None:
        decode_routing(server, choice, expert_layers)
    if listed := alternatives(top_k):
        try:
            await server.post(
                "/inference/v1/generate", {"token_ids": [0, 0], "sampling_params": {**certain, "logprobs": listed}}
            )
        except EngineError as error:
            raise EngineError(f"{error}; rollout.top_k={top_k} needs --max-logprobs {listed}") from error
