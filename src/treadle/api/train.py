"""A training run from its configuration to its summary, new or resumed.

train_run     restarted after losing a rank, from the last checkpoint
  _train      inputs are checked, then: directory (new, or locked and proven) -> runtime, trainer -> event loop
    _Run.run  warm start or checkpoint -> engine, rollouts -> Loop.run -> summary.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from treadle.api.warm_start import run_warm_start
from treadle.core.config_diff import changes, leaves
from treadle.core.errors import RankError, RunError
from treadle.core.files import Manifest, read_proven, write_atomically
from treadle.core.stop import StopRequest
from treadle.core.trainer import Trainer
from treadle.core.types import Group
from treadle.engines.kv_budget import budgeted
from treadle.loop.engines import EngineSpec, use_threads
from treadle.loop.loop import Loop, StartingPoint, make_loop
from treadle.loop.runtime import Runtime, open_runtime
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
from treadle.plan.validation import LEARNING_RATE, check_changes, check_config
from treadle.record.checkpoint_retention import checkpoint_update, find_checkpoint
from treadle.record.code import record_code, renew_code
from treadle.record.ledger import AttemptKey, Ledger
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
from treadle.rollout.isolation.event_loop import run as run_event_loop
from treadle.rollout.replay import AnsweredCall
from treadle.rollout.rewards import RewardShaper
from treadle.training.make import load_model
from treadle.training.optimizer import learning_rate

_WARM_START = "warm_start.json"
_RESTARTS = 3  # without another checkpoint in between
_TO_CLOSE = 0.5  # seconds, after an interrupt


def train_run(
    config: RunConfig,
    inputs: Inputs,
    path: Path,
    progress: Progress,
    *,
    resume: bool = False,
    checkpoint: str | None = None,
    runtime: Runtime | None = None,
) -> dict[str, Any]:
    """Train in a new run directory, or resume the run there; returns the summary.

    resume: continue from the latest checkpoint, or from an earlier one by name (`checkpoint`), rolling back everything
    after it. From the latest, weights become bit-identical to an uninterrupted run's. A run without a recorded
    checkpoint, such as one killed in its warm start or first evaluation, is restarted, even without `resume`.
    runtime: factories of the run's parts; default: as named by `placement.kind`.

    When a cluster loses a rank of the learner, the run continues from the last checkpoint, at most three times without
    a new one in between.

    Raises TreadleError. For a run to resume: RunError if it is finished (unless it goes back or gets more updates), in
    use, or has no checkpoint; DamageError if ledger, checkpoint or configuration are damaged; ConfigError for a change
    of configuration that it cannot continue with, DataError for other tasks.

    """
    limit = 0 if config.placement.kind == "embedded" else _RESTARTS
    reached, restarts = _last_update(path), 0
    while True:
        try:
            return _train(config, inputs, path, progress, resume, checkpoint, runtime)
        except RankError as error:
            before, reached = reached, _last_update(path)
            restarts = restarts + 1 if reached == before else 1
            if reached is None or restarts > limit:
                raise
            progress.log(f"{str(error).splitlines()[0]}; continuing from the checkpoint of update {reached}")
            resume, checkpoint = True, None


def _train(
    config: RunConfig,
    inputs: Inputs,
    path: Path,
    progress: Progress,
    resume: bool,
    checkpoint: str | None,
    runtime: Runtime | None,
) -> dict[str, Any]:
    clock, resumed = Clock(), None
    check_config(config)
    if checkpoint is None and RunDirectory(path).is_unsaved:
        progress.log(f"run {str(path)!r} has no checkpoint yet: it starts over")
        resume = False
    with ExitStack() as cleanup:
        if resume:
            run = RunDirectory.open(path)
            run.lock()
            cleanup.enter_context(closing(run))
            resumed, config = _find_checkpoint(run, config, inputs, checkpoint)
            clock.wall_before, clock.cpu_before = resumed.state.wall_seconds, resumed.state.cpu_seconds
        else:
            config = settled(config)
        ranks, embedded = config.placement.learner.ranks, config.placement.kind == "embedded"
        if embedded:
            check_device(config.device, ranks)
        state = resumed.state if resumed else LoopState(began=datetime.now().isoformat(timespec="seconds"))

        began = datetime.fromisoformat(state.began)
        renderer = load_chat(config.model, began)[1]
        runtime = runtime or cleanup.enter_context(open_runtime(config.runtime, path, progress.log))
        trainer = cleanup.enter_context(_closing(runtime.make_trainer(replace(config.trainer, began=began))))
        threads = use_threads(config.training.threads, trainer.model.parameters, ranks, config.device)
        config = _with_threads(config, threads)

        if resumed is None:
            # Errors that would otherwise occur after the warm start, or in every attempt.
            check_first_prompts(inputs, renderer, config, trainer.model.context, progress.log)
            check_demonstrations(config, inputs, renderer)
            check_drivers(inputs.players, renderer, config, progress.log)
            run = cleanup.enter_context(closing(RunDirectory.create(path, config)))
            record_data(run, inputs)
            record_code(run, inputs.players)
            progress.log(f"run directory: {path} ({describe_device(config)}, {_describe_threads(threads)})")
            for part in unused_parts(config.model, config.rollout.model_dump()):
                progress.log(f"not used of {base_directory(config.model)}: {part}")
            problem = renderer.tools_problem(parse=renderer.parser(config.rollout.reply_parser))
            if inputs.players.agents and problem:
                progress.log(f"agents' calls with tools will be refused: {problem}")
        else:
            updates = f"{state.update} of {config.orchestration.updates} updates"
            progress.log(f"resuming {path} after {updates} ({describe_device(config)}, {_describe_threads(threads)})")
            _report_changes(resumed.before, config, state.update, progress)
            if line := renew_code(run, inputs.players):
                progress.log(line)
        if embedded and (line := unused_gpus(config.device, config.engine, ranks)):
            progress.log(line)

        section = config.orchestration
        run.require_space(trainer.checkpoint_bytes, section.keep_last + (section.keep_best is not None))
        status = LiveStatus()
        status.sources.append(trainer.status)
        members = {run.metrics_file.name: JsonLines(run), run.status_file.name: status, "stalls": StallWarnings()}
        callbacks = Callbacks({**members, **inputs.callbacks}, StopRequest(), progress)
        work = _Run(config, inputs, run, renderer, trainer, runtime, callbacks, status, progress, state, clock, resumed)
        with status.writing(run.status_file):
            start = RunStart(path, config, state.update, progress.log, renderer.decode)
            return callbacks.around(start, work.run)


@dataclass(frozen=True, slots=True)
class _Resumed:
    """A checkpoint to resume from. before: the configuration so far. warm_start: its report."""

    checkpoint: Manifest
    state: LoopState
    before: RunConfig
    warm_start: dict[str, Any] | None


def _find_checkpoint(
    run: RunDirectory, config: RunConfig, inputs: Inputs, name: str | None
) -> tuple[_Resumed, RunConfig]:
    """Check that a locked run can continue with this configuration and tasks; return checkpoint and configuration,
    with the original threads, device and precisions unless others are configured.
    """
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
    return _Resumed(checkpoint, state, before, warm_start), config


@dataclass(slots=True)
class _Run:
    """State of a run with a locked directory and a trainer. resumed: None for a new run."""

    config: RunConfig
    inputs: Inputs
    directory: RunDirectory
    renderer: ChatRenderer
    trainer: Trainer
    runtime: Runtime
    callbacks: Callbacks
    status: LiveStatus
    progress: Progress
    state: LoopState
    clock: Clock
    resumed: _Resumed | None

    def run(self) -> dict[str, Any]:
        return run_event_loop(self._run(), self.progress.log, self.runtime.new_event_loop)

    async def _run(self) -> dict[str, Any]:
        config, directory = self.config, self.directory
        with ExitStack() as cleanup:
            if self.resumed is None:
                warm_start = await self._warm_start()
                ledger = cleanup.enter_context(open_ledger(directory, config.orchestration.ledger_directory))
                ledger.note_files(directory.written)
                ledger.copy_out()
                start = StartingPoint(self.state, clock=self.clock)
            else:
                warm_start = self.resumed.warm_start
                await self.trainer.load(self.resumed.checkpoint)
                ledger = cleanup.enter_context(open_ledger(directory, config.orchestration.ledger_directory))
                start = StartingPoint(self.state, *self._roll_back(ledger, self.resumed.checkpoint), self.clock)
            loop = await self._run_loop(ledger, start)
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

    async def _warm_start(self) -> dict[str, Any] | None:
        """Train on demonstrations, if configured; return the report, which is recorded from now on."""
        if self.config.warm_start is None:
            return None
        with interval(self.callbacks, "warm start", 0):
            report = await run_warm_start(
                self.trainer, self.renderer, self.config, self.inputs, self.progress, self.status.phase
            )
        assert report is not None, "the configuration has a warm start"
        how = "read from the cache" if report.cached else f"{report.seconds:.0f} s"
        self.progress.log(f"warm start: loss {report.loss:.3f} after {report.steps} steps ({how})")
        self.directory.write(_WARM_START, json.dumps(asdict(report)).encode())
        return asdict(report)

    def _roll_back(
        self, ledger: Ledger, checkpoint: Manifest
    ) -> tuple[dict[int, Group], dict[AttemptKey, list[AnsweredCall]]]:
        """Restore directory and ledger to the checkpoint; return groups and calls that are not sampled again."""
        config, directory = self.config, self.directory
        directory.summary_file.unlink(missing_ok=True)
        if changes(config_of(directory), config):
            directory.change_config(config, ledger)
        ledger.note_files(directory.written)
        remove_other_shards(directory.rollouts, ledger.shards())
        restored = roll_back(
            directory,
            ledger,
            checkpoint.directory.name,
            self.state,
            keeping=config.loop.retention,
            max_staleness=config.orchestration.max_staleness,
            pinned=config.pinned is not None,
            repeats=config.repeats(self.inputs.players.may_wait),
            log=self.progress.log,
        )
        remove_other_shards(directory.traces, ledger.traces())
        return restored

    async def _run_loop(self, ledger: Ledger, start: StartingPoint) -> Loop:
        """Run the loop; return it in its final state. Raises the error that stopped it, if any."""
        config, renderer, log, callbacks = self.config, self.renderer, self.progress.log, self.callbacks
        path, players = self.directory.path, self.inputs.players
        spec = EngineSpec(
            config.engine_in_training(players.may_wait),
            renderer,
            self.trainer,
            partial(load_model, config.model, config.seed, config.training.lora),
            path,
            config.training.routing_replay,
            config.pinned,
            log,
            config.device,
        )
        engine, weight_sync = await self.runtime.open_engine(spec)
        longest = config.rollout.longest_call
        try:
            played = budgeted(engine, spec.config, longest, config.placement.engines.count)
            self.status.sources.append(played.status)
            async with (
                judging_models(engine, renderer, spec.config),
                self.runtime.open_rollouts(
                    played, renderer, players, config.rollout, config.rewards, log, path
                ) as runner,
            ):
                calls = None if config.repeats(players.may_wait) else OpenCalls(ledger, start.calls, log)
                store = RunStore(self.directory, ledger, callbacks.rollout, calls)
                shaper = RewardShaper(config.rewards, config.rollout.environment_timeout, renderer.decode)
                loop = make_loop(
                    config.loop,
                    self.inputs.train,
                    self.inputs.held_out,
                    self.trainer,
                    weight_sync,
                    runner,
                    shaper,
                    store,
                    callbacks,
                    start,
                )
                self.status.sources += [loop.scheduler.status, runner.status]
                await self.runtime.check_engine(
                    engine, weight_sync, self.trainer, renderer, 10 * config.engine.tolerance
                )
                await runner.check(self.inputs.train)
                with stop_on_signals(callbacks.stop):
                    await loop.run(start.state)
        finally:
            await engine.close()
        callbacks.stop.raise_reason(loop.state.update)
        return loop


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


def _last_update(path: Path) -> int | None:
    try:
        return checkpoint_update(find_checkpoint(path, "latest").directory)
    except RunError:
        return None


def _with_threads(config: RunConfig, threads: int | None) -> RunConfig:
    """Return the configuration as stored: bits depend on the number of threads, so resumed runs use the same."""
    return config.model_copy(update={"training": config.training.model_copy(update={"threads": threads})})


def _describe_threads(threads: int) -> str:
    cores = available_cores()
    note = f"; this process may use {cores} cores, but other threads give other bits" if threads > cores else ""
    return f"{threads} thread{'s' * (threads > 1)}{note}"


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
