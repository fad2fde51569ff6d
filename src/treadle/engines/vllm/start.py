"""From a configuration to a `VLLMEngine`: servers started or connected to, and checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import torch

from treadle.core.errors import ConfigError, EngineError
from treadle.core.trainer import WeightSource
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.calls import decode_routing
from treadle.engines.vllm.collective import Collective
from treadle.engines.vllm.engine import VLLMEngine
from treadle.engines.vllm.launch import VERSION, Started, find_python, installed_vllm, on_gpu, tail
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
    """Return an engine whose servers answer, at version 0, and the publication of the source's weights to them.

    serve: starts the server of a number, also again when it is lost; None: servers run already.
    probe, notify, on_close: see `Publication` and `VLLMEngine`.
    Raises EngineError, with the end of the log, for a server that does not start, does not fit this engine or cannot
    take weights; ConfigError without vLLM.
    """

    async def open_server(number: int) -> Server:
        if serve is None:
            server = Server(config.vllm.urls[number])
        else:
            process = await asyncio.to_thread(serve, number)
            server = Server(process.url, process)
        try:
            await wait_for(server, START_TIMEOUT)
            await _connect(server, source.model.expert_layers)
            if config.vllm.transfer == "collective":
                server.workers = int((await server.get("/get_world_size"))["world_size"])
        except BaseException:
            await server.close()
            raise
        return server

    dtype = getattr(torch, config.dtype)
    transfer: Transfer = Collective(dtype) if config.vllm.transfer == "collective" else SharedMemory(dtype)
    servers: list[Server] = []
    opening = [asyncio.ensure_future(open_server(number)) for number in range(config.count)]
    try:
        servers += await asyncio.gather(*opening)
        publication = Publication(servers, transfer, source, in_flight=config.in_flight, probe=probe)
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
        restart=None if serve is None else open_server,
        notify=notify,
        on_close=on_close,
    )
    return engine, publication


async def describe_servers(config: EngineConfig, longest: int) -> str:
    """Describe, for a dry run, the configured servers: those that run, or what would be started.

    longest: tokens of prompt and completion together. Raises EngineError for a server that does not answer,
    ConfigError for one with a shorter context, or for an interpreter without vLLM.
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
    """Wait until the server is well. A process that Treadle started has `timeout` seconds; another must answer at once.

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


async def _connect(server: Server, expert_layers: Sequence[int] | None) -> None:
    """Read the context's length; check that weights are whole, and log-probabilities those of what is sampled from.

    expert_layers: those whose experts it must report, if any.
    """
    if (await server.get("/weight_info"))["weight_version"] == LOADING:
        raise EngineError(f"{server} is half loaded: whoever published to it was interrupted; restart it")
    await server.post("/resume")  # it may have been left paused
    await server.read_context()
    certain = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True}
    answer = await server.post("/inference/v1/generate", {"token_ids": [0], "sampling_params": certain})
    [choice] = answer["choices"]
    if choice["logprobs"]["content"][0]["logprob"] < -1e-3:  # the only token left has probability 1
        raise EngineError(f"{server} reports raw log-probabilities; start it with --logprobs-mode processed_logprobs")
    if expert_layers is not None:
        decode_routing(server, choice, expert_layers)
