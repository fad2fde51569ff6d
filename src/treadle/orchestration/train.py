"""Starting, resuming and finishing a run: everything around the loop.

load_inputs -> ChatInterface, Trainer -> warm start or checkpoint -> Engine, WeightSync -> Loop.run -> summary.json
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from treadle.core.errors import RunError
from treadle.core.files import write_atomically
from treadle.core.manifest import Manifest, read_proven
from treadle.core.outcomes import interrupted_reason
from treadle.core.trainer import Trainer
from treadle.core.types import DropReason, Group
from treadle.orchestration.callbacks import Callbacks, JsonLines, RunStart
from treadle.orchestration.changes import Change, changes, check_changes
from treadle.orchestration.chat_interface import ChatInterface, check_engine, load_chat_interface, use_threads
from treadle.orchestration.config import RunConfig
from treadle.orchestration.curve import draw_curve
from treadle.orchestration.engines import open_engine
from treadle.orchestration.inputs import Inputs, check_first_prompts
from treadle.orchestration.ledger import Ledger, LoopState
from treadle.orchestration.loop import Clock, Loop
from treadle.orchestration.progress import Progress
from treadle.orchestration.retention import checkpoint_name, checkpoint_updates, find_checkpoint, retained
from treadle.orchestration.reuse import reusable
from treadle.orchestration.rollout_store import remove_other_shards
from treadle.orchestration.run_directory import RunDirectory
from treadle.orchestration.stopping import StopRequest, stop_on_signals
from treadle.orchestration.threads import available_cores
from treadle.orchestration.validation import check_config
from treadle.orchestration.warm_start import WarmStartReport, check_demonstrations, run_warm_start
from treadle.rollout.attempt import open_rollouts
from treadle.rollout.event_loop import run as run_event_loop
from treadle.rollout.replies import reply_parser
from treadle.training.checkpoint import remove_others
from treadle.training.make import MakeTrainer, load_model, make_trainer
from treadle.training.optimizer import learning_rate

_WARM_START = "warm_start.json"


def start_run(
    config: RunConfig, inputs: Inputs, path: Path, progress: Progress, make_trainer: MakeTrainer = make_trainer
) -> dict[str, Any]:
    """Train from the beginning in a new run directory; returns the summary. Raises TreadleError."""
    clock = Clock()
    check_config(config)
    chat = load_chat_interface(config.model)
    with closing(make_trainer(config.trainer)) as trainer:
        config = _with_threads(config, use_threads(config.training.threads, trainer.model.parameters))
        check_first_prompts(inputs, chat.renderer, config, trainer.model.context, progress.say)
        check_demonstrations(config, chat.renderer)
        run = RunDirectory.create(path, config)
        try:
            progress.say(f"run directory: {path} ({_computing(config)})")
            if problem := _tools_problem(inputs, chat, config):
                progress.say(f"agents' calls with tools will be refused: {problem}")
            run.require_space(trainer.checkpoint_bytes, _kept_at_least(config))
            told = Callbacks({run.metrics_file.name: JsonLines(run), **inputs.callbacks}, StopRequest())

            async def work() -> dict[str, Any]:
                report = await run_warm_start(trainer, chat.renderer, config, progress)
                warm_start = None if report is None else asdict(report)
                if report is not None:
                    progress.say(_warm_start_line(report))
                    run.write(_WARM_START, json.dumps(warm_start).encode())
                return await _train(config, inputs, run, chat, trainer, LoopState(), clock, progress, told, warm_start)

            return told.around(
                RunStart(path, config, 0, progress.say), lambda: run_event_loop(work(), progress.say, told.stop.ask)
            )
        finally:
            run.unlock()


def resume_run(
    config: RunConfig,
    inputs: Inputs,
    path: Path,
    progress: Progress,
    checkpoint: str | None = None,
    make_trainer: MakeTrainer = make_trainer,
) -> dict[str, Any]:
    """Go on from the latest checkpoint, or an earlier one by name; returns the summary.

    From the latest, weights become bit-identical to those of a run that was never interrupted. From an earlier one,
    everything after it is rolled back. Raises RunError if the run is finished (one that goes back or gets more updates
    is not), in use, or never reached its first checkpoint; DamageError if the ledger, the checkpoint or the
    configuration is not as it was written; ConfigError for a change of configuration that a run cannot go on with.
    """
    clock = Clock()
    check_config(config)
    run = RunDirectory.open(path)
    run.lock()
    try:
        found, state = _where_to_resume(run, checkpoint)
        warm_start = _recorded_warm_start(run)
        updates = config.orchestration.updates
        if run.summary_file.is_file() and checkpoint is None and state.update >= updates:
            raise RunError(f"run {str(path)!r} is finished ({state.update} updates); nothing to resume")
        before = run.config()
        config = _with_threads(config, config.training.threads or before.training.threads)
        changed = changes(before, config)
        check_changes(changed, state.update)
        chat = load_chat_interface(config.model)
        with closing(make_trainer(config.trainer)) as trainer:
            config = _with_threads(config, use_threads(config.training.threads, trainer.model.parameters))
            progress.say(f"resuming {path} after {state.update} of {updates} updates ({_computing(config)})")
            _tell_changes(changed, config, state.update, progress)
            clock = replace(clock, wall_before=state.wall_seconds, cpu_before=state.cpu_seconds)
            run.require_space(trainer.checkpoint_bytes, _kept_at_least(config))
            told = Callbacks({run.metrics_file.name: JsonLines(run), **inputs.callbacks}, StopRequest())

            async def work() -> dict[str, Any]:
                return await _train(config, inputs, run, chat, trainer, state, clock, progress, told, warm_start, found)

            return told.around(
                RunStart(path, config, state.update, progress.say),
                lambda: run_event_loop(work(), progress.say, told.stop.ask),
            )
    finally:
        run.unlock()


def _where_to_resume(run: RunDirectory, checkpoint: str | None) -> tuple[Manifest, LoopState]:
    """The latest checkpoint or the one that is named, and the loop's state. Raises RunError."""
    with closing(run.ledger()) as ledger:
        ledger.prove()
        found = find_checkpoint(run.path, checkpoint or "latest")
        return found, ledger.checkpoint(found.directory.name)


