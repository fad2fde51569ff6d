"""The embedded engine: what it reports is what the learner computes, it computes only what is new, and its answers
depend on nothing but the call."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.engines.kit import (
    PROMPT,
    STOP,
    Script,
    ids,
    learner_gap,
    logprobs,
    moved,
    plain_gap,
    play,
    play_all,
    random_ids,
    random_script,
    random_scripts,
    recorded,
    sampling,
    serving,
    texts,
)
from tests.models import FAMILIES, HYBRIDS, SLIDING, drawn_token, exact, full, tiny
from tests.sources import make_engine, publish
from tests.until import CEILING, until
from treadle.core.draws import token_uniforms
from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.types import Ids, SamplingParams, Step, StopReason
from treadle.engines.sampling import processed_logprobs, rules
from treadle.engines.torch import kv_cache
from treadle.engines.torch.batch import most_probable
from treadle.engines.torch.engine import TorchEngine
from treadle.models.weights import unique_weights
from treadle.training.forward import Forward

# What is reported is what the learner computes


# Sinks, soft caps, values smaller than keys, keyword arguments that do not reach attention.
UNUSUAL = [*("gpt-oss-half-sliding", "gemma2-half-sliding", "deepseek-latent", "glm4-moe-lite", "nemotron", "stablelm")]


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *UNUSUAL])
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking would take minutes
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 256]), st.sampled_from([1, 20, 16384]))
def test_recorded_logprobs_are_the_learners(family: str, seed: int, max_batch: int, prefill_tokens: int) -> None:
    """Random multi-turn sessions, several at once, some of which go back to an earlier prefix."""
    model = tiny(family) if family in FAMILIES else exact(family)
    played, _ = recorded(model, random_scripts(seed), max_batch=max_batch, prefill_tokens=prefill_tokens)
    assert learner_gap(model, played) <= (1e-4 if family in FAMILIES else 1e-5)


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", [*FAMILIES, *UNUSUAL])
def test_recorded_logprobs_are_those_of_a_plain_forward_pass(family: str) -> None:
    """Against stock attention, long past the sliding windows, with every wave of another shape."""
    model = tiny(family)
    played, _ = recorded(model, random_scripts(5, sessions=7, turns=6, forks=False))
    assert plain_gap(model, chain.from_iterable(played)) <= 1e-4
    assert max(len(step.full_ids) for steps in played for step in steps) > 20


@pytest.mark.parametrize("family", SLIDING)
def test_padding_leaves_nothing_behind_that_a_grown_cache_could_show(family: str) -> None:
    """One session's long turn makes the cache grow over positions that held the others' padding."""
    model = tiny(family)
    scripts = [
        Script(PROMPT, seed=1, observations=[ids(1), random_ids(np.random.default_rng(0), 80, 80), ids(2)]),
        Script(PROMPT[:2], seed=2, observations=[ids(*range(9)), ids(3), ids(*range(20))]),
        Script(ids(7), seed=3, observations=[ids(4, 4), ids(*range(12)), ids(5)]),
    ]
    assert plain_gap(model, chain.from_iterable(recorded(model, scripts)[0])) <= 1e-4


async def test_score_is_what_generate_reported() -> None:
    async with serving() as engine:
        for temperature in (0.5, 1.0, 1.7):
            engine.open_session("a")
            answer = await engine.generate(PROMPT, sampling(temperature=temperature), session="a")
            engine.close_session("a")
            scores = await engine.score(np.concatenate([PROMPT, answer.token_ids]), temperature=temperature)
            assert scores.dtype == np.float32 and len(scores) == len(PROMPT) + len(answer.token_ids) - 1
            np.testing.assert_allclose(scores[len(PROMPT) - 1 :], answer.logprobs, atol=1e-5)
        assert len(await engine.score(PROMPT[:1])) == 0


def test_a_bfloat16_engine_stays_near_and_keeps_its_positions_exact() -> None:
    """Rotary frequencies rounded to bfloat16 would turn late positions by whole radians."""
    model = tiny()
    played, engine = recorded(model, [Script(PROMPT, max_tokens=20)], dtype="bfloat16")
    assert {p.dtype for p in engine._model.model.parameters()} == {torch.bfloat16}
    for name, buffer in engine._model.model.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
    assert 0 < plain_gap(model, played[0]) < 0.25


# It computes only what is new


async def test_a_turn_prefills_only_what_is_new() -> None:
    async with serving(sessions="a") as engine:
        prompt, cached = PROMPT, 0
        for turn in range(4):
            before = engine.counters.prefilled, engine.counters.reused
            answer = await engine.generate(prompt, sampling(turn), session="a")
            assert engine.counters.prefilled - before[0] == len(prompt) - cached
            assert engine.counters.reused - before[1] == cached
            cached = len(prompt) + len(answer.token_ids) - 1  # the last sampled token was never fed
            prompt = np.concatenate([prompt, answer.token_ids, ids(7, 7)])
        assert engine.counters.shared == 0


async def test_a_groups_prompt_is_prefilled_once() -> None:
    other = ids(9, 9)
    async with serving() as engine:
        await play_all(engine, [Script(p, seed=n) for n, p in enumerate([PROMPT, other, PROMPT, PROMPT])])
        counters = engine.counters
        assert (counters.prefilled, counters.shared, counters.reused) == (len(PROMPT) + len(other), 2 * len(PROMPT), 0)


async def test_what_fresh_prompts_begin_with_is_prefilled_once() -> None:
    """Instructions and examples, mostly; what is too short for a pass of its own is computed with each prompt."""
    begin = ids(*(n % 25 + 3 for n in range(100)))
    prompts = [np.concatenate([begin, ids(7, n)]) for n in (5, 6, 5)]
    async with serving() as engine:
        await play_all(engine, [Script(p, seed=n) for n, p in enumerate(prompts)])
        counters = engine.counters
        # 101 tokens are common to all; one more of each of two prompts; the third is the first once more
        assert (counters.prefilled, counters.shared, counters.reused) == (101 + 2, 101 + 102, 0)
    async with serving() as engine:
        await play_all(engine, [Script(p[60:], seed=n) for n, p in enumerate(prompts)])
        assert (engine.counters.prefilled, engine.counters.shared) == (2 * 42, 42)


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_what_is_sampled_after_a_common_beginning_is_what_the_learner_computes(family: str) -> None:
    model, random = exact(family) if family in HYBRIDS else tiny(family), np.random.default_rng(3)
    begin = random_ids(random, 70, 80)
    scripts = [random_script(random, np.concatenate([begin, random_ids(random, 1, 9)]), 2, False) for _ in range(5)]
    together, engine = recorded(model, scripts)
    assert engine.counters.shared >= 4 * len(begin)
    assert texts(together) == texts([recorded(model, [script])[0][0] for script in scripts])
    assert learner_gap(model, together) <= 1e-4


async def test_the_cache_is_free_while_no_session_is_open() -> None:
    async with serving() as engine:
        for name in ("a", "b"):
            engine.open_session(name)
        await asyncio.gather(*(engine.generate(PROMPT, sampling(), session=name) for name in ("a", "b")))
        engine.close_session("a")
        await engine.generate(PROMPT, sampling(), session="b")
        assert engine._batch._cached.cache.layers
        engine.close_session("b")
        await until(lambda: not engine._batch._cached.cache.layers)  # a worker lets go of it


async def test_a_fork_reuses_the_common_prefix_only() -> None:
    async with serving(sessions="a") as engine:
        answer = await engine.generate(PROMPT, sampling(), session="a")
        fork = np.concatenate([PROMPT[:3], ids(8, 8)])
        await engine.generate(fork, sampling(1), session="a")
        assert engine.counters.reused == 3 and engine.counters.prefilled == len(PROMPT) + 2
        prompt = np.concatenate([PROMPT, answer.token_ids])  # back to the first branch, which is there still
        await engine.generate(prompt, sampling(2), session="a")
        assert engine.counters.reused == 3 + len(prompt) - 1


async def test_the_same_prompt_again_still_has_a_token_to_compute() -> None:
    async with serving(sessions="a") as engine:
        one = await engine.generate(PROMPT, sampling(), session="a")
        two = await engine.generate(PROMPT, sampling(), session="a")
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert engine.counters.reused == len(PROMPT) - 1


# Answers depend on nothing but the call


def test_the_same_seed_gives_the_same_bits_and_another_one_other_tokens() -> None:
    model = tiny()
    one, two, other = (recorded(model, random_scripts(seed))[0] for seed in (1, 1, 2))
    assert texts(one) == texts(two) != texts(other)
    assert logprobs(one).tobytes() == logprobs(two).tobytes()
    fixed = [recorded(model, [Script(PROMPT, seed=seed, max_tokens=20)])[0] for seed in range(4)]
    assert len({str(texts(played)) for played in fixed}) == 4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_each_token_is_the_one_that_its_address_draws(temperature: float) -> None:
    """Token n of a call: its seed's draw number n, from the distribution after all tokens before it."""
    model = tiny()
    scripts = [Script(PROMPT, temperature, seed, [ids(6, 6)], max_tokens=12) for seed in range(8)]
    played, _ = recorded(model, scripts, stop_token_ids=[])
    checked = 0
    for step in (step for steps in played for step in steps):
        with torch.no_grad():
            logits = full(model(torch.from_numpy(step.full_ids.astype(np.int64))[None]).logits[0])
        for number, token in enumerate(step.completion_ids):
            draw = float(token_uniforms(np.array([step.sampling.seed], np.uint64), number)[0])
            wanted, _, margin = drawn_token(logits[len(step.prompt_ids) - 1 + number], temperature, draw)
            if margin > 1e-4:
                checked += 1
                assert token == wanted
    assert checked > 150


