"""Images from clients: the same prompt by every dialect and its own client; and whatever is sent, no 500."""

import asyncio
import base64
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from tests.hostile_images import JPEG, LIMITS, PNG, REFUSED, WEBP, color, encoded, turned, url
from tests.rollout.gateway.servers import Served, served
from tests.seeing import picture, write
from tests.until import CEILING
from tests.worlds import user
from treadle.core.draws import Stream
from treadle.core.images import PLACE, picture_of, read_image
from treadle.core.types import Message, SamplingParams, StopReason, as_messages
from treadle.models.vision import ImageProcessor
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.config import ImagesConfig
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.session import Address, OtherReply, SessionSpec
from treadle.rollout.text_session import NoEngine, NoRenderer, TextSession
from treadle.testing import FakeEngine

ONE, TWO = picture(1), picture(2)
CONVERSATION = as_messages(
    [
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image", "image": ONE.data}]},
        {"role": "assistant", "content": "I look."},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "It is"}, {"type": "image", "image": TWO.data}],
        },
    ],
    "test",
)


def chat_part(source: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": source, "detail": "low"}}


def responses_part(source: Any) -> Any:
    return {"type": "input_image", "image_url": source, "detail": "auto"}


def anthropic_part(source: Any) -> Any:
    """Of a data URL; anything else as base64 that it is not."""
    if isinstance(source, str) and (found := re.match("data:([^;,]*);base64,", source)):
        head = {"media_type": found[1]} if found[1] else {}
        return {"type": "image", "source": {"type": "base64", **head, "data": source[found.end() :]}}
    if isinstance(source, str) and re.match(r"\w+://", source):
        return {"type": "image", "source": {"type": "url", "url": source}}
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": source}}


def text_part(text: str, kind: str = "text") -> Any:
    return {"type": kind, "text": text}


CHAT: Any = [
    user([text_part("What is "), chat_part(ONE.url)]),  # type: ignore[arg-type]
    {"role": "assistant", "content": "I look."},
    {"role": "tool", "tool_call_id": "c1", "content": [text_part("It is"), chat_part(TWO.url)]},
]
RESPONSES: Any = [
    user([text_part("What is ", "input_text"), responses_part(ONE.url)]),  # type: ignore[arg-type]
    {"type": "message", "role": "assistant", "content": [text_part("I look.", "output_text")]},
    {
        "type": "function_call_output",
        "call_id": "c1",
        "output": [text_part("It is", "input_text"), responses_part(TWO.url)],
    },
]
ANTHROPIC: Any = [
    user([text_part("What is "), anthropic_part(ONE.url)]),  # type: ignore[arg-type]
    {
        "role": "assistant",
        "content": [text_part("I look.")],
    },
    user(
        [  # type: ignore[arg-type]
            {
                "type": "tool_result",
                "tool_use_id": "c1",
                "content": [text_part("It is"), anthropic_part(TWO.url)],
            }
        ]
    ),
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    directory = write(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")
    return ChatRenderer(AutoTokenizer.from_pretrained(directory), [2], images=ImageProcessor.find(directory))


def saying_red(renderer: ChatRenderer) -> FakeEngine:
    return FakeEngine(lambda prompt, sampling: renderer.reply(Message(role="assistant", content="red")).tolist())


async def ask_chat(server: Served, address: SessionAddress, stream: bool) -> str:
    client: Any = server.openai(address)
    if not stream:
        answer = await client.chat.completions.create(model="m", messages=CHAT)
        return answer.choices[0].message.content or ""
    events = await client.chat.completions.create(model="m", messages=CHAT, stream=True)
    return "".join([event.choices[0].delta.content or "" async for event in events])


async def ask_responses(server: Served, address: SessionAddress, stream: bool) -> str:
    client: Any = server.openai(address)
    if not stream:
        return str((await client.responses.create(model="m", input=RESPONSES)).output_text)
    async with client.responses.stream(model="m", input=RESPONSES) as events:
        return str((await events.get_final_response()).output_text)


async def ask_anthropic(server: Served, address: SessionAddress, stream: bool) -> str:
    client = server.anthropic(address)
    asked: Any = {"model": "m", "max_tokens": 9, "messages": ANTHROPIC}
    if not stream:
        return str((await client.messages.create(**asked)).content[0].text)
    async with client.messages.stream(**asked) as events:
        return str(await events.get_final_text())


@pytest.mark.xdist_group("anthropic")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_anthropic])
async def test_real_clients_send_images(ask: Callable[..., Any], stream: bool, renderer: ChatRenderer) -> None:
    """What is sampled from has the processor's ids, and no dialect makes another prompt."""
    async with served(saying_red(renderer), renderer) as server:
        address = server.open()
        assert await ask(server, address, stream) == "red"
        [step] = server.steps()
        direct = server.sessions["s"].session
        counted = await direct.count(CONVERSATION)
        assert (await direct.chat(CONVERSATION)).step.prompt_ids.tolist() == step.prompt_ids.tolist()
        assert counted == len(step.prompt_ids)
        assert [image.sha256 for image in step.images] == [ONE.sha256, TWO.sha256]
        assert [image.url for image in step.images] == [ONE.url, TWO.url]
        places = [place for image in step.images for place in image.places(step.prompt_ids).tolist()]
        assert places == np.flatnonzero(step.prompt_ids == step.images[0].placeholder).tolist()


@pytest.mark.xdist_group("anthropic")
async def test_tokens_of_images_are_counted(renderer: ChatRenderer) -> None:
    async with served(saying_red(renderer), renderer) as server:
        address = server.open()
        counted = await server.anthropic(address).messages.count_tokens(model="m", messages=ANTHROPIC)
        assert counted.input_tokens == await server.sessions["s"].session.count(CONVERSATION)
        answer = await server.anthropic(address).messages.create(model="m", max_tokens=9, messages=ANTHROPIC)
        assert answer.usage.input_tokens == counted.input_tokens


async def test_a_response_goes_on_from_one_with_images(renderer: ChatRenderer) -> None:
    async with served(saying_red(renderer), renderer) as server:
        client = server.openai(server.open())
        first = await client.responses.create(model="m", input=RESPONSES)
        await client.responses.create(model="m", input="And now?", previous_response_id=first.id)
        before, after = server.steps()
        length = len(before.prompt_ids)
        assert after.prompt_ids[:length].tolist() == before.prompt_ids.tolist()
        assert after.images == before.images


async def test_a_model_without_sight_refuses_images() -> None:
    async with served(FakeEngine(lambda prompt, sampling: [3])) as server, httpx.AsyncClient() as http:
        base = server.open().base_url
        for route, body in bodies(ONE.url):
            answer = await http.post(f"{base}/{route}", json=body)
            assert answer.status_code == 400 and "the model takes none" in answer.text
        assert not server.steps()


# As far as messages: what was read, or why not


@asynccontextmanager
async def messages_of(**settings: Any) -> AsyncIterator[tuple[Served, httpx.AsyncClient, SessionAddress]]:
    """A session that records messages, without a renderer, whose model says `ok`."""

    async def answer(*_: Any) -> OtherReply:
        return OtherReply(Message(role="assistant", content="ok"), 1, 1, StopReason.STOP)

    async with served(NoEngine(), NoRenderer(), **settings) as server, httpx.AsyncClient(timeout=CEILING) as http:
        address = Address(0, Stream.TRAIN, 0, 0, 0)
        session = TextSession(SessionSpec("s", NoEngine(), NoRenderer(), SamplingParams(), 9, address))
        session.answer, session.model = answer, "m"
        server.sessions["s"] = server.gateway.attach(session)
        yield server, http, server.sessions["s"].address


def bodies(source: Any) -> list[tuple[str, Any]]:
    """Requests of every dialect with an image, as a user's and as a tool's."""
    chat, responses, anthropic = chat_part(source), responses_part(source), anthropic_part(source)
    result = {"type": "tool_result", "tool_use_id": "c", "content": [anthropic]}
    return [
        ("chat/completions", {"messages": [{"role": "user", "content": [chat]}]}),
        ("chat/completions", {"messages": [{"role": "tool", "tool_call_id": "c", "content": [chat]}]}),
        ("responses", {"input": [{"role": "user", "content": [responses]}]}),
        ("responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": [responses]}]}),
        ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [anthropic]}]}),
        ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [result]}]}),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": [anthropic]}]}),
    ]


