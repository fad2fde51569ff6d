"""Remote images: only if allowed, only from where a client may reach, within limits of bytes, time and redirects."""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.hostile_images import JPEG, LIMITS, PNG, url
from tests.http_servers import serving
from tests.rollout.gateway.test_images import bodies, messages_of
from treadle.core.images import PLACE
from treadle.rollout.config import ImagesConfig
from treadle.rollout.gateway import fetch as fetching
from treadle.rollout.gateway.fetch import fetch, is_public
from treadle.rollout.gateway.request import ApiError

ANYWHERE = ImagesConfig(fetch="any", max_bytes=LIMITS.bytes, max_pixels=LIMITS.pixels)


class Pictures(BaseHTTPRequestHandler):
    """One path for each way to answer."""

    asked: list[tuple[str, str]]  # host and path
    released: threading.Event

    def do_GET(self) -> None:
        self.asked.append((self.headers["Host"], self.path))
        kind, _, rest = self.path[1:].partition("?")[0].partition("/")
        match kind:
            case "png":
                self.send(PNG)
            case "text":
                self.send(b"<html>")
            case "missing":
                self.send(PNG, 404)
            case "gzip":
                self.send(PNG, encoding="gzip")
            case "to":
                self.send(b"", 302, location=rest)
            case "hops":
                self.send(b"", 307, location=f"/hops/{int(rest) - 1}" if int(rest) > 1 else "/png")
            case "endless":
                self.send(b"", length=None)
                with self.unheard():
                    while not self.released.is_set():
                        self.wfile.write(bytes(2**16))
            case "slow":
                self.send(b"", length=10_000)
                with self.unheard():
                    while not self.released.wait(0.05):
                        self.wfile.write(b"x")
            case "silent":
                self.released.wait(60)
            case "slow-head":
                with self.unheard():
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
                    while not self.released.wait(0.05):
                        self.wfile.write(b"x")

    def send(
        self, body: bytes, status: int = 200, location: str = "", encoding: str = "", length: int | None = -1
    ) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(len(body) if length < 0 else length))
        if location:
            self.send_header("Location", location)
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.wfile.write(body)

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Ends with the connection."""
        try:
            yield
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def pictures() -> Iterator[str]:
    Pictures.asked, Pictures.released = [], threading.Event()
    with serving(Pictures) as base:
        yield base
        Pictures.released.set()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SECONDS", 0.5)


def named(base: str) -> str:
    return base.replace("127.0.0.1", "localhost")


async def test_a_remote_image_is_fetched_where_that_is_allowed(pictures: str) -> None:
    async with messages_of(images=ANYWHERE) as (server, http, address):
        for route, body in bodies(f"{named(pictures)}/png?token=secret"):
            answer = await http.post(f"{address.base_url}/{route}", json=body)
            assert answer.status_code == (400 if "count" in route else 200), answer.text
        for step in server.steps():
            assert step.chat is not None
            assert step.chat.messages[0]["images"] == [url(PNG)]
            assert step.chat.messages[0]["content"] == PLACE
        host = urlsplit(named(pictures)).netloc
        assert Pictures.asked == [(host, "/png?token=secret")] * 7


@pytest.mark.parametrize("images", [ImagesConfig(), ImagesConfig(fetch="public")], ids=["never", "public"])
async def test_it_is_not_where_it_is_not(images: ImagesConfig, pictures: str) -> None:
    remedy = "set rollout.images.fetch"
    async with messages_of(images=images) as (server, http, address):
        for base in (pictures, named(pictures), pictures.replace("127.0.0.1", "[::1]"), "http://169.254.169.254"):
            for route, body in bodies(f"{base}/png"):
                answer = await http.post(f"{address.base_url}/{route}", json=body)
                assert answer.status_code == 400 and remedy in answer.text, answer.text
        assert not server.steps() and not Pictures.asked


PROBLEMS = {
    "text": "is damaged, or none of PNG",
    "missing": "was answered by status 404",
    "gzip": "was answered compressed",
    "hops/4": "is behind more than 3 redirects",
    "endless": "has more than 400000 bytes; scale it down",
    "to/ftp://example.com/x": "is not at a plain http",
    "to/file:///etc/passwd": "is not at a plain http",
    "to/http://user:password@localhost/": "is not at a plain http",
    "to/http://:0/": "cannot be fetched|is not at a plain http",
    "to/http://no.such.host.invalid/": "cannot be fetched",
}


@pytest.mark.parametrize("path", PROBLEMS)
async def test_what_is_wrong_is_named(path: str, pictures: str) -> None:
    async with messages_of(images=ANYWHERE) as (server, http, address):
        answer = await http.post(f"{address.base_url}/{bodies('')[0][0]}", json=bodies(f"{pictures}/{path}")[0][1])
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith(f"the image '{pictures}/{path.partition('?')[0]}'"[:60])
        assert re.search(PROBLEMS[path], message), message
        assert not server.steps()


@pytest.mark.parametrize("path", ["slow", "silent", "slow-head"])
async def test_time_is_limited_as_a_whole(path: str, pictures: str, hurried: None) -> None:
    """Also of a server that never stops sending a little."""
    with pytest.raises(ApiError, match=r"did not arrive within 0.5 s; send a data URL"):
        await fetch(f"{pictures}/{path}", 10**6, anywhere=True)


async def test_redirects_are_followed_and_checked(pictures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await fetch(f"{pictures}/hops/3", 10**6, anywhere=True) == PNG
    # A public place that redirects to this machine: public by name alone.
    monkeypatch.setattr(fetching, "is_public", lambda address: address == "127.0.0.1" and len(Pictures.asked) < 5)
    with pytest.raises(ApiError, match="is not at a public address"):
        await fetch(f"{pictures}/to/{named(pictures)}/png", 10**6, anywhere=False)
    assert len(Pictures.asked) == 5  # four of the first, the redirect


async def test_the_address_that_was_checked_is_connected_to(pictures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is resolved once: it has no second answer to give (DNS rebinding)."""
    loop, port = asyncio.get_running_loop(), urlsplit(pictures).port
    resolve, names = loop.getaddrinfo, list[Any]()

    async def getaddrinfo(host: Any, *arguments: Any, **more: Any) -> Any:
        names.append(host)
        return await resolve("127.0.0.1" if host == "pictures.invalid" else host, *arguments, **more)

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    assert await fetch(f"http://pictures.invalid:{port}/png", 10**6, anywhere=True) == PNG
    assert [name for name in names if name in ("pictures.invalid", b"pictures.invalid")] == ["pictures.invalid"]
    assert Pictures.asked == [(f"pictures.invalid:{port}", "/png")]


