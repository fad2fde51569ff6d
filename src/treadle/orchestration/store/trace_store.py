"""Traces: what updates computed of single tokens, in Parquet files that pandas reads: one row for a step and an update.

A file holds the traces of one batch, named after the policy version that the batch updated (`trace_file`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from treadle.core.files import WrittenFile
from treadle.core.trainer import StepTrace
from treadle.orchestration.store.ledger_reader import trace_file
from treadle.orchestration.store.rollout_store import open_shard, write_table

_OF_TOKENS: Mapping[str, type[np.generic]] = {
    "logprobs": np.float32,
    "entropy": np.float32,
    "advantage": np.float32,
    "ratio": np.float32,
    "clipped": np.bool_,
}
_SCHEMA = pa.schema(
    [
        ("update", pa.int32()),
        ("group_id", pa.string()),
        ("trajectory_id", pa.string()),
        ("step", pa.int32()),
        *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in _OF_TOKENS.items()),
    ]
)


def write_traces(directory: Path, version: int, traces: Sequence[StepTrace]) -> WrittenFile:
    """Write the traces of a batch durably; return the file. Complete or absent. Raises RunError.

    version: of the policy that the batch updated.
    """
    rows = [{name: getattr(trace, name) for name in _SCHEMA.names} for trace in traces]
    return write_table(directory, trace_file(version), pa.Table.from_pylist(rows, schema=_SCHEMA))


def read_traces(directory: Path, file: WrittenFile, trajectory_id: str | None = None) -> list[StepTrace]:
    """Traces of one trajectory, or of all, in the order of writing. Raises DamageError."""
    filters = None if trajectory_id is None else [("trajectory_id", "=", trajectory_id)]
    return [_trace(row) for row in pq.read_table(open_shard(directory, file), filters=filters).to_pylist()]


def _trace(row: dict[str, Any]) -> StepTrace:
    arrays: dict[str, Any] = {
        name: None if row[name] is None else np.array(row[name], dtype) for name, dtype in _OF_TOKENS.items()
    }
    return StepTrace(**{**row, **arrays})
