"""Where the loop stands: what a checkpoint's row in the ledger says beside its weights and its optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LoopState:
    """All that resuming needs, with the weights and the optimizer.

    cursor: groups started so far, in submission order; outstanding: those of them that were not taken for training.
    evaluations: held-out results so far, for the summary. failed_tasks: task_id -> groups in a row with too few
    graded attempts. began: when the run did, in ISO format: the date that templates write.
    """

    update: int = 0
    version: int = 0
    cursor: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    evaluations: tuple[dict[str, Any], ...] = ()
    outstanding: tuple[int, ...] = ()
    failed_tasks: Mapping[str, int] = field(default_factory=dict)
    began: str = ""

    @classmethod
    def from_json(cls, text: str) -> LoopState:
        state = json.loads(text)
        return cls(**{**state, **{name: tuple(state[name]) for name in ("evaluations", "outstanding")}})
