"""An engine as an actor, without a cluster: what rollout workers ask of it."""

import asyncio

import numpy as np
import pytest

from treadle.core.errors import EngineError
from treadle.core.types import SamplingParams
from treadle.placement import engine_actors


async def test_each_call_of_a_session_that_never_opens_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_actors, "_OPENING", 0.01)
    actor = engine_actors.EngineActor()
    calls = [actor.generate(np.array([1], np.int32), SamplingParams(), "s", None) for _ in range(2)]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, EngineError) and str(error) == "session 's' is not open"
