"""Where a gateway listens and what agents call it."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.rollout.test_agents import TASK, once, played
from tests.worlds import saying
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.types import Task
from treadle.rollout.config import RolloutConfig
from treadle.rollout.gateway.address import GatewayConfig, listen, url_of


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
