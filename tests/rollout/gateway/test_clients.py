"""Unmodified clients, streaming and not, with tools and without, in sessions of several turns over real sockets.

Whatever a client is told is what the engine sampled: thought, content and calls are the decoded ids of its step.
"""

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.rollout.families import world
from tests.rollout.gateway.servers import CALL, FINAL, Served, Slow, looks_then_answers, scripted, served, written
from tests.worlds import PlainTokenizer, user
from treadle.core.types import Step, StopReason
from treadle.rendering.replies import hermes, plain
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.gateway.request import SamplingRequest

SCHEMA = {"type": "object", "properties": {"who": {"type": "string"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
ANTHROPIC_TOOLS: Any = [{"name": "look", "input_schema": SCHEMA}]
HELLO: Any = [user("who plays chess?")]


def looking() -> Slow:
    return Slow(scripted(looks_then_answers))


def check(steps: list[Step], told: list[tuple[str, str, list[dict[str, Any]]]]) -> None:
    """told: (thought, content, tool arguments) as each reply reached the client."""
    assert len(steps) == len(told)
    for step, (thought, content, arguments) in zip(steps, told, strict=True):
        message = hermes(written(step), CHAT_TOOLS)
        assert (message.get("reasoning_content", ""), message["content"]) == (thought, content)
        assert [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls", [])] == arguments
    assert [written(step) for step in steps] == [CALL, FINAL]
    first, second = (PlainTokenizer().decode(s.prompt_ids, skip_special_tokens=False) for s in steps)
    assert "plays chess" in first and "the page of Anna" in second


def taken(message: dict[str, Any], conversation: list[Any]) -> tuple[str, str, list[Any]]:
    """Send a message back with what its tool answers; returns what it told."""
    calls = message.get("tool_calls") or []
    assert all(call["function"]["name"] == "look" for call in calls)
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "the page of Anna"} for call in calls]
    conversation += [message, *answers]
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    return message.get("reasoning_content") or "", message["content"] or "", arguments


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat_with_tools(stream: bool) -> None:
    async with served(looking()) as server:
        client = server.openai(server.open())
        conversation = list(HELLO)
        told = []
        for _ in range(2):
            told.append(taken(await _chat(client, conversation, stream), conversation))
        check(server.steps(), told)
        assert [m["role"] for m in conversation] == ["user", "assistant", "tool", "assistant"]


async def _chat(client: openai.AsyncOpenAI, conversation: Any, stream: bool) -> dict[str, Any]:
    """The assistant message, as a client would send it back."""
    asked = {"model": "m", "messages": conversation, "tools": CHAT_TOOLS}
    if not stream:
        answer = await client.chat.completions.create(**asked)
        [choice] = answer.choices
        assert answer.usage is not None and answer.usage.total_tokens > 0
        assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
        return dict(choice.message.model_dump(exclude_none=True))
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    events = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    usage, reasons = None, []
    async for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            reasons.append(choice.finish_reason)
            delta = choice.delta.model_dump(exclude_none=True)
            for key in ("content", "reasoning_content"):
                message[key] = message.get(key, "") + delta.get(key, "")
            for call in delta.get("tool_calls", []):
                assert call.pop("index") == len(message.setdefault("tool_calls", []))
                message["tool_calls"].append(call)
    assert usage is not None and usage.total_tokens > 0
    assert reasons[-1] == ("tool_calls" if "tool_calls" in message else "stop") and not any(reasons[:-1])
    return message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
async def test_openai_responses_with_tools(stream: bool, stateful: bool) -> None:
    async with served(looking()) as server:
        client = server.openai(server.open())
        items: list[Any] = list(HELLO)
        told, previous = [], None
        for _ in range(2):
            asked: dict[str, Any] = {"model": "m", "input": items, "tools": RESPONSES_TOOLS}
            if stateful and previous:
                asked["previous_response_id"] = previous
            if stream:
                async with client.responses.stream(**asked) as events:
                    numbers = [event.sequence_number async for event in events]
                    answer: Any = await events.get_final_response()
                assert numbers == list(range(len(numbers)))
            else:
                answer = await client.responses.create(**asked)
            assert answer.status == "completed"
            previous, output = answer.id, [item.model_dump(exclude_none=True) for item in answer.output]
            calls = [item for item in output if item["type"] == "function_call"]
            thoughts = [i["content"][0]["text"] for i in output if i["type"] == "reasoning"]
            told.append(("".join(thoughts), answer.output_text, [json.loads(c["arguments"]) for c in calls]))
            done = [
                {"type": "function_call_output", "call_id": c["call_id"], "output": "the page of Anna"} for c in calls
            ]
            items = done if stateful else [*items, *output, *done]
        check(server.steps(), told)


@pytest.mark.xdist_group("anthropic")
@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_with_tools(stream: bool) -> None:
    async with served(looking()) as server:
        client = server.anthropic(server.open())
        conversation = list(HELLO)
        told = []
        for _ in range(2):
            asked: Any = {"model": "m", "max_tokens": 500, "messages": conversation, "tools": ANTHROPIC_TOOLS}
            asked["thinking"] = {"type": "adaptive"}
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            blocks = {block.type: block for block in answer.content}
            assert answer.stop_reason == ("tool_use" if "tool_use" in blocks else "end_turn")
            assert answer.usage.output_tokens == len(server.steps()[-1].completion_ids)
            thought = blocks["thinking"].thinking if "thinking" in blocks else ""
            calls = [block for block in answer.content if block.type == "tool_use"]
            told.append((thought, blocks["text"].text, [call.input for call in calls]))
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            conversation.append({"role": "assistant", "content": content})
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": "the page of Anna"} for c in calls]
            conversation.append({"role": "user", "content": results})
        check(server.steps(), told)


ONE = CALL.partition("</think>\n")[2]  # the template leaves out thoughts
BOTH = ONE + ONE.removeprefix("I look.").replace("Anna", "Bob")


async def chat_one(server: Served, address: SessionAddress, history: list[Any]) -> None:
    client = server.openai(address)
    answer = await client.chat.completions.create(
        model="m", messages=history, tools=CHAT_TOOLS, parallel_tool_calls=False
    )
    taken(answer.choices[0].message.model_dump(exclude_none=True), history)


async def respond_one(server: Served, address: SessionAddress, history: list[Any]) -> None:
    client = server.openai(address)
    asked: Any = {"model": "m", "input": history, "tools": RESPONSES_TOOLS}
    answer = await client.responses.create(**asked, parallel_tool_calls=False)
    output = [item.model_dump(exclude_none=True) for item in answer.output]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    history += [*output, *({"type": "function_call_output", "call_id": call, "output": "Anna's"} for call in calls)]


async def message_one(server: Served, address: SessionAddress, history: list[Any]) -> None:
    client = server.anthropic(address)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    asked: Any = {"model": "m", "max_tokens": 500, "messages": history, "tools": ANTHROPIC_TOOLS}
    content = [block.model_dump() for block in (await client.messages.create(**asked, tool_choice=choice)).content]
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": "Anna's"} for call in calls]
    history += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]


@pytest.mark.xdist_group("anthropic")
@pytest.mark.parametrize("ask", [chat_one, respond_one, message_one])
async def test_calls_that_were_not_handed_out_are_in_no_later_prompt(ask: Any) -> None:
    """All that was sampled is recorded; the step counts the calls that were withheld, and what follows is a break."""
    replies = [BOTH, ONE, BOTH, FINAL]
    async with served(Slow(scripted(lambda prompt, number: replies[number]))) as server:
        address, history = server.open(), list(HELLO)
        for _ in replies:
            await ask(server, address, history)
        steps = server.steps()
        assert [written(step) for step in steps] == replies
        assert [step.withheld for step in steps] == [1, 0, 1, 0]
        assert [step.break_cause for step in steps] == [None, "calls withheld", None, "calls withheld"]
        for number, step in enumerate(steps):
            prompt = PlainTokenizer().decode(step.prompt_ids, skip_special_tokens=False)
            assert (prompt.count("<tool_call>"), prompt.count("Bob")) == (number, 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.filterwarnings("ignore")  # of its own
async def test_litellm_with_tools(provider: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the internet when imported
    import litellm

    async with served(looking()) as server:
        address = server.open()
        url = address.base_url if provider == "openai" else address.anthropic_url
        conversation = list(HELLO)
        told = []
        for _ in range(2):
            answer: Any = await litellm.acompletion(
                model=f"{provider}/m",
                api_base=url,
                api_key="unused",
                messages=conversation,
                tools=CHAT_TOOLS,
                max_tokens=500,
                stream=stream,
                _skip_mcp_handler=True,  # tools make litellm import the package `mcp`, which it does not require
            )
            if stream:
                answer = litellm.stream_chunk_builder([chunk async for chunk in answer])
            message = answer.choices[0].message.model_dump(exclude_none=True)
            sent = {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
            _, content, arguments = taken(sent, conversation)
            told.append(("Who?" if arguments else "", content, arguments))
        await litellm.close_litellm_async_clients()
        check(server.steps(), told)


@pytest.mark.parametrize("stream", [False, True])
async def test_raw_completions_keep_the_ids_of_what_they_carry_on(stream: bool) -> None:
    """The model says "a", "b"; encoded anew, that would be one token."""
    engine = Slow(lambda prompt, sampling: [5 + ord("a"), 5 + ord("b"), 2])
    async with served(engine) as server:
        client = server.openai(server.open())
        prompt = "x abc "
        for turn in range(3):
            answer: Any = await client.completions.create(
                model="m", prompt=prompt, stream=stream, extra_body={"return_token_ids": True}
            )
            if stream:
                [answer] = [event async for event in answer]
            [choice] = answer.choices
            step = server.steps()[turn]
            assert choice.text == "ab" == written(step)
            assert choice.token_ids == step.completion_ids.tolist()
            assert choice.prompt_token_ids == step.prompt_ids.tolist()
            prompt += choice.text + " more "
        first, second, third = server.steps()
        assert second.prompt_ids[: len(first.full_ids) - 1].tolist() == first.full_ids[:-1].tolist()
        assert third.prompt_ids[: len(second.full_ids) - 1].tolist() == second.full_ids[:-1].tolist()
        [choice] = (await client.completions.create(model="m", prompt=[1, 70, 71], max_tokens=9)).choices
        assert server.steps()[3].prompt_ids.tolist() == [1, 70, 71]


@pytest.mark.xdist_group("anthropic")
async def test_a_stop_string_ends_the_text_and_anthropic_is_told_which() -> None:
    async with served(Slow(scripted(lambda prompt, number: "one STOP two"))) as server:
        address = server.open(parse=plain)
        chat = server.openai(address)
        answer = await chat.chat.completions.create(model="m", messages=HELLO, stop=["HALT", "STOP"])
        assert answer.choices[0].message.content == "one "
        client = server.anthropic(address)
        said = await client.messages.create(model="m", max_tokens=99, messages=HELLO, stop_sequences=["STOP"])
        assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", "STOP")
        assert [block.text for block in said.content if block.type == "text"] == ["one "]
        assert all(step.sampling.stop[-1] == "STOP" for step in server.steps())


async def test_logprobs_and_token_ids_are_those_of_the_step() -> None:
    async with served(Slow(scripted(lambda prompt, number: f"answer {number}"))) as server:
        client = server.openai(server.open(parse=plain))
        answer = await client.chat.completions.create(
            model="m", messages=HELLO, n=3, logprobs=True, extra_body={"return_token_ids": True}
        )
        steps = server.steps()
        assert answer.prompt_token_ids == steps[0].prompt_ids.tolist()  # type: ignore[attr-defined]
        assert answer.usage is not None and answer.usage.prompt_tokens == len(steps[0].prompt_ids)
        assert answer.usage.completion_tokens == sum(len(step.completion_ids) for step in steps)
        assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(steps) == 3
        for choice, step in zip(answer.choices, steps, strict=True):
            assert choice.message.content == written(step)
            assert choice.token_ids == step.completion_ids.tolist()  # type: ignore[attr-defined]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert [token.logprob for token in choice.logprobs.content] == step.logprobs.tolist()


@pytest.mark.xdist_group("anthropic")
async def test_answers_and_errors_are_what_the_sdks_models_say() -> None:
    """Which the SDKs themselves do not check."""
    from anthropic.types import ErrorResponse, Message

    async with served(looking()) as server:
        address = server.open()
        headers = {"anthropic-version": "2023-06-01"}
        async with httpx.AsyncClient(base_url=address.base_url, timeout=300) as client:
            for path, body, model in (
                ("chat/completions", {"messages": HELLO, "logprobs": True}, ChatCompletion),
                ("completions", {"prompt": "é", "logprobs": 0}, Completion),
                ("responses", {"input": "hi", "include": ["message.output_text.logprobs"]}, Response),
                ("messages", {"messages": HELLO, "max_tokens": 9}, Message),
            ):
                more = headers if path == "messages" else {}
                answer = await client.post(path, json={"model": "m", **body}, headers=more)
                assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
                model.model_validate(answer.json())
                wrong = await client.post(path, json={"model": 3, **body}, headers=more)
                assert wrong.status_code == 400
                if path == "messages":
                    ErrorResponse.model_validate({"request_id": None, **wrong.json()})
                else:
                    assert wrong.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_what_clients_ask_for_in_vain_is_said_once() -> None:
    said: list[str] = []
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "mine", "tools": []}]
    async with served(looking(), log=said.append) as server:
        for name in ("first", "second"):
            client = server.openai(server.open(name))
            await client.responses.create(model="m", input="hi", tools=tools, temperature=0.2)  # type: ignore[arg-type]
            await client.responses.create(model="m", input="hi", temperature=0.3)
    assert said == [
        "agents offer tools of type web_search, which no model here supports: they are left out",
        "agents offer tools of type namespace, which no model here supports: they are left out",
        "agents request another temperature; the recipe's is used (rollout)",
    ]


ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
IN_VAIN: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}),
    ("responses", {"tool_choice": ALLOWED}),
    ("messages", {"tool_choice": ALLOWED}),
    ("responses", {"structured_outputs": {"whitespace_pattern": " "}}),
    ("messages", {"guided_whitespace_pattern": " "}),
    ("chat/completions", {"documents": [{"text": "Anna plays chess."}]}),
    ("chat/completions", {"chat_template": "{{ messages }}"}),
    ("completions", {"prompt_logprobs": 1}),
    ("responses", {"top_logprobs": 3}),
    ("chat/completions", {"min_tokens": 3}),
    ("completions", {"stop_token_ids": [3]}),
]


