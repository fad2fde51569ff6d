"""What a judge's server may do to a reward and to the record: cut replies, wrong figures, floods, its key repeated."""

import asyncio
import base64
import gzip
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("httpx")

from tests.judge.servers import at, check_read, judging
from tests.judge.servers import quick as quick
from treadle.core.errors import Cause, EngineError, TrajectoryFailure
from treadle.core.text import redacted, without_keys
from treadle.core.types import Message, StopReason
from treadle.engines.vllm.server import Server
from treadle.judge import Criterion, Judge
from treadle.rendering.chat import ChatRenderer
from treadle.rollout import chat_endpoint
from treadle.rollout.chat_endpoint import ChatEndpoint, JsonEndpoint
from treadle.rollout.isolation.user_code import attributed, raised
from treadle.rollout.other_models import OPEN_MODELS, Chat, OnTry
from treadle.rollout.session import Address, OtherReply

NUMBER, KEY = Criterion("good", "Good?", "number"), "sk-Ab/12+cd.34-XyZ"


def completion(content: str = "ANSWER: 1", reason: str | None = "stop", usage: Any = None) -> bytes:
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": reason}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def in_turn(*answers: Any) -> Callable[[Any], Any]:
    left = iter(answers)
    return lambda request: next(left)


@pytest.mark.parametrize("reason", ["length", "content_filter", "abort", "error", "max_tokens"])
async def test_a_reply_that_was_cut_is_asked_for_again(reason: str, tmp_path: Path) -> None:
    with judging(in_turn(completion("ANSWER: 1", reason), completion("ANSWER: 10"))) as server:
        judge = Judge(at(server.url), [NUMBER], cache=tmp_path)
        assert (await judge.grade("Hello.")).components == {"good": 1.0}
        assert (await judge.grade("Hello.")).components == {"good": 1.0}  # of the cache
    assert len(server.requests) == 2


@pytest.mark.parametrize("reason", ["stop", "tool_calls", "eos_token", None])
async def test_a_reply_that_ended_by_itself_counts(reason: str | None) -> None:
    with judging(in_turn(completion("ANSWER: 1", reason))) as server:
        assert (await Judge(at(server.url), [NUMBER]).grade("Hello.")).components == {"good": 0.1}


async def test_replies_that_are_always_cut_are_no_reward() -> None:
    def parse(reply: str) -> float:
        return 1.0

    criterion = Criterion("c", "?", parse)
    refused = pytest.raises(TrajectoryFailure, match=r"c: the reply was cut \(length; max_tokens in the judge's")
    with judging(lambda m: completion("ANSWER: 1", "length")) as server, refused as caught:
        await Judge(at(server.url), [criterion], tries=2).grade("Hello.")
    assert (caught.value.cause, len(server.requests)) == (Cause.VERIFIER, 2)


GOOD = '{"reason": "as <think> } says", "score": 10}'


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ('<think>{"score": 1} or {x}?</think>\n\n' + GOOD, 1.0),
        ('{"score": 1}, no: {}\n</think>\n' + GOOD, 1.0),
        ("[THINK]{a}[/THINK]```json\n" + GOOD + "\n```", 1.0),
        ("<|channel>thought\n{a}<channel|>" + GOOD, 1.0),
        ("<|channel|>analysis<|message|>{a}<|end|><|start|>assistant<|channel|>final<|message|>" + GOOD, 1.0),
        ('{"reason": "it wrote </think> twice", "score": 5}', 0.5),
        ('<think>{"score": 10}', None),
        ('<think>{"score": 10}</think>', None),
        ('{"score": 10}\n</think>\nI cannot say.', None),
        ('{"score": 10} {"score": 1}', None),
    ],
)
def test_json_is_read_behind_a_thought(reply: str, value: float | None) -> None:
    check_read("json", reply, value)


