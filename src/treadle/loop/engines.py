"""Opens engines from a configuration, and checks that they sample the trained model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedModel

from treadle.core.engine import Engine
from treadle.core.errors import ConfigError, EngineError
from treadle.core.images import PLACE, read_image
from treadle.core.registry import resolve
from treadle.core.trainer import Trainer, WeightSource, WeightSync
from treadle.core.types import Floats, Routing, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.engines.probe import ProbeResult, probe_engine
from treadle.engines.remote import start_engine
from treadle.engines.staging import temporary_directory
from treadle.engines.torch.model import MakeTower
from treadle.engines.torch.options import TorchEngineOptions
from treadle.engines.torch.pinned import LocalEngine, make_engine
from treadle.engines.vllm.launch import ServerProcess
from treadle.engines.weight_sync import EmbeddedSync, SharedMemorySync
from treadle.models.config import ModelConfig
from treadle.models.towers import takes_images
from treadle.models.vision import ImageProcessor
from treadle.models.weights import adapter_weights
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.training.trainer import EmbeddedSource

if TYPE_CHECKING:
    from treadle.engines.vllm.server import Started

LANGUAGE_ONLY = "language-model-only"  # a server's argument
_LEAST_AGREEMENT = 0.8  # of the experts of engine and learner; a judgment call, as rounding decides near-ties


async def check_engine(
    engine: Engine,
    weight_sync: WeightSync,
    trainer: Trainer,
    renderer: ChatRenderer,
    tolerance: float = 1e-3,
    sees: bool = False,
) -> ProbeResult:
    """Publish to the engine, probe it and have the trainer score its samples; return the probe's result.

    Raises EngineError if their log-probabilities differ by at least `tolerance` nats, or the model's `decoding_gap` if
    that is larger, so that they are different policies; if the engine lacks a feature that training needs
    (`probe_engine`); or, with routing replay, if its reported experts are not the learner's. sees: whether images are
    to be expected; then also if they differ after an image, or do not depend on its pixels.
    """
    await weight_sync.publish(0)
    allowed, why = trainer.model.decoding_gap or (0.0, "")
    tolerance = max(tolerance, allowed)
    prompt = Conversation(renderer).render([{"role": "user", "content": "ok"}]).ids
    facts = await probe_engine(engine, prompt, stop_token_ids=renderer.stop_ids, version=0, tolerance=tolerance)
    ids = np.concatenate([prompt, facts.sampled.token_ids])
    learned = (await trainer.score(ids))[len(prompt) - 1 :]
    _check_gap(facts.engine, facts.sampled.logprobs - learned, tolerance, why)
    if sees:
        await _check_images(engine, facts.engine, trainer, renderer, tolerance, why)
    if trainer.model.expert_layers is not None:
        _check_experts(facts, (await trainer.experts(ids))[len(prompt) - 1 : -1])
    return facts


def _check_gap(engine: str, gaps: Floats, tolerance: float, why: str, where: str = "") -> None:
    gap = float(np.abs(gaps).max())
    if not gap < tolerance:
        raise EngineError(
            f"{engine} reports log-probabilities{where} that differ from those of the learner by up to {gap:.2e} "
            f"({tolerance:g} is allowed{why and ', as ' + why}); it must serve the published weights in the learner's "
            "precision"
        )


async def _check_images(
    engine: Engine, name: str, trainer: Trainer, renderer: ChatRenderer, tolerance: float, why: str
) -> None:
    """Raise EngineError unless engine and learner agree after each of two images, and disagree about which it is."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    urls = [read_image(each).url for each in (pixels, 255 - pixels)]
    prompts = [Conversation(renderer).render([{"role": "user", "content": PLACE, "images": [url]}]) for url in urls]
    session = "treadle-probe-images"
    engine.open_session(session)
    try:
        for seed, prompt in enumerate(prompts):  # whose ids are equal: what the engine keeps of the first is not reused
            sampling = SamplingParams(max_tokens=8, seed=seed)
            answer = await engine.generate(prompt.ids, sampling, session=session, images=prompt.images)
            whole = np.concatenate([prompt.ids, answer.token_ids])
            learned, other = [await trainer.score(whole, each.images) for each in (prompt, prompts[1 - seed])]
            start = len(prompt.ids) - 1
            _check_gap(name, answer.logprobs - learned[start:], tolerance, why, " after an image")
            if np.array_equal(learned[start:], other[start:]):
                raise EngineError("the learner's log-probabilities do not depend on pixels; take another model")
    finally:
        engine.close_session(session)


