"""Starting, resuming and finishing a run: everything around the loop.

load_inputs -> ChatInterface, Trainer -> warm start or checkpoint -> Engine, WeightSync -> Loop.run -> summary.json
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from treadle.core.errors import RunError
from treadle.core.files import write_atomically
from treadle.core.manifest import Manifest, read_proven
from treadle.core.trainer import Trainer
from treadle.engines.kv_budget import budgeted
from treadle.orchestration.config import RunConfig
from treadle.orchestration.loop.assembly import StartingPoint, make_loop
from treadle.orchestration.loop.loop import Loop
from treadle.orchestration.reporting.callbacks import Callbacks, JsonLines, RunStart
from treadle.orchestration.reporting.clock import Clock
from treadle.orchestration.reporting.curve import RunMetrics
from treadle.orchestration.reporting.live_status import LiveStatus
from treadle.orchestration.reporting.picture import draw_runs
from treadle.orchestration.reporting.progress import Progress, ProgressCallback
from treadle.orchestration.reporting.summary import run_summary
from treadle.orchestration.runtime import Runtime, open_runtime
from treadle.orchestration.setup.chat_interface import ChatInterface, load_chat_interface, use_threads
from treadle.orchestration.setup.config_diff import Change, changes, check_changes
from treadle.orchestration.setup.engines import training_engine
from treadle.orchestration.setup.inputs import Inputs, check_drivers, check_first_prompts
from treadle.orchestration.setup.same_data import check_same_data, record_data
from treadle.orchestration.setup.thread_count import available_cores
from treadle.orchestration.setup.validation import check_config
from treadle.orchestration.setup.warm_start import WarmStartReport, check_demonstrations, run_warm_start
from treadle.orchestration.stop_request import StopRequest, stop_on_signals
from treadle.orchestration.store.checkpoint_retention import find_checkpoint
from treadle.orchestration.store.ledger import Ledger
from treadle.orchestration.store.local_ledger import open_ledger, recover_ledger
from treadle.orchestration.store.loop_state import LoopState
from treadle.orchestration.store.resume import roll_back
from treadle.orchestration.store.rollout_store import remove_other_shards
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.orchestration.store.run_store import RunStore
from treadle.rollout.isolation.event_loop import run as run_event_loop
from treadle.training.optimizer import learning_rate

_WARM_START = "warm_start.json"


def start_run(
    config: RunConfig, inputs: Inputs, path: Path, progress: Progress, runtime: Runtime | None = None
) -> dict[str, Any]:
    """Train from the beginning in a new run directory; returns the summary. Raises TreadleError."""
    clock, began = Clock(), datetime.now().isoformat(timespec="seconds")
    check_config(config)
    chat = load_chat_interface(config.model, began)
    with (
        _opened(runtime, config, path, progress) as parts,
        closing(parts.make_trainer(config.trainer)) as trainer,
    ):
        config = _with_threads(
            config, use_threads(config.training.threads, trainer.model.parameters, config.placement.learner.ranks)
        )
        check_first_prompts(inputs, chat.renderer, config, trainer.model.context, progress.log)
        check_demonstrations(config, chat.renderer)
        check_drivers(inputs.players, chat.renderer, config, progress.log)
        run = RunDirectory.create(path, config)
        with closing(run):
            record_data(run, inputs)
            progress.log(f"run directory: {path} ({_threads_line(config)})")
            if problem := _tools_problem(inputs, chat, config):
                progress.log(f"agents' calls with tools will be refused: {problem}")

            async def begin(cleanup: ExitStack) -> _Beginning:
                report = await run_warm_start(trainer, chat.renderer, config, progress, status.phase)
                if report is not None:
                    progress.log(_warm_start_line(report))
                    run.write(_WARM_START, json.dumps(asdict(report)).encode())
                ledger = cleanup.enter_context(open_ledger(run, config.orchestration.ledger_directory))
                ledger.note_files(run.written)
                ledger.copy_out()
                start = StartingPoint(LoopState(began=began), clock=clock)
                return _Beginning(ledger, start, None if report is None else asdict(report))

            status = LiveStatus()
            return _Session(config, inputs, run, chat, trainer, progress, parts, status).train(0, begin)


def resume_run(
    config: RunConfig,
    inputs: Inputs,
    path: Path,
    progress: Progress,
    checkpoint: str | None = None,
    runtime: Runtime | None = None,
) -> dict[str, Any]:
    """Go on from the latest checkpoint, or an earlier one by name; returns the summary.

    From the latest, weights become bit-identical to those of a run that was never interrupted. From an earlier one,
    everything after it is rolled back. Raises RunError if the run is finished (one that goes back or gets more updates
    is not), in use, or never reached its first checkpoint; DamageError if the ledger, the checkpoint or the
    configuration is not as it was written; ConfigError for a change of configuration that a run cannot go on with,
    DataError for other tasks.
    """
    clock = Clock()
    check_config(config)
    run = RunDirectory.open(path)
    run.lock()
    with closing(run):
        recover_ledger(run, run.config().orchestration.ledger_directory)
        found, state = _where_to_resume(run, checkpoint)
        warm_start = _recorded_warm_start(run)
        updates = config.orchestration.updates
        if run.summary_file.is_file() and checkpoint is None and state.update >= updates:
            raise RunError(f"run {str(path)!r} is finished ({state.update} updates); nothing to resume")
        before = run.config()
        config = _with_threads(config, config.training.threads or before.training.threads)
        changed = changes(before, config)
        check_changes(changed, state.update)
        check_same_data(run, inputs)
        chat = load_chat_interface(config.model, state.began)
        with (
            _opened(runtime, config, path, progress) as parts,
            closing(parts.make_trainer(config.trainer)) as trainer,
        ):
            config = _with_threads(
                config, use_threads(config.training.threads, trainer.model.parameters, config.placement.learner.ranks)
            )
            progress.log(f"resuming {path} after {state.update} of {updates} updates ({_threads_line(config)})")
            _report_changes(changed, config, state.update, progress)
            clock.wall_before, clock.cpu_before = state.wall_seconds, state.cpu_seconds

            async def begin(cleanup: ExitStack) -> _Beginning:
                await trainer.load(found)
                ledger = cleanup.enter_context(open_ledger(run, config.orchestration.ledger_directory))
                run.summary_file.unlink(missing_ok=True)
                if changes(run.config(), config):
                    run.change_config(config, ledger)
                remove_other_shards(run.rollouts, ledger.shards())
                restored = roll_back(config, run, ledger, found.directory.name, state, progress.log)
                remove_other_shards(run.traces, ledger.traces())
                return _Beginning(ledger, StartingPoint(state, restored, clock), warm_start)

            return _Session(config, inputs, run, chat, trainer, progress, parts).train(state.update, begin)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What a session begins with. warm_start: the report of it, if there was one."""

    ledger: Ledger
    start: StartingPoint
    warm_start: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Session:
    """One process's work on a run, whose directory is locked and whose trainer is made."""

    config: RunConfig
    inputs: Inputs
    run: RunDirectory
    chat: ChatInterface
    trainer: Trainer
    progress: Progress
    runtime: Runtime
    status: LiveStatus = field(default_factory=LiveStatus)

    def train(self, update: int, begin: Callable[[ExitStack], Awaitable[_Beginning]]) -> dict[str, Any]:
        """Train to the end or a stop; returns the summary. update: that it begins after."""
        section = self.config.orchestration
        self.run.require_space(self.trainer.checkpoint_bytes, section.keep_last + (section.keep_best is not None))
        self.status.sources.append(self.trainer.status)
        members = {
            self.run.metrics_file.name: JsonLines(self.run),
            self.run.status_file.name: self.status,
            **self.inputs.callbacks,
        }
        callbacks = Callbacks(members, StopRequest(), ProgressCallback(self.progress, section.updates))

        def work() -> dict[str, Any]:
            return run_event_loop(self._train(begin, callbacks), self.progress.log, self.runtime.new_event_loop)

        with self.status.writing(self.run.status_file):
            return callbacks.around(RunStart(self.run.path, self.config, update, self.progress.log), work)

    async def _train(self, begin: Callable[[ExitStack], Awaitable[_Beginning]], callbacks: Callbacks) -> dict[str, Any]:
        with ExitStack() as cleanup:
            beginning = await begin(cleanup)
            loop = await self._run_loop(beginning, callbacks)
        summary = run_summary(
            self.config,
            self.run.path,
            loop.state,
            weights_sha256=await self.trainer.digest(),
            stopped_early=not loop.finished,
            warm_start=beginning.warm_start,
        )
        if loop.finished:
            draw_runs([RunMetrics(self.config, self.run.metrics())], self.run.curve_file)
            write_atomically(self.run.summary_file, json.dumps(summary, indent=2).encode())
        return summary

    async def _run_loop(self, beginning: _Beginning, callbacks: Callbacks) -> Loop:
        """Run the loop; returns it as it ended. Raises what stopped it, if something went wrong."""
        config, chat, log = self.config, self.chat, self.progress.log
        spec = training_engine(config, chat, self.trainer, self.run.path, log, self.inputs.players.may_wait)
        engine, weight_sync = await self.runtime.open_engine(spec)
        longest = config.rollout.max_input_tokens + config.rollout.max_completion_tokens
        try:
            played = budgeted(engine, spec.config, longest, config.placement.engines.count)
            self.status.sources.append(played.status)
            async with self.runtime.open_rollouts(
                played,
                chat.renderer,
                self.inputs.players,
                config.rollout,
                config.rewards,
                log,
                self.run.path,
            ) as runner:
                store = RunStore(self.run, beginning.ledger, callbacks.rollout)
                loop = make_loop(
                    config, self.inputs, self.trainer, weight_sync, runner, store, callbacks, beginning.start
                )
                self.status.sources += [loop.scheduler.status, runner.status]
                await self.runtime.check_engine(engine, weight_sync, self.trainer, chat, 10 * config.engine.tolerance)
                await runner.check(self.inputs.train)
                with stop_on_signals(callbacks.stop):
                    await loop.run(beginning.start.state)
        finally:
            await engine.close()
        callbacks.stop.raise_reason(loop.state.update)
        return loop


