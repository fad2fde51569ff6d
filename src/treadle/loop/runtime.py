"""The replaceable parts of a run: trainer, engine and event loop.

`placement.kind` chooses their factories; here, all of them are on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from treadle.core.engine import ComponentStatus, Engine
from treadle.core.registry import resolve
from treadle.core.trainer import Trainer, WeightSync
from treadle.core.types import Task
from treadle.loop.config import RuntimePlan
from treadle.loop.engines import OpenEngine, check_engine, open_engine
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.attempt import Players, RolloutRunner, open_rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.rewards import RewardsConfig
from treadle.training.start import MakeTrainer, make_trainer

CheckEngine = Callable[[Engine, WeightSync, Trainer, ChatRenderer, float, bool], Awaitable[object]]
"""Raises EngineError if the engine is unsuitable for training: `loop.engines.check_engine`, or your own."""


class CheckedRunner(RolloutRunner, Protocol):
    """Plays attempts, after checking that it can."""

    async def check(self, tasks: Sequence[Task]) -> None: ...  # raises ConfigError or EngineError

    # Current load of its own processes; thread-safe.
    def status(self) -> Sequence[ComponentStatus]: ...


OpenRollouts = Callable[
    [Engine, ChatRenderer, Players, RolloutConfig, RewardsConfig, Callable[[str], None], Path],
    AbstractAsyncContextManager[CheckedRunner],
]


@dataclass(frozen=True, slots=True)
class Runtime:
    """Factories of a run's parts; by default as configured.

    open_rollouts: opens the runner of attempts; as `rollout.attempt.open_rollouts`.
    new_event_loop: for example `treadle.testing.VirtualLoop`; default: asyncio's own.
    """

    make_trainer: MakeTrainer = make_trainer
    open_engine: OpenEngine = open_engine
    open_rollouts: OpenRollouts = open_rollouts
    check_engine: CheckEngine = check_engine
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None


OpenRuntime = Callable[[RuntimePlan, Path, Callable[[str], None]], AbstractContextManager[Runtime]]
"""A registered placement (entry points `treadle.placements`, chosen by `placement.kind`).

Called with the plan of places, the run's directory (which may not exist yet) and a log function for the run's output,
before anything is loaded. The runtime is used inside the context. Raises ConfigError or PlacementError.
"""


def open_runtime(plan: RuntimePlan, path: Path, log: Callable[[str], None]) -> AbstractContextManager[Runtime]:
    opened: OpenRuntime = resolve("placements", plan.placement.kind, "placement.kind")
    return opened(plan, path, log)


@contextmanager
def embedded(plan: RuntimePlan, path: Path, log: Callable[[str], None]) -> Iterator[Runtime]:
    yield Runtime()
