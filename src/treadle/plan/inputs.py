"""Inputs of a run: tasks, environments, agents, callbacks; checked before anything expensive starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from treadle.core.config_diff import changes
from treadle.core.errors import ConfigError, DataError, RunError
from treadle.core.files import read_proven
from treadle.core.types import Task
from treadle.data.config import SourceConfig, sources_of
from treadle.data.load import LoadContext, load_tasks
from treadle.data.tasks import check_disjoint, players, tasks_sha256, with_players
from treadle.plan.config import RunConfig, config_of
from treadle.plan.other_models import make_models
from treadle.plan.player import Player
from treadle.plan.validation import check_changes, check_config
from treadle.record.checkpoint_retention import find_checkpoint
from treadle.record.run_directory import RunDirectory
from treadle.report.callback import Callback
from treadle.report.callbacks import load_callbacks
from treadle.rollout.attempt import Players
from treadle.rollout.drivers.environment import EnvironmentFactory, check_metrics
from treadle.rollout.other_models import PolicyCopy

T = TypeVar("T")
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")

_NOBODY = Players()
_LOOKED_AT = 64  # tasks

IN_MEMORY = "in memory"
"""`data.train.source` of a run with tasks made in Python, which no recipe can name."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tasks, their environments, agents and drivers by name, and the callbacks."""

    train: Sequence[Task]
    held_out: Sequence[Task]
    players: Players = field(default_factory=Players)
    callbacks: dict[str, Callback] = field(default_factory=dict)


def shows_images(tasks: Sequence[Task]) -> bool:
    """Return whether the first tasks have images. Those of environments come later."""
    return any(message.get("images") for task in islice(tasks, _LOOKED_AT) for message in task.prompt)


def is_in_memory(section: SourceConfig | tuple[SourceConfig, ...] | None) -> bool:
    """Return whether the tasks of a section were made in Python."""
    return section is not None and sources_of(section)[0].source == IN_MEMORY


def is_of_python(config: RunConfig) -> bool:
    """Return whether no recipe can name the training tasks or their player, as they were made in Python."""
    return is_in_memory(config.data.train) or not config.player.is_registered


def has_held_out(config: RunConfig) -> bool:
    """Return whether there are held-out tasks that can be loaded and played by configured players."""
    held_out = config.data.held_out
    return held_out is not None and not is_in_memory(held_out) and config.player.is_registered


def resumable_config(path: Path, overrides: Sequence[str] = (), checkpoint: str | None = None) -> RunConfig:
    """Return the configuration for resuming a run from its latest or a named checkpoint, or restarting it without.

    Raises RunError for a run that is finished or has no such checkpoint, or with tasks that only a program can make;
    ConfigError for a setting that may not change.
    """
    run = RunDirectory.open(path)
    if run.has_summary and not overrides and checkpoint is None:
        raise RunError(
            f"run {str(path)!r} is finished; nothing to resume (see treadle report {path}); "
            "give it more orchestration.updates, or --resume-from an earlier checkpoint"
        )
    config = config_of(run, overrides)
    if checkpoint is not None or not run.is_unsaved:  # it is restarted
        check_changes(changes(config_of(run), config))
        # Fails early, before torch is loaded.
        find_checkpoint(path, checkpoint or "latest")
    if is_in_memory(config.data.train):
        raise RunError(
            f"run {str(path)!r} was started from Python; continue with treadle.train(..., resume=True) there"
        )
    if not config.player.is_registered:
        kind_and_name = f"{config.player.kind} {config.player.name!r}"
        raise RunError(
            f"run {str(path)!r}: {kind_and_name} is not registered; if the run was started from Python, continue with "
            "treadle.train(..., resume=True) there"
        )
    return config


def load_inputs(config: RunConfig, callbacks: Sequence[Callback] = ()) -> Inputs:
    """Check the configuration, then load tasks, players and callbacks. Needs no torch.

    callbacks: beside those configured. Raises ConfigError or DataError.
    """
    check_config(config)
    return replace(load_data(config), callbacks=load_callbacks(config.callbacks, callbacks))


def load_data(config: RunConfig) -> Inputs:
    """Load tasks and players, without callbacks. Raises ConfigError or DataError."""
    configured = configured_players(config)
    train, held_out = (load_split(config, split, configured.environments) for split in SPLITS)
    return make_inputs(train, held_out, configured)


def load_held_out(config: RunConfig) -> Inputs:
    """Load only the inputs of an evaluation. Needs no torch. Raises ConfigError or DataError."""
    if config.data.held_out is None:
        raise ConfigError("the configuration has no held-out tasks; add data.held_out.source=...")
    configured = configured_players(config)
    return make_held_out(load_split(config, "held_out", configured.environments), configured)


def configured_players(config: RunConfig, player: Player | None = None) -> Players:
    """Return the player of tasks that name none, if any, and the other models. Raises ConfigError.

    player: instead of the recipe's.
    """
    player = player or config.player
    return Players.of({player.of_task: player.load()} if player.name else {}, make_models(config.called_models))