@pytest.mark.parametrize("reply", ["<think>Perhaps:\nANSWER: 7", "Hm.\nANSWER: 7\n</think>\n", "[THINK]\nANSWER: 7"])
def test_an_answer_within_a_thought_is_none(reply: str) -> None:
    assert NUMBER.read("<think>a</think>\nANSWER: 7") == 0.7
    with pytest.raises(ValueError):
        NUMBER.read(reply)


@pytest.mark.parametrize(
    "usage",
    [
        *({"prompt_tokens": wrong} for wrong in (-5, "5", 5.5, True, [5], 2**40)),
        *({"total_tokens": 9, "completion_tokens": wrong} for wrong in (-1, "x", {})),  # type: ignore[var-annotated]
        *({"total_tokens": wrong} for wrong in (-(2**70), 10**30)),
        [7],
        "many",
    ],
)
async def test_usage_that_is_no_number_of_tokens_is_refused(usage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 60.0)  # no time for another call
    refused = pytest.raises(TrajectoryFailure, match=r"its usage reports|is not a chat completion")
    with judging(lambda m: completion(usage=usage)) as server, refused:
        await Judge(at(server.url), [NUMBER]).grade("Hello.")


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
async def test_usage_that_is_no_number_is_refused(number: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 60.0)
    body = completion(usage={"total_tokens": 123}).replace(b"123", number)
    with judging(lambda m: body) as server, pytest.raises(TrajectoryFailure, match="is not a chat completion"):
        await Judge(at(server.url), [NUMBER]).grade("Hello.")


async def test_an_answer_has_a_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_endpoint, "_LARGEST", 10**6)
    with judging(lambda m: completion("x" * 2 * 10**6)) as server:
        endpoint = ChatEndpoint(server.url, "m", options={}, timeout=30, patience=30, largest=10**6)
        with pytest.raises(EngineError, match="the answer has more than 1000000 bytes"):
            await endpoint.ask([])
        teacher = JsonEndpoint(f"{server.url}/x", timeout=30, patience=30, largest=10**6)
        with pytest.raises(EngineError, match="more than 1000000 bytes"):
            await teacher.post({"messages": []})
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("head", "part", "seconds", "message"),
    [
        (b"", b" ", 0.3, "at last: none within"),
        (b"Content-Encoding: gzip\r\n", gzip.compress(b" " * 10**6), 30, "the answer is compressed ('gzip')"),
    ],
    ids=["slow", "compressed"],
)
async def test_an_answer_has_a_limit_of_time_and_is_never_unpacked(
    head: bytes, part: bytes, seconds: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 60.0)

    def answer() -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")
            while True:  # until the client goes
                connection.sendall(part)
                time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        with pytest.raises(EngineError, match=re.escape(message)):
            await ChatEndpoint(url, "m", options={}, timeout=seconds, patience=seconds).ask([])
        await asyncio.to_thread(thread.join)


# The key


ECHOES = {
    "as it is": KEY,
    "of JSON": json.dumps(KEY).replace("/", r"\/"),
    "of JSON in JSON": json.dumps(json.dumps({"key": KEY.replace("/", "\\/")})),
    "in code points": "".join(f"\\u{ord(letter):04X}" for letter in KEY),
    "in a URL": urllib.parse.quote(KEY, safe=""),
    "cut where the error is": "x" * (200 - 10) + KEY,
}


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("echo", ECHOES)
async def test_a_key_that_the_server_repeats_is_in_no_error(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", KEY)
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 60.0)
    body = f'{{"error": "wrong key {ECHOES[echo]}"}}'
    for status in (401, 500, 200):
        answer = status, body.encode()
        with judging(in_turn(answer, answer)) as server, pytest.raises(TrajectoryFailure) as caught:
            await Judge(at(server.url, api_key_env="MINE"), [NUMBER]).grade("Hello.")
        for error in with_causes(caught.value):
            text = (repr(error) + str(error)).replace(server.url, "")  # whose port may have those digits
            assert not any(part in text for part in (KEY, KEY[:9], KEY[-6:], "sk-Ab", "005"))


