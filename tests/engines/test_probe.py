"""The start-up probe refuses what training cannot rely on; the scripted engine keeps the Engine protocol's promises."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.clocks import virtually
from tests.models import tiny
from tests.sources import make_engine
from tests.until import until
from treadle.core.engine import Completion, Engine, VersionSpan
from treadle.core.errors import EngineError
from treadle.core.types import Floats, Ids, SamplingParams, StopReason
from treadle.engines.probe import ProbeResult, probe_engine
from treadle.testing import FakeEngine

PROMPT = np.array([3, 1, 4], np.int32)
END = 2


def probed(engine: Any, **options: Any) -> ProbeResult:
    return asyncio.run(probe_engine(engine, PROMPT, **{"stop_token_ids": [END], **options}))


def saying(prompt: Ids, sampling: SamplingParams) -> list[int]:
    return [7, 8, END]


@pytest.mark.parametrize("options", [{}, {"lock_step": True}, {"lock_step": True, "own_thread": False}])
def test_the_embedded_engine_passes(options: dict[str, Any]) -> None:
    async def run() -> ProbeResult:
        engine = make_engine(tiny(), stop_token_ids=[END], **options)
        facts = await probe_engine(engine, PROMPT, stop_token_ids=[END], version=0)
        await engine.close()
        return facts

    facts = asyncio.run(run())
    assert facts.engine == "TorchEngine" and facts.version == 0
    assert facts.gap < 1e-5 and facts.tempered_gap < 1e-5
    assert facts.tokens > len(facts.sampled.token_ids) > 0


def test_the_scripted_engine_passes_and_its_session_is_closed() -> None:
    engine = FakeEngine(saying, delay=lambda: 0.003)
    facts = probed(engine)
    assert (facts.engine, facts.gap, facts.sampled.token_ids.tolist()) == ("FakeEngine", 0.0, [7, 8, END])
    assert engine.open == []


class Broken(FakeEngine):
    """Changes each answer."""

    def __init__(self, change: Callable[[Completion, SamplingParams], Completion]) -> None:
        super().__init__(saying)
        self.change = change

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        return self.change(await super().generate(prompt_ids, sampling, session=session, **more), sampling)


def changed(**fields: Any) -> Callable[[Completion, SamplingParams], Completion]:
    return lambda answer, sampling: replace(answer, **fields)


def raw_at_top_k(answer: Completion, sampling: SamplingParams) -> Completion:
    return replace(answer, logprobs=np.full(3, -0.5, np.float32)) if sampling.top_k else answer


def raw_when_tempered(answer: Completion, sampling: SamplingParams) -> Completion:
    return replace(answer, logprobs=answer.logprobs * 1.2) if sampling.temperature == 0.7 else answer


def other_tokens(applies: Callable[[SamplingParams], bool]) -> Callable[[Completion, SamplingParams], Completion]:
    return lambda answer, sampling: (
        replace(answer, token_ids=np.array([9, 9, END], np.int32)) if applies(sampling) else answer
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(token_ids=np.array([7.0, 8.0, 2.0])), "returns token ids of type float64"),
        (changed(token_ids=np.empty(0, np.int32)), "returns 0 tokens where 1 to 8"),
        (changed(token_ids=np.ones(9, np.int32)), "returns 9 tokens where 1 to 8"),
        (changed(logprobs=np.zeros(2, np.float32)), "returns 2 logprobs of type float32 for 3 tokens"),
        (changed(logprobs=np.full(3, np.nan, np.float32)), r"each must be finite and at most 0"),
        (changed(stop_reason=StopReason.ABORT), "ended a call with 'abort'"),
        (changed(stop_reason=StopReason.LENGTH), "says 'length' after 3 of 8 tokens"),
        (changed(token_ids=np.array([7, 8, 9], np.int32)), r"says 'stop' after token 9, which is none of \[2\]"),
        (changed(token_ids=np.array([7, END, END], np.int32)), "sampled on after stop token 2"),
        (changed(policy_versions=(VersionSpan(0, 0, 2),)), "reports impossible versions"),
        (changed(policy_versions=(VersionSpan(4, 0, 3),)), r"reports versions \[4\] where version 0 serves"),
        (changed(logprobs=np.full(3, -0.6, np.float32)), "own scoring pass by up to 1.00e-01 at temperature 1"),
        (raw_when_tempered, "own scoring pass by up to 1.00e-01 at temperature 0.7; .*processed_logprobs"),
        (raw_at_top_k, "with top_k 1, where each token is certain; .*processed_logprobs"),
        (other_tokens(lambda s: s.top_k == 1), "samples other tokens with top_k 1 than greedily"),
        (other_tokens(lambda s: s.temperature == 0 and s.seed == 2), "temperature 0 for another seed"),
    ],
)
def test_what_an_engine_lacks_is_refused_in_one_sentence(change: Any, message: str) -> None:
    engine = Broken(change)
    with pytest.raises(EngineError, match=rf"^Broken .*{message}") as refused:
        probed(engine, version=0)
    assert "; " in str(refused.value) and "\n" not in str(refused.value)
    assert engine.open == []


def test_a_seed_must_give_the_same_tokens_again_and_other_seeds_others() -> None:
    count = iter(range(1000))
    with pytest.raises(EngineError, match="samples other tokens for the same seed"):
        probed(FakeEngine(lambda prompt, sampling: [next(count) + 3, END]))
    with pytest.raises(EngineError, match="the same unlikely tokens for 4 different seeds"):
        probed(FakeEngine(saying, logprob=-5.0))


def test_an_engine_that_scores_something_else_is_refused() -> None:
    class Short(FakeEngine):
        async def score(self, ids: Ids, **more: Any) -> Floats:
            return np.full(len(ids), self.logprob, np.float32)

    with pytest.raises(EngineError, match=r"scores 6 tokens with \(6,\) logprobs"):
        probed(Short(saying))


def test_an_engine_that_serves_one_call_at_a_time_or_none_is_refused() -> None:
    class Single(FakeEngine):
        async def generate(self, *arguments: Any, **named: Any) -> Completion:
            if self.running:
                raise EngineError("busy")
            return await super().generate(*arguments, **named)

    with pytest.raises(EngineError, match=r"Single failed a call: busy; .*several at once"):
        probed(Single(saying, delay=lambda: 0.001))
    with pytest.raises(EngineError, match=r"FakeEngine has not answered the probe within 0.05 s"):
        probed(FakeEngine(saying, delay=lambda: 10.0), timeout=0.05)


TWO = np.array([1, 2], np.int32)


async def test_it_replies_as_scripted_cut_to_max_tokens() -> None:
    engine = FakeEngine(lambda prompt, sampling: [*prompt, 9], logprob=-0.25)
    typed: Engine = engine
    typed.open_session("a")
    whole = await typed.generate(TWO, SamplingParams(max_tokens=3), session="a")
    assert whole.token_ids.tolist() == [1, 2, 9] and whole.stop_reason is StopReason.STOP
    cut = await typed.generate(TWO, SamplingParams(max_tokens=2), session="a")
    assert cut.token_ids.tolist() == [1, 2] and cut.stop_reason is StopReason.LENGTH
    assert cut.logprobs.tolist() == [-0.25, -0.25]
    assert cut.token_ids.dtype == np.int32 and cut.logprobs.dtype == np.float32
    assert [call.tolist() for call in engine.calls] == [[1, 2], [1, 2]]
    assert (await typed.score(np.array([1, 2, 3], np.int32))).tolist() == [-0.25, -0.25]


async def test_it_reports_the_published_version() -> None:
    engine = FakeEngine(lambda prompt, sampling: [5, 6])
    engine.open_session("a")
    await engine.publish(4)
    completion = await engine.generate(TWO, SamplingParams(), session="a")
    assert completion.versions_per_token().tolist() == [4, 4]
    await engine.close()


async def test_sessions_are_opened_once_and_must_be_open() -> None:
    engine = FakeEngine(lambda prompt, sampling: [5])
    with pytest.raises(EngineError, match="'a' is not open"):
        await engine.generate(TWO, SamplingParams(), session="a")
    engine.open_session("a")
    with pytest.raises(EngineError, match="'a' is open already"):
        engine.open_session("a")
    engine.close_session("a")
    engine.close_session("a")
    with pytest.raises(EngineError, match="'a' is not open"):
        await engine.generate(TWO, SamplingParams(), session="a")
    assert engine.calls == [] and engine.open == []


async def test_a_reply_may_fail() -> None:
    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        raise EngineError("played to fail")

    engine = FakeEngine(reply)
    engine.open_session("a")
    with pytest.raises(EngineError, match="played to fail"):
        await engine.generate(TWO, SamplingParams(), session="a")


def test_calls_take_time_side_by_side_and_tokens_carry_the_version_they_come_at() -> None:
    async def play() -> None:
        engine = FakeEngine(lambda prompt, sampling: [5, 6, 7, 8], delay=lambda: 0.2)
        engine.open_session("a")
        calls = [asyncio.create_task(engine.generate(TWO, SamplingParams(), session="a")) for _ in range(3)]
        await asyncio.sleep(0.12)
        assert engine.running == 3
        await engine.publish(2)
        for answer in await asyncio.gather(*calls):
            versions = answer.versions_per_token().tolist()
            assert set(versions) == {0, 2} and versions == sorted(versions)
        assert engine.running == engine.aborted == 0

    virtually(play())


async def test_a_call_that_is_cancelled_ends_at_once() -> None:
    engine = FakeEngine(lambda prompt, sampling: [5, 6], delay=lambda: 60.0)
    engine.open_session("a")
    call = asyncio.create_task(engine.generate(TWO, SamplingParams(), session="a"))
    await until(lambda: engine.running)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (engine.running, engine.aborted) == (0, 1)


async def test_a_token_without_alternative_is_certain() -> None:
    engine = FakeEngine(lambda prompt, sampling: [5, 6])
    engine.open_session("a")
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(top_k=1)):
        assert (await engine.generate(TWO, sampling, session="a")).logprobs.tolist() == [0.0, 0.0]
