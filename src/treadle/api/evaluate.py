"""Stand-alone evaluation of a model, with a run's draws; writes nothing but an optional dump."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.files import check_writable
from treadle.core.text import redacted
from treadle.core.types import Group, StopReason
from treadle.loop.config import LoopPlan
from treadle.loop.evaluation import play_held_out, result_of
from treadle.models.config import ModelConfig
from treadle.models.model_files import check_model_files, located, require_model_or_adapter
from treadle.plan.config import RunConfig, recipe_data, recipe_names, without_source_options
from treadle.plan.inputs import Inputs, is_in_memory, load_held_out, shows_images
from treadle.plan.other_models import judging_models
from treadle.plan.player import OVERRIDES, without_player
from treadle.plan.validation import check_playing, check_rollout
from treadle.record.address import began_of, find_address, model_path
from treadle.record.checkpoint_retention import checkpoint_update
from treadle.record.run_directory import RunDirectory, no_run
from treadle.report.metrics import EvaluationResult, kind_of
from treadle.report.progress import Progress, loading
from treadle.report.rewards import lone_attempts, unknown_components
from treadle.rollout.attempt import Rollouts, open_rollouts
from treadle.rollout.isolation.event_loop import run as run_event_loop
from treadle.rollout.other_models import Chat, OtherModelConfig
from treadle.rollout.rewards import RewardsConfig, RewardShaper
from treadle.rollout.text_session import EndpointPolicy, open_text_rollouts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from treadle.plan.plan import Plan
    from treadle.rendering.chat import ChatRenderer
    from treadle.training.trainer import EmbeddedSource


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of an evaluation: `Subject(config, Path("runs/demo/checkpoints/step-000040"), 40)`.

    update: key of the draws, as in the run's own evaluation after that many updates; 0 for a bare model. base: base of
    an adapter; default: the one it names. began: date of the run, for templates; default: today.
    """

    config: RunConfig
    model: Path
    update: int
    base: str | None = None
    began: datetime | None = None

    @property
    def model_config(self) -> ModelConfig:
        """Return how to load the model: with its own tokenizer, or otherwise the configured one."""
        configured = self.config.model
        has_tokenizer = (self.model / "tokenizer.json").is_file()
        tokenizer = None if has_tokenizer else configured.tokenizer or configured.path
        return configured.model_copy(update={**located(self.model, self.base), "tokenizer": tokenizer})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation, in total and for each value of `data.table_by`.

    failures: message -> count, most frequent first, including retried attempts. seconds: time of playing, without
    loading.

    """

    result: EvaluationResult
    parts: dict[str, EvaluationResult]
    failures: dict[str, int]
    seconds: float


def find_subject(run_or_recipe: str, overrides: Sequence[str] = (), model: str | Path | None = None) -> Subject:
    """Return the checkpoint addressed by `run_or_recipe`; or a model, with a run's or recipe's configuration.

    overrides: one of the player (`reward=my_rewards:reward`) replaces that of another kind, with its options.
    model: directory, or address of another run. Needs no torch. Raises ConfigError or RunError if it is missing.
    """
    if touched := [o for o in overrides if o.startswith("model.")]:
        raise ConfigError(
            f"{' '.join(touched)}: the model is the run's; name another checkpoint (RUN@40, RUN@best) "
            "or another model in its place"
        )
    address = find_address(run_or_recipe)
    if address is not None or model is not None:
        config = find_config(run_or_recipe, overrides)
    elif run_or_recipe in recipe_names() or Path(run_or_recipe).suffix in (".yaml", ".yml"):
        raise ConfigError(f"{run_or_recipe!r} is a recipe: add --model DIR, or give the directory of a run of it")
    else:
        raise no_run(run_or_recipe)
    if model is not None:
        began = began_of(run_or_recipe, model)
        return Subject(config, require_model_or_adapter(str(model_path(model)), "--model"), 0, began=began)
    assert address is not None
    directory = address.model()
    return Subject(config, directory, checkpoint_update(directory), config.model.path, began_of(run_or_recipe))


def find_config(run_or_recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a run or recipe, ignoring its model. Raises ConfigError or RunError."""
    if (address := find_address(run_or_recipe)) is None:
        data, source = recipe_data(run_or_recipe), run_or_recipe
    else:
        run = RunDirectory.open(address.run)
        data, source = run.config_data(), str(run.config_file)
    data = without_source_options(without_player(data, overrides), overrides)
    return build(RunConfig, data, source, overrides)


