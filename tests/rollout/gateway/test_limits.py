"""What a gateway bears: how many bytes of requests, and of their headers."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.rollout.gateway.servers import Served, Slow, looks_then_answers, scripted, served
from tests.rollout.gateway.test_fuzz import BODIES, is_error
from tests.until import CEILING, until
from tests.worlds import user
from treadle.rollout.gateway.gateway import Attached, SessionAddress


def engine() -> Slow:
    return Slow(scripted(looks_then_answers))


def attached(server: Served, address: SessionAddress) -> Attached:
    found = server.gateway.find(address.secret)
    assert found is not None
    return found


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("chunked", [False, True])
async def test_bytes_in_flight_of_a_session_are_bounded(route: str, chunked: bool) -> None:
    async def chunks(data: bytes) -> Any:
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

    async with (
        served(engine(), max_body=3000, max_bytes_in_flight=4000) as server,
        httpx.AsyncClient(timeout=CEILING) as http,
    ):
        address, other = server.open("one"), server.open("two")
        large = json.dumps({**BODIES["chat/completions"], "metadata": "x" * 2500})
        body = json.dumps({**BODIES[route], "metadata": "x" * 2500}).encode()
        server.engine.gate.clear()
        waiting = asyncio.create_task(http.post(f"{address.base_url}/chat/completions", content=large))
        await until(lambda: attached(server, address).bytes_in_flight == len(large))
        refused = await http.post(f"{address.base_url}/{route}", content=chunks(body) if chunked else body)
        assert is_error(refused, 429) and refused.headers["retry-after"] == "1"
        assert "more than 4000 bytes of requests in flight" in refused.json()["error"]["message"]
        assert refused.json().get("type") == ("error" if route.startswith("messages") else None)
        server.engine.gate.set()
        assert (await waiting).status_code == 200
        for session in (address, other):
            answer = await http.post(f"{session.base_url}/{route}", content=chunks(body) if chunked else body)
            assert answer.status_code == 200
            assert attached(server, session).bytes_in_flight == 0


async def test_bytes_are_no_longer_in_flight_whatever_becomes_of_a_request() -> None:
    async with served(engine(), max_body=10_000, grace=0.1) as server:
        address = server.open(longest=60)
        url, session = f"{address.base_url}/chat/completions", attached(server, address)
        async with httpx.AsyncClient(timeout=CEILING) as http:
            for content in (b"{", b"[]", b"", b"x" * 20_000, b"\xff", json.dumps(BODIES["chat/completions"]).encode()):
                await http.post(url, content=content)
                assert session.bytes_in_flight == 0
            for body in ({"messages": [user("x" * 500)]}, {"messages": [{"role": "king"}]}, {"n": 3, "messages": []}):
                await http.post(url, json=body)
                assert session.bytes_in_flight == 0
            several = {"messages": [user("hi")], "n": 3}
            assert (await http.post(url, json=several)).status_code == 200
            again = await http.post(url, json=several, headers={"x-stainless-retry-count": "1"})
            assert again.status_code == 200 and len(server.steps()) == 1 + 3
            server.engine.gate.clear()
            gone = asyncio.create_task(http.post(url, json=BODIES["chat/completions"]))
            await until(lambda: session.bytes_in_flight and len(server.engine.calls) > 4)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            await until(lambda: session.bytes_in_flight == 0)  # after the grace


@pytest.mark.parametrize("begin", ["GET /v1/models HTTP/1.1\r\nHost: x\r\nX: ", "GET /", "x"])
async def test_headers_without_an_end_are_refused(begin: str) -> None:
    async with served(engine()) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begin.encode() + b"x" * 100_000)
        answer = await asyncio.wait_for(reader.read(100), CEILING)
        assert answer.startswith(b"HTTP/1.1 400 ")
        writer.close()
