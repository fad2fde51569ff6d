"""Whether vLLM's servers could be had, found out without starting or changing one."""

from __future__ import annotations

import asyncio

from treadle.core.errors import ConfigError
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.launch import VERSION, Build, find_python, on_gpu
from treadle.engines.vllm.server import Server
from treadle.engines.vllm.start import wait_for


async def describe_servers(config: EngineConfig, longest: int) -> str:
    """Return a line on the configured servers: those that run, or what would be started.

    longest: tokens of prompt and completion together. Raises EngineError for a server that does not answer,
    ConfigError for one whose model has a shorter context, or for an interpreter without vLLM.
    """
    if config.vllm.urls:
        contexts = await asyncio.gather(*(_context(url) for url in config.vllm.urls))
        for url, context in zip(config.vllm.urls, contexts, strict=True):
            if context < longest:
                raise ConfigError(
                    f"vLLM server {url} has a context of {context} tokens, rollout.max_input_tokens + "
                    f"max_completion_tokens are {longest}; lower one of them, or start it with a longer --max-model-len"
                )
        return f"vLLM, {', '.join(config.vllm.urls)} running"
    python = find_python(config.vllm.python)
    build = await asyncio.to_thread(Build.of, python)
    tested = "" if build.version == VERSION else f" (tested is {VERSION})"
    where = "on the GPU" if on_gpu() else "on the CPU: there is no GPU here"
    return f"vLLM {build.version}{tested} of {python}, {config.vllm.count} to be started, {where}"


async def _context(url: str) -> int:
    server = Server(url)
    try:
        await wait_for(server, 0)
        [model] = (await server.get("/v1/models"))["data"][:1]
        return int(model["max_model_len"])
    finally:
        await server.close()
