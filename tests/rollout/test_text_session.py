"""A model behind a URL in the policy's place, over real HTTP: what it is sent, what is recorded, and how calls fail."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

pytest.importorskip("httpx")

import treadle
from tests.judge.servers import judging
from tests.judge.servers import quick as quick
from tests.worlds import addresses, user
from treadle.core.config import build
from treadle.core.errors import Cause, ConfigError, DataError
from treadle.core.types import (
    DropReason,
    Message,
    ModelCall,
    SamplingParams,
    Status,
    Step,
    StopReason,
    Task,
    Trajectory,
)
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tools import ToolEnvironment
from treadle.rollout import chat_endpoint
from treadle.rollout.attempt import Players
from treadle.rollout.config import RolloutConfig
from treadle.rollout.other_models import OtherModelConfig
from treadle.rollout.rewards import RewardsConfig
from treadle.rollout.text_session import EndpointPolicy, open_text_rollouts


async def played(url: str, player: Any, *, timeout: float = 45.0, options: Any = None, **rollout: Any) -> Trajectory:
    model = build(OtherModelConfig, {"url": url, "model": "m", "timeout": timeout, "options": options or {}})
    kind = "agent" if not isinstance(player, type) else "environment"
    players, config = Players(**{f"{kind}s": {"p": player}}), build(RolloutConfig, rollout)
    chat = EndpointPolicy(model, 4).chat
    async with open_text_rollouts(chat, "m", players, config, RewardsConfig(), lambda line: None) as rollouts:
        task = Task("t", [user("hi")], **{kind: "p"})  # type: ignore[arg-type]
        return await rollouts.start("g", task, addresses())[0]


def answer(message: dict[str, Any], finish: str = "stop", read: int = 5, wrote: int = 3) -> bytes:
    usage = {"prompt_tokens": read, "completion_tokens": wrote}
    return json.dumps({"choices": [{"message": message, "finish_reason": finish}], "usage": usage}).encode()


def said(content: str | None, **more: Any) -> bytes:
    return answer({"role": "assistant", "content": content}, **more)


class Echo(Environment):
    """Pays for `right`; goes on after anything else."""

    async def step(self, text: str) -> EnvStep:
        return EnvStep(reward=1.0, done=True) if text == "right</a>" else EnvStep([user(f"not {text}")])


async def test_it_plays_and_records_the_calls_as_text() -> None:
    replies = iter([said("wrong"), said("right</a> and more", wrote=9)])
    with judging(lambda m: next(replies)) as server:
        trajectory = await played(server.url, Echo, stop=["</a>"], max_completion_tokens=20, top_p=0.5)
    assert (trajectory.reward, trajectory.status) == (1.0, Status.DONE)
    first, last = server.requests
    assert first["messages"] == [user("hi")]
    assert last["messages"] == [user("hi"), {"role": "assistant", "content": "wrong"}, user("not wrong")]
    asked = {key: first[key] for key in first.keys() - {"messages", "seed"}}
    assert asked == {"model": "m", "temperature": 1.0, "max_tokens": 20, "top_p": 0.5}
    assert first["seed"] != last["seed"]
    chats = [step.chat for step in trajectory.steps]
    assert [(c.reply["content"], c.prompt_tokens, c.completion_tokens) for c in chats if c] == [
        ("wrong", 5, 3),
        ("right</a>", 5, 9),
    ]
    assert all(len(step.prompt_ids) == len(step.logprobs) == 0 and step.completion_tokens for step in trajectory.steps)


class Shop(ToolEnvironment):
    def price(self, item: str) -> int:
        return 7

    def answered(self, text: str) -> float:
        return float(text == "7")

    tools = (price,)


def calling(name: str = "price", ident: str = "") -> bytes:
    call = {"id": ident, "type": "function", "function": {"name": name, "arguments": '{"item": "tea"}'}}
    return answer({"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}, finish="tool_calls")


async def test_tools_are_offered_and_called() -> None:
    replies = iter([calling(), said("7")])
    with judging(lambda m: next(replies)) as server:
        trajectory = await played(server.url, Shop)
    assert trajectory.reward == 1.0
    first, last = server.requests
    assert [offered["function"]["name"] for offered in first["tools"]] == ["price"] and "tool_choice" not in first
    call, result = last["messages"][1:]
    assert (call["reasoning_content"], call["content"], result["content"]) == ("hm", "", "7")
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] == "c00000000"  # the server gave none
    assert trajectory.steps[0].chat is not None
    assert trajectory.steps[0].chat.tools == tuple(first["tools"])


async def test_what_a_reply_must_look_like_is_passed_on_as_far_as_servers_know_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool: Any = {"type": "function", "function": {"name": "price", "strict": True, "parameters": schema}}
    named: Any = {"type": "function", "function": {"name": "price"}}

    async def agent(task: Task, client: openai.AsyncOpenAI) -> treadle.Recovered:
        asked: dict[str, Any] = {"model": "m", "messages": [user("hi")]}
        await client.chat.completions.create(**asked, response_format=format)
        for choice in ("required", named):
            await client.chat.completions.create(**asked, tools=[tool], tool_choice=choice, parallel_tool_calls=False)
        with pytest.raises(openai.BadRequestError, match=r"structured_outputs\.regex: a model behind a URL"):
            await client.chat.completions.create(**asked, extra_body={"structured_outputs": {"regex": "a"}})
        return treadle.Recovered(1.0)

    with judging(lambda m: said("{}")) as server:
        trajectory = await played(server.url, agent)
    assert trajectory.reward == 1.0 and len(trajectory.steps) == 3
    first, *others = server.requests
    assert first["response_format"]["json_schema"] == {"name": "reply", "schema": schema, "strict": True}
    assert [body["tool_choice"] for body in others] == ["required", named]
    assert all(body["tools"] == [tool] and body["parallel_tool_calls"] is False for body in others)


async def test_fields_of_requests_are_set_and_left_out() -> None:
    with judging(lambda m: said("right</a>")) as server:
        options = {"max_tokens": None, "seed": None, "max_completion_tokens": 99, "temperature": 0.25}
        await played(server.url, Echo, options=options)
    assert {k: v for k, v in server.requests[0].items() if k != "messages"} == {
        "model": "m",
        "max_completion_tokens": 99,
        "temperature": 0.25,
    }


async def test_a_reply_that_is_cut_at_its_limit_is_no_failure() -> None:
    replies = iter([said("wro", finish="length"), said(None, finish="length"), said("right</a>")])
    with judging(lambda m: next(replies)) as server:
        trajectory = await played(server.url, Echo)
    assert (trajectory.reward, trajectory.failure) == (1.0, None)
    assert [step.stop_reason for step in trajectory.steps] == [StopReason.LENGTH, StopReason.LENGTH, StopReason.STOP]
    assert server.requests[2]["messages"][3] == {"role": "assistant", "content": ""}


async def test_a_prompt_that_the_server_counts_as_too_long_ends_the_attempt() -> None:
    replies = iter([said("wrong", read=5), said("right</a>", read=11)])
    with judging(lambda m: next(replies)) as server:
        trajectory = await played(server.url, Echo, max_input_tokens=10)
    assert (trajectory.status, trajectory.reward) == (Status.CONTEXT, 0.0)
    assert [step.dropped for step in trajectory.steps] == [None, DropReason.REJECTED]


async def test_limits_of_calls_and_tokens_hold() -> None:
    with judging(lambda m: said("wrong", read=len(m) * 10, wrote=10)) as server:
        by_calls = await played(server.url, Echo, max_steps=3)
        by_tokens = await played(server.url, Echo, max_total_tokens=45)
    assert [(t.status, len(t.steps)) for t in (by_calls, by_tokens)] == [(Status.MAX_STEPS, 3), (Status.MAX_STEPS, 3)]


class Hungup:
    """A server that closes the connection in the middle of an answer. whole: whether it says how long that is."""

    def __init__(self, length: bool) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._length = length
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                call, _ = self._socket.accept()
            except OSError:
                return
            with call, call.makefile("rb") as request:
                request.readline()
                headers = http.client.parse_headers(request)
                request.read(int(headers["Content-Length"]))  # closing before all is read would reset the connection
                body = said("right</a>")
                length = f"Content-Length: {len(body)}\r\n" if self._length else ""
                call.sendall(f"HTTP/1.1 200 OK\r\n{length}\r\n".encode() + body[: len(body) // 2])

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no time for a second call: what the first one meets is what the error says, however slow the machine."""
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 60.0)


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("length", [True, False])
async def test_an_answer_that_breaks_off_is_a_failure(length: bool) -> None:
    server = Hungup(length)
    trajectory = await played(server.url, Echo)
    server.close()
    assert trajectory.reward is None and trajectory.failure is not None
    assert trajectory.failure.cause is Cause.ENGINE
    assert ("peer closed connection" if length else "is not a chat completion") in trajectory.failure.message