async def test_a_key_that_is_no_header_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", f"{KEY}\n")
    monkeypatch.setattr(chat_endpoint, "FIRST_PAUSE", 60.0)
    with judging(lambda m: completion()) as server, pytest.raises(TrajectoryFailure, match="Illegal header") as caught:
        await Judge(at(server.url, api_key_env="MINE"), [NUMBER]).grade("Hello.")
    assert not any("sk-Ab" in str(error) for error in with_causes(caught.value))


async def test_a_key_in_a_reply_is_in_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", KEY)
    limits: dict[str, Any] = {"options": {}, "timeout": 30, "patience": 30, "api_key_env": "MINE"}
    with judging(lambda m: completion(f"Your key is {KEY}.").replace(b"/", rb"\/")) as server:
        answer = await ChatEndpoint(server.url, "m", **limits).ask([])
    assert answer.message["content"] == "Your key is [hidden]." and answer.stop_reason is StopReason.STOP


async def test_the_password_of_a_url_is_in_no_error() -> None:
    sent = base64.b64encode(b"me:hunter22").decode()
    with judging(lambda m: (403, f"no {sent} hunter22".encode())) as server:
        url = server.url.replace("//", "//me:hunter22@")
        with pytest.raises(TrajectoryFailure, match=r"the judge \'m\': status 403: no \[hidden\] \[hidden\]"):
            await Judge(at(url), [NUMBER]).grade("Hello.")
        vllm = Server(url)
        with pytest.raises(EngineError, match=r"//\[hidden\]@127.*no \[hidden\] \[hidden\]"):
            await vllm.post("/x", {"messages": []})
        await vllm.close()
    assert [headers["Authorization"] for headers in server.headers] == [f"Basic {sent}"] * 2


def test_a_key_of_the_environment_is_in_no_failure_of_user_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tracker's, or that of an agent's own client."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    try:
        try:
            raise KeyError(f"no {KEY}")
        except KeyError as inner:
            raise RuntimeError(f"wrong key {KEY}") from inner
    except RuntimeError as error:
        failure = attributed(error, "the agent", Cause.AGENT)
        assert raised("wandb", error) == "wandb raised RuntimeError: wrong key [hidden]"
    assert "no [hidden]" in failure.traceback and KEY not in failure.traceback + failure.message


def test_what_is_no_key_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "abcdefgh-1")
    assert without_keys("an EMPTY shop", "EMPTY") == "an EMPTY shop"
    assert redacted("EMPTY is no key, EMPTYING", "EMPTY") == "[hidden] is no key, EMPTYING"
    assert redacted("x abcdefgh-1, http://u:p@h/a@b") == "x [hidden], http://[hidden]@h/a@b"
    assert redacted("mail me@here, http://h/a@b") == "mail me@here, http://h/a@b"
    assert without_keys("\\" * 10**5 + KEY, KEY) == "\\" * (10**5 - 4) + "[hidden]"


# Models of a run


class Cutting:
    """A model that cuts its first reply. asked: the seeds."""

    renderer: ChatRenderer | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    source, has_draws = ("", "cutting"), True

    def __init__(self, reason: StopReason) -> None:
        self.reason, self.asked = reason, list[int]()

    async def open(self, began: Any) -> None: ...

    async def close(self) -> None: ...

    def chat(self, session: str, address: Address, on_try: OnTry = lambda reply, seconds: None) -> Chat:
        async def chat(messages: Any, tools: Any, options: Any) -> OtherReply:
            self.asked.append(address.seed)
            reason = StopReason.STOP if len(self.asked) > 1 else self.reason
            return OtherReply(Message(role="assistant", content=f"ANSWER: {len(self.asked)}"), 1, 1, reason)

        return chat


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.ABORT])
async def test_a_cut_reply_of_a_model_of_the_run_is_asked_for_again(reason: StopReason) -> None:
    model = Cutting(reason)
    before = OPEN_MODELS.set({"judge": model})
    try:
        assert (await Judge("judge", [NUMBER]).grade("Hello.")).components == {"good": 0.2}
    finally:
        OPEN_MODELS.reset(before)
    assert len(set(model.asked)) == 2
