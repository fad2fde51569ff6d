"""Whatever is sent: never a 500, never another session, and the server stays up."""

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import httpx
import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import status_code_conformance

from tests.rollout.gateway.servers import Slow, looks_then_answers, scripted, served
from tests.worlds import END, plain_renderer, user
from treadle.core.types import Ids, SamplingParams
from treadle.rollout.gateway.chat_completions import ChatRequest, RawRequest
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.gateway.messages import CountRequest, MessagesRequest
from treadle.rollout.gateway.responses import ResponsesRequest

pytestmark = pytest.mark.xdist_group("rollout_gateway_fuzz")  # what its tests share is made once

POSTS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
BODIES: dict[str, Any] = {
    "chat/completions": {"messages": [user("hi")]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [user("hi")], "max_tokens": 9},
    "messages/count_tokens": {"messages": [user("hi")]},
}
MODELS: dict[str, Any] = dict(
    zip(POSTS, (ChatRequest, RawRequest, ResponsesRequest, MessagesRequest, CountRequest), strict=True)
)
CHECKS: Any = [not_a_server_error, status_code_conformance]


def obedient(prompt: Ids, sampling: SamplingParams) -> list[int]:
    """A call or an answer; or whatever a grammar allows."""
    if not sampling.constrains:
        return SAYS(prompt, sampling)
    constraint, draws = plain_renderer().grammars.constraint(sampling), np.random.default_rng(sampling.seed)
    tokens: list[int] = []
    while len(tokens) < sampling.max_tokens and END not in tokens:
        possible = np.unpackbits(np.frombuffer(constraint.mask(), np.uint8), bitorder="little")
        tokens.append(int(draws.choice(np.flatnonzero(possible))))
        constraint.take(tokens[-1])
    return tokens


SAYS = scripted(looks_then_answers)


@dataclass(frozen=True)
class Running:
    url: str
    address: SessionAddress
    other: SessionAddress
    http: httpx.Client


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A gateway with two sessions, served by a thread; it must still answer when all is over."""
    ready, found = threading.Event(), []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        stop = asyncio.Event()
        async with served(Slow(obedient), max_body=2**20) as server:
            found.append((server, server.open("one"), server.open("two"), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    server, one, two, stop = found[0]
    with httpx.Client(timeout=30) as http:
        yield Running(server.url, one, two, http)
        for address in (one, two):
            answer = http.post(f"{address.base_url}/chat/completions", json=BODIES["chat/completions"])
            assert answer.status_code == 200
    assert len(server.steps("two")) == 1  # nobody has reached the other session
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def nested(levels: int) -> dict[str, Any]:
    """An object of so many objects, each in the one before."""
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def is_error(answer: httpx.Response, *statuses: int) -> bool:
    """An error in a provider's form, with one of these statuses."""
    error = answer.json()["error"]
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    return answer.status_code in statuses


def description() -> Any:
    """The routes as OpenAPI describes them, by the models that requests are validated by."""
    schemas = {
        route: model.model_json_schema(ref_template=f"#/components/schemas/{number}/$defs/{{model}}")
        for number, (route, model) in enumerate(MODELS.items())
    }
    paths = {
        prefix + route: {
            "parameters": [{"name": "secret", "in": "path", "required": True, "schema": {"type": "string"}}]
            if "{" in prefix
            else [],
            "post": {
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {str(status): {"description": "-"} for status in (200, 400, 401, 404, 405, 413, 429)},
            },
        }
        for prefix in ("/v1/", "/sessions/{secret}/v1/")
        for route, schema in schemas.items()
    }
    components = {"schemas": {str(number): schema for number, schema in enumerate(schemas.values())}}
    return {"openapi": "3.1.0", "info": {"title": "-", "version": "1"}, "paths": paths, "components": components}


@pytest.mark.filterwarnings("ignore")  # of schemathesis' own
@pytest.mark.parametrize("mode", GenerationMode)
def test_schemathesis_finds_no_fault(mode: GenerationMode, running: Running) -> None:
    """With requests of the models' types and with others, for every operation."""
    described: Any = schemathesis.openapi.from_dict(description())
    operations = [result.ok() for result in described.get_all_operations()]
    assert len(operations) == 2 * len(POSTS)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data(), known=st.booleans())
    def check(data: st.DataObject, known: bool) -> None:
        strategies = [operation.as_strategy(generation_mode=mode) for operation in operations]
        case = data.draw(st.one_of(strategies))
        if known and "secret" in case.path_parameters:
            case.path_parameters["secret"] = running.address.secret
        elif known:
            case.headers["Authorization"] = f"Bearer {running.address.secret}"
        answer = case.call(base_url=running.url)
        seen[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)
        assert answer.status_code == 200 or isinstance(answer.json()["error"]["message"], str)

    seen: Counter[int] = Counter()
    check()
    assert seen[401] and seen[404] and (seen[200] or mode is GenerationMode.NEGATIVE)


@pytest.mark.parametrize("route", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b'{"messages": ' + b'{"a":' * 50_000,
        b'{"messages": NaN}',
        b'{"temperature": 1e999, "messages": [], "prompt": "x", "input": "x", "max_tokens": 1}',
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800", "input": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"prompt": "x"}'.encode("utf-16"),
        b"\xff\xfe{}",
    ],
)
def test_malformed_bodies(route: str, body: bytes, running: Running) -> None:
    assert is_error(running.http.post(f"{running.address.base_url}/{route}", content=body), 400)


