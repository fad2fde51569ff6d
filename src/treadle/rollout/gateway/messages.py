"""Anthropic's `/v1/messages`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from treadle.core.types import FunctionCall, Message, StopReason, ToolCall
from treadle.rendering.replies import Tool
from treadle.rollout.gateway.request import (
    Answer,
    ApiError,
    CompletionRequest,
    Dialect,
    Flag,
    Json,
    Length,
    Object,
    RequestModel,
    SamplingRequest,
    Several,
    SomeOf,
    StopStrings,
    Text,
    Unsupported,
    add_thought,
    problem,
    read,
    shown,
)
from treadle.rollout.session import CallOptions, Reply

_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_AS_BLOCKS = BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value)


class TextBlock(RequestModel):
    """A text."""

    type: Literal["text"]
    text: Text = ""


Content = Annotated[Several[TextBlock], _AS_BLOCKS]
"""Text, or a list of texts; read as a list."""


def _joined(content: Several[TextBlock]) -> str:
    return "\n".join(block.text for block in content)


class ToolResult(RequestModel):
    """A tool's answer, in the user's turn."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Content = ()


class OtherTurn(RequestModel):
    """A turn of anybody but the assistant."""

    role: Literal["user", "system"]
    content: Annotated[Several[Annotated[TextBlock | ToolResult, Field(discriminator="type")]], _AS_BLOCKS]

    def messages(self) -> list[Message]:
        """Convert to messages as templates read them: each tool result is one of its own."""
        messages: list[Message] = []
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
                continue
            if texts:
                messages.append(Message(role=self.role, content="\n".join(texts)))
                texts = []
            messages.append(Message(role="tool", content=_joined(block.content), tool_call_id=block.tool_use_id))
        if texts or not messages:
            messages.append(Message(role=self.role, content="\n".join(texts)))
        return messages


class Thinking(RequestModel):
    """A thought of the assistant. One of type `redacted_thinking` has no text."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Text = ""


class ToolUse(RequestModel):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Object | None = None


class AssistantTurn(RequestModel):
    """A turn of the assistant."""

    role: Literal["assistant"]
    content: Annotated[Several[Annotated[TextBlock | Thinking | ToolUse, Field(discriminator="type")]], _AS_BLOCKS]

    def messages(self) -> list[Message]:
        """Convert to one message as templates read it."""
        message = Message(role="assistant", content="")
        for block in self.content:
            if isinstance(block, TextBlock):
                message["content"] += block.text
            elif isinstance(block, ToolUse):
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                call = ToolCall(
                    id=block.id, type="function", function=FunctionCall(name=block.name, arguments=arguments)
                )
                message.setdefault("tool_calls", []).append(call)
            elif block.type == "thinking":
                add_thought(message, block.thinking)
        return [message]


_OF_SERVERS = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_\w+|memory|advisor)_20\d{6}")
"""Types of tools that Anthropic's servers run, or that only its models know; they are left out."""


class ToolDescription(RequestModel):
    """A tool that the model may call."""

    type: Text = "custom"
    name: Text = ""
    description: Text = ""
    input_schema: Object | None = None

    @property
    def left_out(self) -> bool:
        return bool(_OF_SERVERS.fullmatch(self.type))

    @model_validator(mode="after")
    def _is_custom(self) -> Self:
        if not self.left_out and (self.type != "custom" or not self.name):
            raise problem(f"must be a custom tool with a name, got type {shown(self.type)}, name {shown(self.name)}")
        return self

    def tool(self) -> Tool:
        """Convert to OpenAI's form, which templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema or {}}
        return {"type": "function", "function": function}


class Choice(RequestModel):
    """Which tools may be called: `any` and `tool` cannot be enforced, and count as `auto`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    disable_parallel_tool_use: Flag = False


class ThinkingChoice(RequestModel):
    """Whether the answer shows thoughts: unless `disabled`."""

    type: Text = "disabled"


