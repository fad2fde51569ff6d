"""Admission by KV budget: never above it, in order, everyone in the end."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kv import World, simulate
from benchmarks.measure import Row
from tests.clocks import virtually
from treadle.core.config import build
from treadle.core.errors import ConfigError, EngineError
from treadle.core.types import SamplingParams
from treadle.engines.config import EngineConfig
from treadle.engines.kv_budget import BudgetedEngine, Episode, ExpectedTokens, KVBudget, budgeted, peak_tokens
from treadle.testing import FakeEngine

SIZES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 90)), min_size=1, max_size=30)


def simulated_peak(episodes: list[Episode]) -> int:
    """All grow by a token at a time, and leave when they are done."""
    peak = 0
    for t in range(max((episode.remaining for episode in episodes), default=0) + 1):
        peak = max(peak, sum(episode.held + t for episode in episodes if episode.remaining >= t))
    return peak


@given(SIZES)
def test_the_peak_is_that_of_growing_token_by_token(sizes: list[tuple[int, int]]) -> None:
    episodes = [Episode(held, held + left) for held, left in sizes]
    assert peak_tokens(episodes) == simulated_peak(episodes)


@given(sizes=SIZES, capacity=st.integers(1, 100), data=st.data())
def test_never_above_the_budget_in_order_and_everyone_in_the_end(
    sizes: list[tuple[int, int]], capacity: int, data: st.DataObject
) -> None:
    budget = KVBudget(capacity)
    running: list[str] = []
    started: list[str] = []

    def start(names: list[str]) -> None:
        running.extend(names)
        started.extend(names)
        own = [Episode(held, held + left) for held, left in (sizes[int(name)] for name in running)]
        assert sorted(budget.admitted) == sorted(running)
        assert peak_tokens(own) <= capacity or len(running) == 1

    for number, (held, left) in enumerate(sizes):
        start(budget.request(str(number), Episode(held, held + left)))
        if data.draw(st.booleans()) and running:
            start(budget.release(running.pop(data.draw(st.integers(0, len(running) - 1)))))
    while running:
        start(budget.release(running.pop(data.draw(st.integers(0, len(running) - 1)))))
    assert started == [str(number) for number in range(len(sizes))]
    assert not budget.admitted and not budget.waiting


@given(sizes=SIZES, capacity=st.integers(1, 200))
def test_episodes_that_grow_as_expected_never_exceed_the_budget(sizes: list[tuple[int, int]], capacity: int) -> None:
    """Each that is admitted grows by a token at a time; others start when one ends."""
    budget, running = KVBudget(capacity), dict[str, Episode]()
    known = {str(number): Episode(held, held + left) for number, (held, left) in enumerate(sizes)}
    for name, episode in known.items():
        running |= {admitted: known[admitted] for admitted in budget.request(name, episode)}
    while running:
        assert sum(episode.held for episode in running.values()) <= capacity or len(running) == 1
        ended = [name for name, episode in running.items() if episode.remaining == 0]
        running = {name: Episode(e.held + 1, e.final) for name, e in running.items() if name not in ended}
        budget.admitted = {**running, **{name: known[name] for name in ended}}  # all of them at once
        for name in ended:
            running |= {admitted: known[admitted] for admitted in budget.release(name)}
    assert not budget.waiting


def test_one_that_is_too_large_starts_alone() -> None:
    budget = KVBudget(10)
    assert budget.request("small", Episode(2, 4)) == ["small"]
    assert budget.request("large", Episode(1, 11)) == []
    assert budget.request("late", Episode(1, 1)) == []  # does not overtake
    assert budget.release("small") == ["large"]
    assert budget.release("large") == ["late"]


def test_one_that_gives_up_makes_way() -> None:
    budget = KVBudget(10)
    budget.request("first", Episode(8, 8))
    budget.request("second", Episode(8, 8))
    budget.request("third", Episode(2, 2))
    assert budget.release("second") == ["third"]
    assert budget.release("unknown") == []


def test_one_that_ends_soon_lets_others_start_and_one_that_outgrows_holds_them_back() -> None:
    budget = KVBudget(22)
    assert budget.request("a", Episode(4, 15)) == ["a"]
    assert budget.request("b", Episode(4, 15)) == []  # 30 at the end of both
    assert budget.update("a", Episode(12, 15)) == ["b"]  # 15 + 7 when a ends, and then 15
    budget.update("a", Episode(30, 40))
    assert budget.request("c", Episode(1, 2)) == []


def test_what_is_expected_is_what_was_seen_last() -> None:
    expected = ExpectedTokens(1000)
    assert expected.final(0) == 1000
    for _ in range(4):
        expected.note(200)
    assert expected.final(100) == 600  # half of the first few are not known
    assert expected.final(200) == 1000  # as the others that went on
    for _ in range(4):
        expected.note(300)
    assert expected.final(100) == 250
    assert expected.final(250) == 300
    assert expected.final(300) == 300  # none that is known held more
    for _ in range(300):
        expected.note(401)
    assert expected.final(1) == 401


async def call(engine: BudgetedEngine, session: str, prompt: int, tokens: int) -> int:
    sampling = SamplingParams(max_tokens=tokens)
    return len((await engine.generate(np.zeros(prompt, np.int32), sampling, session=session)).token_ids)


def budget_of_100(seconds: float = 1.0) -> tuple[FakeEngine, BudgetedEngine]:
    fake = FakeEngine(lambda prompt, sampling: [1] * sampling.max_tokens, delay=lambda: seconds)
    engine = BudgetedEngine(fake, 100, longest=60)
    for session in "abc":
        engine.open_session(session)
    return fake, engine


def test_sessions_wait_for_their_first_call_only() -> None:
    async def play() -> None:
        fake, engine = budget_of_100()
        first, second = (asyncio.ensure_future(call(engine, name, 10, 10)) for name in "ab")
        assert await first == 10
        assert fake.running == 0 and not second.done()
        assert [part.waiting for part in engine.status()] == [None, 1]
        assert await call(engine, "a", 30, 10) == 10  # admitted once and for all
        engine.close_session("a")
        assert await second == 10
        assert await call(engine, "b", 30, 20) == 20
        assert len(await engine.score(np.zeros(3, np.int32))) == 2
        await engine.close()

    virtually(play())


def test_a_session_that_is_closed_while_it_waits_fails_and_makes_way() -> None:
    async def play() -> None:
        _, engine = budget_of_100()
        first, second, third = (asyncio.ensure_future(call(engine, name, 10, 10)) for name in "abc")
        await asyncio.sleep(0)
        engine.close_session("b")
        with pytest.raises(EngineError, match="not open"):
            await second
        await first
        engine.close_session("a")
        assert await third == 10
        engine.close_session("c")
        engine.close_session("never opened")

    virtually(play())


def test_the_setting() -> None:
    fake = FakeEngine(lambda prompt, sampling: [])
    assert budgeted(fake, EngineConfig(), 10) is fake
    with pytest.raises(ConfigError, match="vLLM preempts episodes itself; leave it out"):
        build(EngineConfig, {"kind": "vllm", "kv_budget": 5})
    assert isinstance(budgeted(fake, EngineConfig(kv_budget=5, lock_step=False), 10), BudgetedEngine)
    with pytest.raises(ConfigError, match=r"engine\.lock_step=false"):
        budgeted(fake, EngineConfig(kv_budget=5, lock_step=True), 10)


def test_in_the_simulator_growing_episodes_thrash_by_count_and_not_by_budget() -> None:
    world = World(cache=100_000, episodes=160, prefill=5_000.0)
    crowded, budget = (figures(simulate(world, count)) for count in (64, None))
    assert crowded["of these again"] > 0.8 > 0.3 > budget["of these again"]
    assert budget["sampled tokens/s"] > 1.5 * crowded["sampled tokens/s"]


def figures(row: Row) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name != "admission"}
