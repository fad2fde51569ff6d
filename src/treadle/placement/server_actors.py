"""vLLM servers on a cluster: each is started by an actor at its engine's place, and called over HTTP as any other.

The run's process publishes to it and calls it; rollout workers call it through the actor (`ServerActor.generate`), so
that the run's process has no part in their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from treadle.core.engine import Completion, Engine
from treadle.core.errors import ConfigError, EngineError, PlacementError, TreadleError
from treadle.core.trainer import WeightSync
from treadle.core.types import Ids, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.admission import Admission, Admitted
from treadle.engines.vllm.calls import check_call, sample
from treadle.engines.vllm.launch import ServerProcess
from treadle.engines.vllm.server import Server
from treadle.orchestration.config import RunConfig
from treadle.orchestration.setup.engines import EngineSpec, open_vllm
from treadle.placement.actors import Actor, Placed
from treadle.placement.reserve import Reservation

_LOOK = 1.0  # seconds between looks at whether the server runs
_STOPPING = 30.0  # seconds for a server to end by itself


class ServerActor(Placed):
    """Starts a server, which ends when this process does, and makes rollout workers' calls of it.

    stop_token_ids: tokens that end a completion. expert_layers: those whose experts completions report.
    Invariant: calls begin and return only while it is told to be open.
    """

    def __init__(
        self,
        model: Path,
        config: EngineConfig,
        log: Path,
        stop_token_ids: Sequence[int],
        expert_layers: Sequence[int] | None = None,
    ) -> None:
        self._process = ServerProcess(model, config, log, ray.util.get_node_ip_address())
        self._stop, self._expert_layers = sorted(stop_token_ids), expert_layers
        self._admission = Admission()
        self._server: Server | None = None  # once it serves

    async def url(self) -> str:
        """Return where the server is reached."""
        return self._process.url

    async def hold(self) -> None:
        """Let no call begin or return until `open`."""
        self._admission.hold()

    async def open(self, admitted: Admitted) -> None:
        """Let calls go on, under these weights. Raises EngineError."""
        if self._server is None:
            server = Server(self._process.url, self._process)
            await server.read_context()
            self._server = server
        self._admission.open(admitted)

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, session: str, cache_salt: str | None
    ) -> Completion:
        """Sample for a rollout worker. Raises EngineError; ServerLost if another server is to do it."""
        await self._admission.settled()
        assert self._server is not None
        check_call(len(prompt_ids), sampling, self._server.context)
        return await sample(
            self._server, self._admission, prompt_ids, sampling, self._stop, cache_salt, self._expert_layers
        )

    async def ended(self) -> None:
        """Return once the server has ended, or calls of it fail."""
        while self._process.running and not (self._server and self._server.is_lost):
            await asyncio.sleep(_LOOK)

    async def stop(self) -> None:
        """End the server."""
        await self._process.stop()


class PlacedServer:
    """A server that an actor started (`Started`). log: in a directory that all nodes see."""

    def __init__(
        self,
        options: Mapping[str, Any],
        model: Path,
        config: EngineConfig,
        log: Path,
        stop_token_ids: Sequence[int],
        expert_layers: Sequence[int] | None = None,
    ) -> None:
        log.touch()
        self.log = log
        arguments = model.absolute(), config, log.absolute(), stop_token_ids, expert_layers
        self.route = Actor("the actor of a vLLM server", ServerActor, options, *arguments)
        try:
            self.url: str = ray.get(self.route.handle.url.remote())
        except RayError as error:
            raise EngineError(f"a vLLM server was not started: {self.route.translate(error)}") from error
        self._ended = self.route.handle.ended.remote()

    @property
    def running(self) -> bool:
        """Whether neither the server nor its actor has ended."""
        ended, _ = ray.wait([self._ended], timeout=0)
        return not ended

    async def hold(self) -> None:
        await self._call("hold")

    async def open(self, admitted: Admitted) -> None:
        await self._call("open", admitted)

    async def stop(self) -> None:
        """End the server, and the actor. Idempotent."""
        with suppress(TreadleError, TimeoutError):
            async with asyncio.timeout(_STOPPING):
                await self.route.call("stop")
        self.route.kill()

    async def _call(self, method: str, *arguments: Any) -> None:
        try:
            await self.route.call(method, *arguments)
        except PlacementError as error:
            raise EngineError(str(error)) from error


async def open_servers(config: RunConfig, reservation: Reservation, spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Open a vLLM server at each engine's place; see `OpenEngine`. Raises ConfigError for servers that run already."""
    if spec.config.vllm.urls:
        raise ConfigError(
            "engine.options.servers names servers that run, and placement.kind 'ray' starts its own; leave it out"
        )
    places = [reservation.options(bundle) for bundle in reservation.of("engine")]
    gpus = config.placement.engines.gpus
    args = {**({"tensor-parallel-size": gpus} if gpus > 1 else {}), **spec.config.vllm.args}
    options = {**spec.config.options, "servers": len(places), "args": args}

    def serve(number: int, model: Path, config: EngineConfig, log: Path) -> PlacedServer:
        return PlacedServer(places[number], model, config, log, spec.renderer.stop_ids, spec.source.model.expert_layers)

    spec = replace(spec, config=spec.config.model_copy(update={"options": options}))
    return await open_vllm(spec, serve, spec.log_directory())
