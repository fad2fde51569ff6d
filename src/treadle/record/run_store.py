"""Writing of a training process, token arrays before the transaction that refers to them; location of its ledger.

    <ledger_directory>/<run>-<digest>.sqlite --(Ledger.copy_out)--> <run>/ledger.sqlite, read by all others

For runs on a shared filesystem, where SQLite is not safe, the ledger is on a local disk. The copy is made after each
checkpoint, whenever other files of the run follow the ledger, and when the process ends; it is replaced as a whole. A
resumed run continues with the local ledger left by a killed process or, if the machine is lost with its disk, with the
copy: everything after the last checkpoint is then sampled again.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from treadle.core.errors import RunError
from treadle.core.files import WrittenFile, refusal, sync_file
from treadle.core.trainer import StepTrace
from treadle.core.types import Group, Step, Trajectory
from treadle.record.ledger import Ledger
from treadle.record.open_calls import OpenCalls
from treadle.record.rollout_store import read_steps, write_shard, write_traces
from treadle.record.run_directory import RunDirectory


class RunStore:
    """Writes finished attempts into a run's directory and ledger, on a thread beside the event loop.

    Attempts that finish while others are being written share a shard.
    on_recorded: called with each training attempt once it is durable. calls: recorder of attempts in progress; None if
    a resumed run would replay them from the beginning.
    """

    def __init__(
        self,
        run: RunDirectory,
        ledger: Ledger,
        on_recorded: Callable[[Trajectory], None] = lambda trajectory: None,
        calls: OpenCalls | None = None,
    ) -> None:
        self.run, self.ledger, self.calls, self._on_recorded = run, ledger, calls, on_recorded
        self._pending: list[Group] = []
        self._version = 0
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None

    async def record(self, part: Group, version: int) -> None:
        """Record a group's newly finished attempts; return once they are durable. version: current policy version.

        Raises RunError if they could not be written, and on every later call: attempts of several callers are written
        together, and none may assume its own were written.
        """
        if self.calls is not None:
            # Its calls must not be written after it.
            await self.calls.settled()
        self._pending.append(part)
        self._version = version
        async with self._turn:
            # Batches attempts that finish at the same moment.
            await asyncio.sleep(0)
            parts, self._pending = self._pending, []
            failed = self._writing is not None and self._writing.done() and self._writing.exception() is not None
            # Otherwise another caller has written ours, or failed.
            if parts and not failed:
                self._writing = asyncio.ensure_future(self._record_all(parts))
            assert self._writing is not None  # ours, or another caller's
            await asyncio.shield(self._writing)

    async def settled(self) -> None:
        """Wait for writes in progress, even if the callers of `record` were cancelled."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        if self.calls is not None:
            await self.calls.settled()

    def steps(self, trajectory_id: str) -> list[Step]:
        """Return the steps of a recorded trajectory. Raises RunError for an unknown one, DamageError for damage."""
        if (row := self.ledger.trajectory(trajectory_id)) is None:
            raise RunError(f"the ledger knows no trajectory {trajectory_id!r}")
        return read_steps(self.run.rollouts, self.ledger.shard(row["shard"]), trajectory_id)

    async def write_traces(self, version: int, traces: Sequence[StepTrace]) -> WrittenFile | None:
        """Write the traces of a trained batch, if any; the next checkpoint records the file."""
        return await asyncio.to_thread(write_traces, self.run.traces, version, traces) if traces else None

    def record_evaluation(self, name: str, groups: Sequence[Group], version: int) -> None:
        """Record held-out groups; their steps immediately get their terminal state. Raises RunError."""
        self._write(f"evaluation-{name}", groups, "held_out", version)

    async def _record_all(self, parts: list[Group]) -> None:
        name = f"train-{parts[0].trajectories[0].trajectory_id}"
        await asyncio.to_thread(self._write, name, parts, "train", self._version)
        for trajectory in [t for part in parts for t in part.trajectories]:
            self._on_recorded(trajectory)

    def _write(self, name: str, groups: Sequence[Group], split: str, version: int) -> None:
        shard = write_shard(self.run.rollouts, name, groups)
        self.ledger.record(groups, split, version, shard)


def local_file(run: RunDirectory, directory: str) -> Path:
    """Return the path of a run's ledger in this directory, by the run's name and absolute path."""
    path = run.path.resolve()
    return Path(directory).expanduser() / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.sqlite"


@contextmanager
def open_ledger(run: RunDirectory, directory: str | None) -> Iterator[Ledger]:
    """Open the run's ledger for writing. directory: where, instead of the run directory. Raises RunError."""
    if directory is None:
        with closing(Ledger(run.ledger_file)) as ledger:
            yield ledger
        return
    local = local_file(run, directory)
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        _remove(local)
        if run.ledger_file.is_file():
            unfinished = local.with_name(f"{local.name}.new")
            shutil.copyfile(run.ledger_file, unfinished)
            unfinished.replace(local)
    except OSError as error:
        raise RunError(
            f"orchestration.ledger_directory={directory}: {refusal(error, 'give a directory to write to')}"
        ) from error
    with closing(Ledger(local, copy=run.ledger_file)) as ledger:
        # Marks the copy as this ledger's own.
        ledger.copy_out()
        try:
            yield ledger
        finally:
            ledger.copy_out()
    _remove(local)


def recover_ledger(run: RunDirectory, directory: str | None) -> None:
    """Update the run directory's copy with a ledger left in `directory` by a killed process, if any.

    A local ledger is out of date, and removed, if the copy is not the last one it made: the run continued elsewhere.
    Raises DamageError for a damaged one.
    """
    if directory is None or not (local := local_file(run, directory)).is_file():
        return
    with closing(Ledger(local, copy=run.ledger_file)) as ledger:
        ledger.prove()
        if not run.ledger_file.is_file() or ledger.has_copied(sync_file(run.ledger_file)):
            ledger.copy_out()
    _remove(local)


def _remove(local: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        local.with_name(f"{local.name}{suffix}").unlink(missing_ok=True)
