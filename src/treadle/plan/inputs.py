"""Inputs of a run: tasks, environments, agents, callbacks; checked before anything expensive starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from treadle.core.config_diff import changes
from treadle.core.errors import ConfigError, DataError, RunError, TrajectoryFailure
from treadle.core.files import read_proven
from treadle.core.types import Ids, Message, Task
from treadle.data.config import SourceConfig, sources_of
from treadle.data.load import LoadContext, load_tasks
from treadle.data.tasks import Player, check_disjoint, players, tasks_sha256, with_players
from treadle.envs.tasks import load_environment, load_reward
from treadle.plan.config import RunConfig, config_of, is_registered
from treadle.plan.other_models import make_models
from treadle.plan.validation import check_changes, check_config, check_context
from treadle.record.checkpoint_retention import find_checkpoint
from treadle.record.run_directory import RunDirectory
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation, check_turns
from treadle.rendering.replies import Tool
from treadle.report.callback import Callback
from treadle.report.callbacks import load_callbacks
from treadle.rollout.agents.agent import load_agent
from treadle.rollout.attempt import CHECK, Players, open_drivers, user_code
from treadle.rollout.drivers.driver import load_driver
from treadle.rollout.drivers.environment import EnvironmentFactory, IsolatedEnvironment, check_metrics
from treadle.rollout.isolation.event_loop import run, watched_event_loop
from treadle.rollout.other_models import AttemptModels, PolicyCopy
from treadle.rollout.random_calls import RANDOM_CALLS
from treadle.training.demonstrations import load_demonstrations

T = TypeVar("T")
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")

_NOBODY = Players()

IN_MEMORY = "in memory"
"""`data.train.source` of a run with tasks made in Python, which no recipe can name."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tasks, their environments, agents and drivers by name, and the callbacks."""

    train: Sequence[Task]
    held_out: Sequence[Task]
    players: Players = field(default_factory=Players)
    callbacks: dict[str, Callback] = field(default_factory=dict)


def is_in_memory(section: SourceConfig | tuple[SourceConfig, ...] | None) -> bool:
    """Return whether the tasks of a section were made in Python."""
    return section is not None and sources_of(section)[0].source == IN_MEMORY


def is_of_python(config: RunConfig) -> bool:
    """Return whether no recipe can name the training tasks or their player, as they were made in Python."""
    return is_in_memory(config.data.train) or not is_registered(config)


def has_held_out(config: RunConfig) -> bool:
    """Return whether there are held-out tasks that can be loaded and played by configured players."""
    held_out = config.data.held_out
    return held_out is not None and not is_in_memory(held_out) and is_registered(config)


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
    if not is_registered(config):
        kind, name = config.player
        raise RunError(
            f"run {str(path)!r}: {kind} {name!r} is not registered; if the run was started from Python, continue with "
            "treadle.train(..., resume=True) there"
        )
    return config


def load_inputs(config: RunConfig, callbacks: Sequence[Callback] = ()) -> Inputs:
    """Check the configuration, then load tasks, players and callbacks. Needs no torch.

    callbacks: beside those configured. Raises ConfigError or DataError.
    """
    check_config(config)
    check_demonstration(config)
    return replace(load_data(config), callbacks=load_callbacks(config.callbacks, callbacks))


def load_data(config: RunConfig) -> Inputs:
    """Load tasks and players, without callbacks. Raises ConfigError or DataError."""
    configured = configured_players(config)
    train, held_out = (load_split(config, split, configured.environments) for split in SPLITS)
    return make_inputs(train, held_out, configured)


def check_demonstration(config: RunConfig) -> None:
    """Make the first demonstration of the warm start, if any. Raises ConfigError or DataError."""
    if config.warm_start is not None and config.warm_start.demonstrations != RANDOM_CALLS:
        load_demonstrations(config.warm_start.demonstrations, config.warm_start.options, config.seed)(0)


def load_held_out(config: RunConfig) -> Inputs:
    """Load only the inputs of an evaluation. Needs no torch. Raises ConfigError or DataError."""
    if config.data.held_out is None:
        raise ConfigError("the configuration has no held-out tasks; add data.held_out.source=...")
    configured = configured_players(config)
    return make_held_out(load_split(config, "held_out", configured.environments), configured)


