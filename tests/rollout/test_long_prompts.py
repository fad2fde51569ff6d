"""Long prompts: rendered beside the event loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.worlds import END, PLAIN, saying, user
from treadle.core.draws import Stream
from treadle.core.types import SamplingParams
from treadle.rendering import structure
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.session import Address, Session, SessionSpec

LONG = 200_000  # characters
Call = Callable[[Session, str], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "messages": lambda session, text: session.chat([user(text)]),
    "raw": lambda session, text: session.complete(text),
    "counting": lambda session, text: session.count([user(text)]),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def open_session(longest: int, engine: Any = None, name: str = "s") -> Session:
    address = Address(seed=0, stream=Stream.TRAIN, epoch=0, position=0, attempt=0)
    renderer = ChatRenderer(PLAIN, [END])  # its own: what was encoded before is not encoded again
    return Session(SessionSpec(name, engine or saying("ok"), renderer, SamplingParams(), longest, address))


class Encodings:
    """How long the texts were that were encoded, and on which threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        self.threads: set[int] = set()
        self._encode = structure.encode_text
        for module in ("structure", "chat"):
            monkeypatch.setattr(f"treadle.rendering.{module}.encode_text", self)

    def __call__(self, tokenizer: Any, text: str) -> list[int]:
        self.lengths.append(len(text))
        self.threads.add(threading.get_ident())
        return self._encode(tokenizer, text)


@each_call
async def test_long_prompts_are_tokenized_beside_the_event_loop(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(longest=2 * LONG)
    encodings = Encodings(monkeypatch)
    await call(session, "x" * LONG)
    assert max(encodings.lengths) >= LONG
    assert threading.get_ident() not in encodings.threads


async def test_another_session_is_answered_while_a_long_prompt_is_rendered() -> None:
    engine = saying("ok")
    long, other = open_session(10 * LONG, engine, "long"), open_session(1000, engine, "other")
    waiting = asyncio.create_task(long.chat([user("x y " * LONG)]))
    await asyncio.sleep(0)  # it begins
    await other.chat([user("hi")])
    assert not waiting.done()
    assert [len(prompt) < 100 for prompt in engine.calls] == [True]
    await waiting


async def test_calls_of_a_session_are_numbered_as_they_arrived() -> None:
    session = open_session(10 * LONG)
    texts = ["x" * LONG, "b", "y" * LONG, "d"]
    replies = await asyncio.gather(*(session.chat([user(text)]) for text in texts))
    assert [reply.number for reply in replies] == [0, 1, 2, 3]
    for step, text in zip(session.steps, texts, strict=True):
        assert len(step.prompt_ids) - len(text) == len(session.steps[1].prompt_ids) - 1


async def test_a_cancelled_rendering_holds_nobody_up() -> None:
    session = open_session(10 * LONG)
    waiting = asyncio.create_task(session.chat([user("x y " * LONG)]))
    await asyncio.sleep(0)
    waiting.cancel()
    reply = await session.chat([user("hi")])
    assert reply.number == 0 and len(session.steps) == 1