def sent(source: object) -> Any:
    """What a client can send of an image: a URL, or JSON."""
    return url(source) if isinstance(source, bytes) else source


CONFIG = ImagesConfig(max_bytes=LIMITS.bytes, max_pixels=LIMITS.pixels)
FROM_CLIENTS = {
    name: sent(source) for name, (source, _) in REFUSED.items() if isinstance(source, str | bytes | int | None)
} | {
    "list": [url(PNG)],
    "object": {"url": {"url": url(PNG)}},
    "base64 without its head": base64.b64encode(PNG).decode(),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
async def test_hostile_images_are_refused_by_every_dialect() -> None:
    async with messages_of(images=CONFIG) as (server, http, address):
        for name, source in FROM_CLIENTS.items():
            for route, body in bodies(source):
                if name == "base64 without its head" and route.startswith("messages"):
                    continue  # is what Anthropic's clients send
                answer = await http.post(f"{address.base_url}/{route}", json=body)
                assert answer.status_code == 400, (name, route, answer.text[:300])
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error" and len(error["message"]) < 400, name
                told = re.findall(r"[A-Za-z0-9+/]{25,}", error["message"])
                assert not any(run in json.dumps(body) for run in told if run != "application/octet-stream"), name
        assert not server.steps()
        assert server.sessions["s"].bytes_in_flight == 0
        assert (await http.post(f"{address.base_url}/chat/completions", json=bodies(url(PNG))[0][1])).status_code == 200


RIGHT = {
    "png": PNG,
    "jpeg": JPEG,
    "webp": WEBP,
    "turned": turned(6),
    "cmyk": encoded(color("CMYK"), "JPEG"),
    "1 bit": encoded(color("1"), "PNG"),
}


@pytest.mark.parametrize("name", RIGHT)
async def test_the_right_pixels_arrive(name: str) -> None:
    data = RIGHT[name]
    expected = read_image(data)
    async with messages_of(images=CONFIG) as (server, http, address):
        asked = [*bodies(url(data, "image/jpeg")), *bodies(url(data, "image/webp"))]
        for route, body in asked:
            answer = await http.post(f"{address.base_url}/{route}", json=body)
            # A model behind a URL counts nothing.
            assert answer.status_code == (400 if "count" in route else 200), answer.text
        steps = server.steps()
        assert len(steps) == 12
        for step in steps:
            assert step.chat is not None
            [message] = step.chat.messages
            assert message["content"] == PLACE
            assert message["images"] == [expected.url]  # of its true type
            assert np.array_equal(picture_of(message["images"][0]).pixels, expected.pixels)


async def test_texts_and_images_keep_their_order() -> None:
    parts = [text_part("a"), text_part("b"), chat_part(ONE.url), chat_part(TWO.url), text_part("c"), text_part("d")]
    async with messages_of() as (server, http, address):
        body = {"messages": [{"role": "user", "content": parts}]}
        assert (await http.post(f"{address.base_url}/chat/completions", json=body)).status_code == 200
        [step] = server.steps()
        assert step.chat is not None
        assert step.chat.messages == as_messages(body["messages"], "test")
        assert step.chat.messages[0]["content"] == f"a\nb{PLACE}{PLACE}c\nd"


async def test_an_image_cannot_be_an_assistants_nor_its_place_a_text() -> None:
    said = [{"role": "assistant", "content": [chat_part(ONE.url)]}]
    wrong = [
        ("chat/completions", {"messages": said}),
        ("responses", {"input": [{"role": "assistant", "content": [responses_part(ONE.url)]}]}),
        ("messages", {"max_tokens": 9, "messages": [{"role": "assistant", "content": [anthropic_part(ONE.url)]}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": [text_part(PLACE), chat_part(ONE.url)]}]}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}),
        (
            "messages",
            {"max_tokens": 9, "messages": [user([{"type": "image", "source": {"type": "file", "file_id": "f"}}])]},  # type: ignore[arg-type]
        ),
    ]
    async with messages_of() as (_, http, address):
        for route, body in wrong:
            answer = await http.post(f"{address.base_url}/{route}", json=body)
            assert answer.status_code == 400 and ONE.url[30:60] not in answer.text, answer.text
        alone = {"messages": [user(PLACE)]}  # a text
        assert (await http.post(f"{address.base_url}/chat/completions", json=alone)).status_code == 200


async def test_images_that_are_sent_again_are_kept_once() -> None:
    """As every client does at every turn."""
    async with messages_of() as (server, http, address):
        turns: list[Any] = []
        for seed in range(8):
            turns.append({"role": "user", "content": [chat_part(picture(seed).url)]})
            assert (
                await http.post(f"{address.base_url}/chat/completions", json={"messages": turns})
            ).status_code == 200
        urls = [image for s in server.steps() if s.chat for m in s.chat.messages for image in m.get("images", ())]
        assert len(urls) == 36 and len({*map(id, urls)}) == 8


async def test_the_server_answers_while_images_are_decoded() -> None:
    """A text-only request is not behind the images of others."""
    large = encoded(Image.new("RGB", (3000, 3000)), "PNG")
    parts = [chat_part(url(large + bytes([number]))) for number in range(10)]
    body = {"messages": [{"role": "user", "content": parts}]}
    async with messages_of() as (server, http, address):
        url_ = f"{address.base_url}/chat/completions"
        decoding = asyncio.create_task(http.post(url_, json=body))
        while not decoding.done() and not server.sessions["s"].bytes_in_flight:
            await asyncio.sleep(0)
        answered = 0
        while not decoding.done() and answered < 2:
            assert (await http.post(url_, json={"messages": [user("hi")]})).status_code == 200
            answered += 1
        assert answered == 2
        assert (await decoding).status_code == 200


def test_memory_is_bounded() -> None:
    """Bombs, and a request of 100 MB, at the limits a run has, in a process whose peak is compared with its start."""
    code = """
import asyncio, resource, warnings
from tests.hostile_images import REFUSED, PNG
from tests.rollout.gateway.test_images import bodies, messages_of, sent, url
warnings.simplefilter("ignore")
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
NAMES = ("bomb", "largest", "beyond")
BOMBS = [sent(source) for name, (source, _) in REFUSED.items() if any(part in name for part in NAMES)]

async def main():
    async with messages_of() as (server, http, address):
        async def post(source):
            asked = [await http.post(f"{address.base_url}/{route}", json=body) for route, body in bodies(source)]
            return [answer.status_code for answer in asked]
        await post(url(PNG))
        before = peak()
        for bomb in BOMBS:
            if isinstance(bomb, str):
                assert set(await post(bomb)) == {400}
        bombs = peak() - before
        assert set(await post(sent(REFUSED["png that says 100 MB"][0]))) == {400}
        between = peak()
        async def hundred():
            for _ in range(100):
                yield b" " * 2**20
        answer = await http.post(f"{address.base_url}/chat/completions", content=hundred())
        assert answer.status_code == 413, answer.text
        print(bombs, between - before, peak() - between)

asyncio.run(main())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr == ""
    bombs, decoded, large = map(int, result.stdout.split())
    assert bombs < 64  # MiB; 20000 x 20000 pixels would be 1,200
    assert decoded < 12 * 32  # just within the limit of 2**25 pixels, so that it is decoded
    assert large < 160
