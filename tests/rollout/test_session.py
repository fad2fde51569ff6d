"""One exact step per call: what was sent, what came back, how it was sampled."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import END, chatml, plain_ids, plain_renderer, saying, tool, user
from treadle.core.draws import Stream, call_seed
from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import ContextExceeded, EngineError
from treadle.core.types import Ids, Message, SamplingParams, StopReason
from treadle.rollout.session import Address, Session, SessionSpec
from treadle.testing import FakeEngine

ADDRESS = Address(seed=3, stream=Stream.TRAIN, epoch=1, position=5, attempt=2)


def open_session(engine: FakeEngine, longest: int = 1000, **sampling: Any) -> Session:
    renderer = plain_renderer()
    return Session(SessionSpec("s", engine, renderer, SamplingParams(**sampling), longest, ADDRESS))


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


def test_a_call_has_a_start_and_says_how_long_it_waited_if_the_engine_does() -> None:
    class Waiting(FakeEngine):
        async def generate(
            self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
        ) -> Completion:
            done = await super().generate(prompt_ids, sampling, session=session)
            return replace(done, waited=0.25)

    before = time.time()
    for engine, waited in ((saying("a"), None), (Waiting(lambda prompt, sampling: [7, END]), 0.25)):
        session = open_session(engine)
        talk(session, 2)
        first, second = session.steps
        assert first.started is not None and second.started is not None
        assert before <= first.started <= second.started <= time.time()
        assert second.started >= first.started + first.seconds - 1e-3  # of two clocks
        assert (first.waited, second.waited) == (waited, waited)


def test_every_call_has_its_own_seed_from_its_address() -> None:
    session = open_session(saying("a"))
    talk(session, 3)
    seeds = [step.sampling.seed for step in session.steps]
    assert seeds == [call_seed(3, Stream.TRAIN, 1, 5, 2, number) for number in range(3)]
    assert len(set(seeds)) == 3


class Swapping(FakeEngine):
    """Weights are swapped in flight: the first token by the current version, the others by the next."""

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        done = await super().generate(prompt_ids, sampling, session=session)
        spans = (VersionSpan(self.version, 0, 1), VersionSpan(self.version + 1, 1, len(done.token_ids)))
        self.version += 1
        return Completion(done.token_ids, done.logprobs, done.stop_reason, spans)


def test_each_token_knows_the_policy_version_that_sampled_it() -> None:
    engine = Swapping(lambda prompt, sampling: [7, 8, END])
    asyncio.run(engine.publish(4))
    session = open_session(engine)
    talk(session, 2)
    assert [s.policy_versions.tolist() for s in session.steps] == [[4, 5, 5], [5, 6, 6]]


@given(st.integers(1, 60))
def test_the_limit_is_on_the_prompt_really_sent(longest: int) -> None:
    engine = saying("x")
    session = open_session(engine, longest)
    prompt = len(plain_ids(chatml([user("q")])))
    if prompt <= longest:
        talk(session, 1)
        assert len(engine.calls[0]) == prompt
        return
    with pytest.raises(ContextExceeded, match=f"the prompt has {prompt} tokens, max_input_tokens is {longest}"):
        talk(session, 1)
    assert engine.calls == []
    assert session.steps == []


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

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
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
        ([5] * 300, [-0.1] * 300, [(0, 0, 300)], "it has 300 tokens, 1 to 256 were asked for"),
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
