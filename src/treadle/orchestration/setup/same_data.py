"""Whether a run that is resumed finds the tasks that it was started with: its cursor only counts them."""

from __future__ import annotations

import json
from typing import Any

from treadle.core.errors import DataError
from treadle.core.files import read_proven
from treadle.data.tasks import tasks_sha256
from treadle.orchestration.setup.inputs import Inputs
from treadle.orchestration.store.run_directory import RunDirectory

DATA = "data.json"
"""The run's file with number and SHA-256 of its tasks: of the files for Parquet, of the tasks themselves otherwise."""


def record_data(run: RunDirectory, inputs: Inputs) -> None:
    """Write what identifies the run's tasks into its directory."""
    run.write(DATA, json.dumps(_identity(inputs), indent=2).encode())


def check_same_data(run: RunDirectory, inputs: Inputs) -> None:
    """Raise DataError unless the tasks are those that are on record; DamageError for a damaged record."""
    sha256 = run.ledger().file_sha256(DATA)
    recorded = json.loads(read_proven(run.path / DATA, sha256 or "", "restore it from a copy"))
    for split, found in _identity(inputs).items():
        if found != recorded[split]:
            before, now = recorded[split]["tasks"], found["tasks"]
            counts = f"{before} tasks, now {now}" if before != now else f"{now} other tasks"
            raise DataError(
                f"data.{split} is not what the run was started with ({counts}), and the run's cursor counts its tasks; "
                "restore the data, or start a new run (model.path may be an export of this one)"
            )


def _identity(inputs: Inputs) -> dict[str, dict[str, Any]]:
    splits = {"train": inputs.train, "held_out": inputs.held_out}
    return {split: {"tasks": len(tasks), "sha256": tasks_sha256(tasks)} for split, tasks in splits.items()}