def test_the_order_of_arrival_does_not_change_bits() -> None:
    """Sessions of unequal speed: the rows of a wave stand in the order of opening."""
    model = tiny()
    scripts = random_scripts(4, sessions=6)

    async def run(delays: Sequence[int]) -> list[list[Step]]:
        async def late(name: str, script: Script, delay: int) -> list[Step]:
            for _ in range(delay):
                await asyncio.sleep(0)
            return await play(engine, name, script)

        async with serving(model) as engine:
            for number in range(len(scripts)):
                engine.open_session(f"s{number}")
            return list(await asyncio.gather(*[late(f"s{n}", scripts[n], delay) for n, delay in enumerate(delays)]))

    one, two, three = (asyncio.run(run(delays)) for delays in ([0] * 6, [5, 4, 3, 2, 1, 0], [0, 7, 0, 9, 2, 2]))
    assert texts(one) == texts(two) == texts(three)
    assert logprobs(one).tobytes() == logprobs(two).tobytes() == logprobs(three).tobytes()


def test_the_event_loops_thread_gives_the_same_bits_and_failures_as_an_own_one() -> None:
    model, scripts = tiny(), random_scripts(5)
    (threaded, _), (inline, engine) = (recorded(model, scripts, own_thread=flag) for flag in (True, False))
    assert texts(threaded) == texts(inline)
    assert logprobs(threaded).tobytes() == logprobs(inline).tobytes()
    assert engine.counters.sampled == sum(len(step.completion_ids) for steps in inline for step in steps)


