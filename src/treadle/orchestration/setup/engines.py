"""From the `engine` section to an engine that serves a model's weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedModel

from treadle.core.engine import Engine
from treadle.core.registry import resolve
from treadle.core.trainer import WeightSource, WeightSync
from treadle.engines.config import EngineConfig
from treadle.engines.remote import start_engine
from treadle.engines.staging import temporary_directory
from treadle.engines.torch.options import TorchEngineOptions
from treadle.engines.torch.pinned import LocalEngine, make_engine
from treadle.engines.vllm.launch import ServerProcess
from treadle.engines.weight_sync import EmbeddedSync, SharedMemorySync
from treadle.models.model_files import is_adapter
from treadle.models.weights import adapter_weights
from treadle.orchestration.config import RunConfig
from treadle.orchestration.setup.chat_interface import ChatInterface
from treadle.training.make import load_model
from treadle.training.trainer import EmbeddedSource

if TYPE_CHECKING:
    from treadle.engines.vllm.server import Started

_PROBE = 64  # tokens that new weights are proven with


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is made from: `open_engine(EngineSpec(config.engine, chat, trainer, load_model))`.

    source: whose weights it serves. load_model: returns a model like the source's, with any weights, which an engine in
    this process copies. logs: directory where other processes write theirs; default: a temporary one, which stays.
    routing: it is to tell which experts were chosen. pinned: sessions keep the version of their first call, at most
    so many behind the newest. log: takes lines for the run's output.
    """

    config: EngineConfig
    chat: ChatInterface
    source: WeightSource
    load_model: Callable[[], PreTrainedModel]
    logs: Path | None = None
    routing: bool = False
    pinned: int | None = None
    log: Callable[[str], None] = lambda line: None

    def log_directory(self) -> Path:
        """Return where other processes write their logs."""
        return self.logs or Path(tempfile.mkdtemp(prefix="treadle-logs-"))


OpenEngine = Callable[[EngineSpec], Awaitable[tuple[Engine, WeightSync]]]
"""What is registered as an engine (entry points `treadle.engines`, chosen by `engine.kind`).

It returns the engine, and what makes it serve the source's weights, which is called before it samples. Its own settings
are `engine.options`. Raises ConfigError, EngineError or CheckpointError.
"""


def training_engine(
    config: RunConfig,
    chat: ChatInterface,
    trainer: WeightSource,
    logs: Path,
    log: Callable[[str], None],
    may_wait: bool = False,
) -> EngineSpec:
    """The engine of a training run. may_wait: of its players (`Players.may_wait`)."""
    return EngineSpec(
        config=config.engine_in_training(may_wait),
        chat=chat,
        source=trainer,
        load_model=partial(load_model, config.model, config.seed, config.training.lora),
        logs=logs,
        routing=config.training.routing_replay,
        pinned=config.pinned,
        log=log,
    )


