"""One exact step per call: what was sent, what came back, how it was sampled."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.kit import open_session
from tests.worlds import END, PlainTokenizer, chatml, make_step, plain_ids, plain_renderer, saying, tool, user
from treadle.core.draws import Stream, call_seed
from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import DataError, EngineError
from treadle.core.types import Ids, Message, SamplingParams, StopReason
from treadle.rendering import structure
from treadle.rollout.session import RawPrompts, Session
from treadle.testing import FakeEngine


def talk(session: Session, calls: int) -> list[Message]:
    """`calls` calls with an observation between them; returns the conversation after the last reply."""

    async def go() -> list[Message]:
        conversation = [user("q")]
        for number in range(calls):
            conversation += [tool(f"o{number}")] if number else []
            conversation.append((await session.chat(conversation)).message)
        return conversation

    return asyncio.run(go())


def test_a_step_is_what_the_engine_was_sent_and_answered() -> None:
    engine = FakeEngine(lambda prompt, sampling: [*plain_ids("ok"), END], logprob=-0.25)
    session = open_session(engine, temperature=0.7, max_tokens=9, stop=("x",))
    conversation = talk(session, 2)
    first, second = session.steps
    assert first.prompt_ids.tolist() == engine.calls[0].tolist() == plain_ids(chatml([user("q")]))
    assert second.prompt_ids.tolist() == engine.calls[1].tolist() == plain_ids(chatml(conversation[:3]))
    assert [s.completion_ids.tolist() for s in session.steps] == [[*plain_ids("ok"), END]] * 2
    assert (first.logprobs == -0.25).all()
    assert first.mask.all()
    assert (first.sampling.temperature, first.sampling.max_tokens, first.sampling.stop) == (0.7, 9, ("x",))
    assert first.seconds >= 0
    assert [m["content"] for m in conversation] == ["q", "ok", "o1", "ok"]


def test_every_call_has_its_own_seed_from_its_address() -> None:
    session = open_session(saying("a"))
    talk(session, 3)
    seeds = [step.sampling.seed for step in session.steps]
    assert seeds == [call_seed(3, Stream.TRAIN, 1, 5, 2, number) for number in range(3)]
    assert len(set(seeds)) == 3


def test_closing_tells_the_engine_and_may_be_repeated() -> None:
    engine = saying("a")
    session = open_session(engine)
    assert engine.open == ["s"]
    session.close()
    session.close()
    assert engine.open == []
    with pytest.raises(EngineError, match="not open"):
        talk(session, 1)


class Bad(FakeEngine):
    """Answers one completion, whatever was asked."""

    def __init__(self, completion: Completion) -> None:
        super().__init__(lambda prompt, sampling: [])
        self.completion = completion

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        return self.completion


@pytest.mark.parametrize(
    ("ids", "logprobs", "spans", "problem"),
    [
        ([5, 6], [-0.1, float("nan")], [(0, 0, 2)], "logprobs must be finite"),
        ([5, 6], [-0.1, 0.5], [(0, 0, 2)], "logprobs must be finite and <= 0, got 0.5"),
        ([5, 6], [-0.1], [(0, 0, 2)], "logprobs has 1 entries for 2"),
        ([5, -1], [-0.1, -0.1], [(0, 0, 2)], "completion_ids must lie in"),
        ([5, 6], [-0.1, -0.1], [(0, 0, 1)], "version spans end at 1"),
        ([], [], [], "step 0: .* it has 0 tokens, 1 to"),
        ([5] * 300, [-0.1] * 300, [(0, 0, 300)], "it has 300 tokens, 1 to 256 were requested"),
    ],
)
def test_an_answer_that_cannot_be_recorded_is_the_engines_fault(
    ids: list[int], logprobs: list[float], spans: list[tuple[int, int, int]], problem: str
) -> None:
    completion = Completion(
        np.array(ids), np.array(logprobs), StopReason.STOP, tuple(VersionSpan(*span) for span in spans)
    )
    session = open_session(Bad(completion))
    with pytest.raises(EngineError, match=problem):
        talk(session, 1)
    assert session.steps == []


# Long prompts: rendered beside the event loop


LONG = 200_000  # characters
Call = Callable[[Session, str], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "messages": lambda session, text: session.chat([user(text)]),
    "raw": lambda session, text: session.complete(text),
    "counting": lambda session, text: session.count([user(text)]),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


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
    session = open_session(saying("ok"), longest=2 * LONG)
    encodings = Encodings(monkeypatch)
    await call(session, "x" * LONG)
    assert max(encodings.lengths) >= LONG
    assert threading.get_ident() not in encodings.threads


async def test_another_session_is_answered_while_a_long_prompt_is_rendered() -> None:
    engine = saying("ok")
    long, other = open_session(engine, longest=10 * LONG, name="long"), open_session(engine, name="other")
    waiting = asyncio.create_task(long.chat([user("x y " * LONG)]))
    await asyncio.sleep(0)  # it begins
    await other.chat([user("hi")])
    assert not waiting.done()
    assert [len(prompt) < 100 for prompt in engine.calls] == [True]
    await waiting


async def test_calls_of_a_session_are_numbered_as_they_arrived() -> None:
    session = open_session(saying("ok"), longest=10 * LONG)
    texts = ["x" * LONG, "b", "y" * LONG, "d"]
    replies = await asyncio.gather(*(session.chat([user(text)]) for text in texts))
    assert [reply.number for reply in replies] == [0, 1, 2, 3]
    for step, text in zip(session.steps, texts, strict=True):
        assert len(step.prompt_ids) - len(text) == len(session.steps[1].prompt_ids) - 1


async def test_a_cancelled_rendering_holds_nobody_up() -> None:
    session = open_session(saying("ok"), longest=10 * LONG)
    waiting = asyncio.create_task(session.chat([user("x y " * LONG)]))
    await asyncio.sleep(0)
    waiting.cancel()
    reply = await session.chat([user("hi")])
    assert reply.number == 0 and len(session.steps) == 1


# Raw prompts that carry on what was sampled keep its ids


A, B, C = (5 + ord(letter) for letter in "abc")


def prompts() -> RawPrompts:
    return RawPrompts(plain_renderer())


def test_the_longest_earlier_call_is_carried_on() -> None:
    raw = prompts()
    raw.record(make_step(plain_ids("x "), [A, B, END]))
    raw.record(make_step([*plain_ids("x "), A, B, *plain_ids(" y ")], [A, END]))
    assert raw.ids("x ab y a z").tolist() == [*plain_ids("x "), A, B, *plain_ids(" y "), A, *plain_ids(" z")]
    assert raw.ids("x ab y b").tolist() == [*plain_ids("x "), A, B, *plain_ids(" y "), *plain_ids("b")]
    assert raw.ids("x ab<|im_end|>\n").tolist() == [*plain_ids("x "), A, B, END, *plain_ids("\n")]
    assert raw.ids("other").tolist() == plain_ids("other")


def test_text_cut_by_a_stop_string_keeps_what_it_can() -> None:
    raw = prompts()
    raw.record(make_step(plain_ids("x "), [A, B, *plain_ids("STOP")]))
    assert raw.ids("x ab more").tolist() == [*plain_ids("x "), A, B, *plain_ids(" more")]


@given(st.lists(st.sampled_from([3, 4, A, B, C]), min_size=1, max_size=30), st.text("abc ", max_size=10))
def test_whatever_was_sampled_is_kept(sampled: list[int], more: str) -> None:
    raw = prompts()
    step = make_step(plain_ids("p"), sampled)
    raw.record(step)
    text = str(PlainTokenizer().decode(step.full_ids, skip_special_tokens=False)) + more
    ids = raw.ids(text)
    assert ids[: len(step.full_ids)].tolist() == step.full_ids.tolist()
    assert PlainTokenizer().decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("prompt", ["", [], [-1], [2**31], [1.5], [[1]]])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(DataError):
        prompts().ids(prompt)  # type: ignore[arg-type]