# How a completion ends


async def test_greedy_is_the_argmax_and_certain() -> None:
    model = tiny()
    async with serving(model, stop_token_ids=[], sessions="a") as engine:
        one = await engine.generate(PROMPT, sampling(1, temperature=0.0, max_tokens=8), session="a")
        two = await engine.generate(PROMPT, sampling(2, temperature=0.0, max_tokens=8), session="a")
    whole = np.concatenate([PROMPT, one.token_ids]).astype(np.int64)
    with torch.no_grad():
        best = model(torch.from_numpy(whole)[None]).logits[0].argmax(-1).numpy()
    assert one.token_ids.tolist() == best[len(PROMPT) - 1 : -1].tolist() == two.token_ids.tolist()
    assert one.logprobs.tolist() == [0.0] * 8


def test_a_stop_token_ends_the_completion_and_is_part_of_it() -> None:
    played, _ = recorded(tiny(), [Script(PROMPT, seed=n, max_tokens=30) for n in range(40)], stop_token_ids=[STOP, 3])
    ended = 0
    for (step,) in played:
        tokens = step.completion_ids.tolist()
        assert not {STOP, 3} & set(tokens[:-1])
        if step.stop_reason is StopReason.STOP:
            ended += 1
            assert tokens[-1] in (STOP, 3)
        else:
            assert step.stop_reason is StopReason.LENGTH and len(tokens) == 30 and tokens[-1] not in (STOP, 3)
    assert ended > 0