def configured_players(config: RunConfig) -> Players:
    """Return the recipe's players by name, and the other models. Raises ConfigError."""
    kind, name = config.player
    return Players(
        _environments(config),
        {name: load_agent(name)} if kind == "agent" else {},
        {name: load_driver(name, config.driver_options)} if kind == "driver" else {},
        make_models(config.models),
    )


def _environments(config: RunConfig) -> dict[str, EnvironmentFactory]:
    if config.reward:
        return {config.reward: load_reward(config.reward)}
    name = config.environment
    return {name: load_environment(name, config.environment_options)} if name else {}


def make_inputs(
    train: Sequence[Task],
    held_out: Sequence[Task],
    named: Players = _NOBODY,
    callbacks: Mapping[str, Callback] = MappingProxyType({}),
) -> Inputs:
    """Return the inputs of tasks; players not in `named` are looked up in the registry.

    The one in `named`, if any, plays the tasks that name none. Raises DataError for no training tasks or a held-out
    task that is a training task too, ConfigError for an invalid player, or one that would play no task.
    """
    if not train:
        raise DataError("there are no training tasks; give some (data.train, or tasks= in Python)")
    check_disjoint(train, held_out)
    train, held_out = _played(train, named, "train"), _played(held_out, named, "held_out")
    return Inputs(train, held_out, load_players(train, held_out, loaded=named), dict(callbacks))


def make_held_out(held_out: Sequence[Task], named: Players = _NOBODY) -> Inputs:
    """Return the inputs of an evaluation, as `make_inputs` does. Raises DataError or ConfigError."""
    if not held_out:
        raise DataError("there are no tasks to evaluate; give some (data.held_out, or tasks= in Python)")
    held_out = _played(held_out, named, "held_out")
    return Inputs([], held_out, load_players(held_out, loaded=named))


def _played(tasks: Sequence[Task], named: Players, split: Split) -> Sequence[Task]:
    """Return the tasks, each with a player. Raises ConfigError if the named player would play none."""
    by_kind = {"environment": named.environments, "agent": named.agents, "driver": named.drivers}
    player = next(((kind, name) for kind, them in by_kind.items() for name in them), None)
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
    named = sorted(set[Player]().union(*map(players, tasks)))
    if ("environment", "") in named:
        raise ConfigError(
            "some tasks name neither an environment nor an agent; "
            "set 'environment', 'reward' or 'agent' in the recipe, or one in each task"
        )

    def of_kind(wanted: str, before: Mapping[str, T], load: Callable[[str], T]) -> dict[str, T]:
        return {name: before.get(name) or load(name) for kind, name in named if kind == wanted}

    environments = of_kind("environment", loaded.environments, load_environment)
    check_metrics(environments)
    agents = of_kind("agent", loaded.agents, load_agent)
    copies = [name for name, make in loaded.models.items() if make is PolicyCopy]
    if copies and (other := next(((kind, name) for kind, name in named if kind != "environment"), None)):
        raise ConfigError(
            f"models.{copies[0]} is a copy of the policy, which only environments may call, but the {other[0]} "
            f"{other[1]!r} plays tasks; write an environment for it, or leave policy: true out"
        )
    return Players(environments, agents, of_kind("driver", loaded.drivers, load_driver), loaded.models)


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
    known = _environments(config) if environments is None else environments
    return LoadContext(config.data.columns, config.player, known, config.seed)


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The prompt of a task's first call, int32[T], as the model will see it."""

    task_id: str
    ids: Ids


def check_first_prompts(
    inputs: Inputs, renderer: ChatRenderer, config: RunConfig, context: int, log: Callable[[str], None]
) -> None:
    """Raise ConfigError if prompts and completions exceed the model's context, or as `first_prompt` does."""
    check_context(config, context)
    first_prompt(inputs, renderer, config, log)


def check_drivers(players: Players, renderer: ChatRenderer, config: RunConfig, log: Callable[[str], None]) -> None:
    """Open the attempt drivers and close them again, to raise their errors before a warm start or an engine's start."""
    if not players.drivers:
        return

    async def opened() -> None:
        async with open_drivers(renderer, Players(drivers=players.drivers), config.rollout):
            pass

    run(opened(), log)