FAILURES: list[tuple[Callable[[list[dict[str, str]]], Any], str]] = [
    (lambda m: 429, "at last: status 429"),
    (lambda m: 500, "at last: status 500"),
    (lambda m: (400, b'{"error": "auto tool choice"}'), 'status 400: {"error": "auto tool choice"}'),
    (lambda m: (401, b"no such key"), "status 401: no such key"),
    (lambda m: b'{"choices": []}', "is not a chat completion"),
    (lambda m: said(None), "is not a chat completion"),
    (lambda m: said("righ", finish="content_filter"), "cut off the answer"),
]


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize(("script", "message"), FAILURES)
async def test_a_call_without_an_answer_fails_the_attempt_by_name(script: Any, message: str) -> None:
    """Also after an answer that had earned something: an attempt that broke off is no reward."""

    class Paying(Environment):
        async def step(self, text: str) -> EnvStep:
            return EnvStep([user("more")], reward=0.5)

    with judging(lambda m: said("well") if len(m) == 1 else script(m)) as server:
        trajectory = await played(server.url, Paying)
    assert (trajectory.status, trajectory.reward) == (Status.FAILED, None) and trajectory.failure is not None
    assert trajectory.failure.cause is Cause.ENGINE and message in trajectory.failure.message


async def test_a_call_that_hangs_fails_the_attempt_by_name() -> None:
    with judging(lambda m: None) as server:
        trajectory = await played(server.url, Echo, timeout=0.3)
    assert trajectory.failure is not None and "at last: none within" in trajectory.failure.message


