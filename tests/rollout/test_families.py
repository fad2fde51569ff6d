"""No message vanishes: what a caller sends stands in the prompt, or the call is refused with role and remedy."""

import asyncio
import json
import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from transformers import AutoTokenizer

from tests.rollout.families import FAMILIES, LOOK, READING, world
from tests.rollout.kit import open_session
from tests.worlds import CHATML, END, PlainTokenizer, saying, tool, user
from treadle.core.errors import DataError
from treadle.core.types import FunctionCall, Message, ToolCall
from treadle.recipes.agents.questions import TOOL, parse_reply
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rendering.replies import ReplyParser, glm, harmony, hermes, llama, parser_name, plain, qwen_xml, thinking
from treadle.rollout.gateway.chat_completions import AssistantMessage
from treadle.rollout.gateway.messages import AssistantTurn
from treadle.rollout.gateway.responses import Item, read_items
from treadle.rollout.session import CallOptions
from treadle.testing import FakeEngine
from treadle.training.demonstrations import demonstrated_calls

DEVELOPER: Message = {"role": "developer", "content": "Always answer in French."}
QUESTION, ANSWER = user("What is it?"), Message(role="assistant", content="It is tea.")
CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": '{"at": "tea"}'}}],
}


def mapped(name: str, **roles: str) -> ChatRenderer:
    family = world(name)
    return ChatRenderer(family.hf, family.stops, chat_template_kwargs=family.family.options, roles=roles)


def said(name: str, messages: list[Message], tools: list[Any], renderer: ChatRenderer | None = None) -> str | None:
    """The prompt as text; None if it is refused."""
    try:
        prompt = Conversation(renderer or world(name).renderer).render(messages, tools)
    except DataError:
        return None
    return world(name).decode(prompt.ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_stands_before_a_thought_in_content_does_not_vanish_with_it(name: str) -> None:
    thoughtful = Message(role="assistant", content="It was <think>hm</think> tea.")
    text = said(name, [QUESTION, thoughtful, QUESTION], [])
    refusing = "deepseekv3", "around roles", "nemotron_3_nano", "nemotron_3_super"
    assert text is None if name in refusing else text is not None and "It was" in text and "tea." in text


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools])
@pytest.mark.parametrize(
    "arguments", ['["zqz", 1]', '{"q": "zqz", "q": 1}', '{"q": "zqz"', '"zqz"', '{"q": "zqz", "n": 1e999}']
)
def test_arguments_that_are_no_object_are_written_or_refused(name: str, arguments: str) -> None:
    """A client may send back what another model wrote."""
    [call] = CALLING["tool_calls"]
    sent = {**CALLING, "tool_calls": [{**call, "function": {"name": "look", "arguments": arguments}}]}
    text = said(name, [QUESTION, sent, {**tool("r"), "tool_call_id": "abcdefghi"}], [LOOK])  # type: ignore[list-item]
    assert text is None or "zqz" in text


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "glm4moe", "deepseekv3", "phi3_5", "cohere2", "gemma4"])
def test_a_role_that_the_template_drops_is_refused_with_its_remedy(name: str) -> None:
    dropped, shown = (tool("12:00"), "user") if name == "gemma4" else (DEVELOPER, "system")
    talk = [QUESTION, ANSWER, dropped] if dropped["role"] == "tool" else [dropped, QUESTION]
    with pytest.raises(DataError, match=rf"leaves out the content of message \d \({dropped['role']}: .*model\.roles"):
        Conversation(world(name).renderer).render(talk)
    text = said(name, talk, [], mapped(name, **{dropped["role"]: shown}))
    assert text is not None and dropped["content"] in text


def test_calls_of_a_template_without_tools_are_refused_unless_the_model_made_them() -> None:
    """Of a recorded reply it is a break, which has its cause."""
    renderer = world("phi3_5").renderer
    assert said("phi3_5", [QUESTION, {**CALLING, "content": "Well."}, QUESTION], []) is None
    conversation = Conversation(renderer)
    prompt = conversation.render([QUESTION])
    conversation.record(prompt, np.array([*renderer.encode("Well."), world("phi3_5").stops[0]], np.int32), CALLING)
    assert conversation.render([QUESTION, CALLING, QUESTION]).break_cause is not None


def test_thoughts_are_left_out_before_the_last_question_alone() -> None:
    thoughtful: Message = {**ANSWER, "reasoning_content": "Tea or coffee?"}
    assert said("qwen3", [QUESTION, thoughtful, QUESTION], []) is not None
    with pytest.raises(DataError, match=r"leaves out the thought of message 2 \(assistant: 'thought'\)"):
        Conversation(world("qwen2_5").renderer).render([QUESTION, thoughtful, tool("milk")])


