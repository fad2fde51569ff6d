"""Which checkpoints stay on disk, and which of them is the best."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from treadle.core.errors import RemovedError, RunError
from treadle.core.manifest import Manifest
from treadle.orchestration.config import KeepBest, RunConfig
from treadle.orchestration.store.ledger_reader import LedgerReader, no_checkpoint
from treadle.orchestration.store.run_directory import RunDirectory

T = TypeVar("T")
_NAME = re.compile(r"step-\d+")
_FIGURES: Mapping[KeepBest, str] = {"held_out_success": "success", "held_out_reward": "reward_mean"}


def checkpoint_name(update: int) -> str:
    """Return the directory name of an update's checkpoint: `step-000040`."""
    return f"step-{update:06d}"


def checkpoint_update(checkpoint: Path) -> int:
    """Return the update of a checkpoint's directory: 40 of `.../step-000040`."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_updates(checkpoints: Path) -> list[int]:
    """Return the updates of the complete checkpoints in a run's `checkpoints` folder, ascending."""
    return sorted(checkpoint_update(path) for path in checkpoints.glob("step-*") if _NAME.fullmatch(path.name))


def find_checkpoint(path: Path, which: str) -> Manifest:
    """Return the manifest of a run's checkpoint, by name, or `latest` or `best`, also while the run goes on.

    The ledger says which there are: a directory that it does not know was never completed. The manifest is compared
    with the ledger's record; the files that it lists are not read.
    best: by `orchestration.keep_best`, or held-out success. Raises RunError, also where it is not on disk any more.
    """
    run, tried = RunDirectory.open(path), None
    while True:
        ledger = run.ledger()
        name, others = _choose(run, ledger, which)
        sha256 = ledger.manifest_sha256(name)
        remedy = f"restore it, or take another checkpoint ({', '.join(others)})" if others else "restore it from a copy"
        try:
            return Manifest.load(run.checkpoints / name, sha256, remedy)
        except RemovedError:
            if name == tried:
                raise RunError(f"checkpoint {name} of run {str(path)!r} is gone; {remedy}") from None
            tried = name  # the run has gone on meanwhile


def read_checkpoint(path: Path, which: str, read: Callable[[Manifest], T]) -> tuple[Manifest, T]:
    """Return a checkpoint as `find_checkpoint` does, and what `read` returns of it.

    If the run removes it meanwhile, the one that then is the latest or best is read. Raises RunError.
    """
    while True:
        found = find_checkpoint(path, which)
        try:
            return found, read(found)
        except RemovedError:
            continue


def _choose(run: RunDirectory, ledger: LedgerReader, which: str) -> tuple[str, list[str]]:
    """Return the name of the checkpoint, and those of the others on disk. Raises RunError."""
    latest = ledger.latest_checkpoint()
    if latest is None:
        raise RunError(f"run {str(run.path)!r} {no_checkpoint(run.path)}")
    name, state = latest
    there = sorted(own for own in ledger.checkpoint_names() if (run.checkpoints / own).is_dir())
    if which == "best":
        config = run.config()
        metric = config.orchestration.keep_best or "held_out_success"
        best = best_update(state.evaluations, metric, config.evaluation.temperature)
        if best is None:
            raise RunError(f"no checkpoint of run {str(run.path)!r} was evaluated; it has {', '.join(there)}")
        name = checkpoint_name(best)
        if name not in there:
            why = "it was removed" if config.orchestration.keep_best else "orchestration.keep_best was not set"
            among = [checkpoint_update(Path(own)) for own in there]
            second = best_update(state.evaluations, metric, config.evaluation.temperature, among)
            advice = "" if second is None else f"; of those there are, {checkpoint_name(second)} is best"
            raise RunError(
                f"run {str(run.path)!r} was best at update {best}, whose checkpoint is gone: {why}; "
                f"it has {', '.join(there) or 'none'}{advice}"
            )
    elif which != "latest":
        name = which
        if which not in there:
            raise RunError(f"run {str(run.path)!r} has no checkpoint {which!r}; it has {', '.join(there)}")
    return name, [own for own in there if own != name]


def best_update(
    evaluations: Sequence[Mapping[str, Any]], metric: KeepBest, temperature: float, among: Collection[int] | None = None
) -> int | None:
    """Return the update with the best evaluation at this temperature, the earliest of equals; None without any.

    among: the updates that may be chosen; default: all.
    """
    best: tuple[float, int] | None = None
    for row in evaluations:
        figure, update = row[_FIGURES[metric]], row["update"]
        if row["temperature"] != temperature or figure is None or (among is not None and update not in among):
            continue
        if best is None or figure > best[0]:
            best = (figure, update)
    return None if best is None else best[1]


def retained(updates: Sequence[int], config: RunConfig, evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the checkpoints that are kept on disk, of those of `updates`.

    Kept are the `keep_last` newest ones, those at multiples of `keep_every`, and the best by `keep_best`.
    """
    section, batch = config.orchestration, config.training.updates_between_publications
    keep = set(sorted(updates)[-section.keep_last :])
    if section.keep_every is not None:
        keep |= {update for update in updates if update and update % section.keep_every < batch}
    if section.keep_best is not None:
        best = best_update(evaluations, section.keep_best, config.evaluation.temperature, updates)
        keep |= set() if best is None else {best}
    return [checkpoint_name(update) for update in updates if update in keep]