async def test_what_would_be_ignored_in_silence_is_refused_by_name() -> None:
    asked: dict[str, Any] = {"messages": HELLO, "input": "hi", "prompt": "hi", "max_tokens": 5}
    async with served(looking()) as server, httpx.AsyncClient() as http:
        address = server.open(callers_sampling=True)
        for route, fields in IN_VAIN:
            answer = await http.post(f"{address.base_url}/{route}", json={**asked, **fields})
            assert answer.status_code == 400 and next(iter(fields)) in answer.json()["error"]["message"], answer.text
        assert not server.steps()


async def test_what_the_template_leaves_out_of_a_tool_is_said_once() -> None:
    said: list[str] = []
    kinds = {"kind": {"enum": ["near", "far"]}, "who": {"$ref": "#/$defs/person"}, "plain": {"type": "string"}}
    schema = {"type": "object", "properties": kinds, "$defs": {"person": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "look", "description": "-", "parameters": schema}}]
    engine = Slow(lambda prompt, sampling: [world("gptoss").stops[0]])
    async with served(engine, world("gptoss").renderer, log=said.append) as server:
        client = server.openai(server.open(parse=world("gptoss").renderer.parser("auto")))
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=HELLO, tools=tools)  # type: ignore[arg-type]
    assert said == [
        "the tokenizer's chat template leaves out parts of the tool 'look', which the model never sees: kind.enum, "
        "who.$ref, $defs; rephrase them, or move them into its description"
    ]


