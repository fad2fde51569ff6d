"""Making finished trajectories durable: token arrays first, then one ledger transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from treadle.core.types import Group, Trajectory
from treadle.orchestration.ledger import Ledger
from treadle.orchestration.rollout_store import write_shard


class Recorder:
    """Writes beside the event loop. What finishes while something is being written goes together, into one shard.

    version: the policy version of the moment. told: of each trajectory, once it is on record.
    """

    def __init__(
        self, directory: Path, ledger: Ledger, version: Callable[[], int], told: Callable[[Trajectory], None]
    ) -> None:
        self._directory, self._ledger, self._version, self._told = directory, ledger, version, told
        self._pending: list[Group] = []
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None

    async def __call__(self, part: Group) -> None:
        """Record a group's newly finished trajectories; returns once they are durable.

        Raises RunError, then and ever after: who came with those that could not be written must not think theirs were.
        """
        self._pending.append(part)
        async with self._turn:
            await asyncio.sleep(0)  # for those that finish at the same moment
            parts, self._pending = self._pending, []
            if parts and not self._has_failed():  # otherwise somebody has written ours, or could not
                self._writing = asyncio.ensure_future(self._recorded(parts))
            assert self._writing is not None  # of somebody
            await asyncio.shield(self._writing)

    async def settled(self) -> None:
        """Wait for what is being written, also where nobody waits for it any more."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    def _has_failed(self) -> bool:
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    async def _recorded(self, parts: list[Group]) -> None:
        await asyncio.to_thread(self._write, parts, self._version())
        for trajectory in [t for part in parts for t in part.trajectories]:
            self._told(trajectory)

    def _write(self, parts: list[Group], version: int) -> None:
        shard = write_shard(self._directory, f"train-{parts[0].trajectories[0].trajectory_id}", parts)
        self._ledger.record(parts, "train", version, shard)