async def open_engine(spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Open the engine that is registered as `engine.kind`; see `OpenEngine`."""
    opened: OpenEngine = resolve("engines", spec.config.kind, "engine.kind")
    return await opened(spec)


async def open_torch(spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Open Treadle's own engine, in this process or one of its own; see `OpenEngine`."""
    if spec.config.own_process:
        return await _own_process(spec)
    # beside a trainer of adapters, the engine computes with that one's own base
    here = spec.source.module if isinstance(spec.source, EmbeddedSource) else None
    model = here if here is not None and adapter_weights(here) else spec.load_model()
    embedded = embedded_engine(spec.config, spec.chat, model, spec.routing, spec.pinned)
    return embedded, EmbeddedSync(spec.source, embedded, by_file=here is None)


async def open_serving(config: EngineConfig, chat: ChatInterface, source: EmbeddedSource) -> Engine:
    """Return an engine that serves a model which is not trained. Raises as `open_engine`."""
    engine, weight_sync = await open_engine(EngineSpec(config, chat, source, lambda: source.module))
    try:
        await weight_sync.publish(0)  # servers that run already may have any weights
    except BaseException:
        await engine.close()
        raise
    return engine


def embedded_engine(
    config: EngineConfig,
    chat: ChatInterface,
    model: PreTrainedModel,
    routing: bool = False,
    pinned: int | None = None,
) -> LocalEngine:
    """Return an engine in this process with a copy of the model. routing, pinned: as of `EngineSpec`.

    In lock-step it computes on the caller's thread: learner and engine take turns. Otherwise on one of its own,
    beside whatever the sessions do.
    """
    options = torch_options(config, chat, routing, pinned)
    return make_engine(model, options, chat.decode, own_thread=not options.lock_step)


def torch_options(
    config: EngineConfig, chat: ChatInterface, routing: bool, pinned: int | None = None
) -> TorchEngineOptions:
    """Return the options of Treadle's own engine. routing, pinned: as of `EngineSpec`."""
    return TorchEngineOptions(
        stop_token_ids=chat.stop_token_ids,
        max_batch=config.batch,
        cache_gib=config.cache_gib,
        dtype=config.dtype,
        lock_step=config.lock_step is not False,
        in_flight=config.in_flight,
        routing=routing,
        pinned=pinned,
    )


async def _own_process(spec: EngineSpec) -> tuple[Engine, WeightSync]:
    config = spec.config
    with ExitStack() as cleanup:
        folder = _directory(cleanup)
        await spec.source.export(folder)
        engine = await start_engine(
            folder,
            torch_options(config, spec.chat, spec.routing, spec.pinned),
            log=spec.log_directory() / "engine.log",
            notify=spec.log,
            on_close=cleanup.pop_all().close,
        )
    return engine, SharedMemorySync(spec.source, engine)


Serve = Callable[[int, Path, EngineConfig, Path], "Started"]
"""Starts a vLLM server: called with its number, the model's directory, the settings, and the file for its output."""


def serve_here(number: int, model: Path, config: EngineConfig, log: Path) -> Started:
    """Start a server on this machine."""
    return ServerProcess(model, config, log)


async def open_vllm(
    spec: EngineSpec, serve: Serve = serve_here, models: Path | None = None
) -> tuple[Engine, WeightSync]:
    """Open the client of vLLM's servers, which are started unless they run already; see `OpenEngine`.

    models: directory in which the model is handed over, which trainer and
    servers see; default: that of temporary files.
    """
    from treadle.engines.vllm.adapters import Exported  # httpx, which only this needs
    from treadle.engines.vllm.engine import open_engine as start
    from treadle.engines.vllm.publication import Probe

    config, model = spec.config, spec.source.model
    if spec.routing:
        args = {"enable-return-routed-experts": True, **config.vllm.args}
        config = config.model_copy(update={"options": {**config.options, "args": args}})
    ids = np.random.default_rng(0).integers(0, model.vocabulary, min(_PROBE, model.context - 1)).astype(np.int32)
    probe, stop = Probe(ids, config.tolerance), spec.chat.stop_token_ids
    connected = partial(start, source=spec.source, stop_token_ids=stop, probe=probe, notify=spec.log)
    if config.vllm.urls:  # servers that have a model
        return await connected(config, serve=None)
    logs = spec.log_directory()
    with ExitStack() as cleanup:
        folder = _directory(cleanup, models)
        await spec.source.export(folder)
        if is_adapter(folder):
            exported = Exported.read(folder)
            config, served = exported.served_by(config, slots=(spec.pinned or 0) + 2), exported.base
            connected = partial(connected, adapters=folder.parent, pinned=spec.pinned)
        else:
            served = folder

        def serve_model(number: int) -> Started:
            return serve(number, served, config, logs / f"vllm-{number}.log")

        return await connected(config, serve=serve_model, on_close=cleanup.pop_all().close)


def _directory(cleanup: ExitStack, parent: Path | None = None) -> Path:
    """The name of a directory for a model, which goes with the stack."""
    outer = temporary_directory(parent or Path(tempfile.gettempdir()))
    cleanup.callback(shutil.rmtree, outer, ignore_errors=True)
    return outer / "model"
