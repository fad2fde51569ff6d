"""Evaluating a checkpoint or a model directory on its own, with the draws a run would use. Writes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.core.errors import ConfigError, RunError
from treadle.core.types import Group
from treadle.data.config import sources_of
from treadle.models.config import ModelConfig
from treadle.models.model_files import check_model_files, located, require_model_or_adapter
from treadle.orchestration.config import RunConfig, load_recipe, recipe_names
from treadle.orchestration.dump import write_dump
from treadle.orchestration.loop.held_out import play_held_out
from treadle.orchestration.reporting.callbacks import Progress
from treadle.orchestration.reporting.metrics import EvaluationResult, evaluation_result
from treadle.orchestration.setup.inputs import IN_MEMORY, Inputs, check_first_prompts, load_held_out
from treadle.orchestration.setup.validation import check_playing
from treadle.orchestration.store.checkpoint_retention import checkpoint_update, find_checkpoint
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.rollout.attempt import open_rollouts
from treadle.rollout.isolation.event_loop import run
from treadle.rollout.rewards import RewardsConfig

if TYPE_CHECKING:
    from treadle.orchestration.setup.chat_interface import ChatInterface
    from treadle.training.trainer import EmbeddedSource


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated: `Subject(config, Path("runs/demo/checkpoints/step-000040"), 40)`.

    update: keys the draws, as in the run's own evaluation after that many updates; 0 for a bare model. base: of an
    adapter; default: the one that it names.
    """

    config: RunConfig
    model: Path
    update: int
    base: str | None = None

    @property
    def model_config(self) -> ModelConfig:
        """Return how the model is loaded: with its own tokenizer, or else the configured one."""
        configured = self.config.model
        has_tokenizer = (self.model / "tokenizer.json").is_file()
        tokenizer = None if has_tokenizer else configured.tokenizer or configured.path
        return configured.model_copy(update={**located(self.model, self.base), "tokenizer": tokenizer})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation, as a whole and for each value of `data.table_by`.

    failures: message -> count, most frequent first. seconds: of playing, without loading.
    """

    result: EvaluationResult
    parts: dict[str, EvaluationResult]
    failures: dict[str, int]
    seconds: float


def find_subject(
    run_or_recipe: str, overrides: Sequence[str] = (), checkpoint: str | None = None, model: Path | None = None
) -> Subject:
    """Return a run's checkpoint (the latest unless named), or the model directory `model` with a run's or recipe's
    configuration.

    Needs no torch. Raises ConfigError or RunError for what is not there.
    """
    if touched := [o for o in overrides if o.startswith("model.")]:
        raise ConfigError(f"{' '.join(touched)}: the evaluated model is chosen with --checkpoint or --model")
    if model is not None and checkpoint is not None:
        raise ConfigError("give --checkpoint or --model, not both")
    run = Path(run_or_recipe)
    is_run = (run / "config.yaml").is_file()
    if is_run:
        config = RunDirectory.open(run).config(overrides)
    elif model is not None:
        config = load_recipe(run_or_recipe, overrides)
    elif run_or_recipe in recipe_names() or run.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{run_or_recipe!r} is a recipe: add --model DIR, or give the directory of a run of it")
    else:
        raise RunError(f"{run_or_recipe!r} is not a run directory: it has no config.yaml")
    if model is None:
        directory = find_checkpoint(run, checkpoint or "latest").directory
        return Subject(config, directory, checkpoint_update(directory), config.model.path)
    return Subject(config, require_model_or_adapter(str(model), "--model"), 0)


def held_out_inputs(subject: Subject) -> Inputs:
    """Return tasks and environments, as a run would load them. Needs no torch.

    Raises ConfigError or DataError for them, and ConfigError for what else cannot work.
    """
    config = subject.config
    check_playing(config)
    check_model_files(subject.model_config)
    if config.data.held_out is not None and sources_of(config.data.held_out)[0].source == IN_MEMORY:
        raise ConfigError(
            "the run's tasks were made in Python and are on no file; "
            "give data.held_out.source=FILE.jsonl and environment=module:Class"
        )
    return load_held_out(config)


def evaluate_model(subject: Subject, inputs: Inputs, progress: Progress, dump: Path | None = None) -> Evaluation:
    """Play the held-out tasks; returns the evaluation. Raises ConfigError for what cannot work, like a damaged model.

    dump: a file for all trajectories, one a line (`orchestration.dump`).
    """
    from treadle.orchestration.setup.chat_interface import load_chat_interface, use_threads
    from treadle.training.make import load_source

    config = subject.config
    chat = load_chat_interface(subject.model_config)
    source = load_source(subject.model_config, config.seed)
    use_threads(config.training.threads, source.model.parameters)
    played = replace(inputs, train=inputs.held_out)  # the check looks at training tasks
    check_first_prompts(played, chat.renderer, config, source.model.context, progress.log)
    started = time.perf_counter()
    groups = run(_play(subject, inputs, chat, source, progress), progress.log)
    seconds = time.perf_counter() - started
    if dump is not None:
        write_dump(dump, groups, chat.renderer.decode)
    return _evaluation(subject, groups, seconds)


async def _play(
    subject: Subject, inputs: Inputs, chat: ChatInterface, source: EmbeddedSource, progress: Progress
) -> list[Group]:
    from treadle.orchestration.setup.engines import open_serving

    config, finished = subject.config, 0
    section = config.evaluation
    total = len(inputs.held_out) * section.attempts_at(section.temperature)

    def on_trajectory() -> None:
        nonlocal finished
        finished += 1
        progress.phase("evaluation", finished, total)

    progress.phase("evaluation", 0, total)
    engine = await open_serving(config.engine_in_evaluation(inputs.players.may_wait), chat, source)
    try:
        rewards = RewardsConfig(weights=config.rewards.weights)  # evaluations are not shaped
        async with open_rollouts(
            engine, chat.renderer, inputs.players, config.rollout, rewards, progress.log
        ) as rollouts:
            await rollouts.check(inputs.held_out)
            return await play_held_out(
                rollouts,
                inputs.held_out,
                name="evaluation",
                seed=config.seed,
                epoch=subject.update,
                temperature=config.evaluation.temperature,
                config=config.evaluation,
                side_by_side=config.evaluated_together,
                on_trajectory=on_trajectory,
            )
    finally:
        await engine.close()


def _evaluation(subject: Subject, groups: list[Group], seconds: float) -> Evaluation:
    section, table_by = subject.config.evaluation, subject.config.data.table_by

    def result(of: list[Group]) -> EvaluationResult:
        return evaluation_result(
            of, subject.update, section.temperature, section.success_at, table_by, section.success_of
        )

    keyed: dict[str, list[Group]] = {}
    for group in groups:
        if table_by is not None:
            keyed.setdefault(str(group.task.extras.get(table_by)), []).append(group)
    failures = Counter(f"{t.failure.cause}: {t.failure.message}" for g in groups for t in g.trajectories if t.failure)
    return Evaluation(
        result=result(groups),
        parts={key: result(keyed[key]) for key in sorted(keyed)},
        failures=dict(failures.most_common(5)),
        seconds=seconds,
    )
