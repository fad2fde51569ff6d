"""Several engines as one: who gets which session, and what becomes of calls whose engine's process has ended."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from torch import Tensor

from treadle.core.engine import Completion
from treadle.core.errors import EngineEnded, EngineError
from treadle.core.types import Ids, SamplingParams
from treadle.engines.pool import EnginePool, PoolSync
from treadle.engines.staging import Staged
from treadle.testing import FakeEngine, FakeTrainer

PROMPT = np.zeros(3, np.int32)


class Fake(FakeEngine):
    """Is down or over when it is told so; ends after so many calls."""

    def __init__(self, name: int, lives: int = 10**9) -> None:
        super().__init__(lambda prompt, sampling: [name])
        self.is_down = False
        self.over: str | None = None
        self.route = f"to {name}"
        self.asleep = False
        self.lives = lives
        self.versions: list[int] = []

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        if self.over or self.lives == 0:
            self.is_down = True
            raise EngineEnded("it has ended")
        self.lives -= 1
        return await super().generate(prompt_ids, sampling, session=session, cache_salt=cache_salt)

    async def update_weights(self, stage: Callable[[], Awaitable[Staged]], version: int) -> None:
        if self.over:
            raise EngineEnded("it has ended")
        await stage()
        self.versions.append(version)

    async def sleep(self) -> None:
        self.asleep = True

    async def wake(self) -> None:
        self.asleep = False


async def sampled(pool: EnginePool, session: str) -> int:
    completion = await pool.generate(PROMPT, SamplingParams(max_tokens=1), session=session)
    return int(completion.token_ids[0])


async def test_sessions_are_dealt_out_in_turn_and_stay_where_they_are() -> None:
    pool = EnginePool([Fake(n) for n in range(3)])
    for number in range(6):
        pool.open_session(f"s{number}")
    for _ in range(2):
        assert [await sampled(pool, f"s{number}") for number in range(6)] == [0, 1, 2, 0, 1, 2]
    pool.close_session("s1")
    pool.open_session("new")
    assert await sampled(pool, "new") == 1
    with pytest.raises(EngineError, match="'new' is open already"):
        pool.open_session("new")
    with pytest.raises(EngineError, match="'s1' is not open"):
        await sampled(pool, "s1")


async def test_a_call_moves_with_its_session_when_its_engine_ends() -> None:
    ending, other = Fake(0, lives=1), Fake(1)
    pool = EnginePool([ending, other])
    for name in "ab":
        pool.open_session(name)
    assert [await sampled(pool, "a") for _ in range(3)] == [0, 1, 1]
    assert (ending.open, other.open) == ([], ["b", "a"])
    ending.is_down, ending.lives = False, 1  # started again: it gets new sessions
    pool.open_session("c")
    assert await sampled(pool, "c") == 0


async def test_a_call_that_ends_every_engine_fails() -> None:
    pool = EnginePool([Fake(n, lives=0) for n in range(2)])
    pool.open_session("a")
    with pytest.raises(EngineEnded):
        await sampled(pool, "a")


async def test_a_session_is_routed_to_its_engine() -> None:
    pool = EnginePool([Fake(n) for n in range(2)])
    for session in ("a", "b"):
        pool.open_session(session)
    assert [pool.route(session) for session in ("a", "b")] == ["to 0", "to 1"]


async def test_an_engine_that_is_over_is_left_out() -> None:
    over, left = Fake(0), Fake(1)
    pool = EnginePool([over, left])
    over.is_down, over.over = True, "it was ended"
    pool.open_session("a")
    assert await sampled(pool, "a") == 1
    await PoolSync(FakeTrainer(), pool, Nowhere()).publish(3)
    assert (over.versions, left.versions) == ([], [3])
    left.is_down, left.over = True, "so was this"
    with pytest.raises(EngineError, match="no engine is left: it was ended; so was this"):
        pool.open_session("b")
    with pytest.raises(EngineError, match="no engine is left"):
        await PoolSync(FakeTrainer(), pool, Nowhere()).publish(4)


async def test_weights_that_one_engine_refuses_are_an_error() -> None:
    class Refusing(Fake):
        async def update_weights(self, stage: Callable[[], Awaitable[Staged]], version: int) -> None:
            await asyncio.sleep(0)
            raise EngineError("of another shape")

    with pytest.raises(EngineError, match="of another shape"):
        await PoolSync(FakeTrainer(), EnginePool([Fake(0), Refusing(1)]), Nowhere()).publish(1)


class Nowhere:
    """Takes no weights."""

    def write(self, described: object, weights: object) -> "Nowhere":
        return self

    async def fetch(self) -> dict[str, Tensor]:
        return {}

    def discard(self) -> None:
        pass