PARTS = st.sampled_from(["system", "developer", "user", "assistant", "thinking", "calling", "tool", "observation"])


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60)
@given(kinds=st.lists(PARTS, min_size=1, max_size=6), tools=st.booleans(), alike=st.booleans())
def test_whatever_is_sent_stands_in_the_prompt_or_is_refused(
    name: str, kinds: list[str], tools: bool, alike: bool
) -> None:
    """alike: all say the same, so that what is left out stands somewhere else."""
    messages: list[Message] = []
    for number, kind in enumerate(kinds):
        word = "qzeta" if alike else f"qz{'abcdef'[number]}eta"
        message: Message = {"role": kind, "content": word}
        if kind in ("thinking", "calling"):
            message["role"] = "assistant"
        if kind == "thinking":
            message["reasoning_content"] = f"th{word}"
        if kind == "calling":
            call: Any = {"id": f"abcdefgh{number}", "type": "function"}
            call["function"] = {"name": "look", "arguments": f'{{"at": "a{word}"}}'}
            message["tool_calls"] = [call]
        messages.append(message)
    text = said(name, messages, [LOOK] if tools and FAMILIES[name].tools else [])
    if text is None:
        return
    if name.startswith("cohere") and alike and kinds.count("system") > 1:
        return  # one that says the same again is left out
    question = max((n for n, kind in enumerate(kinds) if kind == "user"), default=-1)
    for number, message in enumerate(messages):
        assert text.count(message["content"]) >= (len(messages) if alike else 1)
        if "reasoning_content" in message and number > question:
            assert message["reasoning_content"] in text
        for called in message.get("tool_calls", ()):
            assert f"a{message['content']}" in text and called["function"]["name"] in text


# Several system messages


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6", "qwen3_8", "gptoss", "cohere", "gemma3"])
def test_system_messages_are_one_where_the_template_wants_one_first(name: str) -> None:
    renderer = world(name).renderer
    talk = Conversation(renderer)
    said = ("system", "be brief"), ("user", "who?"), ("assistant", "Anna"), ("system", "be kind"), ("user", "well?")
    messages = [Message(role=role, content=content) for role, content in said]
    prompt = talk.render(messages)
    text = renderer.decode(prompt.ids)
    assert text.index("be brief") < text.index("be kind") < text.index("who?") < text.index("well?")
    assert [m["role"] for m in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.messages[0]["content"] == "be brief\n\nbe kind"
    assert (talk.render([messages[3], messages[1]]).ids == talk.render([messages[1], messages[3]]).ids).all()


# A thought is one until it is closed, whoever opened it; where a template has no place for it, it stays text


LOOKING = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
NO_OPTIONS = CallOptions()
OPENING = CHATML.replace(
    "assistant\n' }}{% endif %}",
    "assistant\n' + ('<think>\n' if enable_thinking | default(true) else '<think>\n\n</think>\n\n') }}{% endif %}",
)


def replied(text: str, parse: ReplyParser, options: CallOptions = NO_OPTIONS, *history: Message) -> Message:
    session = open_session(saying(text, end=False), ChatRenderer(PlainTokenizer(OPENING), [END]), parse)
    tools = [] if parse in (plain, thinking) else [LOOK]
    return asyncio.run(session.chat([user("q <think>"), *history], tools, options)).message


@pytest.mark.parametrize("parse", [hermes, thinking])
def test_what_is_cut_within_a_thought_that_the_prompt_opened_is_thought(parse: ReplyParser) -> None:
    assert replied(f"hm {LOOKING}", parse) == {"role": "assistant", "content": "", "reasoning_content": f"hm {LOOKING}"}


def test_behind_the_thought_a_call_is_one() -> None:
    message = replied(f"hm</think>{LOOKING}", hermes)
    assert message["reasoning_content"] == "hm"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]


def test_a_thought_that_the_caller_began_goes_on() -> None:
    options = CallOptions(template_kwargs={"enable_thinking": False}, continue_final_message=True)
    message = replied("hm", thinking, options, Message(role="assistant", content="<think>\nlet"))
    assert (message["content"], message["reasoning_content"]) == ("", "hm")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_a_thought_that_the_template_has_no_place_for_stays_and_breaks_nothing(name: str) -> None:
    family = world(name)
    text = f"<think>\nhm {LOOKING}\n</think>\n\nyes"

    def reply(prompt: Any, sampling: Any) -> list[int]:
        return [*family.tokenizer.encode(text, add_special_tokens=False).ids, family.stops[0]]

    session = open_session(FakeEngine(reply), family.renderer, family.renderer.parser("auto"))

    async def two_turns() -> Message:
        message = (await session.chat([user("q")], [LOOK])).message
        await session.chat([user("q"), message, user("r")], [LOOK])
        return message

    assert asyncio.run(two_turns()) == {"role": "assistant", "content": text}
    assert [step.break_cause for step in session.steps] == [None, None]


