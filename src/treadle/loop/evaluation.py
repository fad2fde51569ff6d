"""Playing held-out tasks: in a run, with the weights that its engines serve, or by a model on its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.core.config import build
from treadle.core.draws import Stream
from treadle.core.errors import ConfigError
from treadle.core.files import check_writable
from treadle.core.text import redacted
from treadle.core.types import Group, StopReason, Task, Trajectory
from treadle.loop.failures import FailuresConfig, has_not_failed, reward_together
from treadle.loop.stopping import StopRequest, check_evaluation
from treadle.models.config import ModelConfig
from treadle.models.model_files import check_model_files, located, require_model_or_adapter
from treadle.plan.config import (
    PLAYER_OVERRIDES,
    RunConfig,
    is_registered,
    load_recipe,
    recipe_names,
    without_player,
    without_source_options,
)
from treadle.plan.inputs import Inputs, check_first_prompts, is_in_memory, load_held_out
from treadle.plan.other_models import judging_models
from treadle.plan.validation import check_playing, check_rollout
from treadle.record.address import began_of, find_address, model_path
from treadle.record.checkpoint_retention import checkpoint_update
from treadle.record.ledger_reader import LoopState
from treadle.record.run_directory import RunDirectory, no_run
from treadle.report.callbacks import Progress, loading
from treadle.report.metrics import EvaluationResult, evaluation_result, kind_of
from treadle.report.rewards import lone_attempts, unknown_components
from treadle.rollout.attempt import RolloutRunner, Rollouts, open_rollouts
from treadle.rollout.isolation.event_loop import run as run_event_loop
from treadle.rollout.other_models import Chat, OtherModelConfig
from treadle.rollout.rewards import RewardsConfig, RewardShaper
from treadle.rollout.session import Address
from treadle.rollout.text_session import EndpointPolicy, open_text_rollouts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from treadle.record.run_store import RunStore
    from treadle.rendering.chat import ChatRenderer
    from treadle.report.reporter import Reporter
    from treadle.training.trainer import EmbeddedSource


async def play_held_out(
    runner: RolloutRunner,
    tasks: Sequence[Task],
    config: RunConfig,
    *,
    name: str,
    update: int,
    temperature: float,
    on_trajectory: Callable[[], None],
    shaper: RewardShaper,
) -> list[Group]:
    """Play `evaluation.attempts` at each task, in fixed cohorts that are played side by side, so that batches repeat.

    What becomes of failed attempts is what becomes of those of training: `failures.causes`.

    name: prefix of group ids. update: keys the draws together with the seed. on_trajectory: called for each attempt
    that is not retried. shaper: for group rewards.
    """
    section, groups = config.evaluation, list[Group]()
    attempts, sampling = section.attempts_at(temperature), section.sampling(runner.sampling, temperature)
    retry_delay = partial(_retry_delay, config.failures, attempts)

    def ended(attempt: asyncio.Future[Trajectory]) -> None:
        if not attempt.cancelled() and attempt.exception() is None and retry_delay(attempt.result()) is None:
            on_trajectory()

    def play(group: Group, numbers: Sequence[int]) -> list[asyncio.Future[Trajectory]]:
        addresses = [Address(config.seed, Stream.EVALUATE, update, group.position, number) for number in numbers]
        started = runner.start(group.group_id, group.task, addresses, sampling)
        for attempt in started:
            attempt.add_done_callback(ended)
        return started

    cohort = max(1, config.evaluated_together // attempts)
    for start in range(0, len(tasks), cohort):
        places = enumerate(tasks[start : start + cohort], start)
        together = [Group(f"{name}-{place:04d}", place, update, place, task, ()) for place, task in places]
        played = await _played(together, attempts, play, retry_delay)
        groups += await asyncio.gather(*(_rewarded(shaper, group, config.failures, retry_delay) for group in played))
    return groups


def _retry_delay(failures: FailuresConfig, attempts: int, trajectory: Trajectory) -> float | None:
    """Return the seconds before another attempt takes this one's place; None if none does. attempts: at each task."""
    return failures.retry_delay(trajectory, trajectory.attempt // attempts + 1)


async def _played(
    groups: list[Group],
    attempts: int,
    play: Callable[[Group, Sequence[int]], list[asyncio.Future[Trajectory]]],
    retry_delay: Callable[[Trajectory], float | None],
) -> list[Group]:
    """Play attempts of all groups and, once all have ended, those that are retried, together, until none is."""
    missing = [list(range(attempts)) for _ in groups]
    while any(missing):
        running = [play(group, own) if own else [] for group, own in zip(groups, missing, strict=True)]
        ended = await asyncio.gather(*(asyncio.gather(*own) for own in running))
        groups = [replace(g, trajectories=(*g.trajectories, *own)) for g, own in zip(groups, ended, strict=True)]
        missing = [[t.attempt + attempts for t in own if retry_delay(t) is not None] for own in ended]
        if any(missing):
            await asyncio.sleep(max(retry_delay(t) or 0.0 for own in ended for t in own))
    return groups


async def _rewarded(
    shaper: RewardShaper, group: Group, failures: FailuresConfig, retry_delay: Callable[[Trajectory], float | None]
) -> Group:
    """Return the group with what `rewards.group` and `failures.causes` give its attempts, in order."""
    last = [failures.final(t) if retry_delay(t) is None else t for t in group.trajectories]
    reward = partial(shaper.reward_group, group.task, group.group_id)
    rewarded = await reward_together([t for t in last if has_not_failed(t)], reward, failures)
    by_attempt = {t.attempt: t for t in (*last, *rewarded)}
    return replace(group, trajectories=tuple(by_attempt[number] for number in sorted(by_attempt)))


def pending_evaluations(config: RunConfig, state: LoopState) -> list[float]:
    """Temperatures at which the current weights are to be evaluated and have not been yet."""
    section, ends = config.evaluation, state.update == 0 or config.is_last(state.update)
    if not (ends or config.is_due(state.update, section.every)):
        return []
    greedy = [0.0] if ends and section.greedy_too and section.temperature > 0 else []
    made = [row["temperature"] for row in state.evaluations if row["update"] == state.update]
    return [temperature for temperature in (section.temperature, *greedy) if temperature not in made]


class Evaluator:
    """The evaluations of a run."""

    def __init__(
        self,
        config: RunConfig,
        runner: RolloutRunner,
        tasks: Sequence[Task],
        store: RunStore,
        reporter: Reporter,
        shaper: RewardShaper,
    ) -> None:
        self._config, self._runner, self._tasks, self._shaper = config, runner, tasks, shaper
        self._store, self._reporter = store, reporter

    def pending(self, state: LoopState) -> list[float]:
        """Temperatures at which the current weights are still to be evaluated; none without held-out tasks."""
        return pending_evaluations(self._config, state) if self._tasks else []

    async def evaluate(self, state: LoopState, stop: StopRequest) -> LoopState:
        """Make the pending evaluations; return the state with their results.

        Those that a stop request comes before stay pending until the run is resumed, as does one all of whose attempts
        failed: StopConditionMet.
        """
        config, update, reporter = self._config, state.update, self._reporter
        for temperature in self.pending(state):
            name = f"e{update:06d}" + ("g" if temperature == 0 else "")
            if times := self._store.ledger.times_evaluated(name):
                name += f"r{times}"
            reporter.begin("evaluation", len(self._tasks) * config.evaluation.attempts_at(temperature))
            playing = play_held_out(
                self._runner,
                self._tasks,
                config,
                name=name,
                update=update,
                temperature=temperature,
                on_trajectory=lambda: reporter.advance("evaluation"),
                shaper=self._shaper,
            )
            with reporter.timed("evaluation", update):
                groups = await stop.unless_requested(playing)
            if groups is None:
                return state
            self._store.record_evaluation(name, groups, state.version)
            check_evaluation(groups, config)
            result = _result(config, groups, update, temperature)
            reporter.callbacks.evaluate(result)
            state = replace(state, evaluations=(*state.evaluations, asdict(result)))
        return state


def _result(config: RunConfig, groups: Sequence[Group], update: int, temperature: float) -> EvaluationResult:
    section, attempts = config.evaluation, config.evaluation.attempts_at(temperature)
    of_success = section.success_at, config.data.table_by, section.success_of
    return evaluation_result(groups, attempts, update, temperature, *of_success)


# A model on its own, with the draws that a run would use; nothing is written but a dump


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated: `Subject(config, Path("runs/demo/checkpoints/step-000040"), 40)`.

    update: keys the draws, as in the run's own evaluation after that many updates; 0 for a bare model. base: of an
    adapter; default: the one that it names. began: the date that templates write, of the run; default: today's.
    """

    config: RunConfig
    model: Path
    update: int
    base: str | None = None
    began: datetime | None = None

    @property
    def model_config(self) -> ModelConfig:
        """How the model is loaded: with its own tokenizer, or else the configured one."""
        configured = self.config.model
        has_tokenizer = (self.model / "tokenizer.json").is_file()
        tokenizer = None if has_tokenizer else configured.tokenizer or configured.path
        return configured.model_copy(update={**located(self.model, self.base), "tokenizer": tokenizer})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation, as a whole and for each value of `data.table_by`.

    failures: message -> count, most frequent first, also of attempts that were retried. seconds: of playing, without
    loading.
    """

    result: EvaluationResult
    parts: dict[str, EvaluationResult]
    failures: dict[str, int]
    seconds: float


def find_subject(run_or_recipe: str, overrides: Sequence[str] = (), model: str | Path | None = None) -> Subject:
    """Return the checkpoint that `run_or_recipe` addresses; or a model, with a run's or recipe's configuration.

    overrides: one of what plays (`reward=my_rewards:reward`) replaces what the run recorded.
    model: directory, or address of another run. Needs no torch. Raises ConfigError or RunError for what is not there.
    """
    if touched := [o for o in overrides if o.startswith("model.")]:
        raise ConfigError(
            f"{' '.join(touched)}: the model is that of the run; name another checkpoint (RUN@40, RUN@best) "
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
    """Return the configuration of a run or recipe, whose model is not used. Raises ConfigError or RunError."""
    if (address := find_address(run_or_recipe)) is None:
        return load_recipe(run_or_recipe, overrides)
    run = RunDirectory.open(address.run)
    data = without_source_options(without_player(run.config_data(), overrides), overrides)
    return build(RunConfig, data, str(run.config_file), overrides)


def held_out_inputs(subject: Subject) -> Inputs:
    """Return tasks and environments, as a run would load them. Needs no torch. Raises ConfigError or DataError."""
    check_subject(subject)
    return _held_out(subject.config)


def endpoint_inputs(config: RunConfig, model: OtherModelConfig | None = None) -> Inputs:
    """Return what is played with a model behind a URL, as `held_out_inputs` does; the recipe's own may not exist."""
    check_rollout(config)
    if model is not None and model.api_key_env is not None and not os.environ.get(model.api_key_env):
        raise ConfigError(f"the environment variable {model.api_key_env!r}, which is to have the key, is not set")
    return _held_out(config)


def limited(inputs: Inputs, limit: int | None) -> Inputs:
    """Return the inputs with the first held-out tasks alone. limit: how many; None: all."""
    return replace(inputs, held_out=[*itertools.islice(inputs.held_out, limit)])


def _held_out(config: RunConfig) -> Inputs:
    if is_in_memory(config.data.held_out):
        raise ConfigError(
            "the run's tasks were made in Python and are on no file; treadle.evaluate(RUN, environment, tasks) takes "
            f"them, or give data.held_out.source=FILE.jsonl and one of {PLAYER_OVERRIDES}"
        )
    try:
        return load_held_out(config)
    except ConfigError as error:
        if is_registered(config):
            raise
        raise ConfigError(f"{error}; what was made in Python is named by one of {PLAYER_OVERRIDES}") from error


def check_subject(subject: Subject) -> None:
    """Raise ConfigError for settings that do not fit, or files of the model that are not there. Needs no torch."""
    check_playing(subject.config)
    check_model_files(subject.model_config)


def evaluate_model(subject: Subject, inputs: Inputs, progress: Progress, dump: Path | None = None) -> Evaluation:
    """Play the held-out tasks; returns the evaluation. Raises ConfigError for what cannot work, like a damaged model.

    dump: a file for all trajectories, one a line.
    """
    with loading(progress):
        from treadle.loop.engines import use_threads
        from treadle.models.chat import load_chat
        from treadle.plan.device import check_device, settled, unused_gpus
        from treadle.training.make import load_source

    config = settled(subject.config)
    if config.engine.kind == "torch":
        check_device(config.device)
        if line := unused_gpus(config.device, config.engine):
            progress.log(line)
    subject = replace(subject, config=config)
    tokenizer, renderer = load_chat(subject.model_config, subject.began)
    source = load_source(subject.model_config, config.seed)
    use_threads(config.training.threads, source.model.parameters, device=config.device)
    played = replace(inputs, train=inputs.held_out)  # the check looks at training tasks
    check_first_prompts(played, renderer, config, source.model.context, progress.log)
    started = time.perf_counter()
    groups = run_event_loop(_play(subject, inputs, renderer, source, progress), progress.log)
    seconds = time.perf_counter() - started
    if dump is not None:
        _write_dump(dump, groups, tokenizer.backend_tokenizer, str(subject.model.resolve()))
    return _evaluation(config, groups, subject.update, seconds, progress)


def endpoint_name(model: OtherModelConfig) -> str:
    """Return `qwen3-8b at http://127.0.0.1:8000/v1`, without a key that the URL has."""
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
        _write_dump(dump, groups, None, endpoint_name(model))
    steps = [step for group in groups for t in group.everyone for step in t.steps]
    if cut := sum(step.stop_reason is StopReason.LENGTH for step in steps):
        progress.log(
            f"{cut} of {len(steps)} replies were cut off at their limit of tokens, which is meant for the recipe's own "
            "model; raise rollout.max_completion_tokens (and evaluation.max_completion_tokens, if set)"
        )
    return _evaluation(config, groups, 0, seconds, progress)


async def _play_endpoint(config: RunConfig, inputs: Inputs, chat: Chat, model: str, progress: Progress) -> list[Group]:
    rewards = RewardsConfig(weights=config.rewards.weights)
    async with open_text_rollouts(chat, model, inputs.players, config.rollout, rewards, progress.log) as rollouts:
        shaper = RewardShaper(config.rewards, config.rollout.environment_timeout)
        return await _play_all(rollouts, inputs, config, 0, shaper, progress)


def _evaluation(
    config: RunConfig, groups: Sequence[Group], update: int, seconds: float, progress: Progress
) -> Evaluation:
    everyone = [t for group in groups for t in group.everyone]
    for line in (*unknown_components(everyone, config, "the evaluation"), *lone_attempts(config)):
        progress.log(line)
    section, table_by = config.evaluation, config.data.table_by
    by_value: dict[str, list[Group]] = {}
    for group in groups:
        if (kind := kind_of(group.task, table_by)) is not None:
            by_value.setdefault(kind, []).append(group)
    failures = Counter(f"{t.failure.cause}: {t.failure.message}" for g in groups for t in g.trajectories if t.failure)
    return Evaluation(
        _result(config, groups, update, section.temperature),
        {value: _result(config, by_value[value], update, section.temperature) for value in sorted(by_value)},
        dict(failures.most_common(5)),
        seconds,
    )


async def _play(
    subject: Subject, inputs: Inputs, renderer: ChatRenderer, source: EmbeddedSource, progress: Progress
) -> list[Group]:
    from treadle.loop.engines import open_serving

    config = subject.config
    section = config.engine_in_evaluation(inputs.players.may_wait)
    engine = await open_serving(section, renderer, source, config.device)
    try:
        rewards = RewardsConfig(weights=config.rewards.weights)  # evaluations are not shaped
        async with (
            judging_models(engine, renderer, section),
            open_rollouts(engine, renderer, inputs.players, config.rollout, rewards, progress.log) as rollouts,
        ):
            shaper = RewardShaper(config.rewards, config.rollout.environment_timeout, renderer.decode)
            return await _play_all(rollouts, inputs, config, subject.update, shaper, progress)
    finally:
        await engine.close()


async def _play_all(
    rollouts: Rollouts, inputs: Inputs, config: RunConfig, update: int, shaper: RewardShaper, progress: Progress
) -> list[Group]:
    finished, temperature = itertools.count(1), config.evaluation.temperature
    total = len(inputs.held_out) * config.evaluation.attempts_at(temperature)
    progress.phase("evaluation", 0, total)
    await rollouts.check(inputs.held_out)
    return await play_held_out(
        rollouts,
        inputs.held_out,
        config,
        name="evaluation",
        update=update,
        temperature=temperature,
        on_trajectory=lambda: progress.phase("evaluation", next(finished), total),
        shaper=shaper,
    )


def check_dump(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ConfigError(f"--dump: {str(path)!r} is not a regular file; name another")
    try:
        check_writable(path)
    except OSError as error:
        raise ConfigError(f"--dump: cannot write {str(path)!r}: {error.strerror}; name another file") from error


def _write_dump(path: Path, groups: Sequence[Group], tokenizer: Tokenizer | None, model: str) -> None:
    """Write the trajectories as `treadle export-traces` does. tokenizer: None: they are text.

    Raises RunError where the disk refuses.
    """
    from treadle.record.recorded import AS_TEXT, RecordedTrajectory, vocabulary_sha256  # pyarrow
    from treadle.record.trajectory_files import write_trajectories
    from treadle.rendering.texts import TokenTexts

    vocabulary = AS_TEXT if tokenizer is None else vocabulary_sha256(tokenizer)
    recorded = [
        RecordedTrajectory(str(path), "held_out", group.group_id, group.task, trajectory, vocabulary)
        for group in groups
        for trajectory in group.everyone
    ]
    write_trajectories(path, "jsonl", recorded, TokenTexts(tokenizer), model)
