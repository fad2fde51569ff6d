"""What a gateway bears: how many bytes of requests, and of their headers."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.rollout.gateway.servers import Served, Slow, looks_then_answers, scripted, served
from tests.rollout.gateway.test_fuzz import BODIES, is_error
from tests.rollout.kit import TASK, once, played
from tests.until import CEILING, until
from tests.worlds import saying, user
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.types import Task
from treadle.rollout.config import GatewayConfig, RolloutConfig, listen, url_of
from treadle.rollout.gateway.gateway import ClientSession, SessionAddress


def engine() -> Slow:
    return Slow(scripted(looks_then_answers))


def attached(server: Served, address: SessionAddress) -> ClientSession:
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


# Where a gateway listens and what agents call it


@pytest.fixture
def free() -> int:
    """A port that was free just now."""
    with listen(GatewayConfig()) as listening:
        port: int = listening.getsockname()[1]
    return port


@pytest.fixture
def busy() -> Iterator[int]:
    with listen(GatewayConfig()) as listening:
        yield listening.getsockname()[1]


def told(**gateway: Any) -> str:
    """The base URL that an agent is given, and reached the model by."""
    urls = []

    async def agent(task: Task, client: AsyncOpenAI) -> float:
        urls.append(str(client.base_url))
        return await once(task, client)

    [trajectory] = asyncio.run(played({"a": agent}, saying("a"), [TASK], gateway=GatewayConfig(**gateway)))
    assert (trajectory.reward, len(trajectory.steps)) == (1.0, 1), trajectory.failure
    return urls[0]


def test_by_default_it_is_a_free_port_of_the_loopback_interface() -> None:
    assert told().startswith("http://127.0.0.1:")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_agents_are_given_the_advertised_url(host: str, end: str, free: int) -> None:
    url = told(host=host, port=free, advertised_url=f"http://localhost:{free}{end}")
    assert url.startswith(f"http://localhost:{free}/sessions/") and url.endswith("/v1/")


def test_an_ipv6_address_is_written_in_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with listen(GatewayConfig(host="::1")) as listening:
        assert url_of(listening).startswith("http://[::1]:")


def test_a_busy_port_is_named(busy: int) -> None:
    message = f"^rollout.gateway.port={busy} is in use; choose another, or rollout.gateway.port=0 for any free one$"
    with pytest.raises(ConfigError, match=message):
        told(port=busy)


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "x" * 100, "a..b", "300.1.1.1"])
def test_an_address_that_is_not_this_machines_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.gateway.host={host}: cannot listen there: ."):
        listen(GatewayConfig(host=host))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advertised_url": "http://box:80"}, "advertised_url is 'http://box:80', but port is 0, any free one"),
        ({"advertised_url": "box:80", "port": 80}, "'box:80' is not a base URL; write scheme and host"),
        ({"advertised_url": "http://", "port": 80}, "'http://' is not a base URL"),
        ({"advertised_url": "http://box:99999", "port": 80}, "'http://box:99999' is not a base URL"),
        ({"advertised_url": "http://box:x", "port": 80}, "'http://box:x' is not a base URL"),
        ({"advertised_url": "http://[box", "port": 80}, "is not a base URL"),
        ({"advertised_url": "http://box/?a=b", "port": 80}, "is not a base URL"),
        ({"port": 65536}, "gateway.port: got 65536, expected less than 65536"),
        ({"host": ""}, "gateway.host: got '', expected"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(RolloutConfig, {"gateway": settings})
    assert message in str(refused.value)