def _check_experts(facts: ProbeResult, chosen: Routing) -> None:
    """Raise EngineError unless the engine reports the experts that the learner chose: int16[C, M, k], in any order."""
    reported = facts.sampled.routing
    if reported is None:
        raise EngineError(
            f"{facts.engine} does not report the experts it chose; use an engine that does, or set "
            "training.routing_replay to false"
        )
    if reported.shape != chosen.shape:
        raise EngineError(
            f"{facts.engine} reports experts of shape {reported.shape}, the learner chooses {chosen.shape} (sampled "
            "tokens, layers, experts per token); it must serve the learner's model and report each sampled token"
        )
    agreement = float((reported[..., None] == chosen[..., None, :]).any(-1).mean())
    if agreement < _LEAST_AGREEMENT:
        raise EngineError(
            f"{facts.engine} reports experts, {agreement:.0%} of them chosen by the learner; a row must belong to the "
            "token before the sampled one, and layers in the model's order"
        )


_PROBE = 64  # tokens with scores that servers must reproduce


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Arguments for opening an engine: `open_engine(EngineSpec(config.engine, renderer, trainer, load_model))`.

    source: provides the weights to serve, usually the trainer. load_model: returns a model like the source's, with any
    weights, for an engine in this process to copy. logs: directory for logs of other processes; default: a temporary
    one, which is kept. routing: whether to report chosen experts. pinned: sessions keep the version of their first
    call, at most this many behind the newest. probabilities: how many of the sampler's to report at each token. log:
    receives lines for the run's output. device: device of Treadle's own engine. top_k: training's, of which vLLM must
    report the kept tokens. vision: makes the tower for a model of `load_model`; None: it sees nothing. trains_tower:
    whether published weights include it. sees: see `servers_see`.
    """

    config: EngineConfig
    renderer: ChatRenderer
    source: WeightSource
    load_model: Callable[[], PreTrainedModel]
    logs: Path | None = None
    routing: bool = False
    pinned: int | None = None
    probabilities: int | None = None
    log: Callable[[str], None] = lambda line: None
    device: str = "cpu"
    top_k: int = 0
    vision: MakeTower | None = None
    trains_tower: bool = False
    sees: bool = False

    def log_directory(self) -> Path:
        return self.logs or Path(tempfile.mkdtemp(prefix="treadle-logs-"))


OpenEngine = Callable[[EngineSpec], Awaitable[tuple[Engine, WeightSync]]]
"""A registered engine (entry points `treadle.engines`, chosen by `engine.kind`).

Returns the engine and its weight sync; the caller publishes with it before the engine samples. Its own settings are
`engine.options`. Raises ConfigError, EngineError or CheckpointError.
"""


async def open_engine(spec: EngineSpec) -> tuple[Engine, WeightSync]:
    opened: OpenEngine = resolve("engines", spec.config.kind, "engine.kind")
    return await opened(spec)


def servers_see(config: EngineConfig, model: ModelConfig, known: bool) -> bool:
    """Return whether vLLM's servers are shown images, for which they need the model's tower. Raises ConfigError.

    known: whether images are known to come; those of environments are not.
    """
    if config.kind != "vllm" or not takes_images(model):
        return False
    told = {name.replace("_", "-"): value for name, value in config.vllm.args.items()}
    return known or bool(config.vllm.urls) if LANGUAGE_ONLY not in told else not told[LANGUAGE_ONLY]


async def open_torch(spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Open Treadle's own engine, in this process or a separate one; see `OpenEngine`."""
    if spec.config.own_process:
        if spec.trains_tower:
            raise ConfigError(
                "training.vision is 'train', and an engine in a process of its own has the language model alone; set "
                "engine.own_process to false"
            )
        with ExitStack() as cleanup:
            folder = _directory(cleanup)
            await spec.source.export(folder)
            engine = await start_engine(
                folder,
                torch_options(spec),
                log=spec.log_directory() / "engine.log",
                notify=spec.log,
                on_close=cleanup.pop_all().close,
            )
        return engine, SharedMemorySync(spec.source, engine)
    # Beside a trainer of adapters, the engine uses the trainer's base.
    here = spec.source.module if isinstance(spec.source, EmbeddedSource) else None
    model = here if here is not None and adapter_weights(here) else spec.load_model()
    embedded = embedded_engine(spec, model)
    return embedded, EmbeddedSync(spec.source, embedded, by_file=here is None)


async def open_serving(
    config: EngineConfig,
    renderer: ChatRenderer,
    source: EmbeddedSource,
    device: str = "cpu",
    *,
    trains_tower: bool = False,
    sees: bool = False,
) -> Engine:
    """Return an engine that serves an untrained model. Options: see `EngineSpec`. Raises as `open_engine`."""
    spec = EngineSpec(
        *(config, renderer, source, lambda: source.module),
        device=device,
        vision=lambda _: source.vision,
        trains_tower=trains_tower,
        sees=sees,
    )
    engine, weight_sync = await open_engine(spec)
    try:
        # Servers already running may have any weights.
        await weight_sync.publish(0)
    except BaseException:
        await engine.close()
        raise
    return engine


