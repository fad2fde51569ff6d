"""What a gateway bears: clients that stop sending, and more bytes than it holds."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.rollout.gateway.servers import Served, Slow, looks_then_answers, scripted, served
from tests.rollout.gateway.test_fuzz import BODIES, is_error
from tests.until import CEILING, until
from tests.worlds import user
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.gateway.memory_limit import MemoryLimit

PATIENCE = 0.2
LONG_ENOUGH = 45.0  # seconds; without a bound these connections stay open for ever, or for 60 s
HEADERS = "POST {path}/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
STALLS = {
    "nothing": "",
    "headers": HEADERS,
    "half a line": "POST {path}/ch",
    "body": HEADERS + "Content-Length: 1000\r\n\r\n{{",
    "chunks": HEADERS + "Transfer-Encoding: chunked\r\n\r\n2\r\n{{ \r\n",
    "body of a stranger": HEADERS.replace("{path}", "/v1") + "Content-Length: 1000\r\n\r\n{{",
    "body of a GET": "GET {path}/models HTTP/1.1\r\nHost: gateway\r\nContent-Length: 9\r\n\r\n",
}


def engine() -> Slow:
    return Slow(scripted(looks_then_answers))


async def stalled(server: Served, address: SessionAddress, begin: str, drips: bool) -> bytes:
    """What the server says to a client that sends this much and then nothing, or a byte now and then."""
    url = urlsplit(address.base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(begin.format(path=url.path).encode())

    async def drip() -> None:
        while True:
            await asyncio.sleep(PATIENCE / 4)
            writer.write(b"x")

    dripping = asyncio.create_task(drip()) if drips else None
    try:
        return await asyncio.wait_for(reader.read(), LONG_ENOUGH)
    except ConnectionError:  # closed with bytes on their way
        return b""
    finally:
        if dripping:
            dripping.cancel()
        writer.close()


@pytest.mark.quick(4)
@pytest.mark.parametrize("drips", [False, True], ids=["silent", "dripping"])
@pytest.mark.parametrize("begin", STALLS.values(), ids=STALLS)
async def test_who_stops_sending_is_hung_up_on(begin: str, drips: bool) -> None:
    async with served(engine(), patience=PATIENCE) as server:
        address = server.open()
        said = await asyncio.gather(*(stalled(server, address, begin, drips) for _ in range(5)))
        assert len(said) == 5
        if begin == STALLS["body"] and not drips:
            assert all(answer.startswith(b"HTTP/1.1 408 ") and b"not sent to its end" in answer for answer in said)
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{address.base_url}/models")).status_code == 200
        assert server.gateway.memory.is_empty


async def test_a_slow_upload_that_goes_on_is_answered() -> None:
    body = json.dumps({"messages": [user("hi")], "metadata": {"a": "x" * 600_000}}).encode()

    async def slowly() -> Any:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]
            await asyncio.sleep(PATIENCE / 4)

    async with served(engine(), patience=PATIENCE) as server, httpx.AsyncClient(timeout=CEILING) as http:
        answer = await http.post(f"{server.open().base_url}/chat/completions", content=slowly())
        assert answer.status_code == 200


async def test_an_answer_that_takes_long_and_pauses_between_requests_are_no_silence() -> None:
    slow = Slow(scripted(looks_then_answers), lambda: 3 * PATIENCE)
    async with served(slow, patience=PATIENCE) as server, httpx.AsyncClient(timeout=CEILING) as http:
        url = f"{server.open().base_url}/chat/completions"
        for _ in range(2):
            assert (await http.post(url, json=BODIES["chat/completions"])).status_code == 200
            await asyncio.sleep(2 * PATIENCE)


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("status", [429, 503])
async def test_bytes_in_flight_are_bounded_for_a_session_and_in_all(route: str, status: int) -> None:
    async with (
        served(engine(), max_body=2000, max_held=(4000, 10_000), patience=PATIENCE) as server,
        httpx.AsyncClient(timeout=CEILING) as http,
    ):
        address, other = server.open("one"), server.open("two")
        attached = server.gateway.find(address.secret)
        assert attached is not None
        memory = attached.memory if status == 429 else server.gateway.memory
        await memory.take(memory.most)
        refused = await http.post(f"{address.base_url}/{route}", json=BODIES[route])
        assert is_error(refused, status) and refused.headers["retry-after"] == "1"
        assert f"{memory.most} bytes of requests" in refused.json()["error"]["message"]
        assert refused.json().get("type") == ("error" if route.startswith("messages") else None)
        beside = await http.post(f"{other.base_url}/{route}", json=BODIES[route])
        assert beside.status_code == (200 if status == 429 else 503)
        server.gateway.patience = CEILING
        waiting = asyncio.create_task(http.post(f"{address.base_url}/{route}", json=BODIES[route]))
        await until(lambda: memory._queue)
        memory.give(memory.most)
        assert (await waiting).status_code == 200
        assert server.gateway.memory.is_empty and attached.memory.is_empty


async def test_room_is_given_back_whatever_becomes_of_a_request() -> None:
    async with served(engine(), max_body=10_000, patience=PATIENCE, grace=0.1) as server:
        address = server.open(longest=60)
        url, memory = f"{address.base_url}/chat/completions", server.gateway.memory
        async with httpx.AsyncClient(timeout=CEILING) as http:
            for content in (b"{", b"[]", b"", b"x" * 20_000, b"\xff", json.dumps(BODIES["chat/completions"]).encode()):
                await http.post(url, content=content)
                assert memory.is_empty
            for body in ({"messages": [user("x" * 500)]}, {"messages": [{"role": "king"}]}, {"n": 3, "messages": []}):
                await http.post(url, json=body)
                assert memory.is_empty
            several = {"messages": [user("hi")], "n": 3}
            assert (await http.post(url, json=several)).status_code == 200
            again = await http.post(url, json=several, headers={"x-stainless-retry-count": "1"})
            assert again.status_code == 200 and len(server.steps()) == 1 + 3
            server.engine.gate.clear()
            gone = asyncio.create_task(http.post(url, json=BODIES["chat/completions"]))
            await until(lambda: memory.is_empty and len(server.engine.calls) > 4)  # being sampled: its prompt stands
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        assert memory.is_empty


async def test_room_is_handed_out_in_order_and_those_who_leave_hold_nobody_up() -> None:
    memory, order = MemoryLimit(10), list[str]()

    async def take(name: str, size: int) -> None:
        await memory.take(size)
        order.append(name)

    await memory.take(8)
    large, small, last = (asyncio.create_task(take(*one)) for one in (("large", 9), ("small", 2), ("last", 8)))
    await asyncio.sleep(0)
    assert order == []  # the small one waits behind the large one
    large.cancel()
    await asyncio.gather(large, small, return_exceptions=True)
    assert order == ["small"]
    memory.give(8)
    last.cancel()  # in the moment in which it gets its room
    await asyncio.gather(last, return_exceptions=True)
    memory.give(2)
    assert memory.is_empty
