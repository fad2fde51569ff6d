"""Everything that an update changes in a run is saved in its checkpoints, or need not be, and stands here with why."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.orchestration.runs import start
from tests.worlds import Vowels
from treadle.core.config import Config
from treadle.envs.base import EnvStep
from treadle.orchestration.loop.assembly import make_loop
from treadle.orchestration.loop.loop import Loop

KNOWN = {
    "in LoopState, which each checkpoint has": (
        *("LoopState.cursor", "LoopState.evaluations", "LoopState.failed_tasks"),
        *("LoopState.update", "LoopState.version", "LoopState.cpu_seconds", "LoopState.wall_seconds"),
        *("TaskQueue.next_index", "TaskQueue.failed_tasks"),
    ),
    "in the checkpoint's files": ("Learner.updates_done", "KlController.coef"),
    "equal to something of the state": (
        *("Checkpointer._saved", "RolloutScheduler._version", "RunStore._version"),
        *("_SourceOrder._epoch", "_SourceOrder._order"),  # pure functions of the cursor
    ),
    "of the next wave alone, which is drawn by its addresses": ("Batch._draws", "Batch.version", "TorchEngine._opened"),
    "of these two runs": ("Learner.updates", "LoopState.began", "RunDirectory.written"),
    "measured or shown, and nothing is decided by it in synchronous runs": (
        *("Reporter._reported", "Clock._cpu", "Clock._wall"),
        *("ConcurrencyController._in_engine", "ConcurrencyController._seconds"),
        *("EngineCounters.prefilled", "EngineCounters.reused", "EngineCounters.sampled", "EngineCounters.shared"),
    ),
}
"""Where it is saved, or why it is not -> class and attribute."""
PASSED_OVER = ("RunStatus", "Structure")
"""What is shown live; private names, which are other ones in each process."""


class Failing(Vowels):
    """Fails all attempts at some tasks, twice."""

    async def step(self, text: str) -> EnvStep:
        if self.task.task_id.endswith("1"):
            raise LookupError("lost")
        return await super().step(text)


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of Treadle's holds, by attribute."""
    names = [field.name for field in fields(value)] if is_dataclass(value) else list(getattr(value, "__dict__", {}))
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))


def shown(value: Any) -> Any:
    """A value that can be compared, of what is no object of Treadle's."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().sum().item()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return sorted((repr(key), shown(item)) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return [shown(item) for item in value]
    return value if isinstance(value, int | float | str | bytes | None) else type(value).__name__


def snapshot(value: Any, seen: dict[str, Any], done: set[int]) -> dict[str, Any]:
    """Class and attribute -> its value, of all of Treadle's objects that are reached from this one."""
    if id(value) in done:
        return seen
    done.add(id(value))
    if isinstance(value, Mapping):
        for item in value.values():
            snapshot(item, seen, done)
    elif isinstance(value, list | tuple | set):
        for item in value:
            snapshot(item, seen, done)
    elif type(value).__module__.startswith("treadle.") and not isinstance(value, Config | type):
        for name, part in parts(value):
            seen.setdefault(f"{type(value).__name__}.{name}", []).append(shown(part))
            snapshot(part, seen, done)
    return seen


def after(updates: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    loops: list[Loop] = []

    def kept(*args: Any, **more: Any) -> Loop:
        loops.append(make_loop(*args, **more))
        return loops[0]

    found: dict[str, Any] = {}

    with monkeypatch.context() as during:
        during.setattr("treadle.orchestration.train.make_loop", kept)
        start(
            path,
            f"orchestration.updates={updates}",
            "environment=tests.orchestration.test_saved_state:Failing",
            "failures={causes: {environment: {retries: 1, backoff: 0}}, task_limit: 9}",
            "failures.max_failed_fraction=1",
            "failures.max_sampled=100",
            "algorithm.kl={coef: 0.1, target: 0.01}",
        )
    snapshot(loops[0], found, set())
    return found


def test_what_an_update_changes_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early, late = (after(updates, tmp_path / str(updates), monkeypatch) for updates in (2, 4))
    changed = {name for name in early.keys() | late.keys() if early.get(name) != late.get(name)}
    changed = {name for name in changed if not name.startswith(PASSED_OVER)}
    known = {name for names in KNOWN.values() for name in names}
    assert changed - known == set(), "is it saved? Say so in KNOWN"
    assert known - changed <= {"LoopState.began"}
