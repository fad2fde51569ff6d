"""Tasks that are not played any more, because group after group of them failed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from treadle.core.types import Task


class TaskQuarantine:
    """Counts, for each task, the groups in a row with too few graded attempts; from `limit` on it is in quarantine.

    failed_groups: task_id -> that count, of tasks that have any.
    """

    def __init__(self, limit: int, failed_groups: Mapping[str, int] = MappingProxyType({})) -> None:
        self._limit, self.failed_groups = limit, dict(failed_groups)

    def contains(self, task: Task) -> bool:
        """Return whether the task is in quarantine."""
        return self.failed_groups.get(task.task_id, 0) >= self._limit

    def count_failure(self, task: Task) -> bool:
        """Count another failed group; return whether it is the one that puts the task into quarantine."""
        self.failed_groups[task.task_id] = count = self.failed_groups.get(task.task_id, 0) + 1
        return count == self._limit

    def clear(self, task: Task) -> None:
        """Forget a task's failures: a group of it has enough graded attempts."""
        self.failed_groups.pop(task.task_id, None)
