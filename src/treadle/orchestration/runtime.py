"""What a run computes with, each part replaceable: where another trainer, engine or event loop goes in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from treadle.core.engine import Engine
from treadle.core.trainer import Trainer, WeightSync
from treadle.orchestration.setup.chat_interface import ChatInterface, check_engine
from treadle.orchestration.setup.engines import OpenEngine, open_engine
from treadle.training.make import MakeTrainer, make_trainer


class CheckEngine(Protocol):
    """Checks an engine before the first rollout: `setup.chat_interface.check_engine`, or your own."""

    async def __call__(
        self, engine: Engine, weight_sync: WeightSync, trainer: Trainer, chat: ChatInterface, tolerance: float, /
    ) -> object:
        """Raise EngineError if the engine cannot be trained with."""
        ...


@dataclass(frozen=True, slots=True)
class Runtime:
    """Holds what makes the parts of a run; the default is what the configuration says.

    new_event_loop: for example `treadle.testing.VirtualLoop`; default: asyncio's own.
    """

    make_trainer: MakeTrainer = make_trainer
    open_engine: OpenEngine = open_engine
    check_engine: CheckEngine = check_engine
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