def make_inputs(train: Sequence[Task], held_out: Sequence[Task], named: Players = _NOBODY) -> Inputs:
    """Return the inputs of tasks; players not in `named` are looked up in the registry.

    The one in `named`, if any, plays the tasks that name none. Raises DataError for no training tasks or a held-out
    task that is a training task too, ConfigError for an invalid player, or one that would play no task.
    """
    if not train:
        raise DataError("there are no training tasks; give some (data.train, or tasks= in Python)")
    check_disjoint(train, held_out)
    train, held_out = _played(train, named, "train"), _played(held_out, named, "held_out")
    return Inputs(train, held_out, load_players(train, held_out, loaded=named))


def make_held_out(held_out: Sequence[Task], named: Players = _NOBODY) -> Inputs:
    """Return the inputs of an evaluation, as `make_inputs` does. Raises DataError or ConfigError."""
    if not held_out:
        raise DataError("there are no tasks to evaluate; give some (data.held_out, or tasks= in Python)")
    held_out = _played(held_out, named, "held_out")
    return Inputs([], held_out, load_players(held_out, loaded=named))


def _played(tasks: Sequence[Task], named: Players, split: Split) -> Sequence[Task]:
    """Return the tasks, each with a player. Raises ConfigError if the named player would play none."""
    player = next(iter(named.by_task), None)
    tasks = with_players(tasks, player or ("environment", ""))
    if player is not None and tasks and player not in (others := players(tasks)):
        kind, name = min(others)
        raise ConfigError(
            f"{player[0]} {player[1]!r} would play nothing: the tasks of data.{split} name what plays them, {kind} "
            f"{name!r}, which wins; give tasks that name nothing (data.{split}.source=my_tasks.jsonl), or leave "
            f"{player[1]!r} out"
        )
    return tasks


def load_players(*tasks: Sequence[Task], loaded: Players = _NOBODY) -> Players:
    """Load the tasks' environments and agents, except those in `loaded`. Raises ConfigError."""
    named = sorted(set[tuple[str, str]]().union(*map(players, tasks)))
    if ("environment", "") in named:
        raise ConfigError(
            "some tasks name neither an environment nor an agent; "
            "set 'environment', 'reward' or 'agent' in the recipe, or one in each task"
        )

    found = Players.of({each: loaded.by_task.get(each) or Player(*each).load() for each in named}, loaded.models)
    check_metrics(found.environments)
    copies = [name for name, make in loaded.models.items() if make is PolicyCopy]
    if copies and (other := next(((kind, name) for kind, name in named if kind != "environment"), None)):
        raise ConfigError(
            f"models.{copies[0]} is a copy of the policy, which only environments may call, but the {other[0]} "
            f"{other[1]!r} plays tasks; write an environment for it, or leave policy: true out"
        )
    return found


def load_split(
    config: RunConfig, split: Split, environments: Mapping[str, EnvironmentFactory] | None = None
) -> Sequence[Task]:
    """Return the tasks of `data.train` or `data.held_out`; empty if not set.

    environments: by name, instead of the recipe's. Raises ConfigError or DataError.
    """
    section = config.data.train if split == "train" else config.data.held_out
    return [] if section is None else load_tasks(section, split, load_context(config, environments))


def load_context(config: RunConfig, environments: Mapping[str, EnvironmentFactory] | None = None) -> LoadContext:
    """Return the settings common to all sources of a run. Raises ConfigError for unknown names."""
    known = configured_players(config).environments if environments is None else environments
    return LoadContext(
        config.data.columns, config.player.of_task, known, config.seed, images=config.rollout.images.limits
    )


DATA = "data.json"
"""File of the run with number and SHA-256 of its tasks: of the files for Parquet, otherwise of the tasks themselves."""


def record_data(run: RunDirectory, inputs: Inputs) -> None:
    run.write(DATA, json.dumps(_identity(inputs), indent=2).encode())


def check_same_data(run: RunDirectory, inputs: Inputs) -> None:
    """Raise DataError unless the tasks are the recorded ones, which the cursor counts; DamageError for damage."""
    sha256 = run.ledger().file_sha256(DATA)
    recorded = json.loads(read_proven(run.path / DATA, sha256 or "", "restore it from a copy"))
    for split, identity in _identity(inputs).items():
        if identity != recorded[split]:
            before, now = recorded[split]["tasks"], identity["tasks"]
            counts = f"{before} tasks, now {now}" if before != now else f"{now} other tasks"
            raise DataError(
                f"data.{split} has changed since the run was started ({counts}), but the run's cursor counts them; "
                "restore the data, or start a new run (model.path may be an export of this one)"
            )


def _identity(inputs: Inputs) -> dict[str, dict[str, Any]]:
    splits = {"train": inputs.train, "held_out": inputs.held_out}
    return {split: {"tasks": len(tasks), "sha256": tasks_sha256(tasks)} for split, tasks in splits.items()}
