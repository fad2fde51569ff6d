"""`train_run`: a run that goes on by itself when a process of its learner is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from treadle.core.errors import RankError, RunError
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.progress import Progress
from treadle.orchestration.setup.inputs import Inputs
from treadle.orchestration.store.checkpoint_retention import checkpoint_update, find_checkpoint
from treadle.orchestration.train import resume_run, start_run

_RESTARTS = 3  # without another checkpoint in between


def train_run(
    config: RunConfig,
    inputs: Inputs,
    path: Path,
    progress: Progress,
    *,
    resume: bool = False,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Start a run, or resume it from the latest checkpoint or the one that is named; returns the summary.

    Where a rank of the learner is lost on a cluster, all that the run computes with is started anew and goes on from
    the last checkpoint: at most three times without another checkpoint in between. Raises as
    `start_run` and `resume_run` do.
    """
    most = 0 if config.placement.kind == "embedded" else _RESTARTS
    play: Callable[[RunConfig, Inputs, Path, Progress], dict[str, Any]]
    play = partial(resume_run, checkpoint=checkpoint) if resume else start_run
    reached, restarts = _last_update(path), 0
    while True:
        try:
            return play(config, inputs, path, progress)
        except RankError as error:
            before, reached = reached, _last_update(path)
            restarts = restarts + 1 if reached == before else 1
            if reached is None or restarts > most:
                raise
            progress.log(f"{str(error).splitlines()[0]}; going on from the checkpoint of update {reached}")
            play = resume_run


def _last_update(path: Path) -> int | None:
    """The update of the latest checkpoint; None if there is none."""
    try:
        return checkpoint_update(find_checkpoint(path, "latest").directory)
    except RunError:
        return None
