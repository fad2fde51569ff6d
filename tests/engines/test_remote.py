"""Engines of other processes, alone and as a pool: the same waves, and what becomes of calls when one ends."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from torch import Tensor

from tests.models import tiny
from tests.until import until
from treadle.core.engine import Completion
from treadle.core.errors import DataError, EngineEnded, EngineError, WorkerLost
from treadle.core.types import Ids, SamplingParams
from treadle.engines.pool import EnginePool, PoolSync
from treadle.engines.remote import EngineService, RemoteEngine
from treadle.engines.staging import Staged
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.models.weights import unique_weights
from treadle.rendering.grammars import Grammars
from treadle.testing import FakeEngine, FakeTrainer
from treadle.workers.supervised import Supervised

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


class Here:
    """A worker in this process."""

    process = None

    def __init__(self) -> None:
        self.service = EngineService()
        self.dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        pass

    async def call(self, method: str, *arguments: Any) -> Any:
        answer = asyncio.ensure_future(getattr(self.service, method)(*arguments))
        try:
            await asyncio.wait([answer, self.dead], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if self.dead.done():
            raise WorkerLost("engine 0 ended: killed")
        return answer.result()

    def tail(self) -> str:
        return ""

    def post(self, method: str, *arguments: Any) -> None:
        self.posted = asyncio.ensure_future(getattr(self.service, method)(*arguments))

    def kill(self) -> None:
        if not self.dead.done():
            self.dead.set_result(None)

    async def close(self) -> None:
        self.kill()


class Weights:
    """Those of a seed (`Staged`)."""

    def __init__(self, seed: int) -> None:
        self._weights = unique_weights(tiny(seed=seed))

    def discard(self) -> None:
        pass

    async def fetch(self) -> Mapping[str, Tensor]:
        return self._weights


def local_engine() -> TorchEngine:
    grammars = Grammars(Tokenizer.from_file(str(files("treadle.recipes") / "tokenizer" / "tokenizer.json")))
    return TorchEngine(tiny(), TorchEngineOptions(stop_token_ids=[], lock_step=True), grammars=grammars)


@asynccontextmanager
async def opened(said: list[str]) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine("engine 0", local_engine, Here, lock_step=True, tolerance=1e-6, notify=said.append)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


def kill(engine: RemoteEngine) -> None:
    worker = engine._supervised.worker
    assert isinstance(worker, Here)
    worker.kill()


async def publish(engine: RemoteEngine, seed: int, version: int) -> None:
    async def stage() -> Weights:
        return Weights(seed)

    await engine.update_weights(stage, version)


async def test_the_next_process_has_the_weights_that_were_published_last() -> None:
    said: list[str] = []
    async with opened(said) as engine:
        await publish(engine, 5, 1)
        scores = await engine.score(PROMPT)
        engine.open_session("a")
        running = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(max_tokens=200), session="a"))
        await until(lambda: engine._driver is not None and not engine._waiting)
        kill(engine)
        with pytest.raises(EngineEnded, match="engine 0 ended: killed"):
            await running
        assert (await engine.score(PROMPT)).tobytes() == scores.tobytes()
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=2), session="a")
        assert set(completion.versions_per_token()) == {1}
        assert said == ["engine 0 ended: killed; restarting it"]


async def test_a_wrong_grammar_fails_its_own_call_of_the_wave_alone() -> None:
    async with opened([]) as engine:
        await publish(engine, 5, 1)
        calls = {"a": SamplingParams(max_tokens=2, grammar="start: x"), "b": SamplingParams(max_tokens=2)}
        for name in calls:
            engine.open_session(name)
        made = [engine.generate(PROMPT, params, session=name) for name, params in calls.items()]
        wrong, right = await asyncio.gather(*made, return_exceptions=True)
        assert isinstance(wrong, DataError) and "unknown name" in str(wrong)
        assert isinstance(right, Completion) and len(right.token_ids) == 2


async def test_a_process_that_scores_otherwise_does_not_serve() -> None:
    async with opened([]) as engine:
        await publish(engine, 5, 1)
        assert engine._published is not None and engine._published.scores is not None
        assert engine._published.scores.tolist() == (await engine.score(engine._probe)).tolist()
        engine._published.scores = engine._published.scores * 0  # as if the one before had other weights
        kill(engine)
        for reason in ("engine 0 ended: killed", "log-probabilities differ by .* on average"):
            with pytest.raises(EngineEnded, match=reason):
                await engine.score(PROMPT)


class Silent(Here):
    """Answers no ping."""

    async def call(self, method: str, *arguments: Any) -> Any:
        await asyncio.wait([self.dead])
        raise WorkerLost("it ended")


async def test_closing_it_amid_a_ping_leaves_no_error_behind() -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    async def open_nothing(worker: Silent) -> None:
        pass

    place = Supervised("it", Silent, open_nothing, print)
    await place.ready()
    await asyncio.sleep(0)
    await place.close()
    del place
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert not errors


async def test_an_engine_that_always_ends_is_given_up() -> None:
    said: list[str] = []
    async with opened(said) as engine:
        for _ in range(3):
            await engine._supervised.ready()
            kill(engine)
            with pytest.raises(EngineEnded):
                await engine.score(PROMPT)
        with pytest.raises(EngineEnded, match="3 attempts to start it failed"):
            await engine.score(PROMPT)
        assert engine.failure and engine.is_down and len(said) == 2


async def test_what_is_cancelled_or_closed_frees_the_others() -> None:
    async with opened([]) as engine:
        for session in "ab":
            engine.open_session(session)
        alone = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(max_tokens=200), session="a"))
        waiting = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(max_tokens=2), session="b"))
        await until(lambda: engine._driver is not None and not engine._waiting)
        alone.cancel()
        waiting.cancel()
        await until(lambda: engine._driver is None)  # long before 200 tokens
        waiting = asyncio.ensure_future(engine.generate(PROMPT, SamplingParams(max_tokens=2), session="b"))
        await asyncio.sleep(0)
        engine.close_session("b")
        with pytest.raises(EngineError, match="session 'b' was closed while its call waited"):
            await waiting
        assert (await engine.generate(PROMPT, SamplingParams(max_tokens=2), session="a")).token_ids.size


class Fake(FakeEngine):
    """Is down or over when it is told so; ends after so many calls."""

    def __init__(self, name: int, lives: int = 10**9) -> None:
        super().__init__(lambda prompt, sampling: [name])
        self.is_down = False
        self.failure: str | None = None
        self.route = f"to {name}"
        self.asleep = False
        self.lives = lives
        self.versions: list[int] = []

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        if self.failure or self.lives == 0:
            self.is_down = True
            raise EngineEnded("it has ended")
        self.lives -= 1
        return await super().generate(prompt_ids, sampling, session=session, **more)

    async def update_weights(self, stage: Callable[[], Awaitable[Staged]], version: int) -> None:
        if self.failure:
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
    over.is_down, over.failure = True, "it was ended"
    pool.open_session("a")
    assert await sampled(pool, "a") == 1
    await PoolSync(FakeTrainer(), pool, Nowhere()).publish(3)
    assert (over.versions, left.versions) == ([], [3])
    left.is_down, left.failure = True, "so was this"
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