# Several thoughts of one turn


def test_both_thinking_blocks_of_anthropics_client_are_kept() -> None:
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""} for thought in ("one", "two")]
    turn = AssistantTurn.model_validate({"role": "assistant", "content": [*blocks, {"type": "text", "text": "yes"}]})
    assert turn.messages() == [Message(role="assistant", content="yes", reasoning_content="one\ntwo")]


def test_both_reasoning_items_of_openais_client_are_kept() -> None:
    thoughts: list[Any] = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}
        for thought in ("one", "two")
    ]
    items = TypeAdapter(list[Item]).validate_python(
        [*thoughts, {"type": "message", "role": "assistant", "content": "a"}]
    )
    assert read_items(items) == (Message(role="assistant", content="a", reasoning_content="one\ntwo"),)
    [first, second] = read_items([*items, items[0]])
    assert (first["reasoning_content"], second["reasoning_content"]) == ("one\ntwo", "one")


def test_a_summary_is_the_thought_where_there_is_no_other() -> None:
    parts: Any = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "content": None}
    for more, expected in (({}, "so"), ({"content": [{"type": "reasoning_text", "text": "hm"}]}, "hm")):
        items = [{**parts, **more}, {"type": "message", "role": "assistant", "content": "a"}]
        [message] = read_items(TypeAdapter(list[Item]).validate_python(items))
        assert message["reasoning_content"] == expected


def test_a_thought_under_its_other_name_is_kept() -> None:
    sent = {"role": "assistant", "content": "a", "reasoning_content": "", "reasoning": "hm"}
    assert AssistantMessage.model_validate(sent).message()["reasoning_content"] == "hm"


# Tools that a template does not write, or whose calls no parser reads, are refused before anything is sampled


READ: dict[str, ReplyParser] = {"hermes": hermes, "xml": qwen_xml, "glm": glm, "llama": llama, "harmony": harmony}
"""How calls are written -> who reads them."""
WRITTEN = {
    "llama3_1": r'writes it as \'{"name": "find_zqz", "parameters"',
    "gptoss": r"writes it as 'to=functions.find_zqz<\|channel\|>",
    "glm4moe": r"writes it as '<think></think>\\n<tool_call>find_zqz",
    "gemma4": r"writes it as '<\|tool_call>call:find_zqz",
    **dict.fromkeys(("lfm2", "smollm3", "kimi_k2", "kimi_k2_thinking"), "leaves it out of the conversation"),
}
HELLO: Any = [user("q")]
SILENT = CHATML.replace("{% if tools %}", "{% if false %}")
REFUSED = [(SILENT, hermes, "does not write"), (CHATML, plain, "does not read")]


@cache
def renderer(name: str) -> ChatRenderer:
    return world(name).renderer


@pytest.mark.parametrize("name", FAMILIES)
def test_who_writes_tools_is_found_out(name: str) -> None:
    talk = Conversation(renderer(name))
    if FAMILIES[name].tools:
        assert "look" in renderer(name).decode(talk.render([user("q")], [LOOK]).ids)
    else:
        with pytest.raises(
            DataError, match=r"^the tokenizer's chat template does not write tools.*model\.chat_template"
        ):
            talk.render([user("q")], [LOOK])


PERSONS = "ann", "bob"
PARTS_OF_SCHEMAS: list[tuple[Any, dict[str, str]]] = [
    # a schema of `who` -> what of it is left out, by family
    ({"type": "string", "enum": PERSONS, "description": "who it is", "title": "Who"}, {}),
    ({"$ref": "#/$defs/person"}, {"gptoss": "who.$ref", "gemma4": "who.$ref"}),
    ({"enum": PERSONS}, {"gptoss": "who.enum", "gemma4": "who.enum"}),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, {"gptoss": "who.additionalProperties"}),
    ({"type": "object", "additionalProperties": False, "properties": {"at": {"type": "string"}}}, {}),
    ({"type": "array", "items": {"type": "string", "enum": PERSONS}}, {"gptoss": "who.items.enum"}),
    (
        {"type": "object", "properties": {"at": {"type": "string", "description": "where"}}},
        {"gptoss": "who.at.description"},
    ),
    ({"type": "integer", "minimum": 1}, {"gptoss": "who.minimum", "gemma4": "who.minimum"}),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"gptoss": "who.anyOf", "gemma4": "who.anyOf"}),
]


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].tools])
def test_what_is_left_out_of_a_tool_is_named(name: str) -> None:
    for who, left_out in PARTS_OF_SCHEMAS:
        function = {**LOOK["function"], "parameters": {"type": "object", "properties": {"who": who}}}
        lines = world(name).renderer.tools_notes([{"type": "function", "function": function}])
        named = [line.partition("never sees: ")[2].partition(";")[0] for line in lines]
        assert named == ([left_out[name]] if name in left_out else []), who


