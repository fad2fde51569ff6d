"""The Python API: `treadle.train`, with your own environment or agent and tasks, and related functions."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from treadle.api.evaluate import Evaluation, check_dump, check_subject, evaluate_model, find_subject, held_out_inputs
from treadle.api.export import export_checkpoint
from treadle.api.train import train_run
from treadle.core.config import apply_overrides, build
from treadle.core.errors import ConfigError, TreadleError
from treadle.core.types import Task
from treadle.core.user_functions import user_lines
from treadle.data.config import SourceConfig
from treadle.data.load import LoadContext
from treadle.data.rows import ArrowData, Row
from treadle.data.tasks import LazyTasks, check_no_copies
from treadle.envs.tasks import RewardFunction, SingleTurn, check_environment, check_reward_function, is_reward_function
from treadle.loop.thread_count import wait_passively
from treadle.plan.config import RunConfig, read_recipe, with_model_of_run
from treadle.plan.inputs import (
    IN_MEMORY,
    SPLITS,
    Split,
    configured_players,
    load_inputs,
    load_split,
    make_held_out,
    make_inputs,
    resumable_config,
)
from treadle.plan.player import Player, is_of_player
from treadle.plan.validation import check_config
from treadle.record.address import checkpoint_named, run_path
from treadle.record.run_directory import RunDirectory
from treadle.report.callback import Callback
from treadle.report.callbacks import load_callbacks
from treadle.report.progress import NotebookProgress, PlainProgress, Progress
from treadle.rollout.agents.agent import Agent, check_agent, is_agent
from treadle.rollout.attempt import Players
from treadle.rollout.drivers.driver import DriverFactory, is_driver
from treadle.rollout.drivers.environment import EnvironmentFactory
from treadle.rollout.isolation.event_loop import paused_event_loop

if TYPE_CHECKING:
    from treadle.api.warm_start import RecordedReport
    from treadle.record.recorded import Trajectories

P = ParamSpec("P")
T = TypeVar("T")

_IN_MEMORY = SourceConfig(source=IN_MEMORY)

Tasks = Iterable[Task | Mapping[str, Any]] | ArrowData | str | os.PathLike[str]


def _short_tracebacks(function: Callable[P, T]) -> Callable[P, T]:
    """Drop Treadle's own lines from tracebacks of TreadleErrors; lines of user code, including a cause's, stay.

    Ctrl-C becomes a plain KeyboardInterrupt, without the interrupted code.
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TreadleError as error:
            if user_lines(error.__traceback__):
                raise
            cause = error.__cause__
            while cause is not None and not user_lines(cause.__traceback__):
                cause = cause.__cause__
            raise error.with_traceback(None) from cause
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None

    return called