def held_out_inputs(subject: Subject) -> Inputs:
    """Return tasks and environments, loaded as for a run. Needs no torch. Raises ConfigError or DataError."""
    check_subject(subject)
    return _held_out(subject.config)


def endpoint_inputs(config: RunConfig, model: OtherModelConfig | None = None) -> Inputs:
    """Return inputs for a model behind a URL, as `held_out_inputs` does; the recipe's own model may be missing."""
    check_rollout(config)
    if model is not None and model.api_key_env is not None and not os.environ.get(model.api_key_env):
        raise ConfigError(f"the environment variable {model.api_key_env!r} for the key is not set")
    return _held_out(config)


def limited(inputs: Inputs, limit: int | None) -> Inputs:
    """Return the inputs with only the first held-out tasks. limit: their number; None: all."""
    return replace(inputs, held_out=[*itertools.islice(inputs.held_out, limit)])


def _held_out(config: RunConfig) -> Inputs:
    if is_in_memory(config.data.held_out):
        raise ConfigError(
            "the run's tasks were made in Python and are on no file; treadle.evaluate(RUN, environment, tasks) takes "
            f"them, or give data.held_out.source=FILE.jsonl and one of {OVERRIDES}"
        )
    try:
        return load_held_out(config)
    except ConfigError as error:
        if config.player.is_registered:
            raise
        raise ConfigError(f"{error}; what was made in Python is named by one of {OVERRIDES}") from error


def check_subject(subject: Subject) -> None:
    """Raise ConfigError for inconsistent settings, or missing files of the model. Needs no torch."""
    check_playing(subject.config)
    check_model_files(subject.model_config)


def evaluate_model(subject: Subject, inputs: Inputs, progress: Progress, dump: Path | None = None) -> Evaluation:
    """Play the held-out tasks; return the evaluation. Raises ConfigError if it cannot work, as with a damaged model.

    dump: run directory for all trajectories.
    """
    with loading(progress):
        from treadle.models.chat import load_chat
        from treadle.plan.device import check_device, unused_gpus
        from treadle.plan.plan import make
        from treadle.plan.start import check_first_prompts
        from treadle.training.make import load_source

    plan = make(subject.config, inputs)
    config = plan.config
    if config.engine.kind == "torch":
        check_device(config.device)
        if line := unused_gpus(config.device, config.engine):
            progress.log(line)
    tokenizer, renderer = load_chat(subject.model_config, subject.began)
    source = load_source(subject.model_config, config.seed)
    plan = plan.with_threads(source.model.parameters)
    played = replace(inputs, train=inputs.held_out)  # the check uses training tasks
    check_first_prompts(played, renderer, config, source.model.context, progress.log)
    started = time.perf_counter()
    groups = run_event_loop(_play(plan, subject.update, renderer, source, progress), progress.log)
    seconds = time.perf_counter() - started
    if dump is not None:
        played_by = config.model_copy(update={"model": subject.model_config})
        _write_dump(dump, played_by, groups, tokenizer.backend_tokenizer)
    return _evaluation(config, groups, subject.update, seconds, progress)


def endpoint_name(model: OtherModelConfig) -> str:
    """Return `qwen3-8b at http://127.0.0.1:8000/v1`, without any key in the URL."""
    return redacted(f"{model.model} at {model.url}")


def evaluate_endpoint(
    config: RunConfig,
    inputs: Inputs,
    model: OtherModelConfig,
    progress: Progress,
    dump: Path | None = None,
    concurrency: int = 32,
) -> Evaluation:
    """Play the held-out tasks with a model behind a URL; `evaluate_model` without PyTorch. Raises ConfigError."""
    started, policy = time.perf_counter(), EndpointPolicy(model, concurrency)
    groups = run_event_loop(_play_endpoint(config, inputs, policy.chat, str(model.model), progress), progress.log)
    seconds = time.perf_counter() - started
    if dump is not None:
        _write_dump(dump, config, groups, None)
    steps = [step for group in groups for t in group.everyone for step in t.steps]
    if cut := sum(step.stop_reason is StopReason.LENGTH for step in steps):
        progress.log(
            f"{cut} of {len(steps)} replies were cut off at the token limit, which is meant for the recipe's own "
            "model; raise rollout.max_completion_tokens (and evaluation.max_completion_tokens, if set)"
        )
    return _evaluation(config, groups, 0, seconds, progress)


