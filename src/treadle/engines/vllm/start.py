"""From a configuration to a `VLLMEngine`: servers started or connected to, and checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import torch

from treadle.core.errors import EngineError
from treadle.core.trainer import WeightSource
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.calls import decode_routing
from treadle.engines.vllm.collective import Collective
from treadle.engines.vllm.engine import VLLMEngine
from treadle.engines.vllm.launch import Started
from treadle.engines.vllm.publication import LOADING, Probe, Publication
from treadle.engines.vllm.server import Server
from treadle.engines.vllm.transfer import SharedMemory, Transfer

START_TIMEOUT = 1800.0  # seconds; a server that ends meanwhile is noticed at once


async def open_engine(
    config: EngineConfig,
    source: WeightSource,
    *,
    serve: Callable[[int], Started] | None,
    stop_token_ids: Sequence[int],
    probe: Probe | None = None,
    notify: Callable[[str], None] = lambda line: None,
    on_close: Callable[[], None] = lambda: None,
) -> tuple[VLLMEngine, Publication]:
    """Return an engine whose servers answer, at version 0, and the publication of the weights of `source` to them.

    serve: starts a server, by number, also when one is lost; None: they run already. probe: what new weights are proven
    with. notify: gets a line for a server that is lost. Raises EngineError with the end of the log for a server that
    does not start, is no match for this engine or cannot take weights; ConfigError without vLLM.
    """

    async def open_server(number: int) -> Server:
        server = Server(config.vllm.urls[number]) if serve is None else await _started(serve, number)
        try:
            await wait_for(server, START_TIMEOUT)
            await _connect(server, source.model.expert_layers)
            if config.vllm.transfer == "collective":
                server.workers = int((await server.get("/get_world_size"))["world_size"])
        except BaseException:
            await server.close()
            raise
        return server

    servers: list[Server] = []
    opening = [asyncio.ensure_future(open_server(number)) for number in range(config.count)]
    try:
        servers += await asyncio.gather(*opening)
        publication = Publication(servers, _transfer(config), source, in_flight=config.in_flight, probe=probe)
        await publication.begin(version=0)
    except BaseException:
        for task in opening:
            task.cancel()
        found = await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in found if isinstance(server, Server)))
        on_close()
        raise
    engine = VLLMEngine(
        servers,
        publication,
        stop_token_ids=stop_token_ids,
        expert_layers=source.model.expert_layers,
        restart=None if serve is None else open_server,
        notify=notify,
        on_close=on_close,
    )
    return engine, publication


async def _started(serve: Callable[[int], Started], number: int) -> Server:
    starting = asyncio.ensure_future(asyncio.to_thread(serve, number))
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        await (await starting).stop()
        raise
    return Server(process.url, process)


def _transfer(config: EngineConfig) -> Transfer:
    dtype = getattr(torch, config.dtype)
    if config.vllm.transfer == "collective":
        return Collective(dtype)
    return SharedMemory(dtype)


async def wait_for(server: Server, timeout: float) -> None:
    """Wait until the server is well. Raises EngineError, with the end of the log if Treadle started it, if it never is.

    A process that Treadle started has `timeout` seconds; one that should run already has to answer at once.
    """
    deadline = time.monotonic() + (timeout if server.process else 0)
    while not await server.is_well():
        if server.process is None:
            raise EngineError(f"{server} does not answer /health; start it, or correct engine.options.servers")
        if not server.process.running:
            raise EngineError(f"{server} ended while it started:\n{server.process.tail()}")
        if time.monotonic() > deadline:
            raise EngineError(f"{server} did not start within {timeout:g} s:\n{server.process.tail()}")
        await asyncio.sleep(0.2)


async def _connect(server: Server, expert_layers: Sequence[int] | None) -> None:
    """Learn the context's length; check that weights are whole, and log-probabilities those of what is sampled from.

    expert_layers: those whose experts it must report, if any.
    """
    if (await server.get("/weight_info"))["weight_version"] == LOADING:
        raise EngineError(f"{server} is half loaded: whoever published to it was interrupted; restart it")
    await server.post("/resume")  # it may have been left paused
    await server.read_context()
    certain = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True}
    answer = await server.post("/inference/v1/generate", {"token_ids": [0], "sampling_params": certain})
    [choice] = answer["choices"]
    logprob = choice["logprobs"]["content"][0]["logprob"]
    if logprob < -1e-3:  # the only token left has probability 1
        raise EngineError(f"{server} reports raw log-probabilities; start it with --logprobs-mode processed_logprobs")
    if expert_layers is not None:
        decode_routing(server, choice, expert_layers)
