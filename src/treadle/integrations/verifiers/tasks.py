"""Source `verifiers`: the rows of an environment's own data set, as tasks that the driver `verifiers` plays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from treadle.core.config import build
from treadle.core.errors import ConfigError, TrajectoryFailure
from treadle.integrations.verifiers.driver import DRIVER, verifiers_program
from treadle.integrations.worker.config import WorkerConfig
from treadle.integrations.worker.pool import WorkerPool


def verifiers(
    split: str,
    environment: str,
    arguments: Mapping[str, Any] | None = None,
    count: int | None = None,
    first: int = 0,
    python: str | None = None,
    worker: Mapping[str, Any] | None = None,
) -> Iterator[Mapping[str, Any]]:
    """Yield rows of the environment's training data (split `train`), or of its evaluation data.

    environment: as the library loads it; of v1, the id of a taskset. arguments: what it is loaded with; of v1, the
    section `env` of its configuration. count: how many rows (default: all; a taskset without an end needs it). first:
    rows left out before them, so that training and held-out tasks of one taskset differ. python, worker: as of the
    driver.

    Raises ConfigError where the library, or the environment, cannot be loaded.
    """
    order = {
        "do": "rows",
        "environment": environment,
        "arguments": dict(arguments or {}),
        "split": split,
        "first": first,
        "count": count,
    }
    try:
        answer = asyncio.run(_asked(order, python, build(WorkerConfig, worker or {})))
    except TrajectoryFailure as failure:
        raise ConfigError(
            f"verifiers: environment {environment!r} gives no {split} data: {failure.message}"
        ) from failure
    for row in answer["rows"]:
        extras = {"environment": environment, "arguments": order["arguments"], "split": split}
        yield {
            "task_id": f"{environment}-{split}-{row['row']:06d}",
            "prompt": row["prompt"],
            "driver": DRIVER,
            "ground_truth": row["answer"],
            "extras": {**extras, "row": row["row"], "digest": row["digest"]},
        }


async def _asked(order: Mapping[str, Any], python: str | None, worker: WorkerConfig) -> dict[str, Any]:
    one = worker.model_copy(update={"processes": 1})
    async with WorkerPool(verifiers_program(python), one) as pool:
        return await pool.call(order)