def test_a_stop_string_ends_the_completion_at_the_token_that_completes_it() -> None:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(f"<{t}>" for t in tokens)

    free, _ = recorded(tiny(), [Script(PROMPT, seed=3, max_tokens=20)], stop_token_ids=[], decode=decode)
    whole = free[0][0].completion_ids
    stop = f"{whole[4]}><{whole[5]}"  # spans two tokens
    script = Script(PROMPT, seed=3, max_tokens=20, stop=("never", stop))
    [[step]], _ = recorded(tiny(), [script], stop_token_ids=[], decode=decode)
    cut = decode(whole.tolist()).index(stop)
    wanted = next(n for n in range(20) if len(decode(whole[:n].tolist())) >= cut + len(stop))
    assert step.completion_ids.tolist() == whole[:wanted].tolist()
    assert step.stop_reason is StopReason.STOP and len(step.logprobs) == wanted


# Waves


async def settle(engine: TorchEngine) -> None:
    """Time enough for a wave to start, if one would."""
    for _ in range(10):
        await asyncio.sleep(0.001)


async def test_a_wave_waits_for_every_open_session() -> None:
    async with serving(sessions="abc") as engine:
        first = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        second = asyncio.create_task(engine.generate(PROMPT, sampling(), session="c"))
        await settle(engine)
        assert not first.done() and engine.counters.prefilled == 0
        third = asyncio.create_task(engine.generate(PROMPT, sampling(), session="b"))
        await asyncio.gather(first, second, third)
        assert engine.counters.prefilled == len(PROMPT)  # one wave


async def test_a_session_that_is_cancelled_and_closed_releases_the_others() -> None:
    async with serving(sessions="abc") as engine:
        calls = {n: asyncio.create_task(engine.generate(PROMPT, sampling(), session=n)) for n in "ab"}
        await settle(engine)
        calls["b"].cancel()
        await settle(engine)
        engine.close_session("b")
        third = asyncio.create_task(engine.generate(PROMPT, sampling(), session="c"))
        assert len((await asyncio.wait_for(calls["a"], CEILING)).token_ids)
        await third
        assert calls["b"].cancelled()


async def test_a_session_opened_late_joins_and_one_opened_in_the_same_tick_is_waited_for() -> None:
    async with serving(sessions="a") as engine:
        call = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        await asyncio.sleep(0)  # the wave is scheduled, not started
        engine.open_session("b")
        await settle(engine)
        assert not call.done()
        other = await engine.generate(PROMPT, sampling(), session="b")
        assert (await call).token_ids.tolist() == other.token_ids.tolist()


async def test_a_call_whose_session_is_closed_by_somebody_else_fails() -> None:
    async with serving(sessions="ab") as engine:
        call = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        await settle(engine)
        engine.close_session("a")
        with pytest.raises(EngineError, match="'a' was closed"):
            await asyncio.wait_for(call, CEILING)
        assert len((await engine.generate(PROMPT, sampling(), session="b")).token_ids)


class Gate:
    """A decoder that holds the wave's thread until it is opened, and may fail."""

    def __init__(self) -> None:
        self.entered, self.leave, self.error = threading.Event(), threading.Event(), ""

    def __call__(self, tokens: Sequence[int]) -> str:
        self.entered.set()
        self.leave.wait(CEILING)
        if self.error:
            raise ValueError(self.error)
        return ""

    async def reached(self) -> None:
        await asyncio.to_thread(self.entered.wait, CEILING)


