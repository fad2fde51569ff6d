"""`treadle.train`: training from Python, on your own environment or agent and tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from treadle.core.config import apply_overrides, build
from treadle.core.types import Task
from treadle.orchestration.callbacks import Callback, load_callbacks
from treadle.orchestration.config import RunConfig
from treadle.orchestration.inputs import IN_MEMORY, make_inputs
from treadle.orchestration.progress import PlainProgress, Progress
from treadle.orchestration.threads import wait_passively
from treadle.orchestration.validation import check_config
from treadle.rollout.agents import Agent, check_agent, is_agent
from treadle.rollout.attempt import EnvironmentFactory


def train(
    environment: EnvironmentFactory | Agent,
    tasks: Sequence[Task],
    *,
    model: str | dict[str, Any],
    run: str | Path,
    held_out: Sequence[Task] = (),
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train `model` to do `tasks` in `environment`; returns the run's summary (what summary.json holds).

    environment: called once per attempt, for a fresh `Environment` (the class itself will do); or an agent program,
    `async def agent(task, client)`, which is called once per attempt to play it (`treadle.rollout.agents.Agent`).
    model: directory of a Hugging Face causal LM, or a `model` section (`{"build": {...}, "tokenizer": "demo"}`).
    run: directory of the new run. held_out: tasks to evaluate on before and after.
    settings: any configuration by its path, as on the command line: `{"training.group_size": 16}`.

    callbacks: told of what happens, beside those in `settings` (`treadle.Callback`).

    resume: go on from the latest checkpoint of `run`; tasks, environment and most settings must be the same
    (`treadle.orchestration.changes`).

    Raises ConfigError, DataError or RunError before anything is sampled, TrainingStopped later.
    """
    section = {"path": model} if isinstance(model, str) else model
    name = getattr(environment, "__name__", type(environment).__name__)
    source = {"source": IN_MEMORY}  # tasks made in Python are no file that a config could name
    data: dict[str, Any] = {
        "recipe": Path(run).name,
        "agent" if is_agent(environment) else "environment": name,
        "data": {"train": source, "held_out": source if held_out else None},
        "model": section,
    }
    for path, value in (settings or {}).items():
        data = _with_setting(data, path, value)
    config = build(RunConfig, data, "treadle.train")
    check_config(config)
    inputs = make_inputs(
        tasks, held_out, **_player(environment, name), callbacks=load_callbacks(config.callbacks, callbacks)
    )

    progress = progress or PlainProgress(config.orchestration.log_every, config.data.table_by)
    if not wait_passively():
        progress.say(
            "torch was imported before treadle.train was called, so that its threads spin while they wait: beside any "
            "other busy process that takes twice the time or more. Set OMP_WAIT_POLICY=PASSIVE, or import torch later"
        )
    from treadle.orchestration.train import resume_run, start_run  # torch

    begin = resume_run if resume else start_run
    start = partial(begin, config, inputs, Path(run), progress)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return start()
    with ThreadPoolExecutor(1) as thread:  # in a notebook an event loop is running already: ours needs another thread
        return thread.submit(start).result()


def _player(environment: EnvironmentFactory | Agent, name: str) -> dict[str, Any]:
    """Environment or agent, as `make_inputs` takes it."""
    if is_agent(environment):
        return {"agents": {name: check_agent(environment, name)}}
    return {"environments": {name: environment}}


def _with_setting(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`apply_overrides` places a null at the path (making its parents); the value then takes its place."""
    data = apply_overrides(data, [f"{path}=null"])
    *parents, leaf = path.split(".")
    node = data
    for key in parents:
        node = node[key]
    node[leaf] = value
    return data
