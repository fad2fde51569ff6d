"""Conversations: which recorded reply a message is, open turns, what breaks and why."""

import asyncio
import json
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.families import FAMILIES, TOOLS, World, small_vocabulary
from tests.rollout.kit import open_session
from tests.worlds import CHATML, END, PLAIN, PlainTokenizer, chatml, plain_ids, plain_renderer, tool, user
from treadle.core.errors import ConfigError, DataError
from treadle.core.types import BreakCause, Message, Step, StopReason
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation, check_turns
from treadle.rendering.identity import Prompt
from treadle.testing import FakeEngine

THINKING = CHATML.replace("m['content']", "(m.reasoning_content or '') + m['content']")


def said(text: str, **more: Any) -> Message:
    message: Message = {"role": "assistant", "content": text, **more}  # type: ignore[typeddict-item]
    return message


def calling(name: str, ident: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return said("", tool_calls=[{"id": ident, "type": "function", "function": function}])


def conversation(template: str = CHATML, **options: Any) -> Conversation:
    return Conversation(ChatRenderer(PlainTokenizer(template), [END], **options))


def answer(talk: Conversation, messages: list[Message], reply: Message, ids: list[int] | None = None) -> np.ndarray:
    """Record a reply, "ab" sampled as "a", "b"; returns prompt and completion."""
    prompt = talk.render(messages)
    sampled = [5 + byte for byte in reply["content"].encode()] + [END] if ids is None else ids
    talk.record(prompt, np.array(sampled, np.int32), reply)
    return np.concatenate([prompt.ids, np.array(sampled, np.int32)])


def begins(prompt: Prompt, known: np.ndarray) -> bool:
    return bool(prompt.ids[: len(known)].tolist() == known.tolist())


# Identity


@pytest.mark.parametrize(
    ("handed_out", "sent"),
    [
        (said("ab"), said(" ab\n")),
        (said("ab", reasoning_content="why"), said("ab")),
        (said("ab", reasoning_content="why"), said("ab", reasoning_content=" why ")),
        (said("ab"), {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
        (said(""), {"role": "assistant", "content": None}),
    ],
)
def test_a_reply_that_comes_back_in_another_form_is_the_recorded_one(handed_out: Message, sent: Any) -> None:
    talk = conversation(THINKING)
    known = answer(talk, [user("q")], handed_out)
    prompt = talk.render([user("q"), sent, tool("o")])
    assert begins(prompt, known) and prompt.break_cause is None


@pytest.mark.parametrize("sent", [said("abc"), said("ab", reasoning_content="other")])
def test_a_reply_that_says_something_else_is_not(sent: Message) -> None:
    talk = conversation(THINKING)
    known = answer(talk, [user("q")], said("ab", reasoning_content="why"))
    assert not begins(talk.render([user("q"), sent, tool("o")]), known)


def test_of_equal_replies_the_one_with_the_same_history_is_meant_then_the_newest() -> None:
    talk = conversation()
    first = answer(talk, [user("q")], said("ab"), [5 + ord("a"), 5 + ord("b"), END])
    other = answer(talk, [user("r")], said("ab"), [3, END])
    newer = answer(talk, [user("q")], said("ab"), [3, END])
    assert begins(talk.render([user("q"), said("ab"), tool("o")]), newer)
    assert begins(talk.render([user("r"), said("ab"), tool("o")]), other)
    assert not begins(talk.render([user("q"), said("ab"), tool("o")]), first)


def test_tool_calls_are_equal_as_values_and_told_apart_by_their_ids() -> None:
    world = World(FAMILIES["qwen2_5"], small_vocabulary())
    talk, known = Conversation(world.renderer), {}
    for ident in ("one", "two"):
        prompt = talk.render([user("q")], TOOLS)
        sampled = world.tokenizer.encode(f'<tool_call>{{"name": "f", "arguments": {{"n":1}}}}</tool_call>{ident}').ids
        talk.record(prompt, np.array([*sampled, world.stops[0]], np.int32), calling("f", ident, n=1))
        known[ident] = np.array([*prompt.ids, *sampled, world.stops[0]], np.int32)
    for ident in ("one", "two"):
        sent = calling("f", ident, n=1.0)
        assert begins(talk.render([user("q"), sent, tool("o")], TOOLS), known[ident])


# Open turns


def test_a_turn_goes_on_where_it_was_cut() -> None:
    talk = conversation()
    first = answer(talk, [user("q")], said("ab"), [5 + ord("a"), 5 + ord("b")])
    prompt = talk.render([user("q"), said("ab cab")], continue_final_message=True)
    assert prompt.ids.tolist() == [*first.tolist(), *plain_ids(" cab")]
    assert prompt.break_cause is None
    talk.record(prompt, np.array(plain_ids("!"), np.int32), said("!"))
    third = talk.render([user("q"), said("ab cab! ?")], continue_final_message=True)
    assert third.ids.tolist() == [*prompt.ids.tolist(), *plain_ids("! ?")]
    talk.record(third, np.array([*plain_ids("x"), END], np.int32), said("x"))
    later = talk.render([user("q"), said("ab cab! ?x"), user("r")])  # the whole turn as one message
    assert later.ids.tolist() == [*third.ids.tolist(), *plain_ids("x"), END, *plain_ids("\n" + chatml([user("r")]))]


def test_a_message_of_the_agents_own_can_be_continued() -> None:
    prompt = conversation().render([user("q"), said("ab \n")], continue_final_message=True)
    assert prompt.ids.tolist() == plain_ids(chatml([user("q")]) + "ab \n")
    trimming = CHATML.replace("m['content']", "m['content'] | trim")
    prompt = conversation(trimming).render([user("q"), said("ab \n")], continue_final_message=True)
    assert prompt.ids.tolist() == plain_ids(chatml([user("q")]) + "ab")
    blank = conversation().render([user("q"), said("")], continue_final_message=True)
    assert blank.ids.tolist() == plain_ids(chatml([user("q")]))


@pytest.mark.parametrize("messages", [[], [user("q")], [user("q"), calling("f", "1")]])
def test_only_an_assistant_message_can_be_continued(messages: list[Message]) -> None:
    with pytest.raises(DataError, match="needs an assistant message without tool calls"):
        conversation().render(messages, continue_final_message=True)


# Breaks


def history(talk: Conversation) -> list[Message]:
    """Three questions and their answers."""
    messages: list[Message] = [Message(role="system", content="rules")]
    for number in "123":
        messages.append(user("q" + number))
        answer(talk, messages, said("ab" + number))
        messages.append(said("ab" + number))
    return messages


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda m: m, None),
        (lambda m: [*m[:1], user("all so far"), *m[5:]], BreakCause.SUMMARY),
        (lambda m: [*m[:1], *m[3:]], BreakCause.TRUNCATED),
        (lambda m: [*m[:1], user("other"), *m[2:]], BreakCause.HISTORY_EDITED),
        (lambda m: [Message(role="system", content="new"), *m[1:]], BreakCause.HISTORY_EDITED),
        (lambda m: [*m[:6], said("better")], BreakCause.HISTORY_EDITED),
        (lambda m: m[:5], None),  # back to an earlier answer: a fork
        (lambda m: [Message(role="system", content="another agent")], None),
    ],
)
def test_what_the_agent_does_to_its_history(change: Any, cause: BreakCause | None) -> None:
    talk = conversation()
    assert talk.render([*change(history(talk)), user("next")]).break_cause is cause


