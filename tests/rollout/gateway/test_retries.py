"""What is a retry and what is a new sample; what becomes of an answer that nobody reads."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.rollout.gateway.servers import Served, Slow, scripted, served, written
from tests.worlds import user
from treadle.core.errors import EngineError
from treadle.core.types import DropReason, StopReason
from treadle.engines.torch_engine import TorchEngine
from treadle.orchestration.config import load_recipe
from treadle.rollout.chat import ChatRenderer
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.replies import plain
from treadle.training.model import load_tokenizer, make_model, tokenizer_directory

BODY: dict[str, Any] = {"model": "m", "messages": [user("hi")]}


def numbering() -> Slow:
    """Answers the number of the call."""
    return Slow(scripted(lambda prompt, number: f"answer {number}"))


async def ask(http: httpx.AsyncClient, address: SessionAddress, body: Any = None, **headers: str) -> str:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await http.post(f"{address.base_url}/chat/completions", json=body or BODY, headers=told)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def hang_up(http: httpx.AsyncClient, server: Served, address: SessionAddress, **headers: str) -> None:
    """Ask, wait until it is being sampled, and go."""
    before = len(server.engine.calls)
    call = asyncio.ensure_future(ask(http, address, **headers))
    await until(lambda: len(server.engine.calls) > before)
    call.cancel()
    await asyncio.wait([call])


@pytest.mark.parametrize("together", [False, True])
async def test_eight_identical_requests_are_eight_samples(together: bool) -> None:
    async with served(numbering()) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        calls = [ask(http, address) for _ in range(8)]
        answers = list(await asyncio.gather(*calls)) if together else [await call for call in calls]
        assert sorted(answers) == [f"answer {number}" for number in range(8)]
        assert sorted(map(written, server.steps())) == sorted(answers)


@pytest.mark.parametrize("together", [False, True])
async def test_a_repeated_key_is_answered_from_the_record(together: bool) -> None:
    async with served(numbering()) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        calls = [ask(http, address, idempotency_key="k") for _ in range(3)]
        answers = list(await asyncio.gather(*calls)) if together else [await call for call in calls]
        assert answers == ["answer 0"] * 3
        assert await ask(http, address, idempotency_key="other") == "answer 1"
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            await ask(http, address, {**BODY, "temperature": 1}, idempotency_key="k")
        assert len(server.steps()) == 2


async def test_the_sdks_retry_count_makes_a_retry_only_of_the_same_body() -> None:
    async with served(numbering()) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        assert await ask(http, address, x_stainless_retry_count="0") == "answer 0"
        assert await ask(http, address, x_stainless_retry_count="1") == "answer 0"
        assert await ask(http, address, {**BODY, "user": "u"}, x_stainless_retry_count="1") == "answer 1"
        assert await ask(http, address, x_stainless_retry_count="0") == "answer 2"
        assert len(server.steps()) == 3


async def test_two_sessions_never_share_an_answer() -> None:
    async with served(numbering()) as server, httpx.AsyncClient() as http:
        first, second = server.open("first", plain), server.open("second", plain)
        assert await ask(http, first, idempotency_key="k") == "answer 0"
        assert await ask(http, second, idempotency_key="k", x_stainless_retry_count="1") == "answer 1"


@pytest.mark.parametrize("headers", [{}, {"x_stainless_retry_count": "1"}])
async def test_a_retry_joins_a_sample_in_flight(headers: dict[str, str]) -> None:
    engine = numbering()
    async with served(engine) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        engine.gate.clear()
        await hang_up(http, server, address)
        again = asyncio.ensure_future(ask(http, address, **headers))
        await asyncio.sleep(0.05)
        engine.gate.set()
        assert await again == "answer 0"
        [step] = server.steps()
        assert step.dropped is None and engine.aborted == 0


async def test_an_answer_that_nobody_read_is_dropped_until_a_retry_reads_it() -> None:
    engine = numbering()
    async with served(engine) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        engine.gate.clear()
        await hang_up(http, server, address)
        engine.gate.set()
        await until(server.steps)
        await until(lambda: server.steps()[0].dropped is DropReason.CANCELLED)
        assert await ask(http, address) == "answer 0"
        [step] = server.steps()
        assert step.dropped is None and written(step) == "answer 0"
        assert await ask(http, address) == "answer 1"  # the record has been read: this is a new sample


async def test_after_the_grace_it_is_aborted_and_recorded_as_cancelled() -> None:
    engine = numbering()
    async with served(engine, grace=0.05) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        engine.gate.clear()
        await hang_up(http, server, address)
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        assert await ask(http, address, x_stainless_retry_count="1") == "answer 1"
        aborted, step = server.steps()
        assert (aborted.dropped, aborted.stop_reason, len(aborted.completion_ids)) == ("cancelled", "abort", 0)
        assert (step.dropped, step.stop_reason) == (None, StopReason.STOP)


async def test_detaching_aborts_what_is_in_flight_and_the_secret_dies() -> None:
    engine = numbering()
    async with served(engine) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        assert await ask(http, address) == "answer 0"
        engine.gate.clear()
        call = asyncio.ensure_future(ask(http, address))
        await until(lambda: len(engine.calls) == 2)
        await server.gateway.detach(address.secret)
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            await call
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            await ask(http, address)
        assert [step.dropped for step in server.steps()] == [None, DropReason.CANCELLED]


async def test_a_failed_call_is_forgotten_and_asked_again() -> None:
    class Failing(Slow):
        failures = 2

        async def generate(self, *a: Any, **k: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise EngineError("out of memory")
            return await super().generate(*a, **k)

    engine = Failing(scripted(lambda prompt, number: "at last"))
    async with served(engine) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        answer = await http.post(f"{address.base_url}/chat/completions", json=BODY, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 503 and "out of memory" in answer.json()["error"]["message"]
        client = server.openai(address)
        said = await client.chat.completions.create(**BODY)  # retries by itself
        assert said.choices[0].message.content == "at last"
        assert len(server.steps()) == 1


async def test_the_openai_clients_own_retry_after_a_timeout() -> None:
    seconds = iter([0.4, 0.0])
    engine = Slow(scripted(lambda prompt, number: f"answer {number}"), lambda: next(seconds, 0.0))
    async with served(engine) as server:
        client = server.openai(server.open(parse=plain)).with_options(timeout=0.2, max_retries=3)
        said = await client.chat.completions.create(**BODY)
        assert said.choices[0].message.content == "answer 0"
        [step] = server.steps()
        assert step.dropped is None


async def test_too_many_requests_in_flight() -> None:
    engine = numbering()
    async with served(engine, max_in_flight=2) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        engine.gate.clear()
        calls = [asyncio.ensure_future(ask(http, address)) for _ in range(2)]
        await until(lambda: len(engine.calls) == 2)
        refused = await http.post(f"{address.base_url}/chat/completions", json=BODY)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        engine.gate.set()
        await asyncio.gather(*calls)
        assert len(server.steps()) == 2


async def test_a_choice_that_fails_takes_the_others_with_it() -> None:
    class Half(Slow):
        async def generate(self, *a: Any, **k: Any) -> Any:
            if len(self.calls) == 2:
                raise EngineError("full")
            return await super().generate(*a, **k)

    async with served(Half(scripted(lambda prompt, number: "x"))) as server, httpx.AsyncClient() as http:
        address = server.open(parse=plain)
        answer = await http.post(f"{address.base_url}/chat/completions", json={**BODY, "n": 3})
        assert answer.status_code == 503
        assert [step.dropped for step in server.steps()] == [DropReason.CANCELLED] * len(server.steps())


# 64 sessions at once


async def stubborn(
    http: httpx.AsyncClient, address: SessionAddress, body: dict[str, Any], key: str, dice: random.Random
) -> list[int]:
    """Ask with random patience, again and again as an SDK does, until there is an answer: its ids."""
    for attempt in range(1000):
        patience = None if attempt > 4 else dice.choice([None, dice.uniform(0, 0.6)])
        headers = {"x-stainless-retry-count": str(attempt), **({"idempotency-key": key} if key else {})}
        try:
            async with asyncio.timeout(patience):
                answer = await http.post(f"{address.base_url}/chat/completions", json=body, headers=headers)
        except TimeoutError:
            await asyncio.sleep(dice.choice([0, 0.3]))  # sometimes for longer than the grace
            continue
        assert answer.status_code == 200, answer.text
        if body["stream"]:
            return streamed_ids(answer.text)
        return list(answer.json()["choices"][0]["token_ids"])
    raise AssertionError("no answer")


def streamed_ids(text: str) -> list[int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [i for event in events for choice in event["choices"] for i in choice.get("token_ids", [])]


async def storm(server: Served, sessions: int, seconds: float, seed: int) -> Counter[str]:
    """Sessions of random turns with random disconnects; every step is where it belongs, once. Counts what happened."""
    found: Counter[str] = Counter()
    end = asyncio.get_running_loop().time() + seconds
    limits = httpx.Limits(max_connections=None)

    async def agent(number: int, http: httpx.AsyncClient) -> None:
        dice = random.Random(seed * 1000 + number)
        name = f"session <{number}>"
        address = server.open(name, plain, max_tokens=40)
        received: list[list[int]] = []
        turn = 0
        while asyncio.get_running_loop().time() < end:
            told: Any = {"messages": [user(f"{name} turn {turn}")], "return_token_ids": True}
            body = {"model": "m", "stream": dice.random() < 0.3, **told}
            # identical ones at once: only a key tells whose retry is whose
            keys = dice.choice([[""], [""], [f"{turn} {i}" for i in range(3)]])
            received += await asyncio.gather(*(stubborn(http, address, body, key, dice) for key in keys))
            turn += 1
        await server.gateway.detach(address.secret)
        server.sessions[name].close()
        steps = server.steps(name)
        live = [step for step in steps if step.dropped is None]
        assert sorted(step.completion_ids.tolist() for step in live) == sorted(received)
        for step in steps:
            assert name in server.renderer.decode(step.prompt_ids)
        found.update(answers=len(received), live=len(live), dropped=len(steps) - len(live))

    async with httpx.AsyncClient(limits=limits, timeout=None) as http:
        await asyncio.gather(*(agent(number, http) for number in range(sessions)))
    return found


async def test_no_step_is_lost_doubled_or_misplaced_in_a_storm_of_disconnects() -> None:
    dice = random.Random(0)
    engine = Slow(scripted(lambda prompt, number: f"unique {number}"), lambda: dice.uniform(0, 0.6))
    async with served(engine, grace=0.1) as server:
        found = await storm(server, sessions=64, seconds=3.0, seed=1)
    assert found["live"] == found["answers"] > 100
    assert found["dropped"] >= engine.aborted > 5


@pytest.mark.slow
async def test_the_same_for_a_minute_on_the_embedded_engine() -> None:
    recipe = load_recipe("demo")
    tokenizer = load_tokenizer(tokenizer_directory(recipe.model))
    end = int(tokenizer.eos_token_id)
    engine = TorchEngine(make_model(recipe.model, len(tokenizer), seed=0), stop_token_ids=[end])
    async with served(engine, ChatRenderer(tokenizer, [end]), grace=0.1) as server:
        found = await storm(server, sessions=64, seconds=60.0, seed=2)
    await engine.close()
    assert found["live"] == found["answers"] > 500
    assert found["dropped"] > 20