@pytest.mark.parametrize("name", READING)
def test_a_reply_of_which_one_call_was_handed_out_is_written_by_the_template(name: str) -> None:
    conversation, fresh = (Conversation(world(name).renderer) for _ in range(2))
    prompt = conversation.render([QUESTION], [LOOK])
    both = world(name).ids(random.Random(0), "call one, call two")
    conversation.record(prompt, np.array([*both, world(name).stops[0]], np.int32), CALLING, whole=False)
    later: list[Message] = [QUESTION, CALLING, {**tool("tea"), "tool_call_id": "abcdefghi"}]
    shown: list[Message] = [QUESTION, {**CALLING, "reasoning_content": ""}, later[-1]]
    got, expected = conversation.render(later, [LOOK]), fresh.render(shown, [LOOK])
    assert (got.ids.tolist(), got.break_cause) == (expected.ids.tolist(), "calls withheld")


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].tools])
def test_who_reads_its_calls_is_found_out(name: str) -> None:
    parsers: list[ReplyParser] = [plain, thinking, *READ.values()]
    for parse in parsers:
        problem = renderer(name).tools_problem([LOOK], parse)
        if parse is READ.get(FAMILIES[name].calls):
            assert problem == "" and renderer(name).tools_problem([LOOK], renderer(name).parser("auto")) == ""
        else:
            assert f"the reply parser {parser_name(parse)} does not read a tool call of this model" in problem
            assert re.search(WRITTEN.get(name, "writes it as '"), problem)


@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_are_taken_out_where_the_template_has_a_place_for_them(name: str) -> None:
    text = "[THINK]hm[/THINK]yes" if FAMILIES[name].thoughts == "[THINK]" else "<think>hm</think>yes"
    message = renderer(name).parser("auto")(text, [LOOK])
    if name != "around roles" and FAMILIES[name].thoughts in ("", "harmony", "<|channel>"):
        assert message == {"role": "assistant", "content": text}
    else:
        assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


@pytest.mark.parametrize(("template", "parse", "why"), REFUSED)
def test_a_session_refuses_them_before_it_samples(template: str, parse: ReplyParser, why: str) -> None:
    session = open_session(saying("ab"), ChatRenderer(PlainTokenizer(template), [END]), parse)
    for _ in range(2):
        with pytest.raises(DataError, match=why):
            asyncio.run(session.chat([user("q")], [LOOK]))
    assert session.steps == []
    assert asyncio.run(session.chat([user("q")])).message["content"] == "ab"
    assert asyncio.run(open_session(saying("ab"), parse=hermes).chat([user("q")], [LOOK])).message["content"] == "ab"


# The demo's model knows one tool without being told


@cache
def demo() -> ChatRenderer:
    tokenizer = AutoTokenizer.from_pretrained("src/treadle/recipes/tokenizer", local_files_only=True)
    return ChatRenderer(tokenizer, [int(tokenizer.eos_token_id)])


def test_the_demos_model_knows_its_tool_by_heart() -> None:
    talk = Conversation(demo())
    assert (talk.render([user("q")], [TOOL]).ids == talk.render([user("q")]).ids).all()
    assert demo().tools_problem([TOOL], parse_reply) == ""
    with pytest.raises(DataError, match="this model knows one tool by heart, search, and cannot be told of another"):
        talk.render([user("q")], [TOOL, LOOK])


# A demonstration's replies are what the family's model would write: calls and thoughts, up to an end token


ARGUMENTS = '{"who": "Anna", "deep": 2}'
CALL = ToolCall(id="c00000000", type="function", function=FunctionCall(name="look", arguments=ARGUMENTS))

THINKING = [name for name in READING if FAMILIES[name].thoughts in ("opt", "prompt")]


FRIEND = Message(role="assistant", content="a friend of mine")


def talk(thought: str = "", answer: Message = FRIEND) -> list[Message]:
    call = Message(role="assistant", content="", tool_calls=[CALL], reasoning_content=thought)
    return [user("who?"), call, Message(role="tool", content="a friend", tool_call_id="c00000000"), answer]


