"""What is a retry and what is a new sample; what becomes of an answer that nobody reads."""

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from tests.rollout.gateway.servers import Served, Slow, asked, scripted, served, written
from tests.until import CEILING, until
from tests.worlds import hang, plain_renderer, user
from treadle.core.engine import Completion
from treadle.core.errors import DataError, EngineError
from treadle.core.types import DropReason, Ids, SamplingParams, StopReason
from treadle.rendering.replies import plain
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.gateway.retries import GivenUp

BODY: dict[str, Any] = {"model": "m", "messages": [user("hi")]}


class Failing(Slow):
    """Fails at these calls, counted from 1, once `when` is true; says "x" otherwise."""

    def __init__(self, *numbers: int, when: Callable[[], bool] = lambda: True) -> None:
        super().__init__(scripted(lambda prompt, number: "x"))
        self.numbers, self.when, self.asked = numbers, when, 0

    async def generate(self, *a: Any, **k: Any) -> Any:
        self.asked += 1
        if self.asked not in self.numbers:
            return await super().generate(*a, **k)
        self.calls.append(a[0])
        await until(self.when)
        raise EngineError("out of memory")


def numbering() -> Slow:
    """Answers the number of the call."""
    return Slow(scripted(lambda prompt, number: f"answer {number}"))


async def ask(http: httpx.AsyncClient, address: SessionAddress, body: Any = None, **headers: str) -> str:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await http.post(f"{address.base_url}/chat/completions", json=body or BODY, headers=told)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


async def hang_up(http: httpx.AsyncClient, server: Served, address: SessionAddress, **headers: str) -> None:
    """Ask an engine that answers later, wait until it is being sampled, and go."""
    assert isinstance(server.engine, Slow)
    server.engine.gate.clear()
    before = len(server.engine.calls)
    call = asyncio.ensure_future(ask(http, address, **headers))
    await until(lambda: len(server.engine.calls) > before)
    call.cancel()
    await asyncio.wait([call])


def joined(server: Served, address: SessionAddress) -> int:
    """Connections that wait for what is being sampled."""
    attached = server.gateway.find(address.secret)
    assert attached is not None
    return sum(exchange.waiting for exchange in attached.exchanges._running)


@pytest.mark.parametrize("together", [False, True])
async def test_eight_identical_requests_are_eight_samples(together: bool) -> None:
    async with asked(numbering()) as (server, http, address):
        calls = [ask(http, address) for _ in range(8)]
        answers = list(await asyncio.gather(*calls)) if together else [await call for call in calls]
        assert sorted(answers) == [f"answer {number}" for number in range(8)]
        assert sorted(map(written, server.steps())) == sorted(answers)


@pytest.mark.parametrize("together", [False, True])
async def test_a_repeated_key_is_answered_from_the_record(together: bool) -> None:
    async with asked(numbering()) as (server, http, address):
        calls = [ask(http, address, idempotency_key="k") for _ in range(3)]
        answers = list(await asyncio.gather(*calls)) if together else [await call for call in calls]
        assert answers == ["answer 0"] * 3
        assert await ask(http, address, idempotency_key="other") == "answer 1"
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            await ask(http, address, {**BODY, "temperature": 1}, idempotency_key="k")
        assert len(server.steps()) == 2


async def test_the_sdks_retry_count_makes_a_retry_only_of_the_same_body() -> None:
    async with asked(numbering()) as (server, http, address):
        assert await ask(http, address, x_stainless_retry_count="0") == "answer 0"
        assert await ask(http, address, x_stainless_retry_count="1") == "answer 0"
        assert await ask(http, address, {**BODY, "user": "u"}, x_stainless_retry_count="1") == "answer 1"
        assert await ask(http, address, x_stainless_retry_count="0") == "answer 2"
        assert len(server.steps()) == 3


@pytest.mark.parametrize("headers", [{}, {"x_stainless_retry_count": "1"}])
async def test_a_retry_joins_a_sample_in_flight(headers: dict[str, str]) -> None:
    engine = numbering()
    async with asked(engine, grace=CEILING) as (server, http, address):
        await hang_up(http, server, address)
        await until(lambda: not joined(server, address))
        again = asyncio.ensure_future(ask(http, address, **headers))
        await until(lambda: joined(server, address))
        engine.gate.set()
        assert await again == "answer 0"
        [step] = server.steps()
        assert step.dropped is None and engine.aborted == 0


async def test_an_answer_that_nobody_read_is_dropped_until_a_retry_reads_it() -> None:
    engine = numbering()
    async with asked(engine, grace=CEILING) as (server, http, address):
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
    async with asked(engine, grace=0.05) as (server, http, address):
        await hang_up(http, server, address)
        await until(lambda: engine.aborted == 1)
        engine.gate.set()
        assert await ask(http, address, x_stainless_retry_count="1") == "answer 1"
        aborted, step = server.steps()
        assert (aborted.dropped, aborted.stop_reason, len(aborted.completion_ids)) == ("cancelled", "abort", 0)
        assert (step.dropped, step.stop_reason) == (None, StopReason.STOP)