STOPPING = SamplingParams(max_tokens=3, stop=("stop",))  # makes the engine decode


async def test_a_cancelled_call_of_a_running_wave_harms_nobody_and_its_session_may_go_on() -> None:
    gate = Gate()
    async with serving(decode=gate, sessions="ab") as engine:
        a = asyncio.create_task(engine.generate(PROMPT, STOPPING, session="a"))
        b = asyncio.create_task(engine.generate(PROMPT, STOPPING, session="b"))
        await gate.reached()
        a.cancel()
        await settle(engine)
        again = asyncio.create_task(engine.generate(PROMPT, sampling(7), session="a"))
        gate.leave.set()
        answer = await b
        engine.close_session("b")
        alone = await play_again(sampling(7))
        assert (await again).token_ids.tolist() == alone.token_ids.tolist()
        assert len(answer.token_ids) and a.cancelled()


async def play_again(params: SamplingParams, prompt: Ids = PROMPT) -> Completion:
    """The call alone, on a fresh engine."""
    async with serving(sessions="a") as engine:
        return await engine.generate(prompt, params, session="a")


async def test_a_wave_that_fails_fails_its_calls_and_the_engine_goes_on() -> None:
    """Whatever the failed wave left in the cache is not read again."""
    gate = Gate()
    gate.leave.set()
    async with serving(decode=gate) as engine:
        prompts = {"a": PROMPT, "b": ids(6, 2), "c": ids(9, 9, 9, 1)}
        for name in prompts:
            engine.open_session(name)
        first = await asyncio.gather(*[engine.generate(p, sampling(), session=n) for n, p in prompts.items()])
        engine.close_session("a")  # the rows of the others move
        gate.error = "broken decoder"
        forks = {n: np.concatenate([prompts[n][:1], ids(7, 7, 7, 7, 7, 7, 7)]) for n in "bc"}
        for result in await asyncio.gather(
            *[engine.generate(p, STOPPING, session=n) for n, p in forks.items()], return_exceptions=True
        ):
            assert isinstance(result, EngineError) and "ValueError: broken decoder" in str(result)
        longer = {n: np.concatenate([prompts[n], first["abc".index(n)].token_ids, ids(4)]) for n in "bc"}
        for name, answer in zip(
            "bc",
            await asyncio.gather(*[engine.generate(p, sampling(5), session=n) for n, p in longer.items()]),
            strict=True,
        ):
            alone = await play_again(sampling(5), longer[name])
            assert answer.token_ids.tolist() == alone.token_ids.tolist()
            np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-5)


# Publication


