"""`treadle serve --tinker`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from treadle.cli.console import Console
from treadle.cli.options import address_of
from treadle.core.config import Config, build
from treadle.core.errors import ConfigError
from treadle.engines.config import Device
from treadle.models.model_files import require_model_or_adapter
from treadle.plan.config import RunConfig
from treadle.plan.inputs import IN_MEMORY
from treadle.record.address import model_path
from treadle.rollout.config import listen

if TYPE_CHECKING:
    from treadle.record.recording import Recording
    from treadle.tinker.models import Models


class TinkerConfig(Config):
    """Configuration of `treadle serve --tinker`."""

    device: Device = Field("auto", description="device of the model")
    token_budget: int = Field(8192, ge=1, description="largest number of tokens of a training pass")
    cache_gib: float = Field(4.0, gt=0, description="memory for keys and values of the samplers, in GiB")
    names: tuple[str, ...] = Field((), description="more names by which clients ask for the model")
    provenance: Literal["refuse", "count"] = Field(
        "refuse", description="what happens to datums that contradict what was sampled: they fail, or are counted"
    )


def run_tinker(options: argparse.Namespace) -> int:
    config = build(TinkerConfig, {}, overrides=options.overrides)
    _check(options)
    directory = require_model_or_adapter(str(model_path(options.model)), "MODEL")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"MODEL: {str(directory)!r} is an adapter; serve its base, and load_state its weights")
    from treadle.models.chat import load_tokenizer
    from treadle.plan.device import check_device, chosen
    from treadle.record.recording import Recording
    from treadle.tinker.models import Models
    from treadle.tinker.serving import api_key

    address = address_of(options, "treadle serve")
    with listen(address, "--{} {}") as listening:
        device = chosen(config.device)
        check_device(device)
        run = options.record or Path("runs") / f"tinker-{directory.resolve().name}"
        data = {"recipe": "tinker", "data": {"train": {"source": IN_MEMORY}}, "model": {"path": str(directory)}}
        tokenizer = load_tokenizer(directory)
        recording = Recording(run, build(RunConfig, data, "treadle serve"), tokenizer.backend_tokenizer, options.model)
        try:
            models = Models.open(
                directory, device=device, budget=config.token_budget, cache_gib=config.cache_gib
            )  # fmt: skip
            key = os.environ.get(options.api_key_env or "") or api_key(run)
            names = list(dict.fromkeys([options.model, str(directory.resolve()), directory.name, *config.names]))
            asyncio.run(_serve(options, config, models, recording, names, directory, key, listening))
        finally:
            recording.close()
    return 0


def _check(options: argparse.Namespace) -> None:
    defaults = {"temperature": 1.0, "max_tokens": 1024, "parser": "auto", "chat_template": None, "advertised_url": None}
    for name, default in defaults.items():
        if vars(options)[name] != default:
            raise ConfigError(f"--{name.replace('_', '-')}: clients of --tinker set it themselves; leave it out")
    if options.api_key_env and not os.environ.get(options.api_key_env):
        raise ConfigError(f"--api-key-env: the environment variable {options.api_key_env!r} is not set")
    if options.api_key_env and not os.environ[options.api_key_env].startswith("tml-"):
        raise ConfigError(f"--api-key-env: the key in {options.api_key_env} must begin with tml-, for the SDK")


async def _serve(
    options: argparse.Namespace,
    config: TinkerConfig,
    models: Models,
    recording: Recording,
    names: list[str],
    directory: Path,
    key: str,
    listening: socket.socket,
) -> None:
    from treadle.tinker.serving import serving

    console, stop = Console(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    refuse = config.provenance == "refuse"
    async with serving(models, recording, names, directory.resolve(), key, listening, refuse) as served:
        console.line(f"serving {options.model} to Tinker's clients; press Ctrl-C to stop")
        console.line(f"TINKER_BASE_URL={served.url}")
        console.line(f"TINKER_API_KEY={'$' + options.api_key_env if options.api_key_env else key}")
        console.line(f"base_model={names[0]}")
        console.line(f"recorded in {recording.path}")
        if served.resumed:
            console.line(f"took up {served.resumed} requests of the server before")
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(served.service.failed.wait())
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, failing):
            task.cancel()
        if served.service.failure is not None:
            raise served.service.failure
    console.line(f"recorded: {recording.calls} samples, in {recording.path}")