async def test_what_passes_is_asked_again() -> None:
    script: Iterator[Any] = iter([429, 503, b"{", said("right</a>")])
    with judging(lambda m: next(script)) as server:
        assert (await played(server.url, Echo)).reward == 1.0


async def test_an_agent_plays_with_it_too() -> None:
    openai = pytest.importorskip("openai")

    async def solve(task: Task, client: Any) -> treadle.Recovered:
        chat = client.chat.completions
        first = await chat.create(model="policy", messages=[user("hi")], stop=["!"], max_tokens=4)
        assert (first.choices[0].message.content, first.usage.prompt_tokens) == ("well", 5)
        with pytest.raises(openai.BadRequestError, match="does not take raw prompts"):
            await client.completions.create(model="policy", prompt="hi")
        with pytest.raises(openai.BadRequestError, match="leave them out"):
            await chat.create(model="policy", messages=[user("hi")], logprobs=True)
        talk = [user("hi"), {"role": "assistant", "content": "well"}, user("and?")]
        answer = await chat.create(model="policy", messages=talk)
        return treadle.Recovered(float(answer.choices[0].message.content == "right"))

    replies = iter([said("well! and"), said("right")])
    with judging(lambda m: next(replies)) as server:
        trajectory = await played(server.url, solve)
    assert trajectory.failure is None, trajectory.failure
    assert (trajectory.reward, [step.dropped for step in trajectory.steps]) == (1.0, [None, None])
    assert trajectory.steps[1].chat is not None and trajectory.steps[1].chat.messages[-1] == user("and?")


async def test_an_agent_whose_call_is_not_answered_fails() -> None:
    openai = pytest.importorskip("openai")

    async def solve(task: Task, client: Any) -> float:
        with suppress(openai.OpenAIError):
            await client.chat.completions.create(model="policy", messages=[user("hi")])
        return 0.0

    with judging(lambda m: 400) as server:
        trajectory = await played(server.url, solve, timeout=0.3)
    assert trajectory.reward is None and trajectory.failure is not None
    assert trajectory.failure.cause is Cause.ENGINE


async def test_what_needs_ids_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="driver 'p' plays with the models of Treadle's engines alone"):
        async with open_text_rollouts(None, "m", Players(drivers={"p": None}), RolloutConfig(), RewardsConfig(), print):  # type: ignore[arg-type, dict-item]
            pass
    with pytest.raises(ConfigError, match=r"set rollout\.conversation=turns"):
        await played("http://127.0.0.1:9/v1", Echo, conversation="single_message")

    class Begun(Echo):
        async def reset(self, task: Task) -> list[Message]:
            return [user("hi"), Message(role="assistant", content="I")]

    trajectory = await played("http://127.0.0.1:9/v1", Begun)
    assert trajectory.failure is not None and "let the prompt end before it" in trajectory.failure.message


def test_a_step_has_ids_or_a_chat_or_both() -> None:
    call = ModelCall("m", (user("hi"),), Message(role="assistant", content="yes"), 3, 1, 0.0, 0.1)
    step = Step(*([],) * 4, SamplingParams(), StopReason.STOP, chat=call)  # type: ignore[arg-type]
    assert (step.prompt_tokens, step.completion_tokens) == (3, 1)
    with pytest.raises(DataError, match="a completion needs at least one token before it"):
        replace(step, chat=None)
    both = replace(step, prompt_ids=np.array([1], np.int32))
    assert step.is_text and not both.is_text and (both.prompt_tokens, both.completion_tokens) == (1, 0)
