"""Which checkpoints stay on disk, and which of them is the best."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.core.errors import RunError
from treadle.orchestration.config import KeepBest, RunConfig
from treadle.orchestration.run_directory import RunDirectory

_FIGURES: Mapping[KeepBest, str] = {"held_out_success": "success", "held_out_reward": "reward_mean"}


def checkpoint_name(update: int) -> str:
    """`step-000040`."""
    return f"step-{update:06d}"


def checkpoint_update(checkpoint: Path) -> int:
    """40 of `.../step-000040`."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_updates(checkpoints: Path) -> list[int]:
    """Updates of the complete checkpoints in a run's folder of them, ascending."""
    return sorted(map(checkpoint_update, checkpoints.glob("step-*")))


def find_checkpoint(path: Path, which: str) -> Path:
    """Of a run directory, by name, or `latest` or `best`. They are complete or absent, also while the run goes on.

    best: by `orchestration.keep_best`, or held-out success, among those that are there. Raises RunError.
    """
    run = RunDirectory.open(path)
    there = {checkpoint_name(update): update for update in checkpoint_updates(run.checkpoints)}
    if not there:
        raise RunError(f"run {str(path)!r} has no checkpoint yet")
    if which == "latest":
        return run.checkpoints / list(there)[-1]
    if which == "best":
        config, evaluations = run.config(), [row for row in run.metrics() if row["kind"] == "evaluation"]
        metric = config.orchestration.keep_best or "held_out_success"
        best = best_update(evaluations, metric, config.evaluation.temperature, there.values())
        if best is None:
            raise RunError(f"no checkpoint of run {str(path)!r} was evaluated; it has {', '.join(there)}")
        which = checkpoint_name(best)
    if which not in there:
        raise RunError(f"run {str(path)!r} has no checkpoint {which!r}; it has {', '.join(there)}")
    return run.checkpoints / which


def best_update(
    evaluations: Sequence[Mapping[str, Any]], metric: KeepBest, temperature: float, among: Collection[int] | None = None
) -> int | None:
    """The update with the best evaluation at this temperature, the earliest of equals; None without any.

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
    """Names of those checkpoints, given by their updates, that stay."""
    section, batch = config.orchestration, config.training.updates_between_publications
    keep = set(sorted(updates)[-section.keep_last :])
    if section.keep_every is not None:
        keep |= {update for update in updates if update and update % section.keep_every < batch}
    if section.keep_best is not None:
        best = best_update(evaluations, section.keep_best, config.evaluation.temperature, updates)
        keep |= set() if best is None else {best}
    return [checkpoint_name(update) for update in updates if update in keep]