def embedded_engine(spec: EngineSpec, model: PreTrainedModel) -> LocalEngine:
    """Return an engine in this process with a copy of the model.

    In lock-step it computes on the caller's thread: learner and engine take turns. Otherwise on its own thread, beside
    the sessions.
    """
    options = torch_options(spec)
    renderer = spec.renderer
    return make_engine(
        model, options, renderer.decode, renderer.grammars, own_thread=not options.lock_step, vision=spec.vision
    )


def torch_options(spec: EngineSpec) -> TorchEngineOptions:
    """Return the options of Treadle's own engine: keys of `engine` by name, and what is known of the run."""
    config = spec.config
    same = {f.name: getattr(config, f.name) for f in fields(TorchEngineOptions) if f.name in EngineConfig.model_fields}
    settled = {"dtype": config.dtype_name, "lock_step": config.lock_step is not False}
    return TorchEngineOptions(
        **{**same, **settled},
        stop_token_ids=spec.renderer.stop_ids,
        max_batch=config.batch,
        device=spec.device,
        routing=spec.routing,
        pinned=spec.pinned,
        probabilities=spec.probabilities,
    )


Serve = Callable[[int, Path, EngineConfig, Path], "Started"]
"""Starts a vLLM server: called with its number, the model's directory, the settings, and its log file."""


async def open_vllm(spec: EngineSpec, serve: Serve | None = None) -> tuple[Engine, WeightSync]:
    """Open the client of vLLM's servers, which are started unless already running; see `OpenEngine`.

    serve: default: on this machine. Remote servers find the model, or adapters, in the directory of logs.
    """
    from treadle.engines.vllm.adapters import Exported  # httpx, which only this needs
    from treadle.engines.vllm.engine import open_engine as start
    from treadle.engines.vllm.images import Pictures
    from treadle.engines.vllm.publication import Probe

    config, model = spec.config, spec.source.model
    if spec.routing and not config.vllm.urls:
        args = {"enable-return-routed-experts": True, **config.vllm.args}
        config = config.model_copy(update={"options": {**config.options, "args": args}})
    pictures = None
    if isinstance(processor := spec.renderer.images.processor, ImageProcessor) and spec.sees:
        tolerance = 1e-3 if config.dtype_name == "float32" else 0.3
        pictures = Pictures(
            *(processor, spec.renderer.encode, spec.renderer.decode, model.vocabulary, tolerance),
            trained=spec.trains_tower,
        )
        if not config.vllm.urls:
            args = {LANGUAGE_ONLY: None, **config.vllm.args}
            config = config.model_copy(update={"options": {**config.options, "args": args}})
    ids = np.random.default_rng(0).integers(0, model.vocabulary, min(_PROBE, model.context - 1)).astype(np.int32)
    probe, stop = Probe(ids, config.tolerance), spec.renderer.stop_ids
    connected = partial(
        start,
        source=spec.source,
        stop_token_ids=stop,
        probe=probe,
        top_k=spec.top_k,
        probabilities=spec.probabilities,
        pictures=pictures,
        notify=spec.log,
    )
    running = bool(config.vllm.urls)
    if running and not model.publishes_adapters:
        return await connected(config, serve=None)
    logs = spec.log_directory()
    with ExitStack() as cleanup:
        # Running servers may belong to another user.
        folder = served = _directory(cleanup, logs if serve or running else None, 0o755 if running else 0o700)
        await spec.source.export(folder)
        if model.publishes_adapters:
            adapters = Exported.read(folder, slots=(spec.pinned or 0) + 2)
            connected, served = partial(connected, adapters=adapters, pinned=spec.pinned), adapters.base
            config = config if running else adapters.served_by(config)

        def serve_model(number: int) -> Started:
            log = logs / f"vllm-{number}.log"
            return serve(number, served, config, log) if serve else ServerProcess(served, config, log)

        return await connected(config, serve=None if running else serve_model, on_close=cleanup.pop_all().close)


def _directory(cleanup: ExitStack, parent: Path | None = None, mode: int = 0o700) -> Path:
    """Return a path for a model's directory, removed with the stack."""
    outer = temporary_directory(parent or Path(tempfile.gettempdir()), mode=mode)
    cleanup.callback(shutil.rmtree, outer, ignore_errors=True)
    return outer / "model"
