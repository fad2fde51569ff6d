"""The scripted engine keeps the Engine protocol's promises."""

import asyncio

import numpy as np
import pytest

from tests.until import until
from treadle.core.engine import Engine
from treadle.core.errors import EngineError
from treadle.core.types import Ids, SamplingParams, StopReason
from treadle.testing import FakeEngine, VirtualLoop

PROMPT = np.array([1, 2], np.int32)


async def test_it_replies_as_scripted_cut_to_max_tokens() -> None:
    engine = FakeEngine(lambda prompt, sampling: [*prompt, 9], logprob=-0.25)
    typed: Engine = engine
    typed.open_session("a")
    whole = await typed.generate(PROMPT, SamplingParams(max_tokens=3), session="a")
    assert whole.token_ids.tolist() == [1, 2, 9] and whole.stop_reason is StopReason.STOP
    cut = await typed.generate(PROMPT, SamplingParams(max_tokens=2), session="a")
    assert cut.token_ids.tolist() == [1, 2] and cut.stop_reason is StopReason.LENGTH
    assert cut.logprobs.tolist() == [-0.25, -0.25]
    assert cut.token_ids.dtype == np.int32 and cut.logprobs.dtype == np.float32
    assert [call.tolist() for call in engine.calls] == [[1, 2], [1, 2]]
    assert (await typed.score(np.array([1, 2, 3], np.int32))).tolist() == [-0.25, -0.25]


async def test_it_reports_the_published_version() -> None:
    engine = FakeEngine(lambda prompt, sampling: [5, 6])
    engine.open_session("a")
    await engine.publish(4)
    completion = await engine.generate(PROMPT, SamplingParams(), session="a")
    assert completion.versions_per_token().tolist() == [4, 4]
    await engine.close()


async def test_sessions_are_opened_once_and_must_be_open() -> None:
    engine = FakeEngine(lambda prompt, sampling: [5])
    with pytest.raises(EngineError, match="'a' is not open"):
        await engine.generate(PROMPT, SamplingParams(), session="a")
    engine.open_session("a")
    with pytest.raises(EngineError, match="'a' is open already"):
        engine.open_session("a")
    engine.close_session("a")
    engine.close_session("a")
    with pytest.raises(EngineError, match="'a' is not open"):
        await engine.generate(PROMPT, SamplingParams(), session="a")
    assert engine.calls == [] and engine.open == []


async def test_a_reply_may_fail() -> None:
    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        raise EngineError("played to fail")

    engine = FakeEngine(reply)
    engine.open_session("a")
    with pytest.raises(EngineError, match="played to fail"):
        await engine.generate(PROMPT, SamplingParams(), session="a")


def test_calls_take_time_side_by_side_and_tokens_carry_the_version_they_come_at() -> None:
    async def play() -> None:
        engine = FakeEngine(lambda prompt, sampling: [5, 6, 7, 8], delay=lambda: 0.2)
        engine.open_session("a")
        calls = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(), session="a")) for _ in range(3)]
        await asyncio.sleep(0.12)
        assert engine.running == 3
        await engine.publish(2)
        for answer in await asyncio.gather(*calls):
            versions = answer.versions_per_token().tolist()
            assert set(versions) == {0, 2} and versions == sorted(versions)
        assert engine.running == engine.aborted == 0

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())


async def test_a_call_that_is_cancelled_ends_at_once() -> None:
    engine = FakeEngine(lambda prompt, sampling: [5, 6], delay=lambda: 60.0)
    engine.open_session("a")
    call = asyncio.create_task(engine.generate(PROMPT, SamplingParams(), session="a"))
    await until(lambda: engine.running)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (engine.running, engine.aborted) == (0, 1)


async def test_a_token_without_alternative_is_certain() -> None:
    engine = FakeEngine(lambda prompt, sampling: [5, 6])
    engine.open_session("a")
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(top_k=1)):
        assert (await engine.generate(PROMPT, sampling, session="a")).logprobs.tolist() == [0.0, 0.0]
