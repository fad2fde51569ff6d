"""Anthropic's `/v1/messages`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from treadle.core.types import Message, StopReason
from treadle.rendering.replies import Tool
from treadle.rollout.config import ImagesConfig
from treadle.rollout.gateway import request as api
from treadle.rollout.gateway.images import ImageBlock, filled
from treadle.rollout.session import CallOptions

_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class TextBlock(api.RequestModel):
    type: Literal["text"]
    text: api.Text = ""

    @property
    def said(self) -> str:
        return self.text


Content = Annotated[api.Several[TextBlock], api.AS_PARTS]
SeeingContent = Annotated[api.Several[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], api.AS_PARTS]


def _joined(content: api.Several[TextBlock]) -> str:
    return "\n".join(block.text for block in content)


class ToolResult(api.RequestModel):
    type: Literal["tool_result"]
    tool_use_id: api.Text
    content: SeeingContent = ()


class OtherTurn(api.RequestModel):
    role: Literal["user", "system"]
    content: Annotated[
        api.Several[Annotated[TextBlock | ImageBlock | ToolResult, Field(discriminator="type")]], api.AS_PARTS
    ]

    def messages(self) -> list[Message]:
        """Convert to messages as templates expect them: each tool result is a separate one."""
        messages: list[Message] = []
        parts: list[TextBlock | ImageBlock] = []
        for block in self.content:
            if not isinstance(block, ToolResult):
                parts.append(block)
                continue
            if parts:
                messages.append(filled(Message(role=self.role, content=""), parts))
                parts = []
            result = Message(role="tool", content="", tool_call_id=block.tool_use_id)
            messages.append(filled(result, block.content))
        if parts or not messages:
            messages.append(filled(Message(role=self.role, content=""), parts))
        return messages


class Thinking(api.RequestModel):
    type: Literal["thinking", "redacted_thinking"]  # the latter has no text
    thinking: api.Text = ""


class ToolUse(api.RequestModel):
    type: Literal["tool_use"]
    id: api.Text
    name: api.Text
    input: api.Object | None = None


class AssistantTurn(api.RequestModel):
    role: Literal["assistant"]
    content: Annotated[
        api.Several[Annotated[TextBlock | Thinking | ToolUse, Field(discriminator="type")]], api.AS_PARTS
    ]

    def messages(self) -> list[Message]:
        message = Message(role="assistant", content="")
        for block in self.content:
            if isinstance(block, TextBlock):
                message["content"] += block.text
            elif isinstance(block, ToolUse):
                message.setdefault("tool_calls", []).append(api.tool_call(block.id, block.name, block.input or {}))
            elif block.type == "thinking":
                api.add_thought(message, block.thinking)
        return [message]


_OF_SERVERS = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_\w+|memory|advisor)_20\d{6}")
"""Types of tools that Anthropic's servers run, or that only its models support; they are left out."""


class ToolDescription(api.RequestModel):
    type: api.Text = "custom"
    name: api.Text = ""
    description: api.Text = ""
    input_schema: api.Object | None = None
    strict: api.Flag = False

    @property
    def left_out(self) -> bool:
        return bool(_OF_SERVERS.fullmatch(self.type))

    @model_validator(mode="after")
    def _is_custom(self) -> Self:
        if not self.left_out and (self.type != "custom" or not self.name):
            raise api.problem(
                f"must be a custom tool with a name, got type {api.shown(self.type)}, name {api.shown(self.name)}"
            )
        return self

    def tool(self) -> Tool:
        """Convert to OpenAI's form, as templates expect it."""
        function: api.Json = {"name": self.name, "description": self.description, "parameters": self.input_schema or {}}
        if self.strict:
            function["strict"] = True
        return {"type": "function", "function": function}


