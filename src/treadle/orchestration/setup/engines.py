"""From the `engine` section to an engine that serves a model's weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from treadle.core.engine import Engine
from treadle.core.trainer import Trainer, WeightSource, WeightSync
from treadle.engines.config import EngineConfig
from treadle.engines.engine_process import start_engine
from treadle.engines.staging import new_directory
from treadle.engines.torch_engine import TorchEngine
from treadle.engines.weight_sync import EmbeddedSync, SharedMemorySync
from treadle.orchestration.config import RunConfig
from treadle.orchestration.setup.chat_interface import ChatInterface
from treadle.training.make import load_model
from treadle.training.trainer import EmbeddedSource

_PROBE = 64  # tokens that new weights are proven with


async def open_engine(
    config: RunConfig, chat: ChatInterface, trainer: Trainer, logs: Path, log: Callable[[str], None]
) -> tuple[Engine, WeightSync]:
    """Return the engine of a training run, and what makes it serve the trainer's weights: publish before it samples.

    logs: directory for those of other processes. log: told of an own process that was started again.
    Raises ConfigError, EngineError or CheckpointError.
    """
    load = partial(load_model, config.model, config.seed)
    return await open_source(config.engine_in_training, chat, trainer, load, logs, config.training.routing_replay, log)


async def open_source(
    config: EngineConfig,
    chat: ChatInterface,
    source: WeightSource,
    load_model: Callable[[], PreTrainedModel],
    logs: Path | None = None,
    routing: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Engine, WeightSync]:
    """Return an engine for any source's model, and what makes it serve the source's weights, as `open_engine` does.

    load_model: returns a model like the source's, with any weights, which an engine in this process copies.
    logs: where other processes write theirs; default: a temporary directory, which stays. routing: kind torch tells
    which experts are chosen; with others, a run refuses it. say: told of an own process that was started again.
    Raises ConfigError, EngineError or CheckpointError.
    """
    if config.kind == "torch" and not config.own_process:
        embedded = embedded_engine(config, chat, load_model(), routing)
        return embedded, EmbeddedSync(source, embedded)
    logs = logs or Path(tempfile.mkdtemp(prefix="treadle-logs-"))
    if config.kind == "torch":
        return await _own_process(config, chat, source, logs, routing, say)
    return await _vllm(config, chat, source, logs)


async def open_serving(config: EngineConfig, chat: ChatInterface, source: EmbeddedSource) -> Engine:
    """Return an engine that serves a model which is not trained. Raises as `open_engine`."""
    engine, weight_sync = await open_source(config, chat, source, lambda: source.module)
    try:
        await weight_sync.publish(0)  # servers that run already may have any weights
    except BaseException:
        await engine.close()
        raise
    return engine


def embedded_engine(
    config: EngineConfig, chat: ChatInterface, model: PreTrainedModel, routing: bool = False
) -> TorchEngine:
    """Return an engine in this process with a copy of the model. routing: it tells which experts were chosen.

    In lock-step it computes on the caller's thread: learner and engine take turns. Otherwise on one of its own,
    beside whatever the sessions do.
    """
    lock_step = config.lock_step is not False
    return TorchEngine(
        model,
        stop_token_ids=chat.stop_token_ids,
        decode=chat.decode,
        max_batch=config.batch,
        dtype=getattr(torch, config.dtype),
        lock_step=lock_step,
        in_flight=config.in_flight,
        own_thread=not lock_step,
        routing=routing,
    )


async def _own_process(
    config: EngineConfig,
    chat: ChatInterface,
    source: WeightSource,
    logs: Path,
    routing: bool,
    say: Callable[[str], None],
) -> tuple[Engine, WeightSync]:
    with ExitStack() as cleanup:
        folder = _directory(cleanup)
        await source.export(folder)
        engine = await start_engine(
            folder,
            stop_token_ids=chat.stop_token_ids,
            log=logs / "engine.log",
            max_batch=config.batch,
            dtype=config.dtype,
            lock_step=config.lock_step is not False,
            in_flight=config.in_flight,
            routing=routing,
            say=say,
            on_close=cleanup.pop_all().close,
        )
    return engine, SharedMemorySync(source, engine)


async def _vllm(
    config: EngineConfig, chat: ChatInterface, source: WeightSource, logs: Path
) -> tuple[Engine, WeightSync]:
    from treadle.engines.vllm.publication import Probe  # httpx, which only this needs
    from treadle.engines.vllm.start import open_engine as start

    known = source.model
    ids = np.random.default_rng(0).integers(0, known.vocabulary, min(_PROBE, known.context - 1)).astype(np.int32)
    probe = Probe(ids, config.tolerance)
    connected = partial(start, config, source, stop_token_ids=chat.stop_token_ids, logs=logs, probe=probe)
    if config.vllm.urls:  # servers that have a model
        return await connected(model=None)
    with ExitStack() as cleanup:
        folder = _directory(cleanup)
        await source.export(folder)
        return await connected(model=folder, on_close=cleanup.pop_all().close)


def _directory(cleanup: ExitStack) -> Path:
    """The name of a directory for a model, which goes with the stack."""
    outer = new_directory(Path(tempfile.gettempdir()))
    cleanup.callback(shutil.rmtree, outer, ignore_errors=True)
    return outer / "model"