async def _play_endpoint(config: RunConfig, inputs: Inputs, chat: Chat, model: str, progress: Progress) -> list[Group]:
    rewards = RewardsConfig(weights=config.rewards.weights)
    async with open_text_rollouts(chat, model, inputs.players, config.rollout, rewards, progress.log) as rollouts:
        shaper = RewardShaper(config.rewards, config.rollout.environment_timeout)
        return await _play_all(rollouts, replace(config.loop, held_out=inputs.held_out), 0, shaper, progress)


def _evaluation(
    config: RunConfig, groups: Sequence[Group], update: int, seconds: float, progress: Progress
) -> Evaluation:
    everyone = [t for group in groups for t in group.everyone]
    for line in (*unknown_components(everyone, config.grading, "the evaluation"), *lone_attempts(config.grading)):
        progress.log(line)
    section, table_by = config.evaluation, config.data.table_by
    by_value: dict[str, list[Group]] = {}
    for group in groups:
        if (kind := kind_of(group.task, table_by)) is not None:
            by_value.setdefault(kind, []).append(group)
    failures = Counter(f"{t.failure.cause}: {t.failure.message}" for g in groups for t in g.trajectories if t.failure)
    return Evaluation(
        result_of(config.loop, groups, update, section.temperature),
        {value: result_of(config.loop, by_value[value], update, section.temperature) for value in sorted(by_value)},
        dict(failures.most_common(5)),
        seconds,
    )


async def _play(
    plan: Plan, update: int, renderer: ChatRenderer, source: EmbeddedSource, progress: Progress
) -> list[Group]:
    from treadle.loop.engines import open_serving, servers_see

    config, players = plan.config, plan.inputs.players
    trains_tower = config.training.trains_tower
    known = trains_tower or shows_images(plan.inputs.held_out)
    engine = await open_serving(
        *(plan.evaluation_engine, renderer, source, config.device),
        trains_tower=trains_tower,
        sees=servers_see(plan.evaluation_engine, config.model, known),
    )
    try:
        rewards = RewardsConfig(weights=config.rewards.weights)  # evaluations are not shaped
        async with (
            judging_models(players.models, engine, renderer, plan.evaluation_engine),
            open_rollouts(engine, renderer, players, config.rollout, rewards, progress.log) as rollouts,
        ):
            shaper = RewardShaper(config.rewards, config.rollout.environment_timeout, renderer.decode)
            return await _play_all(rollouts, plan.loop, update, shaper, progress)
    finally:
        await engine.close()


async def _play_all(
    rollouts: Rollouts, plan: LoopPlan, update: int, shaper: RewardShaper, progress: Progress
) -> list[Group]:
    finished, temperature = itertools.count(1), plan.evaluation.temperature
    total = len(plan.held_out) * plan.evaluation.attempts_at(temperature)
    progress.phase("evaluation", 0, total)
    await rollouts.check(plan.held_out)
    return await play_held_out(
        rollouts,
        plan,
        name="evaluation",
        update=update,
        temperature=temperature,
        on_trajectory=lambda: progress.phase("evaluation", next(finished), total),
        shaper=shaper,
    )


def check_dump(path: Path) -> None:
    """Raise RunError if a run directory cannot be made there, ConfigError if the system denies it."""
    RunDirectory(path).check_free()
    above = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        check_writable(above / path.name)
    except OSError as error:
        raise ConfigError(f"--dump: cannot write {str(path)!r}: {error.strerror}; name another directory") from error


def _write_dump(path: Path, config: RunConfig, groups: Sequence[Group], tokenizer: Tokenizer | None) -> None:
    """Write the trajectories as a run that is not trained. tokenizer: None for text. Raises RunError."""
    from treadle.record.run_store import RunStore, open_ledger  # pyarrow

    run = RunDirectory.create_recorded(path, config, "treadle eval", tokenizer)
    with open_ledger(run, None) as ledger:
        ledger.note_files(run.written)
        RunStore(run, ledger).record_evaluation("dump", groups, 0)
    run.close()
