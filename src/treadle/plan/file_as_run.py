"""A file of recorded trajectories as a run, for commands that show runs."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from treadle.core.config import build
from treadle.core.errors import DataError
from treadle.core.types import DropReason, Group, StepState
from treadle.plan.config import RunConfig
from treadle.record.address import find_address
from treadle.record.ledger import Ledger
from treadle.record.recorded import UNREWARDED, RecordedTrajectory
from treadle.record.rollout_store import write_shard
from treadle.record.run_directory import RunDirectory
from treadle.record.run_store import open_ledger
from treadle.record.tables import update
from treadle.record.trajectory_files import read_records

_SHARD = 512  # groups
UNRATED = "unrated"
_UNREWARDED = (UNREWARDED.cause, UNREWARDED.message)


def file_as_run(file: Path) -> Path:
    """Return a run directory, removed at exit, with the current trajectories of a .jsonl file.

    Its state is `recorded`. Trajectories without a reward have not failed: their status is `unrated`.

    Raises DataError for a file that is malformed or empty, has text without ids, or a repeated id.
    """
    records = list(read_records(file))
    if not records:
        raise DataError(f"{file} has no trajectories yet")
    _check_distinct(recorded for recorded, _ in records)
    model = next((record["model"] for _, record in reversed(records) if record.get("model")), "")
    address = find_address(model) if model else None
    sampled_by = RunDirectory.open(address.run).config_data()["model"] if address else {"path": model or "unknown"}
    data = {"recipe": file.stem, "data": {"train": {"source": str(file)}}, "model": sampled_by}
    place = Path(tempfile.mkdtemp(prefix="treadle-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    run = RunDirectory.create(place / file.name, build(RunConfig, data, str(file)))
    with open_ledger(run, None) as ledger:
        for split in ("train", "held_out"):
            groups = _groups(recorded for recorded, _ in records if recorded.split == split)
            while part := list(islice(groups, _SHARD)):
                shard = write_shard(run.rollouts, f"{split}-{part[0].index}", part)
                ledger.record(part, split, 0, shard)
        _mark_unrated(ledger)
    run.write(run.recording_file.name, str(file).encode())
    run.close()
    return run.path


def _mark_unrated(ledger: Ledger) -> None:
    changes = {"status": UNRATED, "failure_cause": None, "failure_message": None}
    which = "trajectory_id IN (SELECT trajectory_id FROM trajectories WHERE status = ?) AND reason = ?"
    with ledger.transaction() as db:
        update(db, "trajectories", changes, "failure_cause = ? AND failure_message = ?", *_UNREWARDED)
        update(db, "steps", {"state": StepState.RECORDED, "reason": None}, which, UNRATED, DropReason.FAILED)


def _check_distinct(records: Iterable[RecordedTrajectory]) -> None:
    places: dict[str, str] = {}
    for recorded in records:
        ident = recorded.trajectory.trajectory_id
        if (place := places.setdefault(ident, recorded.source)) != recorded.source:
            raise DataError(f"{recorded.source}: trajectory {ident} is at {place}, too; give each its own id")


def _groups(records: Iterable[RecordedTrajectory]) -> Iterator[Group]:
    """Yield the attempts at each task as a group, in the file's order."""
    by_group: dict[str, list[RecordedTrajectory]] = {}
    for recorded in records:
        by_group.setdefault(recorded.group_id, []).append(recorded)
    for index, (name, attempts) in enumerate(by_group.items()):
        yield Group(name, index, 0, index, attempts[0].task, tuple(attempt.trajectory for attempt in attempts))