def read(name: str, completion: Any, prompt: Any) -> Message:
    renderer = world(name).renderer
    assert int(completion[-1]) in renderer.stop_ids
    begun = "<think>" if renderer.decode(prompt).rstrip().endswith("<think>") else ""
    return renderer.parser("auto")(begun + renderer.text(completion), [LOOK])


@pytest.mark.parametrize("name", READING)
def test_calls_are_learned_as_the_template_writes_them(name: str) -> None:
    (prompt, call, *_), (later, answer, *_) = demonstrated_calls(talk(), world(name).renderer, [LOOK])
    [found] = read(name, call, prompt)["tool_calls"]
    assert found["function"]["name"] == "look"
    assert json.loads(found["function"]["arguments"]) == {"who": "Anna", "deep": 2}
    assert read(name, answer, later)["content"] == "a friend of mine"
    assert "look" in world(name).renderer.decode(prompt)  # the tool


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_learned_as_the_template_writes_them(name: str) -> None:
    """With what it puts around a reply: gpt-oss's channel, the empty thought of Qwen 3."""
    if name == "deepseekv3":  # which prompts for a thought that it does not write
        return
    renderer, messages = world(name).renderer, [user("who?"), Message(role="assistant", content="Anna")]
    [(prompt, answer, *_)] = demonstrated_calls(messages, renderer)
    shown: Any = messages
    text = renderer.write(shown, None, renderer.options, generation_prompt=False)
    written = renderer.structure.plain(text)
    learned = renderer.decode(prompt) + renderer.decode(answer)
    assert int(answer[-1]) in renderer.stop_ids
    assert learned.startswith(written.rstrip()) or written.startswith(learned) or "<think>\n</think>" in learned


@pytest.mark.parametrize("name", ["gptoss", *THINKING])
def test_thoughts_are_learned_too(name: str) -> None:
    (prompt, call, *_), (later, answer, *_) = demonstrated_calls(
        talk("hm, Anna", Message(role="assistant", content="a friend", reasoning_content="so")),
        world(name).renderer,
        [LOOK],
    )
    assert read(name, call, prompt)["reasoning_content"] == "hm, Anna"
    assert read(name, answer, later)["reasoning_content"] == "so"
    assert read(name, answer, later)["content"] == "a friend"


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_learned_is_kept_by_the_next_prompt_as_a_sampled_reply_is(name: str) -> None:
    renderer = world(name).renderer
    reply = Message(role="assistant", content="a friend")
    conversation = Conversation(renderer)
    prompt = conversation.render([user("who?")])
    if name == "deepseekv3":
        with pytest.raises(DataError, match=r"writes this reply as .*a friend.*, and prompts for it with .*<think>"):
            conversation.demonstrated([user("who?"), reply])
        return
    completion = conversation.demonstrated([user("who?"), reply])
    conversation.record(prompt, completion, renderer.parser("auto")(renderer.text(completion), []))
    assert "a friend" in renderer.text(completion)
    assert conversation.render([user("who?"), reply, user("and?")]).ids.size > prompt.ids.size


def test_what_the_template_leaves_out_is_refused() -> None:
    silent = CHATML.replace("calls(m) +", "")
    with pytest.raises(DataError, match="the chat template leaves out the tool call of message 2"):
        demonstrated_calls(talk(), ChatRenderer(PlainTokenizer(silent), [END]), [LOOK])
    thoughtful = [user("q"), Message(role="assistant", content="a", reasoning_content="hm")]
    with pytest.raises(DataError, match="the chat template leaves out the thought of message 2"):
        demonstrated_calls(thoughtful, ChatRenderer(PlainTokenizer(), [END]))


@pytest.mark.parametrize("arguments", ['{"who": "An', "[1]", "5", '"a"'])
def test_calls_whose_arguments_are_no_object_are_refused(arguments: str) -> None:
    call = ToolCall(id="", type="function", function=FunctionCall(name="look", arguments=arguments))
    messages = [user("q"), Message(role="assistant", content="", tool_calls=[call])]
    with pytest.raises(DataError, match="the arguments of a call of 'look' are not a JSON object"):
        demonstrated_calls(messages, world("qwen3").renderer, [LOOK])


def test_a_reply_that_begins_otherwise_than_the_prompt_is_refused() -> None:
    with pytest.raises(DataError, match=r"the chat template writes this reply as .* and prompts for it with"):
        demonstrated_calls(
            [user("q"), Message(role="assistant", content="a", reasoning_content="hm")], world("qwen3_nothink").renderer
        )
