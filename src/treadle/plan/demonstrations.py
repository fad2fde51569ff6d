"""Conversations for a warm start: found, or played at random."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.registry import resolve
from treadle.envs.tasks import load_environment
from treadle.models.loading import file_sha256
from treadle.plan.config import RunConfig
from treadle.plan.inputs import Inputs
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.random_calls import RANDOM_CALLS, RandomCallsConfig, calls_of_tools, play_all_at_random
from treadle.training.config import WarmStartConfig
from treadle.training.demonstrations import (
    Demonstration,
    Demonstrations,
    demonstrated_calls,
    load_demonstrations,
    reshuffled,
)


class Opened(NamedTuple):
    """Demonstrations by number, and the hash of their sources. about: a line about played ones."""

    row: Demonstrations
    sha256: str
    about: str = ""


def check_demonstrations(
    inputs: Inputs, renderer: ChatRenderer, config: RunConfig, log: Callable[[str], None]
) -> WarmStartConfig | None:
    """Render the first demonstration; return the section. Raises ConfigError or DataError if there are none."""
    if config.warm_start is not None:
        first = asyncio.run(open_demonstrations(config, inputs, most=64)).row(0)
        demonstrated_calls(first.messages, renderer, first.tools)
    return config.warm_start


async def open_demonstrations(config: RunConfig, inputs: Inputs, most: int | None = None) -> Opened:
    """Find the configured demonstrations, or play them. most: maximum number of attempts; default: as configured."""
    section = config.warm_start
    assert section is not None, "the configuration has a warm start"
    if section.demonstrations != RANDOM_CALLS:
        source = section.demonstrations
        file = source if source.endswith(".jsonl") else inspect.getfile(resolve("demonstrations", source))
        return Opened(load_demonstrations(source, section.options, config.seed), file_sha256(Path(file)))
    options = build(RandomCallsConfig, section.options, "warm_start.options")
    environments, tasks = inputs.players.environments, [task for task in inputs.train if task.environment]
    if (name := options.environment) is not None:
        environments = {name: load_environment(name)}
        tasks = [replace(task, environment=name, agent="", driver="") for task in inputs.train]
    if not tasks:
        raise ConfigError(
            f"warm_start.demonstrations is {RANDOM_CALLS}, but no environment with tools plays; set "
            "warm_start.options.environment to one with the agent's tools, module:Class, or warm_start to null if the "
            "model can call them"
        )
    count = min(options.attempts, most or options.attempts)
    played = await play_all_at_random(tasks, environments, config.rollout, config.seed, count)
    rows = [Demonstration(attempt.messages, attempt.tools) for attempt in played]
    calls = ", ".join(f"{name} {number:,}" for name, number in calls_of_tools(played).items())
    about = f"successful random calls, in {len(rows):,} attempts: {calls}"
    return Opened(reshuffled(rows, config.seed), hashlib.sha256(json.dumps(rows).encode()).hexdigest(), about)