@pytest.mark.xdist_group("anthropic")
async def test_a_completion_cut_by_length_says_so() -> None:
    async with served(Slow(scripted(lambda prompt, number: "too long to say"))) as server:
        address = server.open(max_tokens=5)
        chat = server.openai(address)
        answer = await chat.chat.completions.create(model="m", messages=HELLO)
        assert answer.choices[0].finish_reason == "length"
        response = await chat.responses.create(model="m", input="hi")
        assert response.status == "incomplete" and response.incomplete_details is not None
        async with chat.responses.stream(model="m", input="hi") as stream:
            final = await stream.get_final_response()
        assert (final.status, final.output_text) == ("incomplete", response.output_text)
        client = server.anthropic(address)
        said = await client.messages.create(model="m", max_tokens=99, messages=HELLO)
        assert said.stop_reason == "max_tokens"
        assert all(step.stop_reason is StopReason.LENGTH for step in server.steps())


@pytest.mark.xdist_group("anthropic")
async def test_the_secret_may_be_the_api_key() -> None:
    async with served(looking()) as server:
        address = server.open()
        chat = server.openai(address, f"{server.url}/v1")
        assert [model.id async for model in chat.models.list()] == ["policy"]
        await chat.chat.completions.create(model="m", messages=HELLO)
        client = server.anthropic(address, server.url)
        await client.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert [model.id async for model in client.models.list()] == ["policy"]
        counted = await client.messages.count_tokens(model="m", messages=HELLO)
        assert counted.input_tokens == len(server.steps()[1].prompt_ids)
        assert len(server.steps()) == 2
        prefilled: Any = [*HELLO, {"role": "assistant", "content": "I"}]
        counted = await client.messages.count_tokens(model="m", messages=prefilled)
        await client.messages.create(model="m", max_tokens=9, messages=prefilled)
        assert counted.input_tokens == len(server.steps()[2].prompt_ids)