async def test_the_images_of_one_request_have_a_limit(pictures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.rollout.gateway.images._FETCHED", 3 * len(PNG) - 1)
    part = {"type": "image_url", "image_url": {"url": f"{pictures}/png"}}
    async with messages_of(images=ANYWHERE) as (_, http, address):
        for count, status in ((2, 200), (3, 400)):
            body = {"messages": [{"role": "user", "content": [part] * count}]}
            answer = await http.post(f"{address.base_url}/chat/completions", json=body)
            assert answer.status_code == status, answer.text
    assert f"has more than {len(PNG) - 1} bytes" in answer.text


async def test_remote_and_sent_images_keep_their_order(pictures: str) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": source}} for source in (url(JPEG), f"{pictures}/png", url(JPEG))
    ]
    async with messages_of(images=ANYWHERE) as (server, http, address):
        body = {"messages": [{"role": "user", "content": parts}]}
        assert (await http.post(f"{address.base_url}/chat/completions", json=body)).status_code == 200
        [step] = server.steps()
        assert step.chat is not None
        assert step.chat.messages[0]["images"] == [url(JPEG, "image/jpeg"), url(PNG), url(JPEG, "image/jpeg")]


async def test_https_is_not_plain_http(pictures: str) -> None:
    with pytest.raises(ApiError, match="cannot be fetched"):
        await fetch(f"{named(pictures).replace('http', 'https')}/png", 10**6, anywhere=True)


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "2001:4860:4860::8888"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::1", "::", "fe80::1", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0::1"),
    ],
)
def test_addresses_of_this_machine_and_its_network(address: str) -> None:
    assert not is_public(address)