def _recorded_warm_start(run: RunDirectory) -> dict[str, Any] | None:
    """What the warm start did, if there was one. Raises DamageError."""
    with closing(run.ledger()) as ledger:
        sha256 = ledger.file_sha256(_WARM_START)
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
    return chat.renderer.tools_problem(parse=reply_parser(config.rollout.reply_parser, chat.renderer.source))


def _computing(config: RunConfig) -> str:
    """`2 threads`, and what is odd about them here."""
    threads, cores = config.training.threads or 1, available_cores()
    odd = f"; this process may use {cores} cores, but other threads give other bits" if threads > cores else ""
    return f"{threads} thread{'s' * (threads > 1)}{odd}"


def _tell_changes(changed: list[Change], config: RunConfig, update: int, progress: Progress) -> None:
    """What changed, and what else follows from another number of updates."""
    for change in changed:
        progress.say(f"changed: {change}")
        if change.path == "orchestration.updates":
            optimizer, algorithm = config.training.optimizer, config.algorithm
            old, new = (learning_rate(optimizer, update, updates) for updates in (change.old, change.new))
            if optimizer.decay_from < 1:
                progress.say(f"the learning rate follows: at the next update it is {new:.3g} instead of {old:.3g}")
            if algorithm.entropy_coef != algorithm.entropy_coef_end:
                end = algorithm.entropy_coef_end
                progress.say(f"the entropy bonus follows: it is {end:g} after {change.new} updates")


def _kept_at_least(config: RunConfig) -> int:
    """Checkpoints on disk at a time, but for those kept for ever."""
    return config.orchestration.keep_last + (config.orchestration.keep_best is not None)


async def _train(
    config: RunConfig,
    inputs: Inputs,
    run: RunDirectory,
    chat: ChatInterface,
    trainer: Trainer,
    state: LoopState,
    clock: Clock,
    progress: Progress,
    callbacks: Callbacks,
    warm_start: dict[str, Any] | None,
    resume_from: Manifest | None = None,
) -> dict[str, Any]:
    ledger, kept = Ledger(run.ledger_file), dict[int, Group]()
    try:
        if resume_from is None:
            ledger.note_files(run.written)
        else:
            await trainer.load(resume_from)
            run.summary_file.unlink(missing_ok=True)
            if changes(run.config(), config):
                run.change_config(config, ledger)
            remove_other_shards(run.rollouts, ledger.shards())
            kept = _roll_back(config, run, ledger, resume_from.directory.name, state, progress)
        state, stopped = await _run_loop(
            config, inputs, run, chat, trainer, ledger, state, clock, progress, callbacks, kept
        )
    finally:
        ledger.close()
    summary = _summary(config, run, await trainer.digest(), state, stopped, warm_start)
    if not stopped:
        draw_curve(run.metrics(), run.curve_file, f"{config.recipe}, seed {config.seed}")
        write_atomically(run.summary_file, json.dumps(summary, indent=2).encode())
    return summary