def test_other_tools_are_a_cause() -> None:
    world = World(FAMILIES["qwen2_5"], small_vocabulary())
    talk = Conversation(world.renderer)
    prompt = talk.render([user("q")], TOOLS)
    talk.record(prompt, np.array([5, world.stops[0]], np.int32), said(world.decode([5])))
    sent = [user("q"), said(world.decode([5])), user("r")]
    assert talk.render(sent, TOOLS).break_cause is None
    assert talk.render(sent, TOOLS[:1]).break_cause is BreakCause.TOOLS_CHANGED


def test_a_stop_token_that_the_template_does_not_write() -> None:
    talk = Conversation(ChatRenderer(PLAIN, [0, END]))
    known = answer(talk, [user("q")], said("ab"), [3, 0])
    prompt = talk.render([user("q"), said("ab"), user("r")])
    assert prompt.break_cause is BreakCause.END_TOKEN_REWRITTEN
    assert begins(prompt, known[:-1]) and prompt.ids[len(known) - 1] == END


# Templates


def test_a_conversation_that_goes_on_with_bare_text_is_rendered_once_a_call() -> None:
    rendered: list[str] = []

    def tick() -> str:
        rendered.append("")
        return ""

    talk = conversation("{{ tick() }}" + CHATML, chat_template_kwargs={"tick": tick})
    known = answer(talk, [user("q")], said("ab"))
    rendered.clear()
    assert begins(talk.render([user("q"), said(" ab\n"), tool("a page")]), known)
    assert len(rendered) == 1


def test_a_template_that_does_not_stand_marks_keeps_what_it_writes() -> None:
    counting = CHATML.replace("m['content'] +", "m['content'] + (m['content'] | length | string) +")
    talk = conversation(counting)
    known = answer(talk, [user("q")], said("ab"))
    prompt = talk.render([user("q"), said("ab"), user("<|im_end|>")])
    assert begins(prompt, known) and prompt.break_cause is None
    assert prompt.ids.tolist().count(END) == 3


def test_another_template_by_file_or_name(tmp_path: Any) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages[0].content }}<|im_end|>{% if loud %}!{% endif %}")
    options: dict[str, Any] = {"chat_template": str(path), "chat_template_kwargs": {"loud": True}}
    assert conversation(**options).render([user("q")]).ids.tolist() == [*plain_ids("q"), END, *plain_ids("!")]
    named = PlainTokenizer()
    named.chat_template = {"default": CHATML, "short": "{{ messages[0].content }}"}
    chosen = Conversation(ChatRenderer(named, [END], chat_template="short"))
    assert chosen.render([user("q")]).ids.tolist() == plain_ids("q")
    with pytest.raises(ConfigError, match="neither a file nor one of the tokenizer's"):
        ChatRenderer(named, [END], chat_template="missing")


def test_a_reply_that_the_template_alters_is_not_put_in_its_place() -> None:
    talk = conversation(CHATML.replace("m['content'] +", "(m['content'] | replace('ab', 'xy')) +"))
    answer(talk, [user("q")], said("cab"))
    prompt = talk.render([user("q"), said("cab"), user("r")])
    assert prompt.ids.tolist() == plain_ids(chatml([user("q"), said("cxy"), user("r")]))
    assert prompt.break_cause is BreakCause.REWRITTEN


# Prompts are recorded ids plus newly tokenized text; what was sampled is never tokenized again


LONGEST = 5  # tokens of a completion
STOP_STRING = "</s>"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, the ids a model may draw from, and its end-of-turn token."""

    tokenizer: Any
    renderer: ChatRenderer
    ids: tuple[int, ...]
    end: int


def vocabulary(tokenizer: Any, candidates: range) -> Vocabulary:
    [end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    ids = tuple(i for i in candidates if i != end)
    return Vocabulary(tokenizer, ChatRenderer(tokenizer, [int(end)]), ids, int(end))


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

    async def talk() -> tuple[list[Step], list[list[Message]]]:
        session = open_session(engine, words.renderer, longest=10**6, max_tokens=LONGEST, stop=stop)
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