async def test_sampling_is_the_recipes_in_training_and_the_callers_elsewhere() -> None:
    async with served(Slow(scripted(lambda prompt, number: "ok"))) as server:
        for name, callers in (("recipe", False), ("callers", True)):
            address = server.open(name, callers_sampling=callers, context=600)
            chat = server.openai(address)
            await chat.chat.completions.create(model="m", messages=HELLO)
            await chat.chat.completions.create(model="m", messages=HELLO, temperature=0.25, max_tokens=7, stop="x")
        _, asked = server.steps("recipe")
        assert (asked.sampling.temperature, asked.sampling.max_tokens, asked.sampling.stop) == (1.0, 500, ("x",))
        assert sorted(server.sessions["recipe"].session.notes) == ["max_tokens", "temperature"]
        _, asked = server.steps("callers")
        assert (asked.sampling.temperature, asked.sampling.max_tokens, asked.sampling.stop) == (0.25, 7, ("x",))
        assert server.sessions["callers"].session.notes == {}


def test_what_clients_write_of_sampling_is_brought_within_its_bounds() -> None:
    asked = SamplingRequest(temperature=1e-9, top_k=-1, seed=-1, presence_penalty=0.5, logit_bias={})
    assert asked.overrides(7, ("x",)) == {
        "temperature": 0.01,
        "top_k": 0,
        "seed": 2**63 - 1,
        "max_tokens": 7,
        "stop": ("x",),
        "presence_penalty": "0.5",
    }
    assert SamplingRequest(temperature=0.0).overrides(None, ()) == {"temperature": 0.0}