def first_prompt(
    inputs: Inputs, renderer: ChatRenderer, config: RunConfig, log: Callable[[str], None]
) -> FirstPrompt | None:
    """Return the prompt of the first task with an environment that resets; None if an agent, a driver or another role
    of the policy makes it.

    log: receives lines about environments that block the event loop, or do not end. Raises ConfigError if none of up to
    three can be reset, if one refuses its options, may wait longer than `rollout.environment_timeout` or needs more
    calls than `rollout.max_steps`, or if the prompt is longer than `rollout.max_input_tokens` or the mark of
    `rollout.compaction`. Agents are not started: their first prompt is unknown.
    """
    problems = []
    tasks = (task for task in inputs.train if task.environment) if inputs.players.environments else ()
    for task in islice(tasks, 3):
        try:
            first = run(_first(inputs.players, task, config, log), log)
        except TrajectoryFailure as failure:
            problems.append(f"task {task.task_id}: {failure}")
            continue
        if first is None:
            return None
        messages, tools, parsed = first
        if tools:
            name, parse = task.environment, renderer.parser(config.rollout.reply_parser) if parsed else None
            if problem := renderer.tools_problem(tools, parse):
                raise ConfigError(f"environment {name!r} has tools, but {problem}")
            for line in renderer.tools_notes(tools):
                log(line)
            if config.rollout.conversation == "single_message":
                raise ConfigError(
                    f"environment {name!r} has tools, with answers as separate messages, but "
                    "rollout.conversation is 'single_message'; leave it out"
                )
        try:
            ids = Conversation(renderer).render(messages, tools).ids
        except DataError as error:
            if not tools:
                raise
            raise ConfigError(
                f"environment {task.environment!r} has tools, but {error}; use a model that supports tools: with "
                "model.chat_template=qwen3_keep_thoughts any of ChatML, or the recipe tools-small, a small one from "
                "scratch"
            ) from error
        if len(ids) > config.rollout.max_input_tokens:
            raise ConfigError(
                f"the first prompt of task {task.task_id} has {len(ids)} tokens, rollout.max_input_tokens is "
                f"{config.rollout.max_input_tokens}; raise it or shorten the prompt"
            )
        if config.rollout.compaction is not None and len(ids) > (mark := config.rollout.compaction_mark):
            raise ConfigError(
                f"the first prompt of task {task.task_id} has {len(ids)} tokens, and rollout.compaction.at is {mark}: "
                "every turn would be summarized; raise it"
            )
        check_turns(renderer, messages, several=config.rollout.max_steps > 1 and config.rollout.conversation == "turns")
        return FirstPrompt(task.task_id, ids)
    if problems:
        raise ConfigError("no environment could be started; " + "; ".join(problems))
    return None


async def _first(
    players: Players, task: Task, config: RunConfig, log: Callable[[str], None]
) -> tuple[list[Message], Sequence[Tool], bool] | None:
    """Return the first messages of an attempt at the task, its tools, and whether it takes parsed replies.

    None if they depend on the policy in another role.
    """
    user = user_code(task, "as a check")
    factory, models = players.environments[task.environment], {name: make() for name, make in players.models.items()}
    called = AttemptModels(models, None, CHECK)
    environment = IsolatedEnvironment(task.environment, factory, user, config.rollout, called)
    with watched_event_loop(log):
        try:
            await _make(environment, task.environment, config)
            messages = await environment.reset(task.copy())
            return messages, environment.tools, environment.takes_reply
        except TrajectoryFailure:
            if called.asked_early:
                return None
            raise
        finally:
            # Its errors are only warnings, as in an attempt.
            await environment.close()
            user.release()
            for model in models.values():
                await model.close()


async def _make(environment: IsolatedEnvironment, name: str, config: RunConfig) -> None:
    """Construct it. Raises ConfigError for options refused by its constructor, and a time limit too short."""
    try:
        await environment.make()
    except TrajectoryFailure as failure:
        if not isinstance(failure.__cause__, ConfigError):
            raise
        has_options = config.environment_options and name == config.environment
        where = f"{'environment_options of' if has_options else 'environment'} {name!r}"
        raise ConfigError(f"{where}: {failure.__cause__}") from failure
    waits, limit = environment.longest_wait, config.rollout.environment_timeout
    if waits >= limit:
        raise ConfigError(
            f"rollout.environment_timeout is {limit:g} s, but environment {name!r} itself waits up to {waits:g} s: an "
            "outage would end as a time-out; raise it above that, or have it wait for less (environment_options)"
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