def _opened(
    runtime: Runtime | None, config: RunConfig, path: Path, progress: Progress
) -> AbstractContextManager[Runtime]:
    """The runtime that is given, or the configured one, which ends with the context."""
    return open_runtime(config, path, progress.log) if runtime is None else nullcontext(runtime)


def _where_to_resume(run: RunDirectory, checkpoint: str | None) -> tuple[Manifest, LoopState]:
    """The latest checkpoint or the one that is named, and the loop's state. Raises RunError."""
    ledger = run.ledger()
    ledger.prove()
    found = find_checkpoint(run.path, checkpoint or "latest")
    return found, ledger.checkpoint(found.directory.name)


def _recorded_warm_start(run: RunDirectory) -> dict[str, Any] | None:
    """What the warm start did, if there was one. Raises DamageError."""
    sha256 = run.ledger().file_sha256(_WARM_START)
    if sha256 is None:
        return None
    report: dict[str, Any] = json.loads(read_proven(run.path / _WARM_START, sha256, "restore it from a copy"))
    return report


def _with_threads(config: RunConfig, threads: int | None) -> RunConfig:
    """The configuration as it is stored: bits depend on the number of threads, so that a resumed run takes the same."""
    return config.model_copy(update={"training": config.training.model_copy(update={"threads": threads})})


