"""An open run, new or resumed, from its directory and trainer to its summary."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from treadle.api.warm_start import run_warm_start
from treadle.core.config_diff import changes, leaves
from treadle.core.engine import Engine
from treadle.core.errors import RunError
from treadle.core.files import Manifest, read_proven, write_atomically
from treadle.core.stop import StopRequest
from treadle.core.trainer import Trainer, WeightSync
from treadle.engines.kv_budget import budgeted
from treadle.loop.engines import EngineSpec, use_threads
from treadle.loop.loop import StartingPoint, make_loop
from treadle.loop.runtime import CheckedRunner, Runtime, open_runtime
from treadle.loop.stopping import stop_on_signals
from treadle.loop.thread_count import available_cores
from treadle.models.chat import load_chat
from treadle.models.model_files import base_directory
from treadle.models.unused import unused_parts
from treadle.plan.config import RunConfig, config_of
from treadle.plan.demonstrations import check_demonstrations
from treadle.plan.device import check_device, describe_device, settled, unused_gpus
from treadle.plan.inputs import Inputs, check_drivers, check_first_prompts, check_same_data, record_data
from treadle.plan.other_models import judging_models
from treadle.plan.validation import LEARNING_RATE, check_changes
from treadle.record.checkpoint_retention import find_checkpoint
from treadle.record.code import record_code, renew_code
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import LoopState
from treadle.record.open_calls import OpenCalls
from treadle.record.resume import roll_back
from treadle.record.rollout_store import remove_other_shards
from treadle.record.run_directory import RunDirectory
from treadle.record.run_store import RunStore, open_ledger, recover_ledger
from treadle.rendering.chat import ChatRenderer
from treadle.report.callback import RunStart
from treadle.report.callbacks import Callbacks, JsonLines
from treadle.report.curve import RunMetrics, draw_runs
from treadle.report.progress import Progress
from treadle.report.reporter import Clock, interval, run_summary
from treadle.report.stalls import StallWarnings
from treadle.report.status import LiveStatus
from treadle.rollout.rewards import RewardShaper
from treadle.training.make import load_model
from treadle.training.optimizer import learning_rate

_WARM_START = "warm_start.json"
_TO_CLOSE = 0.5  # seconds, after an interrupt


@dataclass(slots=True)
class Run:
    """State of a run with a locked directory and a trainer. origin: its start, or the checkpoint it resumes."""

    config: RunConfig
    inputs: Inputs
    directory: RunDirectory
    renderer: ChatRenderer
    trainer: Trainer
    runtime: Runtime
    callbacks: Callbacks
    status: LiveStatus
    progress: Progress
    origin: _New | _Resumed

    @property
    def start(self) -> RunStart:
        return RunStart(
            self.directory.path, self.config, self.origin.state.update, self.progress.log, self.renderer.decode
        )

    async def train(self) -> dict[str, Any]:
        """Sample and train to the end; return the summary. Raises the error that stopped the run, if any."""
        config, directory, callbacks = self.config, self.directory, self.callbacks
        warm_start = await self.origin.load(self)
        with open_ledger(directory, config.orchestration.ledger_directory) as ledger:
            start = self.origin.prepare_record(self, ledger)
            async with self._sampling() as (engine, weight_sync, runner):
                may_repeat = config.repeats(self.inputs.players.may_wait)
                calls = None if may_repeat else OpenCalls(ledger, start.calls, self.progress.log)
                store = RunStore(directory, ledger, callbacks.rollout, calls)
                shaper = RewardShaper(config.rewards, config.rollout.environment_timeout, self.renderer.decode)
                loop = make_loop(
                    *(config.loop, self.inputs.train, self.inputs.held_out, self.trainer, weight_sync),
                    *(runner, shaper, store, callbacks, start),
                )
                self.status.sources += [loop.scheduler.status, runner.status]
                await self.runtime.check_engine(
                    engine, weight_sync, self.trainer, self.renderer, 10 * config.engine.tolerance
                )
                await runner.check(self.inputs.train)
                with stop_on_signals(callbacks.stop):
                    await loop.run(start.state)
            callbacks.stop.raise_reason(loop.state.update)
        summary = run_summary(
            directory.path,
            loop.state,
            recipe=config.recipe,
            seed=config.seed,
            temperature=config.evaluation.temperature,
            weights_sha256=await self.trainer.digest(),
            stopped_early=not loop.finished,
            warm_start=warm_start,
        )
        if loop.finished:
            draw_runs([RunMetrics(leaves(config), directory.metrics())], directory.curve_file)
            write_atomically(directory.summary_file, json.dumps(summary, indent=2).encode())
        return summary

    @asynccontextmanager
    async def _sampling(self) -> AsyncIterator[tuple[Engine, WeightSync, CheckedRunner]]:
        """Open the engine and the rollouts that use it."""
        config, players, path, log = self.config, self.inputs.players, self.directory.path, self.progress.log
        spec = EngineSpec(
            config.engine_in_training(players.may_wait),
            self.renderer,
            self.trainer,
            partial(load_model, config.model, config.seed, config.training.lora),
            path,
            config.training.routing_replay,
            config.pinned,
            log,
            config.device,
        )
        engine, weight_sync = await self.runtime.open_engine(spec)
        try:
            played = budgeted(engine, spec.config, config.rollout.longest_call, config.placement.engines.count)
            self.status.sources.append(played.status)
            async with (
                judging_models(players.models, engine, self.renderer, spec.config),
                self.runtime.open_rollouts(
                    played, self.renderer, players, config.rollout, config.rewards, log, path
                ) as runner,
            ):
                yield engine, weight_sync, runner
        finally:
            await engine.close()


@contextmanager
def open_run(
    config: RunConfig,
    inputs: Inputs,
    path: Path,
    progress: Progress,
    resume: bool = False,
    checkpoint: str | None = None,
    runtime: Runtime | None = None,
) -> Iterator[Run]:
    """Open a run. The directory of a new one is made last, so that earlier errors leave none behind."""
    if checkpoint is None and RunDirectory(path).is_unsaved:
        progress.log(f"run {str(path)!r} has no checkpoint yet: it starts over")
        resume = False
    with ExitStack() as cleanup:
        origin = _find_checkpoint(cleanup, path, config, inputs, checkpoint) if resume else _New(settled(config))
        config, ranks = origin.config, origin.config.placement.learner.ranks
        embedded = config.placement.kind == "embedded"
        if embedded:
            check_device(config.device, ranks)
        began = datetime.fromisoformat(origin.state.began)
        renderer = load_chat(config.model, began)[1]
        runtime = runtime or cleanup.enter_context(open_runtime(config.runtime, path, progress.log))
        trainer = cleanup.enter_context(_closing(runtime.make_trainer(replace(config.trainer, began=began))))
        threads = use_threads(config.training.threads, trainer.model.parameters, ranks, config.device)
        config = _with_threads(config, threads)
        if isinstance(origin, _Resumed):
            directory = origin.report(config, inputs, progress)
        else:
            _check_start(config, inputs, renderer, trainer.model.context, progress.log)
            directory = cleanup.enter_context(closing(RunDirectory.create(path, config)))
            _record_start(directory, config, inputs, renderer, progress.log)
        if embedded and (line := unused_gpus(config.device, config.engine, ranks)):
            progress.log(line)

        section = config.orchestration
        directory.require_space(trainer.checkpoint_bytes, section.keep_last + (section.keep_best is not None))
        status = LiveStatus()
        status.sources.append(trainer.status)
        files = {directory.metrics_file.name: JsonLines(directory), directory.status_file.name: status}
        members = {**files, "stalls": StallWarnings(), **inputs.callbacks}
        callbacks = Callbacks(members, StopRequest(), progress)
        cleanup.enter_context(status.writing(directory.status_file))
        yield Run(config, inputs, directory, renderer, trainer, runtime, callbacks, status, progress, origin)


def _check_start(
    config: RunConfig, inputs: Inputs, renderer: ChatRenderer, context: int, log: Callable[[str], None]
) -> None:
    """Raise errors that would otherwise occur after the warm start or in every attempt. context: the model's."""
    check_first_prompts(inputs, renderer, config, context, log)
    check_demonstrations(config, inputs, renderer)
    check_drivers(inputs.players, renderer, config, log)


