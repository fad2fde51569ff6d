"""Supervised learning: what `treadle sft` and `treadle.sft` call; needs no torch before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from treadle.api.lesson import Lesson
from treadle.loop.thread_count import wait_passively
from treadle.plan.config import RunConfig
from treadle.plan.inputs import Inputs, load_data
from treadle.plan.validation import checks
from treadle.report.progress import Progress, loading
from treadle.rollout.isolation.event_loop import paused_event_loop
from treadle.rollout.random_calls import RANDOM_CALLS

if TYPE_CHECKING:
    from treadle.api.warm_start import RecordedReport, WarmStartReport


def learn(lesson: Lesson, directory: Path, progress: Progress) -> RecordedReport:
    """Train the lesson's model on its trajectories, and write it into a new directory.

    Raises ConfigError for ids of another vocabulary, DataError if there is nothing to learn, TrainingStopped.
    """
    wait_passively()
    with loading(progress):
        from treadle.api.warm_start import learn_recorded

    with paused_event_loop():  # a notebook's
        return learn_recorded(lesson, directory, progress)


def learn_demonstrations(config: RunConfig, directory: Path, progress: Progress) -> WarmStartReport:
    """Write the configured model, warm-started, into a new directory.

    Raises ConfigError or DataError for what cannot be learned, TrainingStopped, CheckpointError.
    """
    assert config.warm_start is not None, "the configuration has a warm start"
    for part, check in checks(config):
        if part != "engine":
            check()
    inputs = load_data(config) if config.warm_start.demonstrations == RANDOM_CALLS else Inputs([], [])
    with loading(progress):
        from treadle.api.warm_start import make_warm_model

    return make_warm_model(config, inputs, directory, progress)