@pytest.mark.parametrize("lock_step", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
async def test_an_engine_that_has_slept_samples_as_before(family: str, lock_step: bool) -> None:
    model = tiny(family)
    async with serving(model, lock_step=lock_step, sessions="a") as engine:
        before = await engine.generate(PROMPT, sampling(), session="a")
        for _ in range(2):  # twice is as good as once
            await engine.sleep()
        held = unique_weights(engine._model.model).values()
        assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
        assert engine.status()[0].cache == 0
        for call in (engine.generate(PROMPT, sampling(), session="a"), engine.score(PROMPT)):
            with pytest.raises(EngineError, match="sleeps, without weights; publish some"):
                await call
        await publish(engine, unique_weights(model), 1)
        after = await engine.generate(PROMPT, sampling(), session="a")
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs.tolist() == before.logprobs.tolist()


async def test_an_engine_does_not_sleep_while_calls_run() -> None:
    gate = Gate()
    async with serving(decode=gate, lock_step=False, sessions="a") as engine:
        call = asyncio.create_task(engine.generate(PROMPT, STOPPING, session="a"))
        await gate.reached()
        asleep = asyncio.create_task(engine.sleep())
        await settle(engine)  # sleep takes the turn between this token and the next
        gate.leave.set()
        with pytest.raises(EngineError, match="1 calls run: the engine cannot sleep"):
            await asleep
        assert len((await call).token_ids) == 3


@pytest.mark.parametrize("family", list(FAMILIES))
async def test_publication_swaps_every_weight_and_drops_caches(family: str) -> None:
    old, new = tiny(family), moved(tiny(family))
    async with serving(old, sessions="a") as engine:
        first = await engine.generate(PROMPT, sampling(), session="a")
        assert set(first.versions_per_token()) == {0}
        await publish(engine, unique_weights(new), 3)
        prompt = np.concatenate([PROMPT, first.token_ids, ids(8)])
        second = await engine.generate(prompt, sampling(1), session="a")
        assert set(second.versions_per_token()) == {3}
        assert engine.counters.reused == 0
    async with serving(new, sessions="a") as engine:
        fresh = await engine.generate(prompt, sampling(1), session="a")
    assert second.token_ids.tolist() == fresh.token_ids.tolist()
    assert second.logprobs.tobytes() == fresh.logprobs.tobytes()


async def test_the_engine_works_on_its_own_copy() -> None:
    """The optimizer may change the trained model while the engine samples."""
    model = tiny()
    async with serving(model, sessions="a") as engine:
        before = await engine.generate(PROMPT, sampling(), session="a")
        moved(model)
        after = await engine.generate(PROMPT, sampling(), session="a")
        assert before.token_ids.tolist() == after.token_ids.tolist()
        await publish(engine, unique_weights(model), 1)
        moved(model)
        one = await engine.generate(PROMPT, sampling(), session="a")
        assert one.logprobs[0] != before.logprobs[0]
    assert model.config._attn_implementation != engine._model.model.config._attn_implementation
    assert all(p.requires_grad for p in model.parameters())


async def test_a_model_prepared_for_training_can_be_served() -> None:
    stock, model = tiny(), tiny()
    Forward(model, budget=64, gradient_checkpointing=True)
    async with serving(stock) as one, serving(model) as other:
        answers = []
        for engine in (one, other):
            engine.open_session("a")
            answers.append(await engine.generate(PROMPT, sampling(), session="a"))
        assert answers[0].logprobs.tobytes() == answers[1].logprobs.tobytes()
    assert model.training


@pytest.mark.parametrize("broken", ["missing", "shape"])
async def test_weights_that_do_not_fit_are_refused_whole(broken: str) -> None:
    async with serving(sessions="a") as engine:
        before = await engine.generate(PROMPT, sampling(), session="a")
        weights = dict(unique_weights(moved(tiny())))
        name = "model.norm.weight"
        if broken == "missing":
            del weights[name]
        else:
            weights[name] = weights[name][:1]
        with pytest.raises(EngineError, match=rf"version 9 .*{name}"):
            await publish(engine, weights, 9)
        after = await engine.generate(PROMPT, sampling(), session="a")
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert set(after.versions_per_token()) == {0}


# Errors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_weights_that_are_not_numbers_are_told_and_those_published_next_serve(temperature: float) -> None:
    broken = tiny()
    with torch.no_grad():
        next(broken.parameters())[3] = float("nan")  # the embedding of a token of the prompt
    async with serving(broken, sessions="a") as engine:
        params = sampling(temperature=temperature)
        with pytest.raises(EngineError, match="logits are not finite"):
            await engine.generate(PROMPT, params, session="a")
        await publish(engine, unique_weights(tiny()), 1)
        answer = await engine.generate(PROMPT, params, session="a")
        assert set(answer.versions_per_token()) == {1} and np.isfinite(answer.logprobs).all()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (ids(), sampling(), r"non-empty and in \[0, 32\)"),
        (ids(1, 32), sampling(), r"non-empty and in \[0, 32\)"),
        (ids(1, -1), sampling(), r"non-empty and in \[0, 32\)"),
        (np.ones(251, np.int32), sampling(), "prompt of 251 . max_tokens 6 exceeds the model's context of 256"),
        (PROMPT, sampling(stop=("x",)), "stop strings .* need an engine that was given `decode`"),
    ],
)
async def test_impossible_calls_are_refused_before_anybody_waits(
    prompt: Ids, params: SamplingParams, message: str
) -> None:
    async with serving(sessions="a") as engine:
        with pytest.raises(EngineError, match=message):
            await engine.generate(prompt, params, session="a")
        assert len((await engine.generate(np.ones(250, np.int32), sampling(), session="a")).token_ids)


