"""Tools that a template does not write, or whose calls no parser reads, are refused before anything is sampled."""

import asyncio
import re
from functools import cache
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.rollout.families import FAMILIES, WRITING_TOOLS, World, small_vocabulary
from tests.rollout.gateway.servers import Slow, looks_then_answers, scripted, served
from tests.worlds import CHATML, END, PlainTokenizer, saying, user
from treadle.core.draws import Stream
from treadle.core.errors import DataError
from treadle.core.types import SamplingParams
from treadle.recipes.agents.questions import TOOL, parse_reply
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rendering.replies import ReplyParser, glm, harmony, hermes, llama, parser_name, plain, qwen_xml, thinking
from treadle.rollout.session import Address, CallOptions, Session, SessionSpec

EVERY = {**FAMILIES, **WRITING_TOOLS}
READ: dict[ReplyParser, str] = {
    hermes: "qwen2_5 qwen3 qwen3_nothink qwen3_keep_thoughts qwen3_instruct_2507",
    qwen_xml: "qwen3_5_think qwen3_6 qwen3_6_preserve qwen3_8 nemotron_3_nano nemotron_3_super",
    glm: "glm4moe",
    llama: "llama3_1",
    harmony: "gptoss",
}
WRITTEN = {
    "llama3_1": r'writes it as \'{"name": "find_zqz", "parameters"',
    "gptoss": r"writes it as 'to=functions.find_zqz<\|channel\|>",
    "glm4moe": r"writes it as '<think></think>\\n<tool_call>find_zqz",
    "gemma4": r"writes it as '<\|tool_call>call:find_zqz",
    **dict.fromkeys(("lfm2", "smollm3", "kimi_k2", "kimi_k2_thinking"), "leaves it out of the conversation"),
}
LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "description": "-", "parameters": {"type": "object", "properties": {}}},
}
HELLO: Any = [user("q")]
SILENT = CHATML.replace("{% if tools %}", "{% if false %}")
REFUSED = [(SILENT, hermes, "does not write"), (CHATML, plain, "does not read")]


@cache
def renderer(name: str) -> ChatRenderer:
    return World(EVERY[name], small_vocabulary()).renderer


@pytest.mark.parametrize("name", EVERY)
def test_who_writes_tools_is_found_out(name: str) -> None:
    talk = Conversation(renderer(name))
    if EVERY[name].tools:
        assert "look" in renderer(name).decode(talk.render([user("q")], [LOOK]).ids)
    else:
        with pytest.raises(
            DataError, match=r"^the tokenizer's chat template does not write tools.*model\.chat_template"
        ):
            talk.render([user("q")], [LOOK])


@pytest.mark.parametrize("name", [name for name in EVERY if EVERY[name].tools])
def test_who_reads_its_calls_is_found_out(name: str) -> None:
    parsers: list[ReplyParser] = [plain, thinking, *READ]
    for parse in parsers:
        problem = renderer(name).tools_problem([LOOK], parse)
        if name in READ.get(parse, "").split():
            assert problem == "" and renderer(name).tools_problem([LOOK], renderer(name).parser("auto")) == ""
        else:
            assert f"the reply parser {parser_name(parse)} does not read a tool call of this model" in problem
            assert re.search(WRITTEN.get(name, "writes it as '"), problem)


WITHOUT_THOUGHTS = (
    *(
        "gemma4",
        "gptoss",
        "qwen2_5",
        "qwen3_instruct_2507",
        "llama3",
        "llama3_1",
        "gemma",
        "gemma3",
        "phi3_5",
        "cohere2",
    ),
    *("smollm2", "lfm2", "cohere", "from roles", "mistral_nemo", "mistral_small_3_2", "ministral_3", "kimi_k2"),
)


@pytest.mark.parametrize("name", EVERY)
def test_thoughts_are_taken_out_where_the_template_has_a_place_for_them(name: str) -> None:
    text = "[THINK]hm[/THINK]yes" if EVERY[name].thoughts == "[THINK]" else "<think>hm</think>yes"
    message = renderer(name).parser("auto")(text, [LOOK])
    if name in WITHOUT_THOUGHTS:
        assert message == {"role": "assistant", "content": text}
    else:
        assert message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def open_session(template: str, parse: ReplyParser) -> Session:
    address = Address(0, Stream.TRAIN, 0, 0, 0)
    engine, shown = saying("ab"), ChatRenderer(PlainTokenizer(template), [END])
    return Session(SessionSpec("s", engine, shown, SamplingParams(), 10_000, address), parse)


@pytest.mark.parametrize(("template", "parse", "why"), REFUSED)
def test_a_session_refuses_them_before_it_samples(template: str, parse: ReplyParser, why: str) -> None:
    session = open_session(template, parse)
    for _ in range(2):
        with pytest.raises(DataError, match=why):
            asyncio.run(session.chat([user("q")], [LOOK]))
    assert session.steps == []
    assert asyncio.run(session.chat([user("q")])).message["content"] == "ab"
    assert asyncio.run(open_session(CHATML, hermes).chat([user("q")], [LOOK])).message["content"] == "ab"


def test_calls_that_nobody_looks_for_need_not_be_read() -> None:
    session = open_session(CHATML, plain)
    assert asyncio.run(session.chat([user("q")], [LOOK], CallOptions(tool_calls=False))).message["content"] == "ab"
    with pytest.raises(DataError, match="does not write tools"):
        asyncio.run(open_session(SILENT, plain).chat([user("q")], [LOOK], CallOptions(tool_calls=False)))


@pytest.mark.xdist_group("anthropic")
@pytest.mark.parametrize(("template", "parse", "why"), REFUSED)
async def test_a_client_is_told_in_the_providers_form(template: str, parse: ReplyParser, why: str) -> None:
    import anthropic

    async with served(Slow(scripted(looks_then_answers)), ChatRenderer(PlainTokenizer(template), [END])) as server:
        address = server.open(parse=parse)
        with pytest.raises(openai.BadRequestError, match=why):
            tools: Any = [LOOK]
            await server.openai(address).chat.completions.create(model="m", messages=HELLO, tools=tools)
        with pytest.raises(anthropic.BadRequestError, match=why):
            tools = [{"name": "look", "input_schema": {"type": "object"}}]
            client = server.anthropic(address)
            await client.messages.create(model="m", max_tokens=9, messages=HELLO, tools=tools)
        assert server.steps() == []


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


def test_a_parser_that_does_not_read_the_demos_calls_is_refused() -> None:
    assert "writes it as '<search> zqz</search>'" in demo().tools_problem([TOOL], hermes)
