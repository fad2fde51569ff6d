"""An open run, new or resumed, from its directory and trainer to its summary."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
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
from treadle.loop.engines import EngineSpec, servers_see
from treadle.loop.loop import Loop, StartingPoint
from treadle.loop.runtime import CheckedRunner, Runtime, open_runtime
from treadle.loop.starts import load_demonstrated
from treadle.loop.stopping import stop_on_signals
from treadle.loop.thread_count import available_cores
from treadle.models.chat import load_chat
from treadle.models.towers import engine_tower
from treadle.plan.config import RunConfig, config_of
from treadle.plan.device import check_device, describe_device, unused_gpus
from treadle.plan.inputs import Inputs, check_same_data, record_data, shows_images
from treadle.plan.other_models import judging_models
from treadle.plan.plan import Plan, make
from treadle.plan.start import START
from treadle.plan.validation import LEARNING_RATE, check_changes, check_context
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

    plan: Plan
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
        path, config, update = self.directory.path, self.plan.config, self.origin.state.update
        return RunStart(path, config, update, self.progress.log, self.renderer.decode)

    async def train(self) -> dict[str, Any]:
        """Sample and train to the end; return the summary. Raises the error that stopped the run, if any."""
        plan, directory, callbacks = self.plan, self.directory, self.callbacks
        config, warm_start = plan.config, await self.origin.load(self)
        with open_ledger(directory, config.orchestration.ledger_directory) as ledger:
            start = self.origin.prepare_record(self, ledger)
            async with self._sampling() as (engine, weight_sync, runner):
                calls = None if plan.repeats else OpenCalls(ledger, start.calls, self.progress.log)
                store = RunStore(directory, ledger, callbacks.rollout, calls)
                shaper = RewardShaper(config.rewards, config.rollout.environment_timeout, self.renderer.decode)
                grammars, starts = self.renderer.grammars, config.rollout.starts
                shown = None if starts is None else load_demonstrated(starts.source, self.renderer)
                run = (plan.loop, self.trainer, weight_sync, runner, shaper, store, callbacks, start, grammars, shown)
                loop = Loop(*run)
                self.status.sources += [loop.scheduler.status, runner.status]
                sees = self._images_come or (self._servers_see and not plan.engine.vllm.urls)
                await self.runtime.check_engine(
                    engine, weight_sync, self.trainer, self.renderer, 10 * config.engine.tolerance, sees
                )
                await runner.check(plan.loop.train)
                with stop_on_signals(callbacks.stop):
                    await loop.run()
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

    @property
    def _images_come(self) -> bool:
        """Whether images are known to come. Those of environments are not."""
        return self.plan.config.training.trains_tower or shows_images(self.plan.inputs.train)

    @property
    def _servers_see(self) -> bool:
        return servers_see(self.plan.engine, self.plan.config.model, self._images_come)

    @asynccontextmanager
    async def _sampling(self) -> AsyncIterator[tuple[Engine, WeightSync, CheckedRunner]]:
        """Open the engine and the rollouts that use it."""
        plan, config, path, log = self.plan, self.plan.config, self.directory.path, self.progress.log
        players = plan.inputs.players
        spec = EngineSpec(
            plan.engine,
            self.renderer,
            self.trainer,
            partial(load_model, config.model, config.seed, config.training.lora, whole=config.training.trains_tower),
            path,
            config.training.routing_replay,
            plan.loop.pinned,
            config.algorithm.recorded_probabilities,
            log,
            config.device,
            config.rollout.top_k,
            partial(engine_tower, config.model, config.training.trains_tower, config.device),
            config.training.trains_tower,
            self._servers_see,
        )
        engine, weight_sync = await self.runtime.open_engine(spec)
        try:
            played = budgeted(engine, plan.engine, config.rollout.longest_call, config.placement.engines.count)
            self.status.sources.append(played.status)
            async with (
                judging_models(players.models, engine, self.renderer, plan.engine),
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
        origin = cleanup.enter_context(_open_checkpoint(path, checkpoint)) if resume else _New()
        plan = make(config, inputs, origin.before)
        if isinstance(origin, _Resumed):
            origin.check(plan)
        device, ranks = plan.config.device, plan.config.placement.learner.ranks
        embedded = plan.config.placement.kind == "embedded"
        if embedded:
            check_device(device, ranks)
        began = datetime.fromisoformat(origin.state.began)
        renderer = load_chat(plan.config.model, began)[1]
        runtime = runtime or cleanup.enter_context(open_runtime(plan.runtime, path, progress.log))
        trainer = cleanup.enter_context(_closing(runtime.make_trainer(replace(plan.trainer, began=began))))
        plan = plan.with_threads(trainer.model.parameters, ranks)
        if isinstance(origin, _Resumed):
            directory = origin.report(plan, progress)
        else:
            check_context(plan.config, trainer.model.context)
            for check in START.values():
                check(inputs, renderer, plan.config, progress.log)
            directory = cleanup.enter_context(closing(RunDirectory.create(path, plan.config)))
            record_data(directory, inputs)
            record_code(directory, inputs.players)
            progress.log(f"run directory: {path} ({_describe(plan.config)})")
        if embedded and (line := unused_gpus(device, plan.engine, ranks)):
            progress.log(line)

        plan.require_space(directory.path, trainer.checkpoint_bytes)
        status = LiveStatus()
        status.sources.append(trainer.status)
        files = {directory.metrics_file.name: JsonLines(directory), directory.status_file.name: status}
        members = {**files, "stalls": StallWarnings(), **plan.inputs.callbacks}
        callbacks = Callbacks(members, StopRequest(), progress)
        cleanup.enter_context(status.writing(directory.status_file))
        yield Run(plan, directory, renderer, trainer, runtime, callbacks, status, progress, origin)


class _New:
    """Start of a new run, with weights from the configuration and its warm start."""

    before: RunConfig | None = None

    def __init__(self) -> None:
        self.state = LoopState(began=datetime.now().isoformat(timespec="seconds"))
        self._clock = Clock()

    async def load(self, run: Run) -> dict[str, Any] | None:
        """Train on demonstrations, if configured; return the report, which is recorded from now on."""
        if run.plan.config.warm_start is None:
            return None
        with interval(run.callbacks, "warm start", 0):
            report = await run_warm_start(run.trainer, run.renderer, run.plan, run.progress, run.status.phase)
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
    """Start of a resumed run, from a checkpoint. before: its recorded configuration. warm_start: its report.

    is_latest: whether it is the latest checkpoint.
    """

    directory: RunDirectory
    checkpoint: Manifest
    is_latest: bool
    state: LoopState
    before: RunConfig
    warm_start: dict[str, Any] | None
    clock: Clock

    def check(self, plan: Plan) -> None:
        """Raise RunError for a finished run, ConfigError or DataError if the plan would make it another one."""
        run, update = self.directory, self.state.update
        if run.summary_file.is_file() and self.is_latest and update >= plan.loop.updates:
            raise RunError(
                f"run {str(run.path)!r} is finished ({update} updates); nothing to resume; "
                "give it more orchestration.updates"
            )
        check_changes(changes(self.before, plan.config), update)
        check_same_data(run, plan.inputs)

    def report(self, plan: Plan, progress: Progress) -> RunDirectory:
        """Log what is resumed, and what changed; return its directory."""
        updates = f"{self.state.update} of {plan.loop.updates} updates"
        progress.log(f"resuming {self.directory.path} after {updates} ({_describe(plan.config)})")
        _report_changes(self.before, plan.config, self.state.update, progress)
        if line := renew_code(self.directory, plan.inputs.players):
            progress.log(line)
        return self.directory

    async def load(self, run: Run) -> dict[str, Any] | None:
        await run.trainer.load(self.checkpoint)
        return self.warm_start

    def prepare_record(self, run: Run, ledger: Ledger) -> StartingPoint:
        """Restore directory and ledger to the checkpoint, with groups and calls that are not sampled again."""
        plan, config, directory = run.plan, run.plan.config, self.directory
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
            keeping=plan.loop.retention,
            max_staleness=plan.loop.max_staleness,
            pinned=plan.loop.pinned is not None,
            repeats=plan.repeats,
            log=run.progress.log,
        )
        remove_other_shards(directory.traces, ledger.traces())
        return StartingPoint(self.state, *restored, self.clock)


@contextmanager
def _open_checkpoint(path: Path, name: str | None) -> Iterator[_Resumed]:
    """Lock the run, and find its latest checkpoint, or the named one."""
    clock = Clock()
    with closing(RunDirectory.open(path)) as run:
        run.lock()
        recover_ledger(run, config_of(run).orchestration.ledger_directory)
        before, ledger = config_of(run), run.ledger()
        ledger.prove()
        checkpoint = find_checkpoint(run.path, name or "latest")
        state, warm_start = ledger.checkpoint(checkpoint.directory.name), None
        if sha256 := ledger.file_sha256(_WARM_START):
            warm_start = json.loads(read_proven(run.path / _WARM_START, sha256, "restore it from a copy"))
        clock.wall_before, clock.cpu_before = state.wall_seconds, state.cpu_seconds
        yield _Resumed(run, checkpoint, name is None, state, before, warm_start, clock)


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
