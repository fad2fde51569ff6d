"""OpenAI's `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Tag

from treadle.core.types import FunctionCall, Message, StopReason, ToolCall, arguments_text
from treadle.rollout.gateway.chat_completions import Content, TextFormat, ToolChoice, error, joined, token_logprobs
from treadle.rollout.gateway.fields import (
    Flag,
    Object,
    RequestModel,
    Several,
    SomeOf,
    StopStrings,
    Text,
    one_of,
    only,
    read,
    text_or,
    unsupported,
)
from treadle.rollout.gateway.request import Answer, ApiError, CompletionRequest, Dialect, Json, add_thought
from treadle.rollout.gateway.sampling_overrides import Length, SamplingRequest
from treadle.rollout.session import CallOptions

_ROLES = ("user", "assistant", "system", "developer")
_RANKS = {"reasoning": 0, "message": 1, "function_call": 2}  # the order of items within one assistant message
_KINDS = (*_RANKS, "function_call_output")


# What a request may hold


class MessageItem(RequestModel):
    """Holds a message; an item of an unknown type is read as one, too, and refused for its type."""

    type: Annotated[Text, one_of(*_KINDS)] = "message"
    role: Annotated[Text, one_of(*_ROLES)]
    content: Content = ""


class Thought(RequestModel):
    """Holds a part of what the assistant thought."""

    text: Text = ""


class ReasoningItem(RequestModel):
    """Holds what the assistant thought, or where a client has no more, its summary."""

    type: Annotated[Text, one_of("reasoning")]
    content: Several[Thought] = ()
    summary: Several[Thought] = ()


class CallItem(RequestModel):
    """Holds a tool call of the assistant."""

    null_counts: ClassVar[frozenset[str]] = frozenset({"arguments"})
    type: Annotated[Text, one_of("function_call")]
    call_id: Text
    name: Text
    arguments: Any = "{}"


class OutputItem(RequestModel):
    """Holds what a tool answered."""

    type: Annotated[Text, one_of("function_call_output")]
    call_id: Text
    output: Content = ""


Item = MessageItem | ReasoningItem | CallItem | OutputItem
_TAGS = {"reasoning": "<reasoning>", "function_call": "<call>", "function_call_output": "<output>"}


def _kind(item: Any) -> str:
    return _TAGS.get(str(item.get("type")) if isinstance(item, dict) else "", "<message>")


AnyItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[CallItem, Tag("<call>")]
    | Annotated[OutputItem, Tag("<output>")],
    Discriminator(_kind),
]


_LEFT_OUT = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp"),
    *("computer_use_preview", "tool_search", "namespace", "custom", "local_shell"),
)
"""Types of tools that OpenAI's servers run, or that only its models can be told of."""


class OtherTool(RequestModel):
    """Names a tool that is left out."""

    type: Annotated[Text, one_of(*_LEFT_OUT)]


class FlatTool(RequestModel):
    """Describes a tool that the model may call: this API writes a function's fields beside its type."""

    null_counts: ClassVar[frozenset[str]] = frozenset({"type"})
    type: Annotated[Any, only("only function tools are supported here", "function")] = "function"
    name: Text
    parameters: Object | None = None