def _tools_problem(inputs: Inputs, chat: ChatInterface, config: RunConfig) -> str:
    """Why agents cannot use tools; "" if they can, or there are none."""
    if not inputs.players.agents:
        return ""
    return chat.renderer.tools_problem(parse=chat.renderer.parser(config.rollout.reply_parser))


def _threads_line(config: RunConfig) -> str:
    """`2 threads`, and what is odd about them here."""
    threads, cores = config.training.threads or 1, available_cores()
    odd = f"; this process may use {cores} cores, but other threads give other bits" if threads > cores else ""
    return f"{threads} thread{'s' * (threads > 1)}{odd}"


def _report_changes(changed: list[Change], config: RunConfig, update: int, progress: Progress) -> None:
    """What changed, and what else follows from another number of updates."""
    for change in changed:
        progress.log(f"changed: {change}")
        if change.path == "orchestration.updates":
            optimizer, algorithm = config.training.optimizer, config.algorithm
            old, new = (learning_rate(optimizer, update, updates) for updates in (change.old, change.new))
            if optimizer.decay_from < 1:
                progress.log(f"the learning rate follows: at the next update it is {new:.3g} instead of {old:.3g}")
            start, end = algorithm.entropy_bonus
            if start != end:
                progress.log(f"the entropy bonus follows: it is {end:g} after {change.new} updates")


def _warm_start_line(report: WarmStartReport) -> str:
    how = "read from the cache" if report.cached else f"{report.seconds:.0f} s"
    return f"warm start: loss {report.loss:.3f} after {report.steps} steps ({how})"
