"""Prompts are recorded ids plus newly tokenized text; what was sampled is never tokenized again."""

import asyncio
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worlds import CHATML, END, PLAIN, PlainTokenizer, chatml, plain_ids, plain_renderer, tool, user
from treadle.core.draws import Stream
from treadle.core.errors import ConfigError
from treadle.core.types import Message, SamplingParams, Step, StopReason
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation, check_turns
from treadle.rollout.session import Address, Session, SessionSpec
from treadle.testing import FakeEngine

ADDRESS = Address(seed=1, stream=Stream.TRAIN, epoch=0, position=0, attempt=0)
LONGEST = 5  # tokens of a completion
STOP_STRING = "</s>"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, the ids a model may draw from, those of them that are plain ASCII, and its end-of-turn token."""

    tokenizer: Any
    renderer: ChatRenderer
    ids: tuple[int, ...]
    ascii: tuple[int, ...]
    end: int


def vocabulary(tokenizer: Any, candidates: range) -> Vocabulary:
    [end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    ids = tuple(i for i in candidates if i != end)
    texts = {i: tokenizer.decode([i], skip_special_tokens=False) for i in ids}
    plain = tuple(i for i, text in texts.items() if text.isascii() and text.isprintable() and "<|" not in text)
    return Vocabulary(tokenizer, ChatRenderer(tokenizer, [int(end)]), ids, plain, int(end))


@cache
def load(name: str) -> Vocabulary:
    if name == "plain":
        return vocabulary(PLAIN, range(140))
    from transformers import AutoTokenizer

    import treadle

    tokenizer = AutoTokenizer.from_pretrained(Path(treadle.__file__).parent / "recipes" / "tokenizer")
    return vocabulary(tokenizer, range(len(tokenizer)))


each_tokenizer = pytest.mark.parametrize("name", ["plain", "shipped"])


def converse(
    words: Vocabulary, turns: list[tuple[list[int], list[Message]]], stop: tuple[str, ...] = ()
) -> tuple[list[Step], list[list[Message]]]:
    """Play `turns` of (what the model samples, what it reads next); also the conversation before each call."""
    answers = [completion for completion, _ in turns]
    engine = FakeEngine(lambda prompt, sampling: answers.pop(0))
    sampling = SamplingParams(max_tokens=LONGEST, stop=stop)

    async def talk() -> tuple[list[Step], list[list[Message]]]:
        session = Session(SessionSpec("s", engine, words.renderer, sampling, 10**6, ADDRESS))
        conversation, seen = [user("begin")], []
        for _, observations in turns:
            seen.append(list(conversation))
            reply = (await session.chat(conversation)).message["content"]
            conversation += [Message(role="assistant", content=reply), *observations]
        session.close()
        return session.steps, seen

    steps, seen = asyncio.run(talk())
    for step, sent in zip(steps, engine.calls, strict=True):
        assert np.array_equal(step.prompt_ids, sent)
    return steps, seen


messages = st.lists(
    st.builds(Message, role=st.sampled_from(["user", "tool", "system"]), content=st.text(max_size=8)),
    min_size=1,
    max_size=3,
)


def completions(words: Vocabulary) -> st.SearchStrategy[list[int]]:
    """Ids that need not re-tokenize to themselves, ended in every way there is."""
    ids = st.lists(st.sampled_from(words.ids), max_size=LONGEST - 1)
    stop_string = words.tokenizer.encode(STOP_STRING, add_special_tokens=False)
    return st.one_of(
        ids.map(lambda body: [*body, words.end]),
        ids.map(lambda body: [*body, *stop_string][-LONGEST:]),
        st.lists(st.sampled_from(words.ids), min_size=LONGEST + 1, max_size=LONGEST + 3),  # cut by length
        ids.filter(bool),  # given up by the engine
    )


@each_tokenizer
@settings(max_examples=30)
@given(data=st.data())
def test_the_next_prompt_begins_with_the_last_call_id_for_id(name: str, data: st.DataObject) -> None:
    words = load(name)
    turns = data.draw(st.lists(st.tuples(completions(words), messages), min_size=2, max_size=4))
    steps, _ = converse(words, turns, stop=(STOP_STRING,))
    for (sampled, observations), step, following in zip(turns, steps, steps[1:], strict=False):
        completion = sampled[:LONGEST]
        assert step.completion_ids.tolist() == completion  # what was sampled, and nothing else
        between = "\n" + chatml(observations)
        if completion[-1:] != [words.end]:
            between = "<|im_end|>" + between
        rest = words.tokenizer.encode(between, add_special_tokens=False)
        assert following.prompt_ids.tolist() == [*step.prompt_ids.tolist(), *completion, *rest]
        assert len(step.mask) == len(completion)  # nothing that was appended can be trained


@each_tokenizer
@settings(max_examples=30)
@given(data=st.data())
def test_prompts_read_as_the_chat_template_renders_the_conversation(name: str, data: st.DataObject) -> None:
    words = load(name)
    plain = st.lists(st.sampled_from(words.ascii), min_size=1, max_size=LONGEST - 1)
    ended = st.booleans().flatmap(lambda end: plain.map(lambda body: [*body, words.end] if end else body))
    text = st.text(alphabet="ab c\n.", max_size=6).map(user)
    steps, seen = converse(
        words, data.draw(st.lists(st.tuples(ended, st.lists(text, min_size=1, max_size=2)), min_size=1, max_size=4))
    )
    for step, conversation in zip(steps, seen, strict=True):
        rendered = words.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert words.tokenizer.decode(step.prompt_ids.tolist(), skip_special_tokens=False) == rendered


@pytest.mark.parametrize(
    ("sampled", "stop_reason"), [(plain_ids("abacus!"), "length"), (plain_ids("a</s>"), "stop")], ids=str
)
def test_an_end_of_turn_the_model_did_not_write_stands_in_the_next_prompt_only(
    sampled: list[int], stop_reason: str
) -> None:
    steps, seen = converse(load("plain"), [(sampled, [tool("x")]), ([END], [tool("y")])], stop=(STOP_STRING,))
    cut = sampled[:LONGEST]
    assert steps[0].completion_ids.tolist() == cut
    assert steps[0].stop_reason is StopReason(stop_reason)
    assert END not in steps[0].completion_ids
    behind = len(steps[0].prompt_ids) + len(cut)
    assert steps[1].prompt_ids[behind] == END
    assert steps[1].prompt_ids.tolist().count(END) == 3  # of the first message, of the reply, of the observation
    assert seen[1][1] == {"role": "assistant", "content": "a" if stop_reason == "stop" else "abacus"}


@pytest.mark.parametrize(
    ("ids", "stop", "text"),
    [
        ([*plain_ids("hi"), END], (), "hi"),
        (plain_ids("hi"), (), "hi"),
        ([END], (), ""),
        (plain_ids("a;b,c"), (",", ";"), "a"),
        ([*plain_ids("a;"), END], (";",), "a"),
        ([*plain_ids(" a \n"), END], (), " a \n"),
        ([END, END], (), "<|im_end|>"),
    ],
)
def test_the_environment_reads_the_reply_without_its_ending(ids: list[int], stop: tuple[str, ...], text: str) -> None:
    _, seen = converse(load("plain"), [(ids, [tool("o")]), ([END], [])], stop)
    assert seen[1][1] == {"role": "assistant", "content": text}


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def test_a_demonstrated_reply_ends_as_the_template_ends_a_turn() -> None:
    assert plain_renderer().reply(said("abc.")).tolist() == [*plain_ids("abc."), END]
    with pytest.raises(ConfigError, match=r"ends a turn with '<\|im_end\|>"):
        ChatRenderer(PlainTokenizer(), [0]).reply(said("hi"))


TWICE = CHATML + CHATML
DROPPING = "{% set messages = messages | rejectattr('role', 'equalto', 'assistant') | list %}" + CHATML


@pytest.mark.parametrize(
    ("template", "fault"),
    [(TWICE, "cannot be extended token by token"), (DROPPING, "ends a turn with ''")],
    ids=["twice", "dropping"],
)
def test_a_template_that_cannot_be_extended_is_found_before_the_first_rollout(template: str, fault: str) -> None:
    check_turns(plain_renderer(), [user("?")], several=True)
    with pytest.raises(ConfigError, match=fault):
        check_turns(ChatRenderer(PlainTokenizer(template), [END]), [user("?")], several=True)


def test_turns_that_no_stop_token_ends_are_found_before_the_first_rollout() -> None:
    with pytest.raises(ConfigError, match=r"name the token that ends it in model\.stop_tokens"):
        check_turns(ChatRenderer(PLAIN, [0]), [user("?")], several=False)


def test_a_renderer_is_pickled_as_what_it_was_made_from() -> None:
    renderer = ChatRenderer(PLAIN, [END], chat_template_kwargs={"unknown": 1})
    copy = pickle.loads(pickle.dumps(renderer))
    assert (copy.options, copy.source) == (renderer.options, renderer.source)
    found, expected = (Conversation(each).render([user("abc")]).ids.tolist() for each in (copy, renderer))
    assert found == expected
