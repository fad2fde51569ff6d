"""Engines that are Ray actors, and a pool of them.

EnginePool -> RemoteEngine --(wave, publish)--> EngineActor -> TorchEngine
                    rollout workers --(generate)----^
"""

from __future__ import annotations

import asyncio
from functools import partial

import torch
from transformers.utils import logging as hf_logging

from treadle.core.engine import Engine
from treadle.core.errors import ConfigError
from treadle.core.trainer import WeightSync
from treadle.engines.config import EngineConfig, tolerance_of
from treadle.engines.pool import EnginePool, PoolSync
from treadle.engines.remote import EngineService, MakeEngine, RemoteEngine
from treadle.engines.torch.engine import TorchEngine
from treadle.models.config import LoraConfig, ModelConfig
from treadle.orchestration.config import RunConfig
from treadle.orchestration.setup.chat_interface import load_chat_interface
from treadle.orchestration.setup.engines import EngineSpec, torch_options
from treadle.placement.actors import Actor, Placed
from treadle.placement.reserve import Reservation
from treadle.placement.server_actors import open_servers
from treadle.placement.stored_weights import ObjectStore
from treadle.placement.turns import ColocatedPool, ColocatedTrainer
from treadle.training.make import load_model


def make_engine(
    config: EngineConfig,
    model: ModelConfig,
    lora: LoraConfig | None,
    seed: int,
    routing: bool,
    threads: int,
    deterministic: bool,
    device: str,
) -> TorchEngine:
    """Return an engine in this process. threads, deterministic, device: how and where it computes."""
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    chat = load_chat_interface(model)
    loaded = load_model(model, seed, lora)
    loaded.to(device)  # type: ignore[arg-type]  # a wrapper hides the signature
    return TorchEngine(loaded, torch_options(config, chat, routing), decode=chat.decode)


class EngineActor(Placed, EngineService):
    """A Ray actor that answers for an engine."""


async def open_engines(config: RunConfig, reservation: Reservation, spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Open an engine at each of its places; see `OpenEngine`. config: whose model they serve.

    Beside a trainer that takes turns, they are loaded in theirs.
    """
    if spec.config.kind == "vllm":
        return await open_servers(config, reservation, spec)
    if spec.config.kind != "torch":
        raise ConfigError(
            f"engine.kind is {spec.config.kind!r}, and placement.kind 'ray' starts engines of kind torch and vllm; set "
            "one of them to another"
        )
    make = partial(
        make_engine,
        spec.config,
        config.model,
        config.training.lora,
        config.seed,
        spec.routing,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        "cuda" if "GPU" in reservation.of("engine")[0].resources else "cpu",
    )
    destination = ObjectStore(getattr(torch, spec.config.dtype))
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
            tolerance=tolerance_of(spec.config.dtype),
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