AnyTool = Annotated[
    Annotated[FlatTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(lambda tool: "<other>" if isinstance(tool, dict) and tool.get("type") in _LEFT_OUT else "<function>"),
]


class TextOptions(RequestModel):
    """Says in which format text is wanted."""

    format: TextFormat = TextFormat()


class ResponsesRequest(SamplingRequest):
    """Holds the body of a request for a response."""

    input: Annotated[Annotated[Text, Tag("<text>")] | Annotated[SomeOf[AnyItem], Tag("<items>")], text_or("<items>")]
    instructions: Text = ""
    tools: Several[AnyTool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: Flag = True
    max_output_tokens: Length | None = None
    stop: StopStrings = ()
    include: tuple[Any, ...] = ()
    previous_response_id: Text = ""
    text: TextOptions = TextOptions()
    chat_template_kwargs: Object | None = None
    background: Annotated[Any, unsupported(False)] = None
    conversation: Annotated[Any, unsupported()] = None
    prompt: Annotated[Any, unsupported()] = None


def read_response(body: Json) -> CompletionRequest:
    """Return the body as a CompletionRequest. Raises ApiError."""
    request = read(ResponsesRequest, body)
    given = request.input
    return CompletionRequest(
        model=request.model,
        instructions=request.instructions,
        messages=(Message(role="user", content=given),) if isinstance(given, str) else read_items(given),
        tools=tuple(
            {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
            for tool in body.get("tools") or ()
            if tool.get("type") not in _LEFT_OUT
        ),
        left_out=tuple(tool.type for tool in request.tools if isinstance(tool, OtherTool)),
        options=CallOptions(
            sampling_overrides=request.overrides(request.max_output_tokens, request.stop),
            tool_calls=request.tool_choice != "none",
            parallel_tool_calls=request.parallel_tool_calls,
            template_kwargs=request.chat_template_kwargs or None,
        ),
        stream=request.stream,
        logprobs="message.output_text.logprobs" in request.include,
        token_ids=request.return_token_ids,
        previous=request.previous_response_id or None,
    )


def read_items(items: Sequence[Item]) -> tuple[Message, ...]:
    """Return the items as messages. Reasoning, text and calls that follow each other are one assistant message."""
    found: list[Message] = []
    rank: int | None = None  # of the last item, while an assistant message is being put together
    for item in items:
        if isinstance(item, OutputItem):
            found.append(Message(role="tool", content=joined(item.output), tool_call_id=item.call_id))
            rank = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            found.append(Message(role=role, content=joined(item.content)))
            rank = None
        else:
            if rank is None or _RANKS[item.type] < rank or rank == _RANKS[item.type] == _RANKS["message"]:
                found.append(Message(role="assistant", content=""))
            rank = _RANKS[item.type]
            _add(found[-1], item)
    return tuple(found)


def _add(message: Message, item: MessageItem | ReasoningItem | CallItem) -> None:
    """Put an assistant's item into its message."""
    if isinstance(item, MessageItem):
        message["content"] = joined(item.content, joint="")
    elif isinstance(item, ReasoningItem):
        add_thought(message, "".join(part.text for part in item.content or item.summary))
    else:
        function = FunctionCall(name=item.name, arguments=arguments_text(item.arguments))
        call = ToolCall(id=item.call_id, type="function", function=function)
        message.setdefault("tool_calls", []).append(call)


def write(answer: Answer) -> Json:
    """Return the response body."""
    [reply] = answer.replies
    cut = reply.step.stop_reason is not StopReason.STOP
    body = {
        **_head(answer),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }
    if answer.request.token_ids:
        body["prompt_token_ids"] = reply.step.prompt_ids.tolist()
        body["token_ids"] = reply.step.completion_ids.tolist()
    return body


def _head(answer: Answer) -> Json:
    request, sampling = answer.request, answer.replies[0].step.sampling
    return {
        "id": answer.ident,
        "object": "response",
        "created_at": answer.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions or None,
        "max_output_tokens": sampling.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.options.parallel_tool_calls,
        "previous_response_id": request.previous,
        "store": True,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if request.options.tool_calls else "none",
        "tools": [
            {"strict": False, "parameters": {}, **tool["function"], "type": "function"} for tool in request.tools
        ],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _items(answer: Answer) -> list[Json]:
    """Output items: the thought, the text, the calls."""
    message, tail = answer.replies[0].message, answer.ident.removeprefix(RESPONSES.prefix)
    found: list[Json] = []
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        found.append({"type": "reasoning", "id": f"rs_{tail}", "summary": [], "content": content})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": _logprobs(answer)}
        item = {"type": "message", "id": f"msg_{tail}", "role": "assistant", "status": "completed", "content": [part]}
        found.append(item)
    for i, call in enumerate(calls):
        found.append(
            {
                "type": "function_call",
                "id": f"fc_{tail}_{i}",
                "call_id": call["id"],
                **call["function"],
                "status": "completed",
            }
        )
    return found


def _logprobs(answer: Answer) -> list[Json]:
    return token_logprobs(answer, answer.replies[0]) if answer.request.logprobs else []


def events(answer: Answer) -> Iterator[str]:
    """Yield the response as server-sent events."""
    for number, (kind, data) in enumerate(_events(answer)):
        yield _event(kind, {"sequence_number": number, **data})


def _event(kind: str, data: Json) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"


def _events(answer: Answer) -> Iterator[tuple[str, Json]]:
    yield "response.created", {"response": _head(answer)}
    yield "response.in_progress", {"response": _head(answer)}
    for index, item in enumerate(_items(answer)):
        at = {"output_index": index}
        opened: Any = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        status = {} if item["type"] == "reasoning" else {"status": "in_progress"}
        yield "response.output_item.added", {**at, "item": {**item, **opened, **status}}
        yield from _deltas(item, {**at, "item_id": item["id"]})
        yield "response.output_item.done", {**at, "item": item}
    # Not `response.incomplete`, for which OpenAI's SDK raises when asked for the final response: its status says it.
    yield "response.completed", {"response": write(answer)}


def _deltas(item: Json, at: Json) -> Iterator[tuple[str, Json]]:
    if item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        done = {"arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", {**at, **done}
        return
    [part] = item["content"]
    at = {**at, "content_index": 0}
    name = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
    logprobs = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
    yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
    yield f"{name}.delta", {**at, "delta": part["text"], **logprobs}
    yield f"{name}.done", {**at, "text": part["text"], **logprobs}
    yield "response.content_part.done", {**at, "part": part}


def error_event(problem: ApiError) -> str:
    """Return an error as an event of a stream."""
    told = {"code": problem.code, "message": problem.message, "param": problem.param}
    return _event("error", {"sequence_number": 0, **told, **error(problem)})


RESPONSES = Dialect("resp_", read_response, write, events, error, error_event)
