"""`treadle serve`, `treadle view`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import math
import os
import secrets
import signal
import sys
import webbrowser
from contextlib import AbstractAsyncContextManager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from treadle.api.evaluate import find_subject
from treadle.cli.console import Console
from treadle.cli.options import address_of
from treadle.core.config import Config, build
from treadle.core.draws import Stream
from treadle.core.errors import ConfigError, RunError
from treadle.core.types import SamplingParams
from treadle.engines.config import Device, EngineConfig
from treadle.models.config import ModelConfig
from treadle.models.model_files import located, require_model_or_adapter, require_template
from treadle.plan.config import RunConfig
from treadle.plan.inputs import IN_MEMORY
from treadle.plan.validation import check_engine_config
from treadle.record.address import began_of, find_address, model_path
from treadle.record.run_directory import RunDirectory
from treadle.rendering.replies import AUTO, parser_name, reply_parser
from treadle.rollout.config import ImagesConfig, listen, url_of
from treadle.rollout.gateway.gateway import Access, Gateway
from treadle.rollout.session import Address, Session, SessionSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from treadle.core.engine import Engine
    from treadle.record.recording import Recorder, Recording
    from treadle.rendering.chat import ChatRenderer
    from treadle.training.trainer import EmbeddedSource


class ServeRolloutConfig(Config):
    """What the server takes of a recipe's `rollout`."""

    images: ImagesConfig = Field(ImagesConfig(), description="limits of images in messages")


class ServeConfig(Config):
    """Configuration of the server, with the same keys as in a recipe."""

    device: Device = Field("auto", description="device of the engine")
    engine: EngineConfig = Field(description="what samples")
    rollout: ServeRolloutConfig = Field(ServeRolloutConfig(), description="what its clients may send")


def run_serve(options: argparse.Namespace) -> int:
    if options.tinker:
        from treadle.cli.tinker import run_tinker

        return run_tinker(options)
    config = build(ServeConfig, {"engine": {"lock_step": False}}, overrides=options.overrides)
    model, began = model_to_serve(options)
    _check(options, config.engine)
    from treadle.rollout.gateway.serving import serving  # Starlette and uvicorn

    address = address_of(options, "treadle serve")
    # Early, so that a busy port fails before a model is loaded.
    with listen(address, "--{} {}") as listening:
        from treadle.models.chat import load_chat
        from treadle.plan.device import check_device, chosen, settled_engine
        from treadle.training.make import load_source

        device = chosen(config.device)
        check_device(device)
        config = config.model_copy(update={"device": device, "engine": settled_engine(config.engine, device)})
        tokenizer, renderer = load_chat(model, began)
        recording = _recording(options, model, tokenizer.backend_tokenizer)
        source = load_source(model, seed=0)
        # Garbage collection over the libraries would halt every request for some 200 ms.
        gc.freeze()
        gateway = Gateway(model=Path(options.model).name, images=config.rollout.images)
        server = serving(gateway, address, listening)
        asyncio.run(_serve(options, config, renderer, source, gateway, server, recording))
    return 0


def model_to_serve(options: argparse.Namespace) -> tuple[ModelConfig, datetime | None]:
    """Return how to load the model, and the date for templates: as in its run, if a run is addressed."""
    template = {"chat_template": options.chat_template} if options.chat_template else {}
    directory = require_model_or_adapter(str(model_path(options.model)), "MODEL")
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"MODEL: no tokenizer.json in {str(directory)!r}; add the model's tokenizer")
    if directory != Path(options.model) and find_address(options.model) is not None:
        subject = find_subject(options.model)
        return subject.model_config.model_copy(update=template), subject.began
    return ModelConfig(**located(Path(options.model)), **template), began_of(options.model)


