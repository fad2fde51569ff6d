"""Replies that must look like something, sampled from random weights through unmodified clients.

Random weights write nothing that parses by chance, and obey a grammar just as well.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict

from tests.models import make_group, tiny
from tests.rollout.families import world
from tests.rollout.gateway.servers import Served, Slow, served
from tests.sources import make_engine
from tests.worlds import END, plain_renderer, user
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.types import Step
from treadle.packing.flat import flatten
from treadle.rendering.grammars import with_supports
from treadle.rendering.replies import FORMATS, Parser
from treadle.training.config import TrainingConfig
from treadle.training.learner import Learner

CALLS = Parser("calls", calls=FORMATS["hermes"])  # without thoughts, which random weights do not end
HELLO: Any = [user("hi")]


class Look(BaseModel):
    """Look somebody up."""

    model_config = ConfigDict(extra="forbid")
    who: Literal["Anna", "Bert"]
    pages: Literal[1, 2, 3]


SCHEMA = {**Look.model_json_schema(), "x-guidance": {"whitespace_flexible": False}}
LOOK = {"name": "look", "description": "Look somebody up."}
CHAT_TOOL: Any = {"type": "function", "function": {**LOOK, "strict": True, "parameters": SCHEMA}}
OTHER_TOOL: Any = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL: Any = {"type": "function", **LOOK, "strict": True, "parameters": SCHEMA}
ANTHROPIC_TOOL: Any = {**LOOK, "strict": True, "input_schema": SCHEMA}


@asynccontextmanager
async def random_model(**settings: Any) -> AsyncIterator[Served]:
    renderer = plain_renderer()
    model = tiny(vocab_size=300, max_position_embeddings=4096)
    engine = make_engine(
        model, stop_token_ids=[END], lock_step=False, decode=renderer.decode, grammars=renderer.grammars
    )
    async with served(engine, **settings) as server:
        yield server
    await engine.close()


@asynccontextmanager
async def asked(**settings: Any) -> AsyncIterator[tuple[Served, httpx.AsyncClient]]:
    """With a session, and a bare client for its URL."""
    async with random_model() as server:
        address = server.open(parse=CALLS, **settings)
        async with httpx.AsyncClient(base_url=address.base_url, timeout=300) as http:
            yield server, http


def check(steps: list[Step], count: int) -> None:
    assert len(steps) == count and all(step.sampling.grammar for step in steps)


def is_look(text: str | None) -> bool:
    Draft202012Validator(SCHEMA).validate(json.loads(text or ""))
    return True


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(stream: bool) -> None:
    async with random_model() as server:
        client = server.openai(server.open(parse=CALLS))
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "look", "schema": SCHEMA, "strict": True}}
        named: Any = {"type": "function", "function": {"name": "look"}}
        fields: list[dict[str, Any]] = [
            {"response_format": wanted},
            {"tools": [CHAT_TOOL, OTHER_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [CHAT_TOOL, OTHER_TOOL], "tool_choice": named, "parallel_tool_calls": False},
        ]
        for each in fields:
            if stream:
                async with client.chat.completions.stream(model="m", messages=HELLO, **each) as events:
                    answer: Any = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(model="m", messages=HELLO, **each)
            [choice] = answer.choices
            if "tools" not in each:
                assert choice.finish_reason == "stop" and is_look(choice.message.content)
                continue
            [call] = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and not choice.message.content
            assert call.function.name == "wait" or is_look(call.function.arguments)
            assert call.function.name == "look" or each["tool_choice"] == "required"
        parsed = await client.chat.completions.parse(model="m", messages=HELLO, response_format=Look)
        assert isinstance(parsed.choices[0].message.parsed, Look)
        check(server.steps(), 4)


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_responses(stream: bool) -> None:
    async with random_model() as server:
        client = server.openai(server.open(parse=CALLS))
        wanted: Any = {"format": {"type": "json_schema", "name": "look", "schema": SCHEMA, "strict": True}}
        named: Any = {"type": "function", "name": "look"}
        fields: list[dict[str, Any]] = [
            {"text": wanted},
            {"tools": [FLAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [FLAT_TOOL], "tool_choice": named, "parallel_tool_calls": False},
        ]
        for each in fields:
            if stream:
                async with client.responses.stream(model="m", input="hi", **each) as events:
                    answer: Any = await events.get_final_response()
            else:
                answer = await client.responses.create(model="m", input="hi", **each)
            assert answer.status == "completed"
            if "text" in each:
                assert is_look(answer.output_text) and answer.text.format.type == "json_schema"
            else:
                [call] = answer.output
                assert call.type == "function_call" and is_look(call.arguments)
                assert answer.model_dump(exclude_none=True)["tool_choice"] == each["tool_choice"]
        parsed = await client.responses.parse(model="m", input="hi", text_format=Look)
        assert isinstance(parsed.output_parsed, Look)
        check(server.steps(), 4)


@pytest.mark.xdist_group("anthropic")
@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic(stream: bool) -> None:
    async with random_model() as server:
        client = server.anthropic(server.open(parse=CALLS))
        one: Any = {"disable_parallel_tool_use": True}
        fields: list[dict[str, Any]] = [
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any", **one}},
            {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "look", **one}},
        ]
        for each in fields:
            if stream:
                async with client.messages.stream(model="m", max_tokens=500, messages=HELLO, **each) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(model="m", max_tokens=500, messages=HELLO, **each)
            [block] = answer.content
            if "tools" in each:
                assert answer.stop_reason == "tool_use" and is_look(json.dumps(block.input))
            else:
                assert answer.stop_reason == "end_turn" and is_look(block.text)
        parsed: Any = await client.messages.parse(model="m", max_tokens=500, messages=HELLO, output_format=Look)
        assert isinstance(parsed.parsed_output, Look)
        check(server.steps(), 4)


DIGITS = "[0-9]{3}"
ASKED: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"structured_outputs": {"json": SCHEMA}}, is_look),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_look),
    ({"structured_outputs": {"regex": DIGITS}}, str.isdecimal),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no").__contains__),
    ({"structured_outputs": {"grammar": 'root ::= "y" | "n"'}}, "yn".__contains__),
    ({"guided_json": SCHEMA}, is_look),
    ({"guided_regex": DIGITS}, str.isdecimal),
    ({"guided_choice": ["yes", "no"]}, ("yes", "no").__contains__),
    ({"guided_grammar": 'start: "y" | "n"'}, "yn".__contains__),
    ({"structured_outputs": {"json": None, "regex": DIGITS, "structural_tag": None}}, str.isdecimal),
]
ROUTES: dict[str, tuple[dict[str, Any], Any]] = {
    "chat/completions": ({"messages": HELLO}, lambda answer: answer["choices"][0]["message"]["content"]),
    "completions": ({"prompt": "hi"}, lambda answer: answer["choices"][0]["text"]),
    "responses": ({"input": "hi"}, lambda answer: answer["output"][0]["content"][0]["text"]),
    "messages": ({"messages": HELLO, "max_tokens": 500}, lambda answer: answer["content"][0]["text"]),
}


async def test_vllms_fields_in_all_dialects() -> None:
    async with asked() as (server, http):
        for route, (body, text) in ROUTES.items():
            for fields, holds in ASKED:
                answer = await http.post(route, json={**body, **fields})
                assert answer.status_code == 200, answer.text
                assert holds(text(answer.json())), (route, fields, answer.text)
        check(server.steps(), len(ROUTES) * len(ASKED))


async def test_json_objects_and_schemas_that_are_not_strict() -> None:
    async with asked() as (server, http):
        named = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": False}}
        for route in ("chat/completions", "completions"):
            body, text = ROUTES[route]
            answer = await http.post(route, json={**body, "response_format": named})
            assert is_look(text(answer.json()))
        body, text = ROUTES["chat/completions"]
        answer = await http.post("chat/completions", json={**body, "response_format": {"type": "json_object"}})
        assert text(answer.json()).startswith("{")
        answer = await http.post("chat/completions", json={**body, "response_format": {"type": "text"}})
        assert not server.steps()[-1].sampling.grammar


WRONG = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"type": "string"}}}}}
PLACE = "properties.a.items: Unimplemented keys"
NEVER = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"]}
CHAT: Any = {"messages": HELLO}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": WRONG}}},
        "response_format.json_schema.schema.properties.a.items",
        "Unimplemented keys",
    ),
    (
        "responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": WRONG}}},
        "text.format.schema.properties.a.items",
        "Unimplemented keys",
    ),
    (
        "messages",
        {**CHAT, "max_tokens": 9, "output_format": {"type": "json_schema", "schema": NEVER}},
        "output_format.schema.properties.a",
        "",
    ),
    (
        "completions",
        {"prompt": "hi", "structured_outputs": {"json": NEVER}},
        "structured_outputs.json.properties.a",
        "",
    ),
    ("completions", {"prompt": "hi", "structured_outputs": {"regex": "("}}, "structured_outputs.regex", ""),
    ("chat/completions", {**CHAT, "guided_grammar": "start: x"}, "guided_grammar", "x"),
    ("chat/completions", {**CHAT, "guided_json": "{"}, "guided_json", "is not JSON"),
    ("chat/completions", {**CHAT, "guided_choice": []}, "guided_choice", "empty"),
    ("chat/completions", {**CHAT, "structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "not supported"),
    (
        "chat/completions",
        {**CHAT, "guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
        "already follow response_format",
    ),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema", ""),
    ("responses", {"input": "hi", "text": {"format": {"type": "grammar"}}}, "text.format.type", "grammar"),
    (
        "chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": {"name": "b", "strict": True, "parameters": WRONG}}]},
        "tools.b.parameters.properties.a.items",
        "Unimplemented keys",
    ),
    ("chat/completions", {**CHAT, "tools": [CHAT_TOOL], "tool_choice": "look"}, "tool_choice", "look"),
    (
        "responses",
        {"input": "hi", "tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "b"}},
        "tool_choice",
        "'b' is not among the tools: 'look'",
    ),
    ("responses", {"input": "hi", "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
    ("messages", {**CHAT, "max_tokens": 9, "tool_choice": {"type": "tool"}}, "tool_choice", "name"),
    ("messages", {**CHAT, "max_tokens": 9, "tool_choice": {"type": "any"}}, "tool_choice", "among the tools: none"),
    ("chat/completions", {**CHAT, "tools": [{"function": {"name": "b", "strict": "yes"}}]}, "strict", "boolean"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_followed_is_refused_with_its_place(stream: bool) -> None:
    async with asked() as (server, http):
        for route, body, place, reason in REFUSED:
            answer = await http.post(route, json={**body, "stream": stream})
            error = answer.json()["error"]
            assert answer.status_code == 400 and place in error["message"] and reason in error["message"], answer.text
            assert route == "messages" or place in error["param"], answer.text
        assert not server.steps()
        body, text = ROUTES["completions"]
        answer = await http.post("completions", json={**body, "guided_regex": "a"})
        assert text(answer.json()) == "a" and len(server.steps()) == 1


async def test_a_prefilled_reply_has_no_form() -> None:
    prefilled = {"messages": [*HELLO, {"role": "assistant", "content": "{"}], "max_tokens": 9}
    async with asked() as (server, http):
        format = {"type": "json_schema", "schema": SCHEMA}
        answer = await http.post("messages", json={**prefilled, "output_config": {"format": format}})
        assert answer.status_code == 400 and "continues the last message" in answer.text
        assert not server.steps()


async def test_a_bias_of_minus_100_forbids_where_callers_set_sampling() -> None:
    bias = {str(ident): -100 for ident in range(300) if ident not in (7, END)}
    async with asked(callers_sampling=True) as (server, http):
        for fields in ({"logit_bias": {**bias, "7": 0}}, {"logit_bias": bias, "guided_choice": ["\x02", "a"]}):
            answer = await http.post("completions", json={"prompt": "hi", "max_tokens": 4, **fields})
            assert answer.status_code == 200, answer.text
        first, second = server.steps()
        assert set(first.completion_ids.tolist()) <= {7, END} and len(first.sampling.forbidden) == 298
        assert second.completion_ids.tolist() == [7, END]
        for wrong in ({"17": 5}, {"17": -100, "18": -99}, {"x": -100}):
            answer = await http.post("completions", json={"prompt": "hi", "logit_bias": wrong})
            assert answer.status_code == 400 and "logit_bias is" in answer.text
        answer = await http.post("completions", json={"prompt": "hi", "logit_bias": bias, "guided_choice": ["x"]})
        assert answer.status_code == 400 and "forbid" in answer.text
        assert len(server.steps()) == 2
    async with asked() as (server, http):
        answer = await http.post("completions", json={"prompt": "hi", "max_tokens": 4, "logit_bias": bias})
        assert answer.status_code == 200 and not server.steps()[0].sampling.forbidden
        assert "logit_bias" in server.sessions["s"].session.notes


async def test_strict_tools_without_a_grammar_are_offered_all_the_same() -> None:
    """Clients ask for strict tools by default."""
    said: list[str] = []
    gptoss = world("gptoss")
    engine = Slow(lambda prompt, sampling: [gptoss.stops[0]])
    async with served(engine, gptoss.renderer, log=said.append) as server:
        client = server.openai(server.open(parse=gptoss.renderer.parser("auto")))
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=HELLO, tools=[CHAT_TOOL])
        assert [line for line in said if "strict" in line] == [
            "calls that harmony reads have no grammar here: tools are strict in vain"
        ]
        with pytest.raises(openai.BadRequestError, match="no grammar for replies that the parser harmony reads"):
            await client.chat.completions.create(model="m", messages=HELLO, tools=[CHAT_TOOL], tool_choice="required")
        assert len(server.steps()) == 2


async def test_what_clients_sampled_is_trained_with_ratios_of_one() -> None:
    async with random_model() as server:
        client = server.openai(server.open(parse=CALLS))
        conversation = list(HELLO)
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="m", messages=conversation, tools=[CHAT_TOOL], tool_choice="required"
            )
            message = answer.choices[0].message.model_dump(exclude_none=True)
            results = [{"role": "tool", "tool_call_id": c["id"], "content": "here"} for c in message["tool_calls"]]
            conversation += [message, *results]
        await client.chat.completions.parse(model="m", messages=conversation, response_format=Look)
        await client.chat.completions.create(model="m", messages=conversation, max_tokens=9)
        steps = server.steps()
    assert [bool(step.sampling.grammar) for step in steps] == [True, True, True, False]
    [group] = with_supports([make_group([(steps, 1.0)])], plain_renderer().grammars)
    batch = flatten([group])
    learner = Learner(tiny(vocab_size=300, max_position_embeddings=4096), TrainingConfig(), AlgorithmConfig(), 1)
    learned = learner.logprobs(batch)
    np.testing.assert_allclose(learned, batch.logp_rollout, atol=2e-5)
    assert batch.support is not None
    forced = batch.support.counts == 1
    assert 20 < forced.sum() < len(batch) and (learned[forced] == 0).all()


@pytest.mark.slow
@pytest.mark.xdist_group("anthropic")
@pytest.mark.parametrize("provider", ["openai", "responses", "anthropic"])
async def test_pydantic_ai(provider: str) -> None:
    """Its own choice of strict tools, a forced tool for the output, and the output by the model's own format."""
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async with random_model() as server:
        address = server.open(parse=CALLS)
        if provider == "anthropic":
            model: Any = AnthropicModel(
                "claude-haiku-4-5", provider=AnthropicProvider(anthropic_client=server.anthropic(address))
            )
        else:
            kind: Any = OpenAIChatModel if provider == "openai" else OpenAIResponsesModel
            model = kind("gpt-4o", provider=OpenAIProvider(openai_client=server.openai(address)))
        for output in (ToolOutput(Look, strict=True), NativeOutput(Look)):
            agent: Any = Agent(model, output_type=output, retries=0, model_settings={"max_tokens": 500})
            found = await agent.run("hi")
            assert isinstance(found.output, Look)
        check(server.steps(), 2)


@pytest.mark.slow
@pytest.mark.xdist_group("anthropic")
@pytest.mark.parametrize("provider", ["openai", "responses", "anthropic"])
async def test_langchain(provider: str) -> None:
    """Strict tools, of which it must call one, and its structured output."""
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    async with random_model() as server:
        address = server.open(parse=CALLS)
        if provider == "anthropic":
            model: Any = ChatAnthropic(
                model="claude-sonnet-5", base_url=address.anthropic_url, api_key="unused", max_tokens=500
            )
            server.clients.append(model._async_client)
        else:
            model = ChatOpenAI(
                model="gpt-4o",
                base_url=address.base_url,
                api_key="unused",
                use_responses_api=provider == "responses",
            )
            server.clients.append(model.root_async_client)
        called = await model.bind_tools([Look], tool_choice="any", strict=True).ainvoke("hi")
        assert called.tool_calls and all(Look.model_validate(call["args"]) for call in called.tool_calls)
        assert isinstance(await model.with_structured_output(Look, method="json_schema").ainvoke("hi"), Look)
        check(server.steps(), 2)