class CountRequest(RequestModel):
    """Body of a request to count the tokens of a prompt."""

    system: Content = ()
    messages: SomeOf[Annotated[OtherTurn | AssistantTurn, Field(discriminator="role")]]
    tools: Several[ToolDescription] = ()

    def prompt(self) -> tuple[tuple[Message, ...], tuple[Tool, ...], bool]:
        """Return messages, tools, and whether the reply continues the last message (a prefill)."""
        system = _joined(self.system)
        messages = [Message(role="system", content=system)] if system else []
        for turn in self.messages:
            messages += turn.messages()
        tools = tuple(tool.tool() for tool in self.tools if not tool.left_out)
        return tuple(messages), tools, messages[-1]["role"] == "assistant"


class OutputConfig(RequestModel):
    """How answers are made: efforts are ignored, formats refused."""

    format: Unsupported = None


class MessagesRequest(SamplingRequest, CountRequest):
    """Body of a request for a message."""

    max_tokens: Length
    stop_sequences: StopStrings = ()
    tool_choice: Choice = Choice()
    thinking: ThinkingChoice = ThinkingChoice()
    output_config: OutputConfig = OutputConfig()
    output_format: Unsupported = None


def read_messages(body: Json) -> CompletionRequest:
    """Validate a body and convert it. Raises ApiError."""
    request = read(MessagesRequest, body)
    messages, tools, prefilled = request.prompt()
    return CompletionRequest(
        model=request.model,
        messages=messages,
        tools=tools,
        left_out=tuple(tool.type for tool in request.tools if tool.left_out),
        options=CallOptions(
            sampling_overrides=request.overrides(request.max_tokens, request.stop_sequences),
            tool_calls=request.tool_choice.type != "none",
            parallel_tool_calls=not request.tool_choice.disable_parallel_tool_use,
            continue_final_message=prefilled,
        ),
        stream=request.stream,
        token_ids=request.return_token_ids,
        thoughts=request.thinking.type != "disabled",
    )


def read_prompt(body: Json) -> tuple[tuple[Message, ...], tuple[Tool, ...], bool]:
    """Return messages, tools, and whether the reply continues the last message. Raises ApiError."""
    return read(CountRequest, body).prompt()


def write(answer: Answer) -> Json:
    """Build the response body."""
    [reply] = answer.replies
    ids = {}
    if answer.request.token_ids:
        ids = {"prompt_token_ids": reply.step.prompt_ids.tolist(), "token_ids": reply.step.completion_ids.tolist()}
    return {**_head(answer, answer.completion_tokens), "content": _content(answer), **_stop(reply), **ids}


def _head(answer: Answer, output_tokens: int) -> Json:
    usage = {"input_tokens": answer.prompt_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    head = {"id": answer.ident, "type": "message", "role": "assistant", "model": answer.request.model}
    return {**head, "usage": {**usage, "output_tokens": output_tokens}}


def _stop(reply: Reply) -> Json:
    if reply.step.stop_reason is not StopReason.STOP:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if reply.stop else "end_turn", "stop_sequence": reply.stop}


def _content(answer: Answer) -> list[Json]:
    """Build the blocks: the thought if it is to be shown, the text, the calls."""
    message = answer.replies[0].message
    blocks: list[Json] = []
    if answer.request.thoughts and "reasoning_content" in message:
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        arguments = _input(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _input(arguments: str) -> Json:
    """Read arguments as an object. A foreign parser may give something else, which gets a key of its own."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def events(answer: Answer) -> Iterator[str]:
    """Yield the response as server-sent events."""
    [reply] = answer.replies
    started = {**_head(answer, 0), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message=started)
    for index, block in enumerate(_content(answer)):
        empty, deltas = _parts(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_stop(reply), usage={"output_tokens": answer.completion_tokens})
    yield _event("message_stop")


def _parts(block: Json) -> tuple[Json, list[Json]]:
    """Return a block as it starts, and the deltas that fill it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            return {**block, "thinking": ""}, [thought, {"type": "signature_delta", "signature": ""}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _event(kind: str, **data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"


def error(problem: ApiError) -> Json:
    """Build Anthropic's error body."""
    kind = _ERRORS.get(problem.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def error_event(problem: ApiError) -> str:
    """Write an error as an event of a stream."""
    return f"event: error\ndata: {json.dumps(error(problem))}\n\n"


MESSAGES = Dialect("msg_", read_messages, write, events, error, error_event)
