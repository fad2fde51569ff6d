"""A training run from its checked configuration to its summary, new or resumed; needs no torch until it starts.

treadle.train -> train_run -> Run.train -> Loop.run -> Loop._train
                 open_run: checkpoint found, or first prompts checked and directory made; trainer, callbacks
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.core.errors import RankError, RunError
from treadle.plan.config import RunConfig
from treadle.plan.dry_run import Check, DryRun, Log, try_settings
from treadle.plan.inputs import Inputs
from treadle.record.checkpoint_retention import checkpoint_update, find_checkpoint
from treadle.report.progress import Progress, loading
from treadle.rollout.isolation.event_loop import paused_event_loop
from treadle.rollout.isolation.event_loop import run as run_event_loop

if TYPE_CHECKING:
    from treadle.loop.runtime import Runtime

_RESTARTS = 3  # without another checkpoint in between


def train_run(
    config: RunConfig,
    inputs: Inputs,
    path: Path,
    progress: Progress,
    *,
    resume: bool = False,
    checkpoint: str | None = None,
    runtime: Runtime | None = None,
    resume_with: str = "resume=True",
) -> dict[str, Any]:
    """Train in a new run directory, or resume the run there; return the summary.

    resume: continue from the latest checkpoint, or from an earlier one by name (`checkpoint`), rolling back everything
    after it. From the latest, weights become bit-identical to an uninterrupted run's. A run without a recorded
    checkpoint, such as one killed in its warm start or first evaluation, is restarted, even without `resume`.
    runtime: factories of the run's parts; default: as named by `placement.kind`.
    resume_with: how to continue after an interrupt, for its line.

    When a cluster loses a rank of the learner, the run continues from the last checkpoint, at most three times without
    a new one in between.

    Raises TreadleError. For a run to resume: RunError if it is finished (unless it goes back or gets more updates), in
    use, or has no checkpoint; DamageError if ledger, checkpoint or configuration are damaged; ConfigError for a change
    of configuration that it cannot continue with, DataError for other tasks.

    """
    limit = 0 if config.placement.kind == "embedded" else _RESTARTS
    reached, restarts, summary = _last_update(path), 0, None
    try:
        with loading(progress):
            from treadle.api.run import open_run

        while summary is None:
            try:
                with paused_event_loop(), open_run(config, inputs, path, progress, resume, checkpoint, runtime) as run:
                    summary = run.callbacks.around(
                        run.start, lambda: run_event_loop(run.train(), progress.log, run.runtime.new_event_loop)
                    )
            except RankError as error:
                before, reached = reached, _last_update(path)
                restarts = restarts + 1 if reached == before else 1
                if reached is None or restarts > limit:
                    raise
                progress.log(f"{str(error).splitlines()[0]}; continuing from the checkpoint of update {reached}")
                resume, checkpoint = True, None
    except KeyboardInterrupt:
        saved = any(path.glob("checkpoints/step-*"))
        advice = f"continue from the latest checkpoint with {resume_with}" if saved else "nothing was trained yet"
        progress.log(f"interrupted; {advice}")
        raise
    if summary["stopped_early"]:
        progress.log(f"stopped after {summary['updates']} updates, with a checkpoint; continue with {resume_with}")
    return summary


def dry_run(config: RunConfig, runs: Path, log: Log, tell: Callable[[Check], object] = lambda check: None) -> DryRun:
    """Try everything that a run of this configuration needs before its first rollout.

    runs: parent of the run's directory. log: receives lines about environments that block the event loop. tell:
    receives each check when it is made.
    """
    result = DryRun(tell)
    inputs = try_settings(result, config)
    from treadle.plan.dry_run_parts import try_parts  # torch and transformers

    try_parts(result, config, inputs, runs, log)
    return result


def _last_update(path: Path) -> int | None:
    try:
        return checkpoint_update(find_checkpoint(path, "latest").directory)
    except RunError:
        return None