def _check(options: argparse.Namespace, engine: EngineConfig) -> None:
    require_template(options.chat_template, "--chat-template")
    if options.record is not None and not (run := RunDirectory(options.record)).recording_file.is_file():
        run.check_free()
    if not 0 <= options.temperature < math.inf:
        raise ConfigError(f"--temperature {options.temperature}: must be a number of at least 0")
    if options.max_tokens < 1:
        raise ConfigError(f"--max-tokens {options.max_tokens}: must be at least 1")
    if options.api_key_env and not os.environ.get(options.api_key_env):
        raise ConfigError(f"--api-key-env: the environment variable {options.api_key_env!r} is not set")
    if options.parser != AUTO:
        reply_parser(options.parser, "--parser")
    check_engine_config(engine)


async def _serve(
    options: argparse.Namespace,
    config: ServeConfig,
    renderer: ChatRenderer,
    source: EmbeddedSource,
    gateway: Gateway,
    server: AbstractAsyncContextManager[str],
    recording: Recording | None,
) -> None:
    from treadle.loop.engines import open_serving
    from treadle.record.recording import Recorder

    console, stop = Console(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = await open_serving(config.engine, renderer, source, config.device)
    try:
        opened = itertools.count()

        def open_session() -> Session:
            return _session(options, f"serve-{next(opened)}", renderer, source.model.context, engine)

        def open_recorded(task_id: str) -> tuple[Session, Recorder]:
            assert recording is not None
            return open_session(), Recorder(recording, task_id)

        session = open_session()
        access = Access(opens=open_recorded, recorder=Recorder(recording)) if recording else Access()
        async with server as url:
            address = gateway.attach(session, access, os.environ.get(options.api_key_env or "")).address
            problem = session.renderer.tools_problem(parse=session.parse)
            refused = f"; tools are refused: {problem}" if problem else ""
            console.line(f"serving {options.model} on {config.device}; press Ctrl-C to stop")
            console.line(f"base URL  {url}/v1 (for Anthropic's clients: {url})")
            console.line(f"replies   read by {parser_name(session.parse)}{refused}")
            console.line(f"API key   {'$' + options.api_key_env if options.api_key_env else address.secret}")
            await stop.wait()
        session.close()
        if recording is not None:
            counts = f"{recording.calls} calls of {recording.trajectories} trajectories"
            console.line(f"recorded: {counts}, in {recording.path}")
            recording.close()
    finally:
        await engine.close()


def _recording(options: argparse.Namespace, model: ModelConfig, tokenizer: Tokenizer) -> Recording | None:
    from treadle.record.recording import Recording  # pyarrow

    if options.record is None:
        return None
    data = {"recipe": "serve", "data": {"train": {"source": IN_MEMORY}}, "model": model.model_dump(exclude_unset=True)}
    return Recording(options.record, build(RunConfig, data, "treadle serve"), tokenizer, Path(options.model).name)


def _session(options: argparse.Namespace, name: str, renderer: ChatRenderer, context: int, engine: Engine) -> Session:
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    address = Address(secrets.randbits(47), Stream.SERVE, 0, 0, 0)
    spec = SessionSpec(name, engine, renderer, sampling, context - 1, address)
    return Session(spec, renderer.parser(options.parser, "--parser"), callers_sampling=True, context=context)


def run_view(options: argparse.Namespace) -> int:
    paths = options.runs or [Path("runs")]
    for path in paths:
        if not path.is_dir():
            raise RunError(f"no directory {str(path)!r}; name run directories, or folders of them")
    address, token = address_of(options, "treadle view"), secrets.token_urlsafe(24)
    import uvicorn

    from treadle.view.app import guarded_app  # FastAPI

    with listen(address, "--{} {}") as listening:
        link, console = f"{url_of(listening)}/?token={token}", Console()
        app = guarded_app(paths, token, [options.host, listening.getsockname()[0]])  # the link contains the latter
        config = uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=1)
        with suppress(KeyboardInterrupt):
            console.line(f"{', '.join(map(str, paths))}; press Ctrl-C to stop")
            console.line(("open  ", "bold"), link)
            sys.stdout.flush()
            if options.open:
                webbrowser.open(link)
            uvicorn.Server(config).run(sockets=[listening])
    return 0