@pytest.mark.parametrize(
    ("tokens", "temperature", "message"),
    [
        (ids(), 1.0, r"non-empty and in \[0, 32\)"),
        (ids(1, 32), 1.0, r"non-empty and in \[0, 32\)"),
        (np.ones(257, np.int32), 1.0, "257 tokens exceed the model's context of 256"),
        (PROMPT, 0.0, "temperature"),
    ],
)
async def test_what_cannot_be_scored_is_refused(tokens: Ids, temperature: float, message: str) -> None:
    async with serving() as engine:
        with pytest.raises(EngineError, match=message):
            await engine.score(tokens, temperature=temperature)


async def test_a_closed_engine_refuses_calls_and_fails_those_that_wait() -> None:
    engine = make_engine(tiny(), stop_token_ids=[], lock_step=True)
    engine.open_session("a")
    engine.open_session("b")
    waiting = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
    await settle(engine)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(waiting, CEILING)
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: engine.generate(PROMPT, sampling(), session="b"),
        lambda: engine.score(PROMPT),
        lambda: publish(engine, unique_weights(tiny()), 1),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(call(), CEILING)


@pytest.mark.parametrize("family", ["gpt-oss-half-sliding", "gemma2-half-sliding"])
def test_prompts_with_sinks_and_soft_caps_are_computed_in_blocks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scripts = tiny(family), random_scripts(5)
    whole, _ = recorded(model, scripts)
    monkeypatch.setattr(kv_cache, "_SCORES", 100)
    blocks, _ = recorded(model, scripts)
    np.testing.assert_allclose(logprobs(blocks), logprobs(whole), atol=1e-5, rtol=0)


# What it could have sampled


@pytest.mark.parametrize(("count", "filters"), [(4, {}), (2**31 - 1, {}), (4, {"top_k": 9}), (99, {"top_p": 0.6})])
def test_probabilities_are_those_it_samples_by(count: int, filters: dict[str, Any]) -> None:
    """Of the most probable tokens; of all that filters left, if asked for as many; none where it chose greedily."""
    model = tiny()

    async def run() -> tuple[Completion, Completion]:
        async with serving(model, sessions="ab", probabilities=count) as engine:
            tempered, greedy = sampling(3, temperature=0.7, **filters), sampling(temperature=0.0, **filters)
            answers = engine.generate(PROMPT, tempered, session="a"), engine.generate(PROMPT, greedy, session="b")
            return tuple(await asyncio.gather(*answers))  # type: ignore[return-value]

    sampled, greedy = asyncio.run(run())
    found = sampled.probabilities
    assert greedy.probabilities is None and found is not None and len(found) == len(sampled.token_ids)
    how = rules([SamplingParams(temperature=0.7, **filters)])
    for token in range(len(found)):
        before = torch.from_numpy(np.concatenate([PROMPT, sampled.token_ids[:token]]).astype(np.int64))
        with torch.no_grad():
            p = processed_logprobs(model(input_ids=before[None], use_cache=False).logits[:, -1], how)[0].exp().numpy()
        wanted = sorted(np.argsort(-p)[: min(count, int((p > 0).sum()))].tolist())
        one = found[token : token + 1]
        assert one.of.ids.tolist() == wanted
        np.testing.assert_allclose(one.values, p[wanted], rtol=1e-4)


def test_as_probable_as_the_last_one_is_most_probable_too() -> None:
    [(found, values)] = most_probable(torch.tensor([[0.1, 0.2, 0.2, 0.2, 0.3]]).log(), 2)
    assert found.tolist() == [1, 2, 3, 4] and values == pytest.approx([0.2, 0.2, 0.2, 0.3])
