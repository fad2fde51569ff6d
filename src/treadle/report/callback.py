"""Callbacks: the events that user code and trackers receive during training.

    start -> publish -> [evaluate] -> checkpoint
          -> (rollout ... -> batch -> update ... -> publish -> [evaluate] -> [checkpoint]) ...
          -> [checkpoint] -> [evaluate] -> end

With `orchestration.max_staleness` above 0, `rollout` may occur anywhere in between; `phase`, `interval` and `message`
always may.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.core.types import Group, Ids, Trajectory
from treadle.report.metrics import EvaluationResult


@dataclass(frozen=True, slots=True)
class RunStart:
    """Start of a run. update: the last one already made, 0 in a new run. log: adds a line to the run's output.

    config: the run's whole configuration, with a section for each part: `config.training.group_size`.
    decode: returns the text of token ids, with special tokens.
    """

    directory: Path
    config: Any
    update: int
    log: Callable[[str], None]
    decode: Callable[[Ids], str]


class Callback:
    """Base of callbacks. Subclass it and override the methods you want.

    All methods run on the thread of the run's event loop, which waits for them: return soon. Arguments are read-only
    and return values ignored: a callback cannot affect training. An exception in `start` ends the run before it begins.
    One in another method disables the callback and stops the run after the current update, with a checkpoint; a
    TreadleError stops it immediately.
    """

    def start(self, run: RunStart) -> None:
        """Start of a new or resumed run, before anything is computed."""

    def rollout(self, trajectory: Trajectory) -> None:
        """A training attempt has finished and is recorded."""

    def batch(self, groups: Sequence[Group], version: int) -> None:
        """These groups are trained next, starting from the weights of this version."""

    def update(self, row: Mapping[str, Any]) -> None:
        """An optimizer update was made; `row` is its line of metrics.jsonl."""

    def publish(self, version: int) -> None:
        """From now on the engine samples with the weights of this version."""

    def evaluate(self, result: EvaluationResult) -> None:
        """Result of an evaluation on the held-out tasks."""

    def checkpoint(self, directory: Path, update: int) -> None:
        """Complete checkpoint after this update; later ones remove it, according to `orchestration.keep_last`."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Progress of a phase (rollout, update, evaluation): `done` of `total` equal pieces; 0: it begins."""

    def interval(self, row: Mapping[str, Any]) -> None:
        """End of a phase, including publications and checkpoints: its line of intervals.jsonl."""

    def message(self, line: str) -> None:
        """A line of the run's output: a failure seen for the first time, a task that is left out."""

    def end(self, summary: Mapping[str, Any] | None, error: BaseException | None) -> None:
        """End of the run, with its summary or an error. An exception here only becomes a line of output."""


EVENTS = tuple(name for name, member in vars(Callback).items() if inspect.isfunction(member) and name[0] != "_")
"""The methods of a callback, in the order of a run."""
