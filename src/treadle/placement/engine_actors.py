"""Engines as Ray actors, and a pool of them.

EnginePool -> RemoteEngine --(wave, publish)--> EngineActor -> TorchEngine
                    rollout workers --(generate)----^
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from treadle.core.engine import Completion, Engine
from treadle.core.errors import ConfigError, EngineError, PlacementError, TreadleError
from treadle.core.images import PromptImage
from treadle.core.trainer import WeightSync
from treadle.core.types import Ids, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.engines.pool import EnginePool, PoolSync
from treadle.engines.remote import EngineService, MakeEngine, RemoteEngine
from treadle.engines.staging import to_host
from treadle.engines.torch.pinned import LocalEngine
from treadle.engines.torch.pinned import make_engine as make_local_engine
from treadle.engines.vllm.launch import ServerProcess
from treadle.engines.vllm.server import Admission, Admitted, Server, check_call, sample
from treadle.loop.config import RuntimePlan
from treadle.loop.engines import EngineSpec, open_vllm, torch_options
from treadle.placement.actors import Actor, Placed
from treadle.placement.reserve import Reservation
from treadle.placement.turns import ColocatedPool, ColocatedTrainer

_LOOK = 1.0  # seconds between checks whether the server runs
_STOPPING = 30.0  # seconds for a server to exit
_BUCKET = 64 * 2**20  # bytes of tensors per object


def make_engine(
    load_model: Callable[[], PreTrainedModel],
    make: Callable[[PreTrainedModel], LocalEngine],
    threads: int,
    deterministic: bool,
) -> LocalEngine:
    """Return an engine in this process. threads, deterministic: settings of its computation."""
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    return make(load_model())


class EngineActor(Placed, EngineService):
    """A Ray actor that serves an engine."""


async def open_engines(plan: RuntimePlan, reservation: Reservation, spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Open an engine at each of its places (`OpenEngine`); colocated with the trainer if they take turns."""
    if spec.config.kind == "vllm":
        return await open_servers(plan, reservation, spec)
    if spec.config.kind != "torch":
        raise ConfigError(
            f"engine.kind is {spec.config.kind!r}, and placement.kind 'ray' starts engines of kind torch and vllm; set "
            "one of them to another"
        )
    device = "cuda" if "GPU" in reservation.of("engine")[0].resources else "cpu"
    options = torch_options(replace(spec, device=device))
    make = partial(
        make_engine,
        spec.load_model,
        partial(
            make_local_engine,
            options=options,
            decode=spec.renderer.decode,
            grammars=spec.renderer.grammars,
            vision=spec.vision,
        ),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled() and device == "cpu",
    )
    destination = ObjectStore(getattr(torch, spec.config.dtype_name))
    if isinstance(spec.source, ColocatedTrainer):
        async with spec.source.turns.of("engines"):
            pool: EnginePool = ColocatedPool(await _open_all(make, reservation, spec), spec.source.turns)
    else:
        pool = EnginePool(await _open_all(make, reservation, spec))
    return pool, PoolSync(spec.source, pool, destination)


async def _open_all(make: MakeEngine, reservation: Reservation, spec: EngineSpec) -> list[RemoteEngine]:
    engines = [
        RemoteEngine(
            str(bundle),
            make,
            partial(Actor, str(bundle), EngineActor, reservation.options(bundle)),
            lock_step=spec.config.lock_step is not False,
            tolerance=spec.config.tolerance,
            notify=spec.log,
        )
        for bundle in reservation.of("engine")
    ]
    try:
        await asyncio.gather(*(each.open() for each in engines))
    except BaseException:
        await asyncio.gather(*(each.close() for each in engines))
        raise
    return engines


class ServerActor(Placed):
    """Starts a server, which ends when this process does, and calls it for rollout workers.

    stop_token_ids: tokens that end a completion. expert_layers: layers with experts reported by completions.
    Invariant: calls begin and return only while it is open.
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
        return self._process.url

    async def hold(self) -> None:
        """Let no call begin or return until `open`."""
        self._admission.hold()

    async def open(self, admitted: Admitted) -> None:
        """Let calls continue, under these weights. Raises EngineError."""
        if self._server is None:
            server = Server(self._process.url, self._process)
            await server.read_context()
            self._server = server
        self._admission.open(admitted)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        session: str,
        cache_salt: str | None,
        images: Sequence[PromptImage],
    ) -> Completion:
        """Sample for a rollout worker. Raises EngineError; ServerLost if another server should do it."""
        await self._admission.settled()
        assert self._server is not None
        check_call(len(prompt_ids), sampling, self._server.context)
        return await sample(
            *(self._server, self._admission, prompt_ids, sampling, self._stop, cache_salt, self._expert_layers),
            images=images,  # refused: the engine's own process shows images
        )

    async def ended(self) -> None:
        """Return once the server has ended, or its calls fail."""
        while self._process.running and not (self._server and self._server.is_lost):
            await asyncio.sleep(_LOOK)

    async def stop(self) -> None:
        await self._process.stop()


class PlacedServer:
    """A server started by an actor (`Started`). log: file in a directory visible to all nodes."""

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
                await self.route.call("stop", cancel=False)
        self.route.kill()

    async def _call(self, method: str, *arguments: Any) -> None:
        try:
            await self.route.call(method, *arguments, cancel=False)
        except PlacementError as error:
            raise EngineError(str(error)) from error


async def open_servers(plan: RuntimePlan, reservation: Reservation, spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Open a vLLM server at each engine's place; see `OpenEngine`. Raises ConfigError for servers already running."""
    if spec.config.vllm.urls:
        raise ConfigError(
            "engine.options.servers names servers that run, and placement.kind 'ray' starts its own; leave it out"
        )
    places = [reservation.options(bundle) for bundle in reservation.of("engine")]
    gpus = plan.placement.engines.gpus
    args = {**({"tensor-parallel-size": gpus} if gpus > 1 else {}), **spec.config.vllm.args}
    options = {**spec.config.options, "servers": len(places), "args": args}

    def serve(number: int, model: Path, config: EngineConfig, log: Path) -> PlacedServer:
        return PlacedServer(places[number], model, config, log, spec.renderer.stop_ids, spec.source.model.expert_layers)

    spec = replace(spec, config=spec.config.model_copy(update={"options": options}))
    return await open_vllm(spec, serve)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """References to dictionaries of tensors, which exist as long as they are referenced (`engines.staging.Staged`)."""

    references: tuple[Any, ...]

    def discard(self) -> None:
        """No-op: others may hold the references."""

    async def fetch(self) -> dict[str, Tensor]:
        """Return the weights by name, once they are on this node. Raises EngineError if they are gone."""
        weights: dict[str, Tensor] = {}
        try:
            for reference in self.references:
                weights |= await reference
        except ray.exceptions.RayError as error:
            raise EngineError(f"published weights could not be fetched: {error}") from error
        return weights


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """Writes weights as objects (a `WeightsDestination`). dtype: dtype of floating-point weights."""

    dtype: torch.dtype

    def write(self, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> StoredWeights:
        """Put the weights, some tensors at a time, to avoid a full copy here."""
        references: list[Any] = []
        bucket: dict[str, Tensor] = {}
        for name, tensor in weights:
            bucket[name] = to_host(tensor, self.dtype)
            if sum(each.nbytes for each in bucket.values()) >= _BUCKET:
                references.append(ray.put(bucket))
                bucket = {}
        return StoredWeights((*references, ray.put(bucket)))
