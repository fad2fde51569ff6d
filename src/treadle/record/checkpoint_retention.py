"""Finding checkpoints, and choosing the ones to keep on disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from treadle.core.errors import RemovedError, RunError
from treadle.core.files import Manifest
from treadle.record.ledger_reader import LedgerReader, manifest_name
from treadle.record.run_directory import RunDirectory

T = TypeVar("T")
KeepBest = Literal["held_out_success", "held_out_reward"]
_NAME = re.compile(r"step-\d+")
_FIGURES: Mapping[KeepBest, str] = {"held_out_success": "success", "held_out_reward": "reward_mean"}


def checkpoint_name(update: int) -> str:
    """Return the directory name of an update's checkpoint: `step-000040`."""
    return f"step-{update:06d}"


def checkpoint_update(checkpoint: Path) -> int:
    """Return the update of a checkpoint's directory: 40 for `.../step-000040`."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_updates(checkpoints: Path) -> list[int]:
    """Return the updates of the complete checkpoints in a run's `checkpoints` folder, ascending."""
    return sorted(checkpoint_update(path) for path in checkpoints.glob("step-*") if _NAME.fullmatch(path.name))


def find_checkpoint(path: Path, which: str) -> Manifest:
    """Return the manifest of a run's checkpoint: by name, `latest`, or `best`. The run may be in progress.

    best: by `orchestration.keep_best`, or held-out success. Directories unknown to the ledger were never completed. The
    manifest is compared with the ledger's record; the files it lists are not read.
    Raises RunError, also for a removed checkpoint.
    """
    return read_checkpoint(path, which, lambda manifest: None)[0]


def read_checkpoint(path: Path, which: str, read: Callable[[Manifest], T]) -> tuple[Manifest, T]:
    """Find a checkpoint (`find_checkpoint`) and apply `read` to it; retried if the run removes it meanwhile."""
    run, missing = RunDirectory.open(path), None
    while True:
        ledger = run.ledger()
        name, others = _choose(run, ledger, which)
        remedy = f"restore it, or take another checkpoint ({', '.join(others)})" if others else "restore it from a copy"
        try:
            manifest = Manifest.load(run.checkpoints / name, ledger.file_sha256(manifest_name(name)), remedy)
            return manifest, read(manifest)
        except RemovedError:
            if name == missing:
                raise RunError(f"checkpoint {name} of run {str(path)!r} is gone; {remedy}") from None
            missing = name  # the run has continued meanwhile


def _choose(run: RunDirectory, ledger: LedgerReader, which: str) -> tuple[str, list[str]]:
    """Return the name of the checkpoint, and of the others on disk. Raises RunError."""
    latest = ledger.latest_checkpoint()
    if latest is None:
        raise RunError(f"run {str(run.path)!r} {run.no_checkpoint}")
    name, state = latest
    on_disk = sorted(each for each in ledger.checkpoint_names() if (run.checkpoints / each).is_dir())
    if which == "best":
        config = run.config_data()
        kept, temperature = config["orchestration"]["keep_best"], config["evaluation"]["temperature"]
        metric: KeepBest = kept or "held_out_success"
        best = best_update(state.evaluations, metric, temperature)
        if best is None:
            raise RunError(f"no checkpoint of run {str(run.path)!r} was evaluated; it has {', '.join(on_disk)}")
        name = checkpoint_name(best)
        if name not in on_disk:
            among = [checkpoint_update(Path(each)) for each in on_disk]
            second = best_update(state.evaluations, metric, temperature, among)
            advice = "" if second is None else f"; of those there are, {checkpoint_name(second)} is best"
            why = "it was removed" if kept else "orchestration.keep_best was not set"
            raise RunError(
                f"run {str(run.path)!r} was best at update {best}, whose checkpoint is gone: {why}; "
                f"it has {', '.join(on_disk) or 'none'}{advice}"
            )
    elif which != "latest":
        name = which
        if which not in on_disk:
            raise RunError(f"run {str(run.path)!r} has no checkpoint {which!r}; it has {', '.join(on_disk)}")
    return name, [each for each in on_disk if each != name]


def best_update(
    evaluations: Sequence[Mapping[str, Any]], metric: KeepBest, temperature: float, among: Collection[int] | None = None
) -> int | None:
    """Return the update of the best evaluation at this temperature, the earliest of equals. among: default: all."""
    figures = [
        (row[_FIGURES[metric]], -row["update"])
        for row in evaluations
        if row["temperature"] == temperature
        and row[_FIGURES[metric]] is not None
        and (among is None or row["update"] in among)
    ]
    return -max(figures)[1] if figures else None


@dataclass(frozen=True, slots=True)
class Retention:
    """Rule for keeping checkpoints: the newest `last`, multiples of `every`, the best by `best` at `temperature`.

    batch: updates between two publications, one of which may be a multiple.
    """

    last: int
    every: int | None
    best: KeepBest | None
    batch: int
    temperature: float


def retained(updates: Sequence[int], keeping: Retention, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the checkpoints to keep."""
    keep = set(sorted(updates)[-keeping.last :])
    if keeping.every is not None:
        keep |= {update for update in updates if update and update % keeping.every < keeping.batch}
    if keeping.best is not None:
        best = best_update(evaluations, keeping.best, keeping.temperature, updates)
        keep |= set() if best is None else {best}
    return [checkpoint_name(update) for update in updates if update in keep]