async def test_detaching_aborts_what_is_in_flight_and_the_secret_dies() -> None:
    engine = numbering()
    async with asked(engine) as (server, http, address):
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


async def test_a_session_that_ends_while_a_request_is_on_its_way_is_asked_nothing_more() -> None:
    engine = numbering()
    async with asked(engine) as (server, http, address):
        begun, ended = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"messages": '
            begun.set()
            await ended.wait()
            yield b'[{"role": "user", "content": "hi"}]}'

        call = asyncio.ensure_future(http.post(f"{address.base_url}/chat/completions", content=body()))
        await begun.wait()
        await asyncio.sleep(0.05)  # the server has let it in and reads on
        await server.gateway.detach(address.secret)
        ended.set()
        assert (await call).status_code == 404
        assert not engine.calls and not server.steps()


async def test_a_failed_call_is_forgotten_and_asked_again() -> None:
    async with asked(Failing(1, 2)) as (server, http, address):
        answer = await http.post(f"{address.base_url}/chat/completions", json=BODY, headers={"Idempotency-Key": "k"})
        assert answer.status_code == 503 and "out of memory" in answer.json()["error"]["message"]
        client = server.openai(address)
        said = await client.chat.completions.create(**BODY)  # retries by itself
        assert said.choices[0].message.content == "x"
        assert len(server.steps()) == 1


async def test_an_identical_request_that_was_under_way_is_no_retry_of_one_that_fails() -> None:
    """Best of two: one fails while the other is sampled. A later one is its retry."""
    engine = Failing(1, when=lambda: engine.asked == 2)
    async with asked(engine) as (server, http, address):
        results = await asyncio.gather(*(ask(http, address) for _ in range(2)), return_exceptions=True)
        assert sum(isinstance(result, httpx.HTTPStatusError) for result in results) == 1
        assert len(server.sessions["s"].exchanges.unanswered) == 1
        assert await ask(http, address) == "x"
        await server.gateway.detach(address.secret)
        assert server.sessions["s"].exchanges.unanswered == []


@pytest.mark.parametrize(("failed", "retry", "left"), [("a", "a", 0), ("a", "b", 1)])
async def test_another_key_says_that_a_request_is_no_retry(failed: str, retry: str, left: int) -> None:
    engine = numbering()
    async with asked(engine, max_in_flight=0) as (server, http, address):
        for _ in range(2):
            refused = await http.post(
                f"{address.base_url}/chat/completions", json=BODY, headers={"Idempotency-Key": failed}
            )
            assert refused.status_code == 429
        attached = server.gateway.find(address.secret)
        assert attached is not None
        attached.exchanges._max_running = 1
        await ask(http, address, idempotency_key=retry)
        await server.gateway.detach(address.secret)
        assert len(server.sessions["s"].exchanges.unanswered) == left


def unanswered(server: Served) -> list[type[BaseException]]:
    return [type(request.error) for request in server.sessions["s"].exchanges.unanswered]


@pytest.mark.parametrize("became", ["sampled", "aborted", "failed"])
@pytest.mark.parametrize("again", [True, False])
async def test_what_a_client_gave_up_is_unanswered_until_it_asks_again(became: str, again: bool) -> None:
    engine = Failing(*([1] if became == "failed" else []), when=lambda: engine.gate.is_set())
    async with asked(engine, grace=0.0 if became == "aborted" else CEILING) as (server, http, address):
        await hang_up(http, server, address)
        await until(lambda: not joined(server, address))
        assert unanswered(server) == [GivenUp]
        if became != "aborted":
            engine.gate.set()
        attached = server.gateway.find(address.secret)
        assert attached is not None
        await until(lambda: not attached.exchanges._running)
        engine.gate.set()
        assert unanswered(server) == [GivenUp]
        assert await ask(http, address, BODY if again else {**BODY, "user": "u"}) == "x"
        assert unanswered(server) == ([] if again else [GivenUp])
        await server.gateway.detach(address.secret)
        assert unanswered(server) == ([] if again else [GivenUp])


async def test_each_of_several_that_were_given_up_must_be_asked_again() -> None:
    engine = numbering()
    async with asked(engine, grace=CEILING) as (server, http, address):
        engine.gate.clear()
        calls = [asyncio.ensure_future(ask(http, address)) for _ in range(3)]
        await until(lambda: joined(server, address) == 3)
        for call in calls[:2]:
            call.cancel()
        await until(lambda: unanswered(server) == [GivenUp] * 2)
        again = [asyncio.ensure_future(ask(http, address)) for _ in range(2)]
        await until(lambda: joined(server, address) == 3 and unanswered(server) == [])
        again[0].cancel()
        await until(lambda: unanswered(server) == [GivenUp])
        engine.gate.set()
        await asyncio.gather(calls[2], again[1])
        assert unanswered(server) == [GivenUp]


