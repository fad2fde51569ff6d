"""vLLM servers on a cluster: each is started by an actor at its engine's place, and called over HTTP as any other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from treadle.core.engine import Engine
from treadle.core.errors import ConfigError, EngineError
from treadle.core.trainer import WeightSync
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.launch import ServerProcess, tail
from treadle.orchestration.config import RunConfig
from treadle.orchestration.setup.engines import EngineSpec, open_vllm
from treadle.placement.reserve import Reservation

_LOOK = 1.0  # seconds between looks at whether the server runs
_STOPPING = 30.0  # seconds for a server to end by itself


class ServerActor:
    """Has a server as its child, which ends when this process does."""

    def __init__(self, model: Path, config: EngineConfig, log: Path) -> None:
        self._server = ServerProcess(model, config, log, ray.util.get_node_ip_address())

    async def url(self) -> str:
        """Return where the server is reached."""
        return self._server.url

    async def ended(self) -> None:
        """Return once the server has ended."""
        while self._server.running:
            await asyncio.sleep(_LOOK)

    async def stop(self) -> None:
        """End the server."""
        await self._server.stop()


class PlacedServer:
    """Is a server that an actor started (`Started`). log: in a directory that all nodes see."""

    def __init__(self, options: Mapping[str, Any], model: Path, config: EngineConfig, log: Path) -> None:
        log.touch()
        self.log = log
        self._actor = ray.remote(ServerActor).options(max_restarts=0, max_task_retries=0, **options)
        self._actor = self._actor.remote(model.absolute(), config, log.absolute())
        try:
            self.url: str = ray.get(self._actor.url.remote())
        except RayError as error:
            raise EngineError(f"a vLLM server was not started: {error}") from error
        self._ended = self._actor.ended.remote()

    @property
    def running(self) -> bool:
        """Return whether neither the server nor its actor has ended."""
        ended, _ = ray.wait([self._ended], timeout=0)
        return not ended

    def tail(self) -> str:
        """Return the last lines of the log."""
        return tail(self.log)

    async def stop(self) -> None:
        """End the server, and the actor. Idempotent."""
        await asyncio.wait([asyncio.ensure_future(self._stopped())], timeout=_STOPPING)
        ray.kill(self._actor)

    async def _stopped(self) -> None:
        try:
            await self._actor.stop.remote()
        except RayError:
            return


async def open_servers(config: RunConfig, reservation: Reservation, spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Open a vLLM server at each engine's place; see `OpenEngine`. Raises ConfigError for servers that run already."""
    if spec.config.vllm.urls:
        raise ConfigError(
            "engine.vllm.urls names servers that run, and placement.kind 'ray' starts its own; leave one of them out"
        )
    places = [reservation.options(bundle) for bundle in reservation.of("engine")]
    gpus = config.placement.engines.gpus
    args = {**({"tensor-parallel-size": gpus} if gpus > 1 else {}), **spec.config.vllm.args}
    vllm = spec.config.vllm.model_copy(update={"servers": len(places), "args": args})

    def serve(number: int, model: Path, config: EngineConfig, log: Path) -> PlacedServer:
        return PlacedServer(places[number], model, config, log)

    spec = replace(spec, config=spec.config.model_copy(update={"vllm": vllm}))
    return await open_vllm(spec, serve, spec.log_directory())
