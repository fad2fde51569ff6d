"""Groups that are judged and batched as in a run, but recorded nowhere."""

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

from tests.worlds import tiny, user
from treadle.core.stop import StopRequest
from treadle.core.types import DropReason, Group, Task, Trajectory
from treadle.loop.groups import Groups
from treadle.loop.task_queue import Backlog, TaskOrder, TaskQueue
from treadle.plan.config import RunConfig
from treadle.record.ledger import Ledger
from treadle.record.run_store import RunStore
from treadle.report.callbacks import Callbacks
from treadle.report.reporter import Clock, Reporter

Judge = Callable[[Group], DropReason | None]


def make_tasks(count: int) -> list[Task]:
    return [Task(f"t{i}", (user(str(i)),), "world") for i in range(count)]


class Unrecorded(RunStore):
    """Keeps attempts in memory."""

    def __init__(self) -> None:
        self.ledger = cast(Ledger, SimpleNamespace(note_dropped=lambda group: None))
        self.recorded: list[Trajectory] = []
        self.calls = None

    async def record(self, part: Group, version: int) -> None:
        await asyncio.sleep(0)
        self.recorded += part.trajectories

    async def settled(self) -> None:
        pass


class Judged(Groups):
    """Drops the groups that `judge` gives a reason for."""

    def __init__(self, config: RunConfig, queue: TaskQueue, store: RunStore, judge: Judge) -> None:
        super().__init__(config.loop, queue, store, Reporter(config.grading, Callbacks({}, StopRequest()), Clock()))
        self._judge = judge

    def _drop_reason(self, group: Group) -> DropReason | None:
        return self._judge(group)


def make_queue(backlog: Backlog | None = None, left_out: Sequence[str] = ()) -> TaskQueue:
    """40 tasks in order."""
    queue = TaskQueue(TaskOrder(make_tasks(40), 1, shuffle=False), 1, backlog)
    queue.failed_tasks = dict.fromkeys(left_out, 1)
    return queue


def batches_of(size: int, *overrides: str) -> Judged:
    """All groups can be trained, `size` in each batch."""
    config = tiny(f"training.tasks_per_update={size}", *overrides)
    return Judged(config, make_queue(), Unrecorded(), lambda group: None)