async def test_what_is_still_waited_for_when_the_session_ends_is_unanswered() -> None:
    engine = numbering()
    async with asked(engine) as (server, http, address):
        await ask(http, address)
        engine.gate.clear()
        call = asyncio.ensure_future(ask(http, address))
        await until(lambda: joined(server, address))
        await server.gateway.detach(address.secret)
        assert unanswered(server) == [GivenUp]
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            await call


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_not_read_to_its_end_is_unanswered(stream: bool) -> None:
    engine, body = Slow(scripted(lambda prompt, number: "x" * 5000)), {**BODY, "stream": stream, "logprobs": True}
    small = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with served(engine, listening=listening) as server, httpx.AsyncClient(transport=small) as http:
        address = server.open(parse=plain, max_tokens=6000)
        async with http.stream("POST", f"{address.base_url}/chat/completions", json=body, timeout=CEILING) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_raw(1000))
        await until(lambda: server.steps()[0].dropped is DropReason.CANCELLED)
        assert unanswered(server) == [GivenUp]


@pytest.mark.parametrize("happened", ["nothing", "limit", "limit, answer"])
async def test_what_is_given_up_because_another_call_met_a_limit_is_not_held_against_anybody(happened: str) -> None:
    class Patient(Slow):
        """Answers only what is quick."""

        async def generate(self, prompt_ids: Ids, sampling: SamplingParams, **where: Any) -> Completion:
            completion = await super().generate(prompt_ids, sampling, **where)
            if "quick" not in plain_renderer().decode(prompt_ids):
                await hang()
            return completion

    engine = Patient(scripted(lambda prompt, number: "x"))
    async with served(engine) as server, httpx.AsyncClient(timeout=CEILING) as http:
        address = server.open(parse=plain, longest=60)
        calls = [asyncio.ensure_future(ask(http, address, {"messages": [user(str(n))]})) for n in range(2)]
        await until(lambda: joined(server, address) == 2)
        if "limit" in happened:
            with pytest.raises(httpx.HTTPStatusError, match="400"):
                await ask(http, address, {"messages": [user("x" * 100)]})
        if "answer" in happened:
            await ask(http, address, {"messages": [user("quick")]})
        calls.append(asyncio.ensure_future(ask(http, address, {"messages": [user("later")]})))
        await until(lambda: len(engine.calls) == 3 + ("answer" in happened))
        for call in calls:
            call.cancel()
        await until(lambda: not joined(server, address))
        assert unanswered(server) == [GivenUp] * (1 if happened == "limit" else 3)


async def test_what_is_refused_for_its_size_is_unanswered() -> None:
    async with asked(numbering(), max_body=3000) as (server, http, address):
        for _ in range(2):
            with pytest.raises(httpx.HTTPStatusError, match="413"):
                await ask(http, address, {**BODY, "user": "x" * 3000})
        await ask(http, address)
        [request] = server.sessions["s"].exchanges.unanswered
        assert isinstance(request.error, DataError) and str(request.error) == "the request is larger than 3000 bytes"
        assert server.sessions["s"].exchanges.bad_requests == []


async def test_a_client_that_goes_while_it_sends_is_unanswered_until_it_asks_again() -> None:
    """What was not read is known by its length."""
    data = json.dumps(BODY).encode()
    async with asked(numbering()) as (server, http, address):
        url, attached = f"{address.base_url}/chat/completions", server.gateway.find(address.secret)
        assert attached is not None

        async def broken() -> AsyncIterator[bytes]:
            yield data[:9]
            await until(lambda: attached.bytes_in_flight)
            raise httpx.WriteTimeout("too slow")

        with pytest.raises(httpx.WriteTimeout):
            await http.post(url, content=broken(), headers={"content-length": str(len(data))})
        await until(lambda: unanswered(server) == [GivenUp])
        for body, left in ((data + b" ", [GivenUp]), (data, [])):
            assert (await http.post(url, content=body)).status_code == 200
            assert unanswered(server) == left


async def test_a_retry_that_comes_with_the_hang_up_is_one() -> None:
    engine, data = numbering(), json.dumps(BODY).encode()
    async with asked(engine, grace=CEILING) as (server, _, address):
        loop, url = asyncio.get_running_loop(), httpx.URL(address.base_url)
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        first, second = (socket.create_connection((url.host, url.port)) for _ in range(2))
        with first, second:
            engine.gate.clear()
            first.sendall(head + data)
            await until(lambda: engine.calls)
            first.close()
            second.sendall(head + data)  # while the event loop stands still
            second.setblocking(False)
            for _ in range(50):  # turns, in which both are noticed
                await asyncio.sleep(0)
            engine.gate.set()
            assert await loop.sock_recv(second, 12) == b"HTTP/1.1 200"
            assert [step.dropped for step in server.steps()] == [None] and unanswered(server) == []


