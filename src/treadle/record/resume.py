"""Going back to a checkpoint: everything later is dropped, except finished attempts that can still be trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.core.errors import DamageError
from treadle.core.outcomes import interrupted_reason
from treadle.core.types import DropReason, Group, Step
from treadle.record.checkpoint_retention import Retention, checkpoint_name, checkpoint_updates, retained
from treadle.record.ledger import AttemptKey, Ledger
from treadle.record.ledger_reader import LedgerReader, LoopState
from treadle.record.open_calls import restorable_calls
from treadle.record.recorded import trajectory_on_record
from treadle.record.rollout_store import read_shard, task_of
from treadle.record.run_directory import RunDirectory
from treadle.rollout.replay import AnsweredCall
from treadle.training.checkpoint import remove_others


def restorable_groups(
    ledger: LedgerReader, rollouts: Path, state: LoopState, max_staleness: int, pinned: bool = False
) -> tuple[dict[int, Group], dict[str, list[str]]]:
    """Return the groups, by index, with recorded attempts that the checkpoint's next update can all train; and shard ->
    ids of unreadable attempts in it.

    Tokens may be `max_staleness` versions old, but not newer than the checkpoint, because those weights were lost. A
    damaged attempt excludes its group, because it would change the baseline; if attempts are pinned, so does one of
    several versions, as earlier releases recorded them.
    """
    groups: dict[int, Group] = {}
    unreadable: dict[str, list[str]] = {}
    files, oldest = ledger.shards(), state.version - max_staleness
    shards: dict[str, dict[str, list[Step]] | None] = {}
    for index, rows in itertools.groupby(ledger.untaken(state), lambda row: row["idx"]):
        attempts = list(rows)
        if not all(_admitted(row, oldest, state.version, pinned) for row in attempts):
            continue
        for shard in {row["shard"] for row in attempts} - shards.keys():
            try:
                shards[shard] = read_shard(rollouts, files[shard])
            except DamageError:
                shards[shard] = None
        damaged = [row for row in attempts if shards[row["shard"]] is None]
        for row in damaged:
            unreadable.setdefault(row["shard"], []).append(row["trajectory_id"])
        if not damaged:
            steps = [(shards[row["shard"]] or {}).get(row["trajectory_id"], []) for row in attempts]
            groups[index] = _group(attempts, steps, rollouts)
    return groups, unreadable


def roll_back(
    run: RunDirectory,
    ledger: Ledger,
    name: str,
    state: LoopState,
    *,
    keeping: Retention,
    max_staleness: int,
    pinned: bool,
    repeats: bool,
    log: Callable[[str], None],
) -> tuple[dict[int, Group], dict[AttemptKey, list[AnsweredCall]]]:
    """Roll the run back to the checkpoint `name` with the given state; return the restored groups, by index, and the
    restored calls of unfinished attempts.

    pinned: whether an attempt keeps its first version. repeats: whether nothing is restored.
    """
    latest = ledger.latest_checkpoint()
    if latest is not None and latest[0] != name:
        steps = ledger.return_to(name)
        # Before removing checkpoints referenced by an older copy.
        ledger.copy_out()
        log(f"back from {latest[0]} to {name}: {steps} steps are dropped as {DropReason.ROLLED_BACK}")
    # Unreferenced directories are removed.
    committed = ledger.checkpoint_names()
    on_disk = [update for update in checkpoint_updates(run.checkpoints) if checkpoint_name(update) in committed]
    remove_others(run.checkpoints, {name, *retained(on_disk, keeping, state.evaluations)})
    restored, unreadable = (
        ({}, {}) if repeats else restorable_groups(ledger, run.rollouts, state, max_staleness, pinned)
    )
    # engines have no other version to continue with
    oldest = state.version if pinned else state.version - max_staleness
    calls = restorable_calls(ledger, oldest, state.version, repeats)
    for shard, damaged in unreadable.items():
        steps = ledger.note_damaged(damaged)
        log(
            f"{run.rollouts / shard} is damaged or gone: {len(damaged)} trajectories ({steps} steps) that waited in it "
            f"are dropped as {DropReason.DAMAGED}, and their tasks are sampled again"
        )
    reason = interrupted_reason(repeats)
    dropped = ledger.roll_back(state, reason, [group.group_id for group in restored.values()])
    if problem := run.roll_back_metrics(state.update, state.evaluations):
        log(f"{problem}; the run continues without")
    if dropped:
        log(f"{dropped} steps recorded after that checkpoint are dropped as {reason}")
    if not repeats:
        trajectories = [t for group in restored.values() for t in group.everyone]
        steps = sum(len(t.steps) for t in trajectories)
        log(f"{len(trajectories)} finished trajectories ({steps} steps) of {len(restored)} groups are reused")
    if calls:
        log(f"{len(calls)} unfinished attempts continue after {sum(map(len, calls.values()))} recorded calls")
    return restored, calls


def _admitted(row: Mapping[str, Any], oldest: int, newest: int, pinned: bool) -> bool:
    first, last = row["oldest_version"], row["newest_version"]
    if row["trained_reward"] is None or first is None:  # none of it is trained
        return True
    return bool(row["waiting"] and oldest <= first and last <= newest and (first == last or not pinned))


def _group(rows: Sequence[Mapping[str, Any]], steps: Sequence[Sequence[Step]], rollouts: Path) -> Group:
    first = rows[0]
    task = task_of(first["task"], rollouts)
    every = [trajectory_on_record(row, task.task_id, played) for row, played in zip(rows, steps, strict=True)]
    attempts = [
        replace(t, copies=tuple(copy for copy in every if copy.role and copy.attempt == t.attempt))
        for t in every
        if not t.role
    ]
    return Group(first["group_id"], first["idx"], first["epoch"], first["position"], task, tuple(attempts))