@pytest.mark.parametrize("route", POSTS)
@pytest.mark.parametrize(
    ("levels", "number", "status"), [(63, "1e99", 200), (64, "1", 400), (400, "1", 400), (1, "1e999", 400)]
)
def test_nested_too_deep_or_too_large_a_number(
    levels: int, number: str, status: int, route: str, running: Running
) -> None:
    content = f'{json.dumps({**BODIES[route], "any": nested(levels)})[:-1]}, "some": {number}}}'
    answer = running.http.post(f"{running.address.base_url}/{route}", content=content)
    assert answer.status_code == status
    assert status == 200 or "is not JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [nested(50), json.dumps(nested(50)), json.dumps(nested(400)), json.dumps(nested(900)), '{"a": "\\ud800"}', "1e999"],
    ids=["object", "text", "deep", "deeper", "surrogate", "infinite"],
)
def test_tool_calls_with_strange_arguments(arguments: Any, running: Running) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [user("who?"), {"role": "assistant", "tool_calls": [call]}, user("well?")]
    answer = running.http.post(f"{running.address.base_url}/chat/completions", json={"messages": messages})
    assert answer.status_code == 200


@pytest.mark.parametrize("megabytes", [2, 50])
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_that_are_too_large(megabytes: int, chunked: bool, running: Running) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(megabytes):
            yield b"x" * 2**20

    content: Any = chunks() if chunked else b"x" * (megabytes * 2**20)
    try:
        answer = running.http.post(f"{running.address.base_url}/chat/completions", content=content)
    except httpx.TransportError:
        assert megabytes == 50  # the server does not read on for ever
    else:
        assert is_error(answer, 413)
    assert running.http.get(f"{running.address.base_url}/models").status_code == 200


def test_a_request_that_breaks_off(running: Running) -> None:
    for sent in (b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"):
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            path = running.address.base_url.removeprefix(running.url)
            connection.sendall(f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\n".encode() + sent)
    assert running.http.get(f"{running.address.base_url}/models").status_code == 200


@pytest.mark.parametrize("route", POSTS)
def test_wrong_secrets(route: str, running: Running) -> None:
    secret = running.address.secret
    wrong = ["", "x", secret[:-1], secret + "x", secret.swapcase(), "*", "%00", "é", "a" * 5000]
    for guess in wrong:
        asked: Any = {"json": BODIES[route]}
        path = httpx.URL(running.url).copy_with(path=f"/sessions/{guess}/v1/{route}")
        assert is_error(running.http.post(path, **asked), 404)
        for name, value in (("authorization", f"Bearer {guess}"), ("authorization", guess), ("x-api-key", guess)):
            headers = {name.encode(): value.strip().encode()}
            assert is_error(running.http.post(f"{running.url}/v1/{route}", headers=headers, **asked), 401)
    assert is_error(running.http.post(f"{running.url}/v1/{route}", **asked), 401)


def test_path_tricks(running: Running) -> None:
    secret, other = running.address.secret, running.other.secret
    tricks = [
        f"/sessions/{secret}/../{other[:5]}/v1/models",
        f"/sessions/{secret}/v1/../../../etc/passwd",
        f"/sessions/{secret}/v1/models/../../../{other[:-1]}/v1/models",
        f"/sessions//{secret}/v1/models",
        f"/sessions/{secret}/v1/models/",
        f"/sessions/{secret}/v1//models",
        f"//sessions/{secret}/v1/models",
        *("/sessions//v1/models", "/sessions/v1/models", "/sessions/./v1/models", "/sessions", "/sessions/"),
        *("/%2e%2e/%2e%2e/etc/passwd", "/../../etc/passwd", "/", "/docs", "/openapi.json", "*", "http://x/v1/models"),
    ]
    for trick in tricks:  # as they are: httpx would tidy them up
        status, text = raw(running.url, "GET", trick)
        assert status in (401, 404), trick
        assert other not in text
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"):
        status, _ = raw(running.url, method, f"/sessions/{secret}/v1/chat/completions")
        assert status == 405, method


def raw(url: str, method: str, path: str) -> tuple[int, str]:
    """Status and body of a request whose path is sent as it is."""
    with closing(HTTPConnection(url.removeprefix("http://"))) as connection:
        connection.putrequest(method, path)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_errors_are_put_as_each_provider_puts_them(running: Running) -> None:
    base = running.address.base_url
    openai = running.http.post(f"{base}/chat/completions", json={"messages": [{"role": "king", "content": ""}]})
    assert openai.json()["error"] == {
        "message": "messages[0].role: Input tag 'king' found using 'role' does not match any of the expected tags: "
        "'system', 'developer', 'user', 'function', 'tool', 'assistant'",
        "type": "invalid_request_error",
        "param": "messages[0].role",
        "code": None,
    }
    picture = [{"type": "image", "source": {"type": "url", "url": "http://x"}}]
    anthropic = running.http.post(
        f"{base}/messages", json={"max_tokens": 1, "messages": [{"role": "user", "content": picture}]}
    )
    assert anthropic.json() == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "messages[0].content[0].source: is a remote image, which is not fetched; send a data URL "
            "(data:image/png;base64,...), or set rollout.images.fetch",
        },
    }
    for route in ("messages", "messages/count_tokens"):
        assert running.http.post(f"{base}/{route}", json={}).json()["type"] == "error"
    for body, message in (
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2, got 3"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: Field required"),
        ({"messages": ["hi"]}, "messages[0]: Input should be an object, got 'hi'"),
        ({"prediction": {"type": "content"}}, "prediction: not supported here, got an object; leave it out"),
    ):
        asked = running.http.post(f"{base}/chat/completions", json={"messages": [user("x")], **body})
        assert (asked.status_code, asked.json()["error"]["message"]) == (400, message)
    long = running.http.post(f"{base}/chat/completions", json={"messages": [user("x" * 20_000)]})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