@_short_tracebacks
def train(
    environment: EnvironmentFactory | Agent | RewardFunction | DriverFactory | str,
    tasks: Tasks,
    *,
    model: str | Path | dict[str, Any] | None = None,
    run: str | Path,
    recipe: str | Path | None = None,
    held_out: Tasks = (),
    settings: dict[str, Any] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train a model to do `tasks` in `environment`; return the run's summary (the content of summary.json).

    environment: called once per attempt, for a fresh `Environment` (pass the class itself), or the name of one, as in a
    recipe; or a function `def reward(task, text)`, async or not, which grades one reply to a task's prompt; or an agent
    program, `def agent(task, client)`, async or not, which plays an attempt (`treadle.rollout.agents.agent`); or the
    class of an `AttemptDriver` (`treadle.rollout.drivers.driver`).
    tasks: `Task`s, or dicts with their fields (or others, named in the setting `data.columns`), or a DataFrame (pandas,
    polars) or Arrow table with such columns; or, as in a recipe, a .jsonl or .parquet file, a directory of them, a
    Hugging Face data set or the name of a generator.
    model: a value of `model.path` (directory of a Hugging Face causal LM, smollm2, a hub's ORG/NAME, a GGUF file), or a
    `model` section (`{"build": {...}, "tokenizer": "demo"}`).
    run: directory of the new run. held_out: tasks to evaluate on before and after.
    recipe: source of settings, and of a model with its warm start unless another model is given: a shipped one, or a
    .yaml file.
    settings: any configuration by its path, as on the command line: `{"training.group_size": 16}`.

    resume: continue from the latest checkpoint of `run`; tasks, environment and most settings must be the same
    (`treadle.plan.validation`).
    progress: displays the run; default: plain lines, in a notebook with one for the current activity.
    callbacks: callbacks for the run (`treadle.Callback`), beside those in `settings`.

    Ctrl-C, or a notebook's stop button, ends the run after the current update, with a checkpoint, and this returns; a
    second one raises KeyboardInterrupt immediately, and `resume` continues from the latest checkpoint.

    Raises ConfigError, DataError, DownloadError or RunError before anything is sampled, TrainingStopped later.
    """
    if not resume:
        RunDirectory(Path(run)).check_free()
    player = _player(environment)
    given = {"train": _source_or_tasks(tasks, "tasks"), "held_out": _source_or_tasks(held_out, "held_out")}
    sources = {split: {"source": what if isinstance(what, str) else IN_MEMORY} for split, what in given.items() if what}
    data = {} if recipe is None else read_recipe(os.fspath(recipe))
    data = {key: value for key, value in data.items() if key not in ("about", "data") and not is_of_player(key)}
    data |= {"recipe": Path(run).name, player.kind: player.name, "data": {"train": {"source": IN_MEMORY}, **sources}}
    if model is not None:
        data.pop("warm_start", None)  # belongs to the recipe's own model
        data["model"] = {"path": os.fspath(model)} if isinstance(model, str | os.PathLike) else model
    if "model" not in data:
        raise ConfigError("there is no model to train; give model=, or a recipe that has one: recipe='tools-small'")
    data = apply_overrides(data, _overrides(settings))
    config = with_model_of_run(build(RunConfig, data, "treadle.train"))
    check_config(config)
    players = _players(config, player)
    train_tasks, held_out_tasks = (_tasks(given[split], split, config, players.environments) for split in SPLITS)
    check_no_copies(_without_ids(train_tasks, "train"), _without_ids(held_out_tasks, "held_out"))
    inputs = make_inputs(train_tasks, held_out_tasks, players)
    inputs = replace(inputs, callbacks=load_callbacks(config.callbacks, callbacks))

    progress = progress or _progress(config)
    if not wait_passively():
        progress.log(
            "torch was imported before treadle.train was called, so that its threads spin while they wait: beside any "
            "other busy process that takes twice the time or more. Set OMP_WAIT_POLICY=PASSIVE, or import torch later"
        )
    return train_run(config, inputs, Path(run), progress, resume=resume)


@_short_tracebacks
def resume(
    run: str | Path,
    *,
    settings: dict[str, Any] | None = None,
    checkpoint: str | None = None,
    progress: Progress | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Continue a run with its own configuration; return its summary. The recipe is not needed.

    run: its directory. settings: changes, as `{"orchestration.updates": 200}`. checkpoint: go back to it first (`best`,
    `30`), and lose everything after it.

    Raises as `train`; RunError for a run with tasks or environments made in Python: `train(..., resume=True)`.
    """
    path = run_path(run)
    which = None if checkpoint is None else checkpoint_named(checkpoint)
    config = resumable_config(path, _overrides(settings), which)
    inputs = load_inputs(config, callbacks)
    wait_passively()
    return train_run(config, inputs, path, progress or _progress(config), resume=True, checkpoint=which)


@_short_tracebacks
def evaluate(
    run_or_recipe: str | Path,
    environment: EnvironmentFactory | Agent | RewardFunction | DriverFactory | str | None = None,
    tasks: Tasks | None = None,
    *,
    model: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    dump: str | Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Play the held-out tasks of a run or recipe: `evaluate("runs/demo@best").result.success`.

    run_or_recipe: `RUN`, `RUN@best`, `RUN@40`; or a recipe. environment, tasks: replace its own, as for `train`;
    required for a run with tasks made in Python. model: another model, or a run's; required for a recipe.
    dump: a new run directory for all trajectories. Raises ConfigError, DataError or RunError.
    """
    if (environment is None) != (tasks is None):
        raise ConfigError("environment and tasks go together; give both, or neither for the run's held-out tasks")
    if dump is not None:
        check_dump(Path(dump))
    overrides, other = _overrides(settings), None if model is None else str(model)
    if environment is None:
        subject = find_subject(str(run_or_recipe), overrides, other)
        inputs = held_out_inputs(subject)
    else:
        player = _player(environment)
        given = _source_or_tasks(tasks, "tasks")
        source = {"source": given if isinstance(given, str) else IN_MEMORY}
        named = {player.kind: player.name, "data.held_out": source}
        # It has no options, and the run's environment may.
        named |= {"environment_options": {}} if is_reward_function(environment) else {}
        its_own = _overrides(named)
        subject = find_subject(str(run_or_recipe), [*its_own, *overrides], other)
        check_subject(subject)
        players = _players(subject.config, player)
        inputs = make_held_out(_tasks(given, "held_out", subject.config, players.environments), players)
    wait_passively()
    shown = progress or PlainProgress(0, subject.config.data.table_by)
    with paused_event_loop():  # in a notebook
        return evaluate_model(subject, inputs, shown, None if dump is None else Path(dump))


@_short_tracebacks
def export(run: str | Path, directory: str | Path, *, merge: bool = False, dtype: str | None = None) -> Path:
    """Write the model of `RUN`, `RUN@best` or `RUN@40` as a plain Hugging Face directory, which must be new.

    merge: whether to merge an adapter into its base. dtype: dtype of the weights, such as `bfloat16`.
    Raises RunError, CheckpointError or ConfigError.
    """
    export_checkpoint(run, Path(directory), merge, dtype)
    return Path(directory)


@_short_tracebacks
def sft(
    sources: str | Path | Sequence[str | Path],
    directory: str | Path,
    *,
    start: str | Path | None = None,
    select: str = "",
    settings: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> RecordedReport:
    """Train on recorded trajectories of runs or files, and write the model: `treadle sft --from`.

    start: a recipe, run or model to start from; default: the first source's latest checkpoint. select: such as
    `"reward >= 1, best_of=2"`. settings: `{"warm_start.steps": 100}`. Raises ConfigError, DataError or RunError.
    """
    from treadle.api.lesson import prepare  # pyarrow
    from treadle.api.sft import learn

    names = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    begin = None if start is None else str(start)
    lesson = prepare(begin, [str(name) for name in names], select, _overrides(settings))
    if Path(directory).exists():
        raise ConfigError(f"{str(directory)!r} exists already; choose another directory")
    return learn(lesson, Path(directory), progress or PlainProgress(0))


@_short_tracebacks
def load_run(source: str | Path) -> Trajectories:
    """Read the recorded trajectories of a run, or of files: `load_run("runs/demo").dataframe()`.

    Raises RunError, DamageError, or DataError for a malformed file.
    """
    from treadle.api.lesson import read_source  # pyarrow
    from treadle.record.recorded import Trajectories

    return Trajectories(read_source(source))


def _overrides(settings: Mapping[str, Any] | None) -> list[str]:
    return [f"{path}={json.dumps(value, default=str)}" for path, value in (settings or {}).items()]


def _progress(config: RunConfig) -> Progress:
    shows = NotebookProgress if type(sys.stdout).__module__.startswith("ipykernel.") else PlainProgress
    return shows(config.orchestration.updates, config.data.table_by)


def _player(player: Any) -> Player:
    """Return the player made in Python: `Player("environment", "Larger", made=Larger)`. Raises ConfigError."""
    if isinstance(player, str):
        return Player("environment", player)
    kind = type(player).__name__
    name = str(getattr(player, "__name__", kind))
    if is_reward_function(player):
        check_reward_function(player, f"environment {name!r}")
        return Player("environment", name, made=partial(SingleTurn, player))
    if is_agent(player):
        return Player("agent", name, made=check_agent(player, name))
    if is_driver(player):
        return Player("driver", name, made=player)
    if inspect.isclass(player):
        return Player("environment", name, made=check_environment(player, name))
    if isinstance(player, list | tuple):
        raise ConfigError(
            f"environment is a {kind} of {len(player)}; add up several rewards in one function: "
            'def reward(task, text): return treadle.Reward({"right": ..., "short": ...}), weighted by rewards.weights'
        )
    if not callable(player):
        raise ConfigError(
            f"environment is one {kind}, and each attempt needs its own; give the class, or a factory function: "
            f"lambda: {kind}(...)"
        )
    try:
        inspect.signature(player).bind()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"environment {name!r} is none of these, by its parameters ({error}): a reward function, def reward(task, "
            "text), an agent, def agent(task, client), or a function without parameters that makes an environment"
        ) from error
    return Player("environment", name, made=player)


def _players(config: RunConfig, player: Player) -> Players:
    """Return the players for `make_inputs`. Raises ConfigError for options that the player lacks."""
    return configured_players(config, replace(player, options=config.player.options))


def _source_or_tasks(tasks: Any, name: str) -> str | list[Any]:
    """Return a source that a recipe could name, or the tasks and rows themselves."""
    if isinstance(tasks, str | os.PathLike):
        return os.fspath(tasks)
    if isinstance(tasks, ArrowData):
        from treadle.data.table import rows_of  # pyarrow

        return rows_of(tasks, name)
    if isinstance(tasks, Mapping | Task) or not isinstance(tasks, Iterable | None):
        raise ConfigError(
            f"{name} is one {type(tasks).__name__}; "
            "give a list of Task or of dicts, a DataFrame, or a .jsonl or .parquet file"
        )
    return list(tasks or ())


def _tasks(
    tasks: str | list[Any], split: Split, config: RunConfig, environments: Mapping[str, EnvironmentFactory]
) -> Sequence[Task]:
    if isinstance(tasks, str):
        return load_split(config, split, environments)
    name = "tasks" if split == "train" else split
    limits = config.rollout.images.limits
    context = LoadContext(config.data.columns, config.player.of_task, environments, images=limits)
    return [
        context.task(Row(row, f"{name}[{number}]", _place(split, number)), _IN_MEMORY)
        for number, row in enumerate(tasks)
    ]


def _place(split: Split, number: int) -> str:
    return f"{split}-{number:06d}"


def _without_ids(tasks: Sequence[Task], split: Split) -> list[Task]:
    """Return the tasks with ids that only state their position; none of lazy ones, because files have names."""
    if isinstance(tasks, LazyTasks):
        return []
    return [task for number, task in enumerate(tasks) if task.task_id == _place(split, number)]