def _record_start(
    directory: RunDirectory, config: RunConfig, inputs: Inputs, renderer: ChatRenderer, log: Callable[[str], None]
) -> None:
    """Record tasks and code of a new run, and log what is not used."""
    record_data(directory, inputs)
    record_code(directory, inputs.players)
    log(f"run directory: {directory.path} ({_describe(config)})")
    for part in unused_parts(config.model, config.rollout.model_dump()):
        log(f"not used of {base_directory(config.model)}: {part}")
    problem = renderer.tools_problem(parse=renderer.parser(config.rollout.reply_parser))
    if inputs.players.agents and problem:
        log(f"agents' calls with tools will be refused: {problem}")


class _New:
    """Start of a new run, with weights from the configuration and its warm start."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.state = config, LoopState(began=datetime.now().isoformat(timespec="seconds"))
        self._clock = Clock()

    async def load(self, run: Run) -> dict[str, Any] | None:
        """Train on demonstrations, if configured; return the report, which is recorded from now on."""
        if run.config.warm_start is None:
            return None
        with interval(run.callbacks, "warm start", 0):
            report = await run_warm_start(
                run.trainer, run.renderer, run.config, run.inputs, run.progress, run.status.phase
            )
        assert report is not None, "the configuration has a warm start"
        how = "read from the cache" if report.cached else f"{report.seconds:.0f} s"
        run.progress.log(f"warm start: loss {report.loss:.3f} after {report.steps} steps ({how})")
        run.directory.write(_WARM_START, json.dumps(asdict(report)).encode())
        return asdict(report)

    def prepare_record(self, run: Run, ledger: Ledger) -> StartingPoint:
        ledger.note_files(run.directory.written)
        ledger.copy_out()
        return StartingPoint(self.state, clock=self._clock)


@dataclass(frozen=True, slots=True)
class _Resumed:
    """Start of a resumed run, from a checkpoint. before: its recorded configuration. warm_start: its report."""

    directory: RunDirectory
    config: RunConfig
    checkpoint: Manifest
    state: LoopState
    before: RunConfig
    warm_start: dict[str, Any] | None
    clock: Clock

    def report(self, config: RunConfig, inputs: Inputs, progress: Progress) -> RunDirectory:
        """Log what is resumed, and what changed; return its directory."""
        updates = f"{self.state.update} of {config.orchestration.updates} updates"
        progress.log(f"resuming {self.directory.path} after {updates} ({_describe(config)})")
        _report_changes(self.before, config, self.state.update, progress)
        if line := renew_code(self.directory, inputs.players):
            progress.log(line)
        return self.directory

    async def load(self, run: Run) -> dict[str, Any] | None:
        await run.trainer.load(self.checkpoint)
        return self.warm_start

    def prepare_record(self, run: Run, ledger: Ledger) -> StartingPoint:
        """Restore directory and ledger to the checkpoint, with groups and calls that are not sampled again."""
        config, directory = run.config, self.directory
        directory.summary_file.unlink(missing_ok=True)
        if changes(config_of(directory), config):
            directory.change_config(config, ledger)
        ledger.note_files(directory.written)
        remove_other_shards(directory.rollouts, ledger.shards())
        restored = roll_back(
            directory,
            ledger,
            self.checkpoint.directory.name,
            self.state,
            keeping=config.loop.retention,
            max_staleness=config.orchestration.max_staleness,
            pinned=config.pinned is not None,
            repeats=config.repeats(run.inputs.players.may_wait),
            log=run.progress.log,
        )
        remove_other_shards(directory.traces, ledger.traces())
        return StartingPoint(self.state, *restored, self.clock)


def _find_checkpoint(cleanup: ExitStack, path: Path, config: RunConfig, inputs: Inputs, name: str | None) -> _Resumed:
    """Lock the run and check that it can continue with this configuration and tasks.

    Threads, device and precisions stay as they were unless others are configured.
    """
    clock, run = Clock(), RunDirectory.open(path)
    run.lock()
    cleanup.enter_context(closing(run))
    recover_ledger(run, config_of(run).orchestration.ledger_directory)
    ledger = run.ledger()
    ledger.prove()
    checkpoint = find_checkpoint(run.path, name or "latest")
    state = ledger.checkpoint(checkpoint.directory.name)
    if run.summary_file.is_file() and name is None and state.update >= config.orchestration.updates:
        raise RunError(
            f"run {str(run.path)!r} is finished ({state.update} updates); nothing to resume; "
            "give it more orchestration.updates"
        )
    before = config_of(run)
    config = _with_threads(settled(config, before), config.training.threads or before.training.threads)
    check_changes(changes(before, config), state.update)
    check_same_data(run, inputs)
    warm_start = None
    if sha256 := ledger.file_sha256(_WARM_START):
        warm_start = json.loads(read_proven(run.path / _WARM_START, sha256, "restore it from a copy"))
    clock.wall_before, clock.cpu_before = state.wall_seconds, state.cpu_seconds
    return _Resumed(run, config, checkpoint, state, before, warm_start, clock)


@contextmanager
def _closing(trainer: Trainer) -> Iterator[Trainer]:
    """Close the trainer on leaving, after its running update, but not long after an interrupt."""
    try:
        yield trainer
    except KeyboardInterrupt:
        thread = Thread(target=trainer.close, name="treadle-close", daemon=True)
        thread.start()
        thread.join(_TO_CLOSE)
        raise
    except BaseException:
        trainer.close()
        raise
    trainer.close()


def _with_threads(config: RunConfig, threads: int | None) -> RunConfig:
    """Return the configuration as stored: bits depend on the number of threads, so resumed runs use the same."""
    return config.model_copy(update={"training": config.training.model_copy(update={"threads": threads})})


def _describe(config: RunConfig) -> str:
    threads, cores = config.training.threads or 1, available_cores()
    note = f"; this process may use {cores} cores, but other threads give other bits" if threads > cores else ""
    return f"{describe_device(config)}, {threads} thread{'s' * (threads > 1)}{note}"


def _report_changes(before: RunConfig, config: RunConfig, update: int, progress: Progress) -> None:
    """Log changed settings, and the learning rate of the next update if it differs."""
    old, new = (learning_rate(each.training.optimizer, update, each.orchestration.updates) for each in (before, config))
    for change in changes(before, config):
        if old == new or change.path not in LEARNING_RATE:
            progress.log(f"changed: {change}")
    if old != new:
        progress.log(f"learning rate {old:.3g} -> {new:.3g} from update {update + 1} on")
    start, end = config.algorithm.entropy_bonus
    if start != end and before.orchestration.updates != (updates := config.orchestration.updates):
        progress.log(f"the entropy bonus follows: it is {end:g} after {updates} updates")
