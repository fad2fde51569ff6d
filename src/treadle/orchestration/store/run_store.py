"""Where a loop writes finished attempts: token arrays first, then one ledger transaction that refers to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from treadle.core.files import WrittenFile
from treadle.core.trainer import StepTrace
from treadle.core.types import Group, Trajectory
from treadle.orchestration.store.ledger import Ledger
from treadle.orchestration.store.rollout_store import write_shard
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.orchestration.store.trace_store import write_traces


class RunStore:
    """Writes finished attempts into a run's directory and ledger, on a thread beside the event loop.

    Attempts that finish while others are being written share a shard.
    on_recorded: called with each training attempt once it is durable.
    """

    def __init__(
        self, run: RunDirectory, ledger: Ledger, on_recorded: Callable[[Trajectory], None] = lambda trajectory: None
    ) -> None:
        self.run, self.ledger, self._on_recorded = run, ledger, on_recorded
        self._pending: list[Group] = []
        self._version = 0
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None

    async def record(self, part: Group, version: int) -> None:
        """Record a group's newly finished attempts; return once they are durable. version: of the policy now.

        Raises RunError if they could not be written, and on every later call: attempts of several callers are written
        together, and none may take its own for written.
        """
        self._pending.append(part)
        self._version = version
        async with self._turn:
            await asyncio.sleep(0)  # for those that finish at the same moment
            parts, self._pending = self._pending, []
            failed = self._writing is not None and self._writing.done() and self._writing.exception() is not None
            if parts and not failed:  # otherwise another caller has written ours, or could not
                self._writing = asyncio.ensure_future(self._record_all(parts))
            assert self._writing is not None  # ours, or another caller's
            await asyncio.shield(self._writing)

    async def settled(self) -> None:
        """Wait for writes in progress, even if the callers of `record` were cancelled."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def write_traces(self, version: int, traces: Sequence[StepTrace]) -> WrittenFile | None:
        """Write the traces of a trained batch, if any; the next checkpoint puts the file on record.

        version: of the policy that was updated. Raises RunError.
        """
        return await asyncio.to_thread(write_traces, self.run.traces, version, traces) if traces else None

    def record_evaluation(self, name: str, groups: Sequence[Group], version: int) -> None:
        """Record held-out groups, whose steps are in their terminal state at once. Raises RunError."""
        self._write(f"evaluation-{name}", groups, "held_out", version)

    async def _record_all(self, parts: list[Group]) -> None:
        name = f"train-{parts[0].trajectories[0].trajectory_id}"
        await asyncio.to_thread(self._write, name, parts, "train", self._version)
        for trajectory in [t for part in parts for t in part.trajectories]:
            self._on_recorded(trajectory)

    def _write(self, name: str, groups: Sequence[Group], split: str, version: int) -> None:
        shard = write_shard(self.run.rollouts, name, groups)
        self.ledger.record(groups, split, version, shard)
