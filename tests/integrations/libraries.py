"""Libraries in Pythons of their own: where they are, and a server that plays the model for a library's own loop."""

import asyncio
import os
import subprocess
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from tests.worlds import plain_renderer
from treadle.core.draws import Stream
from treadle.core.types import Task, Trajectory
from treadle.rollout.attempt import Players, open_rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.session import Address
from treadle.workers.foreign import WorkerPool, _Slot

T = TypeVar("T")

ROOT = Path(__file__).parents[2]


def library_python(variable: str, folder: str) -> str:
    """The interpreter of an environment that `make integrations-env` makes; the test is skipped without it.

    In continuous integration it fails, unless there is no Python to make one with.
    """
    python = Path(os.environ.get(variable) or ROOT / folder) / "bin" / "python"
    if not python.exists():
        found = subprocess.run([ROOT / "scripts" / "environment.sh", "--find"], capture_output=True, check=False)
        missing = f"{python} is not there (make integrations-env)"
        if os.environ.get("CI") and found.returncode == 0:
            pytest.fail(f"{missing}, and continuous integration must have it")
        pytest.skip(missing)
    return str(python)


async def play_by(
    name: str, driver: Any, engine: Any, tasks: Sequence[Task], check: bool = False, **limits: Any
) -> list[Trajectory]:
    """An attempt at each task by a driver, all at once."""
    players, config = Players(drivers={name: driver}), RolloutConfig(**limits)
    async with open_rollouts(engine, plain_renderer(), players, config) as rollouts:
        if check:
            await rollouts.check(tasks)
        running = [
            rollouts.start(f"g{number}", task, [Address(0, Stream.TRAIN, 0, number, 0)])[0]
            for number, task in enumerate(tasks)
        ]
        trajectories = list(await asyncio.gather(*running))
    assert not getattr(engine, "open", None)  # sessions of a fake one
    return trajectories


class KeptWorkers:
    """An event loop that tests share, in which worker processes stay: importing a library takes them seconds.

    Pools of one program and configuration that are entered in this loop, one after the other, share their processes.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._slots: dict[str, list[_Slot]] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """As `asyncio.run`, in this loop."""
        return self._runner.run(work)

    @contextmanager
    def patched(self) -> Iterator[Self]:
        """Have pools share processes within; in the end these are closed."""
        enter, close = WorkerPool.__aenter__, WorkerPool._close

        async def entered(pool: WorkerPool) -> WorkerPool:
            if self._is_current():
                pool._slots = self._slots.setdefault(repr((pool._program, pool._config)), pool._slots)
            return await enter(pool)

        async def closed(pool: WorkerPool) -> None:
            if not self._is_current():
                await close(pool)

        async def close_all() -> None:
            for slots in self._slots.values():
                await asyncio.gather(*(slot.close() for slot in slots))

        with pytest.MonkeyPatch.context() as patch, self._runner:
            patch.setattr(WorkerPool, "__aenter__", entered)
            patch.setattr(WorkerPool, "_close", closed)
            yield self
            self.run(close_all())

    def _is_current(self) -> bool:
        return asyncio.get_running_loop() is self._runner.get_loop()