class Choice(api.RequestModel):
    """Which tools may be called. name: of the one that must be, with `tool`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: api.Text = ""
    disable_parallel_tool_use: api.Flag = False

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type == "tool" and not self.name:
            raise api.problem("needs the name of the tool")
        return self


class ThinkingChoice(api.RequestModel):
    type: api.Text = "disabled"


class CountRequest(api.RequestModel):
    system: Content = ()
    messages: api.SomeOf[Annotated[OtherTurn | AssistantTurn, Field(discriminator="role")]]
    tools: api.Several[ToolDescription] = ()

    def prompt(self) -> tuple[tuple[Message, ...], tuple[Tool, ...], bool]:
        """Return messages, tools, and whether the reply continues the last message (a prefill)."""
        system = _joined(self.system)
        messages = [Message(role="system", content=system)] if system else []
        for turn in self.messages:
            messages += turn.messages()
        tools = tuple(tool.tool() for tool in self.tools if not tool.left_out)
        return tuple(messages), tools, messages[-1]["role"] == "assistant"


class OutputConfig(api.RequestModel):
    """Options for the form of answers: efforts are ignored."""

    format: api.Format | None = None


class MessagesRequest(api.SamplingRequest, CountRequest):
    max_tokens: api.Length
    stop_sequences: api.StopStrings = ()
    tool_choice: Choice = Choice()
    thinking: ThinkingChoice = ThinkingChoice()
    output_config: OutputConfig = OutputConfig()
    output_format: api.Format | None = None


def read_messages(body: api.Json, images: ImagesConfig) -> api.CompletionRequest:
    request = api.read(MessagesRequest, body, images)
    messages, tools, prefilled = request.prompt()
    return api.CompletionRequest(
        model=request.model,
        messages=messages,
        tools=tools,
        left_out=tuple(tool.type for tool in request.tools if tool.left_out),
        options=CallOptions(
            sampling_overrides=request.overrides(request.max_tokens, request.stop_sequences),
            tool_calls=request.tool_choice.type != "none",
            form=request.form(
                api.form_of(request.output_config.format, "output_config.format"),
                api.form_of(request.output_format, "output_format"),
            ),
            tool_choice={"any": "required", "tool": request.tool_choice.name}.get(request.tool_choice.type, "auto"),
            parallel_tool_calls=not request.tool_choice.disable_parallel_tool_use,
            continue_final_message=prefilled,
        ),
        stream=request.stream,
        token_ids=request.return_token_ids,
        thoughts=request.thinking.type != "disabled",
    )


def write(answer: api.Answer) -> api.Json:
    [reply] = answer.replies
    head = _head(answer, answer.completion_tokens)
    return {**head, "content": _content(answer), **_stop(reply), **answer.ids_of(reply)}


def _head(answer: api.Answer, output_tokens: int) -> api.Json:
    usage = {"input_tokens": answer.prompt_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    head = {"id": answer.ident, "type": "message", "role": "assistant", "model": answer.request.model}
    return {**head, "usage": {**usage, "output_tokens": output_tokens}}


def _stop(reply: api.AnyReply) -> api.Json:
    if reply.stop_reason is not StopReason.STOP:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if reply.stop else "end_turn", "stop_sequence": reply.stop}


def _content(answer: api.Answer) -> list[api.Json]:
    """Build the blocks: the thought if requested, the text, the calls."""
    message = answer.replies[0].message
    blocks: list[api.Json] = []
    if answer.request.thoughts and "reasoning_content" in message:
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        arguments = _input(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return blocks


def _input(arguments: str) -> api.Json:
    """Parse arguments as an object. Anything else, from a custom parser, is wrapped under a key."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def events(answer: api.Answer) -> Iterator[str]:
    [reply] = answer.replies
    started = {**_head(answer, 0), "content": [], "stop_reason": None, "stop_sequence": None}
    yield api.named_event("message_start", message=started)
    for index, block in enumerate(_content(answer)):
        empty, deltas = _parts(block)
        yield api.named_event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield api.named_event("content_block_delta", index=index, delta=delta)
        yield api.named_event("content_block_stop", index=index)
    yield api.named_event("message_delta", delta=_stop(reply), usage={"output_tokens": answer.completion_tokens})
    yield api.named_event("message_stop")


def _parts(block: api.Json) -> tuple[api.Json, list[api.Json]]:
    """Return a block's initial state, and the deltas that complete it."""
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            return {**block, "thinking": ""}, [thought, {"type": "signature_delta", "signature": ""}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def error(problem: api.ApiError) -> api.Json:
    kind = _ERRORS.get(problem.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def error_event(problem: api.ApiError) -> str:
    return f"event: error\ndata: {json.dumps(error(problem))}\n\n"


MESSAGES = api.Dialect("msg_", read_messages, write, events, error, error_event)