async def test_a_retry_whose_answer_nobody_reads_answers_nothing() -> None:
    engine = Failing(1)
    async with asked(engine, grace=CEILING) as (server, http, address):
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            await ask(http, address)
        await hang_up(http, server, address)
        engine.gate.set()
        await until(server.steps)
        await server.gateway.detach(address.secret)
        assert [step.dropped for step in server.steps()] == [DropReason.CANCELLED]
        assert len(server.sessions["s"].exchanges.unanswered) == 1


async def test_too_many_requests_in_flight() -> None:
    engine = numbering()
    async with asked(engine, max_in_flight=2) as (server, http, address):
        engine.gate.clear()
        calls = [asyncio.ensure_future(ask(http, address)) for _ in range(2)]
        await until(lambda: len(engine.calls) == 2)
        refused = await http.post(f"{address.base_url}/chat/completions", json=BODY)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        engine.gate.set()
        await asyncio.gather(*calls)
        assert len(server.steps()) == 2


async def test_a_choice_that_fails_takes_the_others_with_it() -> None:
    async with asked(Failing(3)) as (server, http, address):
        answer = await http.post(f"{address.base_url}/chat/completions", json={**BODY, "n": 3})
        assert answer.status_code == 503
        assert [step.dropped for step in server.steps()] == [DropReason.CANCELLED] * len(server.steps())


async def test_no_step_is_lost_doubled_or_misplaced_in_a_storm_of_disconnects() -> None:
    dice = random.Random(0)
    engine = Slow(scripted(lambda prompt, number: f"unique {number}"), lambda: dice.uniform(0, 0.3))
    async with served(engine, grace=0.05) as server, asyncio.timeout(CEILING):
        found = await storm(server, sessions=16, turns=2, seed=1)
    assert found["live"] == found["answers"] > 0
    assert found["dropped"] >= engine.aborted > 0


# Many sessions at once, whose clients hang up and try again at random


async def stubborn(
    http: httpx.AsyncClient, address: SessionAddress, body: dict[str, Any], key: str, dice: random.Random
) -> list[int]:
    """Ask with random patience, again and again as an SDK does, until there is an answer: its ids."""
    for attempt in range(1000):
        patience = None if attempt > 4 else dice.choice([None, dice.uniform(0, 0.3)])
        headers = {"x-stainless-retry-count": str(attempt), **({"idempotency-key": key} if key else {})}
        try:
            async with asyncio.timeout(patience):
                answer = await http.post(f"{address.base_url}/chat/completions", json=body, headers=headers)
        except TimeoutError:
            await asyncio.sleep(dice.choice([0, 0.15]))  # sometimes for longer than the grace
            continue
        assert answer.status_code == 200, answer.text
        if body["stream"]:
            return streamed_ids(answer.text)
        return list(answer.json()["choices"][0]["token_ids"])
    raise AssertionError("no answer")


def streamed_ids(text: str) -> list[int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [i for event in events for choice in event["choices"] for i in choice.get("token_ids", [])]


async def storm(server: Served, sessions: int, turns: int, seed: int) -> Counter[str]:
    """Sessions of random disconnects; every step is where it belongs, once. Counts what happened.

    Each has this many turns, and more until some call was aborted.
    """
    found: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None)

    async def agent(number: int, http: httpx.AsyncClient) -> None:
        dice = random.Random(seed * 1000 + number)
        name = f"session <{number}>"
        address = server.open(name, plain, max_tokens=40)
        received: list[list[int]] = []
        turn = 0
        while turn < turns or not server.engine.aborted:
            told: Any = {"messages": [user(f"{name} turn {turn}")], "return_token_ids": True}
            body = {"model": "m", "stream": dice.random() < 0.3, **told}
            # identical ones at once: only a key tells whose retry is whose
            keys = dice.choice([[""], [""], [f"{turn} {i}" for i in range(3)]])
            received += await asyncio.gather(*(stubborn(http, address, body, key, dice) for key in keys))
            turn += 1
        await server.gateway.detach(address.secret)
        server.sessions[name].session.close()
        steps = server.steps(name)
        live = [step for step in steps if step.dropped is None]
        assert sorted(step.completion_ids.tolist() for step in live) == sorted(received)
        for step in steps:
            assert name in server.renderer.decode(step.prompt_ids)
        found.update(answers=len(received), live=len(live), dropped=len(steps) - len(live))

    async with httpx.AsyncClient(limits=limits, timeout=None) as http:
        await asyncio.gather(*(agent(number, http) for number in range(sessions)))
    return found