def _roll_back(
    config: RunConfig, run: RunDirectory, ledger: Ledger, name: str, state: LoopState, progress: Progress
) -> dict[int, Group]:
    """Drop what was recorded after the checkpoint; returns the groups that are gone on with all the same."""
    latest = ledger.latest_checkpoint()
    if latest is not None and latest[0] != name:
        steps = ledger.return_to(name)
        progress.say(f"back from {latest[0]} to {name}: {steps} steps are dropped as {DropReason.ROLLED_BACK}")
    committed = ledger.checkpoint_names()  # a directory that no row of the ledger points to is removed
    there = [update for update in checkpoint_updates(run.checkpoints) if checkpoint_name(update) in committed]
    remove_others(run.checkpoints, {name, *retained(there, config, state.evaluations)})
    staleness = config.orchestration.max_staleness
    on_record = reusable(ledger, run.rollouts, state, staleness)
    for shard, damaged in on_record.damaged.items():
        steps = ledger.note_damaged(damaged)
        progress.say(
            f"{run.rollouts / shard} is damaged or gone: {len(damaged)} trajectories ({steps} steps) that waited in it "
            f"are dropped as {DropReason.DAMAGED}, and their tasks are sampled again"
        )
    kept = on_record.groups
    reason = interrupted_reason(staleness)
    dropped = ledger.roll_back(state, reason, [group.group_id for group in kept.values()])
    if problem := run.roll_back_metrics(state.update, state.evaluations):
        progress.say(f"{problem}; the run goes on without")
    if dropped:
        progress.say(f"{dropped} steps recorded after that checkpoint are dropped as {reason}")
    if staleness:
        trajectories = [t for group in kept.values() for t in group.trajectories]
        steps = sum(len(t.steps) for t in trajectories)
        progress.say(f"{len(trajectories)} finished trajectories ({steps} steps) of {len(kept)} groups are reused")
    return kept


async def _run_loop(
    config: RunConfig,
    inputs: Inputs,
    run: RunDirectory,
    chat: ChatInterface,
    trainer: Trainer,
    ledger: Ledger,
    state: LoopState,
    clock: Clock,
    progress: Progress,
    callbacks: Callbacks,
    kept: dict[int, Group],
) -> tuple[LoopState, bool]:
    """Returns the final state and whether the run was asked to stop before its end."""
    engine, weight_sync = await open_engine(
        config.engine_in_training,
        chat,
        trainer,
        partial(load_model, config.model, config.seed),
        run.path,
        config.training.routing_replay,
        progress.say,
    )
    try:
        async with open_rollouts(
            engine, chat.renderer, inputs.players, config.rollout, config.rewards, progress.say
        ) as rollouts:
            loop = Loop(
                config=config,
                run=run,
                ledger=ledger,
                trainer=trainer,
                weight_sync=weight_sync,
                rollouts=rollouts,
                train=inputs.train,
                held_out=inputs.held_out,
                state=state,
                clock=clock,
                progress=progress,
                stop=callbacks.stop,
                callbacks=callbacks,
                kept=kept,
            )
            await check_engine(engine, weight_sync, trainer, chat, 10 * config.engine.tolerance)
            with stop_on_signals(callbacks.stop):
                final = await loop.run()
    finally:
        await engine.close()
    callbacks.stop.raise_reason(final.update)
    return final, not loop.finished


def _warm_start_line(report: WarmStartReport) -> str:
    how = "read from the cache" if report.cached else f"{report.seconds:.0f} s"
    return f"warm start: loss {report.loss:.3f} after {report.steps} steps ({how})"


def _summary(
    config: RunConfig,
    run: RunDirectory,
    weights_sha256: str,
    state: LoopState,
    stopped: bool,
    warm_start: dict[str, Any] | None,
) -> dict[str, Any]:
    """What summary.json holds. Held-out figures are at `evaluation.temperature`, the greedy ones beside them."""
    sampled = [e for e in state.evaluations if e["temperature"] == config.evaluation.temperature]
    greedy = [e for e in state.evaluations if e["temperature"] == 0]

    def success(results: list[dict[str, Any]], which: int) -> float | None:
        return results[which]["success"] if len(results) > 1 else None

    return {
        "run": str(run.path),
        "recipe": config.recipe,
        "seed": config.seed,
        "updates": state.update,
        "stopped_early": stopped,
        "held_out_success_before": sampled[0]["success"] if sampled else None,
        "held_out_success_after": None if stopped else success(sampled, -1),
        "held_out_greedy_before": greedy[0]["success"] if greedy else None,
        "held_out_greedy_after": None if stopped else success(greedy, -1),
        "held_out_tasks": sampled[0]["tasks"] if sampled else 0,
        "evaluations": list(state.evaluations),
        "warm_start": warm_start,
        "threads": torch.get_num_threads(),
        "wall_seconds": round(state.wall_seconds, 1),
        "cpu_seconds": round(state.cpu_seconds, 1),
        "weights_sha256": weights_sha256,
    }
