"""Continuous batching: who else is in the batch, and when they came, changes nothing but rounding; a publication in
flight changes exactly what comes after it; whatever ends leaves nothing behind."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.engines import kit
from tests.engines.kit import CONTEXT, PROMPT, End, ids, lasting, moved, plain_logprobs, swapped, wanted_logprobs
from tests.models import HYBRIDS, VOCABULARY, exact, tiny
from tests.sources import make_engine, publish
from tests.until import CEILING, until
from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.types import Ids, SamplingParams, StopReason
from treadle.engines.torch.engine import TorchEngine
from treadle.models.weights import unique_weights

NO_SHRINKING = [Phase.explicit, Phase.reuse, Phase.generate]  # it would take minutes


@asynccontextmanager
async def serving(model: PreTrainedModel | None = None, **options: Any) -> AsyncIterator[TorchEngine]:
    async with kit.serving(model or tiny(max_position_embeddings=CONTEXT), **{"lock_step": False, **options}) as engine:
        yield engine


async def alone(model: PreTrainedModel, prompt: Ids, params: SamplingParams, **options: Any) -> Completion:
    async with serving(model, **options, sessions="a") as engine:
        return await engine.generate(prompt, params, session="a")


def assert_same(one: Completion, other: Completion) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=0)
    assert one.stop_reason == other.stop_reason


def nothing_left(engine: TorchEngine) -> bool:
    return not (engine._waiting or engine._admitted or engine._running or engine._batch.live)


# Who else is there


@dataclass(frozen=True)
class Arrival:
    """A call of a session after so many ticks, perhaps given up after some more."""

    session: int
    after: int
    prompt: Ids
    params: SamplingParams
    salt: str | None
    cancel_after: int | None


def arrivals(seed: int, count: int) -> list[Arrival]:
    random = np.random.default_rng(seed)
    shared = random.integers(0, VOCABULARY, 9).astype(np.int32)

    def prompt() -> Ids:
        rest = random.integers(0, VOCABULARY, random.integers(1, 7)).astype(np.int32)
        return np.concatenate([shared[: random.integers(0, 10)], rest])

    def params() -> SamplingParams:
        return SamplingParams(
            temperature=float(random.choice([0.0, 0.7, 1.0])),
            max_tokens=int(random.integers(1, 14)),
            seed=int(random.integers(1 << 40)),
            top_k=int(random.choice([0, 0, 5])),
            top_p=float(random.choice([1.0, 0.8])),
            min_p=float(random.choice([0.0, 0.05])),
        )

    return [
        Arrival(
            int(random.integers(0, 3)),
            int(random.integers(0, 12)),
            prompt(),
            params(),
            str(random.choice(["x", "y"])) if random.random() < 0.3 else None,
            int(random.integers(0, 8)) if random.random() < 0.25 else None,
        )
        for _ in range(count)
    ]


async def play(engine: TorchEngine, arrival: Arrival) -> Completion | None:
    for _ in range(arrival.after):
        await asyncio.sleep(0.0005)
    call = asyncio.create_task(
        engine.generate(arrival.prompt, arrival.params, session=f"s{arrival.session}", cache_salt=arrival.salt)
    )
    if arrival.cancel_after is not None:
        await asyncio.sleep(0.0005 * arrival.cancel_after)
        call.cancel()
    try:
        return await call
    except asyncio.CancelledError:
        return None


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", ["qwen3", "mistral-sliding", "qwen3-5", "lfm2"])
@settings(max_examples=8, phases=NO_SHRINKING)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 256]), st.booleans(), st.sampled_from([1e-7, 2e-4, 1.0]))
def test_a_call_gives_what_it_gives_alone(
    family: str, seed: int, max_batch: int, own_thread: bool, cache_gib: float
) -> None:
    """Random arrivals and cancellations, forks of the same sessions, salts, little memory and plenty."""
    model, calls = exact(family) if family in HYBRIDS else tiny(family), arrivals(seed, 12)

    async def run() -> list[Completion | None]:
        async with serving(model, max_batch=max_batch, own_thread=own_thread, cache_gib=cache_gib) as engine:
            for number in range(3):
                engine.open_session(f"s{number}")
            answers = await asyncio.gather(*[play(engine, call) for call in calls])
            await until(lambda: nothing_left(engine))  # what was cancelled leaves at the next token
            rows = engine._batch._cached
            row = rows.cache.capacity * rows._position_bytes + rows._row_bytes
            assert rows.cache.rows * row <= max(cache_gib * 2**30, row)
            for number in range(3):
                engine.close_session(f"s{number}")
            engine.open_session("last")
            await engine.generate(PROMPT, SamplingParams(max_tokens=1), session="last")
            assert {cached.session for cached in rows._held} == {3}
            return answers

    answers = asyncio.run(run())
    for call, answer in zip(calls, answers, strict=True):
        if answer is None:
            assert call.cancel_after is not None
        else:
            assert_same(answer, asyncio.run(alone(model, call.prompt, call.params)))


@settings(max_examples=6, phases=NO_SHRINKING)
@given(st.integers(0, 2**32))
def test_reused_prefixes_change_nothing(seed: int) -> None:
    """Conversations that go on, go back, and branch, with every call in a salt of its own or all in one."""
    random = np.random.default_rng(seed)
    model = tiny()
    cuts = [int(random.integers(1, 30)) for _ in range(6)]
    observations = [random.integers(0, VOCABULARY, random.integers(1, 6)).astype(np.int32) for _ in range(6)]

    async def run(reuse: bool) -> tuple[list[Completion], int]:
        answers: list[Completion] = []
        async with serving(model, sessions="a") as engine:
            history = PROMPT
            for turn, (cut, observation) in enumerate(zip(cuts, observations, strict=True)):
                salt = None if reuse else str(turn)
                branches = await asyncio.gather(
                    *[
                        engine.generate(
                            np.concatenate([history, observation[:size]]),
                            SamplingParams(max_tokens=7, seed=10 * turn + size),
                            session="a",
                            cache_salt=salt,
                        )
                        for size in (0, 1, len(observation))
                    ]
                )
                answers += branches
                kept = history[: max(1, cut)] if turn % 3 == 2 else history
                history = np.concatenate([kept, observation, branches[-1].token_ids])
            return answers, engine.counters.reused

    (on, reused), (off, none) = asyncio.run(run(True)), asyncio.run(run(False))
    assert reused > 30 and none == 0
    for one, other in zip(on, off, strict=True):
        assert_same(one, other)


async def test_calls_join_and_leave_between_tokens() -> None:
    """A short call that comes while a long one runs is answered before it."""
    end = End()
    async with serving(stop_token_ids=[], decode=end, sessions="a") as engine:
        engine.open_session("idle")  # nobody waits for it
        long = asyncio.create_task(engine.generate(PROMPT, lasting(stop=End.STRING), session="a"))
        await until(lambda: engine.counters.sampled >= 3)
        short = await engine.generate(PROMPT, SamplingParams(max_tokens=3), session="a")
        assert len(short.token_ids) == 3 and not long.done()
        assert engine.counters.reused == len(PROMPT) - 1  # of the prompt of the call that still ran
        end.has_come = True
        assert (await long).stop_reason is StopReason.STOP


@pytest.mark.parametrize("lock_step", [False, True])
async def test_a_cancelled_call_frees_its_row_at_the_next_token(lock_step: bool) -> None:
    async with serving(stop_token_ids=[], lock_step=lock_step, sessions="a") as engine:
        call = asyncio.create_task(engine.generate(PROMPT, lasting(), session="a"))
        await until(lambda: engine.counters.sampled >= 3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: nothing_left(engine))
        before = engine.counters.prefilled  # what it computed serves the next call
        await engine.generate(np.concatenate([PROMPT, ids(7)]), SamplingParams(max_tokens=1), session="a")
        assert engine.counters.prefilled - before == 1


async def test_salts_share_nothing() -> None:
    async with serving(sessions="a") as engine:
        for salt in ("x", "y", None):
            await engine.generate(PROMPT, SamplingParams(max_tokens=2), session="a", cache_salt=salt)
        assert engine.counters.reused == 0
        both = [engine.generate(PROMPT[:3], SamplingParams(max_tokens=2), session="a", cache_salt=s) for s in "zw"]
        await asyncio.gather(*both)
        assert engine.counters.shared == 0
        await engine.generate(PROMPT, SamplingParams(max_tokens=2), session="a", cache_salt="x")
        assert engine.counters.reused == len(PROMPT) - 1


async def test_a_session_that_closes_before_its_call_joins_leaves_nothing_in_the_cache() -> None:
    end = End()
    async with serving(stop_token_ids=[], max_batch=1, decode=end, sessions="abc") as engine:
        first = asyncio.create_task(engine.generate(PROMPT, lasting(stop=End.STRING), session="a"))
        await until(lambda: engine.counters.sampled >= 3)
        second = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=2), session="b"))
        await until(lambda: engine._admitted)
        engine.close_session("b")
        end.has_come = True
        assert len((await second).token_ids) == 2 and first.done()
        await engine.generate(PROMPT, SamplingParams(max_tokens=2), session="c")
        assert {cached.session for cached in engine._batch._cached._held} == {0, 2}


class Turn:
    """Work between two tokens that lasts until it is let go."""

    def __init__(self, engine: TorchEngine) -> None:
        self._entered, self.leave = threading.Event(), threading.Event()
        self._task = asyncio.create_task(engine._between_tokens(self._work))

    def _work(self) -> bool:
        self._entered.set()
        return self.leave.wait(CEILING)

    async def entered(self) -> None:
        await asyncio.to_thread(self._entered.wait, CEILING)
        for _ in range(10):  # the next token waits for its turn
            await asyncio.sleep(0)

    async def left(self) -> None:
        self.leave.set()
        assert await self._task


@pytest.mark.parametrize("what", ["call", "score"])
async def test_what_comes_during_a_publication_does_not_wait_for_calls_in_flight(what: str) -> None:
    async with serving(stop_token_ids=[], sessions="a") as engine:
        long = asyncio.create_task(engine.generate(PROMPT, lasting(), session="a"))
        await until(lambda: engine.counters.sampled >= 3)
        turn = Turn(engine)
        await turn.entered()
        if what == "call":
            short: asyncio.Task[Any] = asyncio.create_task(
                engine.generate(PROMPT, SamplingParams(max_tokens=2), session="a")
            )
        else:
            short = asyncio.create_task(engine.score(PROMPT))
        await asyncio.sleep(0)
        await turn.left()
        await short
        assert not long.done()
        long.cancel()


async def test_closing_waits_for_a_publication_and_refuses_the_next_one() -> None:
    engine = make_engine(tiny(), stop_token_ids=[])
    turn = Turn(engine)
    await turn.entered()
    second = asyncio.create_task(publish(engine, unique_weights(tiny()), 1))
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closing.done()
    await turn.left()
    with pytest.raises(EngineError, match="the engine was closed"):
        await asyncio.wait_for(second, CEILING)
    await asyncio.wait_for(closing, CEILING)


async def test_closing_fails_calls_in_flight_without_waiting_for_their_end() -> None:
    engine = make_engine(tiny(max_position_embeddings=CONTEXT), stop_token_ids=[], max_batch=1)
    engine.open_session("a")
    calls = [asyncio.create_task(engine.generate(PROMPT, lasting(), session="a")) for _ in range(2)]
    await until(lambda: engine.counters.sampled >= 3)
    await asyncio.wait_for(engine.close(), CEILING)
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(call, CEILING)


async def test_an_interrupted_engine_fails_its_calls_and_can_be_closed() -> None:
    """As a Ctrl-C does that is raised in the middle of it."""
    engine = make_engine(tiny(max_position_embeddings=CONTEXT), stop_token_ids=[])
    engine.open_session("a")
    call = asyncio.create_task(engine.generate(PROMPT, lasting(), session="a"))
    await until(lambda: engine.counters.sampled >= 3)
    assert engine._driver is not None
    engine._driver.cancel()
    with pytest.raises(EngineError, match="interrupted"):
        await asyncio.wait_for(call, CEILING)
    engine.close_session("a")
    await asyncio.wait_for(engine.close(), CEILING)


# Publication in flight


async def test_calls_in_flight_go_on_with_new_weights_over_their_cache() -> None:
    models = [
        tiny(max_position_embeddings=CONTEXT),
        moved(tiny(max_position_embeddings=CONTEXT), 1),
        moved(tiny(max_position_embeddings=CONTEXT), 2),
    ]
    prompts, end = [PROMPT, ids(9, 9), PROMPT[:3]], End()
    async with serving(models[0], stop_token_ids=[], decode=end) as engine:
        for prompt, answer in zip(prompts, await swapped(engine, end, models, prompts), strict=True):
            assert [span.version for span in answer.policy_versions] == [0, 1, 2]
            np.testing.assert_allclose(answer.logprobs, wanted_logprobs(models, prompt, answer), atol=1e-4, rtol=0)
            for version, model in enumerate(models):  # after the first publication no learner has them so
                here = answer.versions_per_token() == version
                gap = np.abs(answer.logprobs - plain_logprobs(model, prompt, answer))[here].max()
                assert gap > 0.05 if version else gap < 1e-4
        # nothing of that is reused: a call that starts now is the new weights' alone
        history = np.concatenate([PROMPT, ids(8)])
        later = await engine.generate(history, SamplingParams(max_tokens=5), session="s0")
        assert engine.counters.reused == 0
    assert_same(later, await alone(models[2], history, SamplingParams(max_tokens=5), stop_token_ids=[]))


async def test_recomputed_caches_are_those_of_the_new_weights() -> None:
    models = [tiny(max_position_embeddings=CONTEXT), moved(tiny(max_position_embeddings=CONTEXT), 1)]
    prompts, end = [PROMPT, ids(9, 9)], End()
    async with serving(models[0], stop_token_ids=[], decode=end, in_flight="recompute") as engine:
        for prompt, answer in zip(prompts, await swapped(engine, end, models, prompts), strict=True):
            versions = answer.versions_per_token()
            for version, model in enumerate(models):
                here = versions == version
                assert here.any()
                plain = plain_logprobs(model, prompt, answer)
                np.testing.assert_allclose(answer.logprobs[here], plain[here], atol=1e-4, rtol=0)
        history = np.concatenate([PROMPT, ids(8)])
        await engine.generate(history, SamplingParams(max_tokens=2), session="s0")
        assert engine.counters.reused == len(PROMPT)


async def test_a_refused_publication_changes_nothing_in_flight() -> None:
    async with serving(stop_token_ids=[], sessions="a") as engine:
        params = SamplingParams(max_tokens=60)
        call = asyncio.create_task(engine.generate(PROMPT, params, session="a"))
        await until(lambda: engine.counters.sampled >= 5)
        with pytest.raises(EngineError, match="version 3 lacks"):
            await publish(engine, {}, 3)
        answer = await call
        assert set(answer.versions_per_token()) == {0} and answer.stop_reason is StopReason.LENGTH
    assert_same(answer, await alone(tiny(), PROMPT, params, stop_token_ids=[]))


async def test_a_call_says_how_long_it_waited_for_its_place() -> None:
    async with serving(stop_token_ids=[], max_batch=1, sessions="a") as engine:
        calls = [engine.generate(PROMPT, SamplingParams(max_tokens=20), session="a") for _ in range(3)]
        first, second, third = [(await call).waited for call in [asyncio.ensure_future(call) for call in calls]]
    assert first is not None and second is not None and third is not None
    assert 0 <= first < second < third  # one after the other
