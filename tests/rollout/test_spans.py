"""Which messages the tokens of a prompt are: by templates that write messages as they are, alter them or cut them."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.rollout.families import FAMILIES, TOOLS, World, small_vocabulary
from tests.worlds import CHATML, END, PLAIN, PlainTokenizer, chatml, plain_ids, plain_renderer, saying, tool, user
from treadle.core.draws import Stream
from treadle.core.types import Ids, Message, MessageSpan, SamplingParams
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation, Prompt
from treadle.rollout.session import Address, Session, SessionSpec


def shown(ids: Ids, spans: Sequence[MessageSpan] | None, decode: Any) -> list[tuple[str, str, str]]:
    """(role, kind, text) of each span; they cover the prompt."""
    assert spans is not None
    starts = [0, *(span.end for span in spans)]
    assert starts[-1] == len(ids)
    return [(s.role, s.kind, decode(ids[start : s.end])) for start, s in zip(starts, spans, strict=False)]


def plain(prompt: Prompt) -> list[tuple[str, str, str]]:
    return shown(prompt.ids, prompt.message_spans, PLAIN.decode)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


OPENS, ENDS = "<|im_start|>assistant\n", "<|im_end|>\n"


def test_the_prompts_of_a_session_are_known_by_message() -> None:
    address = Address(1, Stream.TRAIN, 0, 0, 0)
    session = Session(SessionSpec("s", saying("ok"), plain_renderer(), SamplingParams(), 1000, address))

    async def talk() -> None:
        reply = await session.chat([user("how?")])
        await session.chat([user("how?"), reply.message, tool("so"), tool("and so")])
        await session.complete("raw")

    asyncio.run(talk())
    first, second, raw = session.steps
    opening = [("user", "template", "<|im_start|>user\n"), ("user", "text", "how?")]
    assert shown(first.prompt_ids, first.prompt_spans, PLAIN.decode) == [
        *opening,
        ("assistant", "template", ENDS + OPENS),
    ]
    assert shown(second.prompt_ids, second.prompt_spans, PLAIN.decode) == [
        *opening,
        ("assistant", "template", ENDS + OPENS),
        ("assistant", "text", "ok"),
        ("assistant", "template", "<|im_end|>"),
        ("tool", "template", "\n<|im_start|>tool\n"),
        ("tool", "text", "so"),
        ("tool", "template", ENDS + "<|im_start|>tool\n"),
        ("tool", "text", "and so"),
        ("assistant", "template", ENDS + OPENS),
    ]
    assert raw.prompt_spans is None


@pytest.mark.parametrize("content", ["user", "\n", "assistant", "im_start", "s", "<|im_start|>user\n", "user\nuser"])
def test_a_message_that_says_what_the_template_writes_too(content: str) -> None:
    messages = [user(content), assistant(content), user(content)]
    prompt = Conversation(plain_renderer()).render(messages)
    texts = [(role, text) for role, kind, text in plain(prompt) if kind == "text"]
    assert texts == [(m["role"], content.strip()) for m in messages if content.strip()]
    assert PLAIN.decode(prompt.ids) == chatml(messages)


def test_a_template_that_alters_messages_is_followed_by_marks_or_not_at_all() -> None:
    def render(content: str) -> Prompt:
        template = CHATML.replace("m['content']", content)
        return Conversation(ChatRenderer(PlainTokenizer(template), [END])).render([user("ab\tc"), tool("d")])

    quoted = render("(m['content'] | tojson)")
    assert [s for s in plain(quoted) if s[1] == "text"] == [("user", "text", "ab\\tc"), ("tool", "text", "d")]
    assert render("(m['content'] if m['content'] | length < 12 else 'long')").message_spans is None


def test_a_recorded_reply_is_thought_text_and_calls() -> None:
    """And still is where it is continued, sent back without its thought, and stripped of it by the template."""
    world = World(FAMILIES["qwen3"], small_vocabulary())
    conversation = Conversation(world.renderer)
    opening = user("Q")
    prompt = conversation.render([opening], TOOLS)
    written = (
        "<think>\nhm, 1 + 1\n</think>\n\n",
        "I look.\n",
        '<tool_call>\n{"name": "search", "arguments": {"q": "é"}}\n</tool_call>',
    )
    completion = [i for text in written for i in world.tokenizer.encode(text, add_special_tokens=False).ids]
    call: Any = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "é"}'}}
    reply = Message(role="assistant", content="I look.", reasoning_content="hm, 1 + 1", tool_calls=[call])
    conversation.record(prompt, np.array([*completion, world.stops[0]], np.int32), reply)
    sent = Message(role="assistant", content="I look.", tool_calls=[call])
    observed = [opening, sent, Message(role="tool", content="T", tool_call_id="1")]
    second = conversation.render(observed, TOOLS)
    turn = shown(second.ids, second.message_spans, world.decode)[2:]
    assert [(kind, text) for role, kind, text in turn if role == "assistant"] == [
        ("template", "<|im_end|>\n<|im_start|>assistant\n"),
        ("thought", written[0]),
        ("text", "I look."),
        ("call", "\n" + written[2]),
        ("template", "<|im_end|>"),
        ("template", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
    ]
    completion = world.tokenizer.encode("two", add_special_tokens=False).ids
    conversation.record(second, np.array([*completion, world.stops[0]], np.int32), assistant("two"))
    third = conversation.render([*observed, assistant("two"), user("Q2")], TOOLS)
    texts = [part for part in shown(third.ids, third.message_spans, world.decode) if part[1] != "template"]
    assert texts == [
        ("user", "text", "Q"),
        ("assistant", "text", "I look."),
        ("assistant", "call", 'search", "arguments": {"q": "é"}}\n</tool_call>'),
        ("tool", "text", "T"),
        ("assistant", "text", "two"),
        ("user", "text", "Q2"),
    ]


def test_a_message_that_is_continued_is_text_up_to_its_end() -> None:
    conversation = Conversation(plain_renderer())
    prefilled = conversation.render([user("q"), assistant("so far")], continue_final_message=True)
    assert plain(prefilled)[-1] == ("assistant", "text", "so far")
    conversation.record(prefilled, np.array(plain_ids(" and"), np.int32), assistant(" and"))
    further = conversation.render([user("q"), assistant("so far and on")], continue_final_message=True)
    assert plain(further)[-2:] == [("assistant", "template", ENDS + OPENS), ("assistant", "text", "so far and on")]
