"""Anthropic's `/v1/messages`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Tag

from treadle.core.types import FunctionCall, Message, StopReason, ToolCall
from treadle.rendering.tool_calls import Tool
from treadle.rollout.gateway.fields import (
    Flag,
    Object,
    RequestModel,
    Several,
    SomeOf,
    StopStrings,
    Text,
    matching,
    one_of,
    only,
    read,
    text_or,
    unsupported,
)
from treadle.rollout.gateway.request import Answer, ApiError, CompletionRequest, Dialect, Json, add_thought
from treadle.rollout.gateway.sampling_overrides import Length, SamplingRequest
from treadle.rollout.session import CallOptions, Reply

_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ROLES = ("user", "assistant", "system")
_BLOCKS = ("text", "tool_use", "thinking", "redacted_thinking")  # of the assistant


# What a request may hold


class TextBlock(RequestModel):
    """Holds text, of anybody but the assistant."""

    type: Annotated[Any, only("only text is supported here", "text")]
    text: Text = ""


Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[Several[TextBlock], Tag("<blocks>")], text_or("<blocks>")
]


def joined(content: str | Sequence[TextBlock]) -> str:
    """Return content as one text, its blocks a line each."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class ToolResult(RequestModel):
    """Holds what a tool answered, in the user's turn."""

    type: Annotated[Text, one_of("tool_result")]
    tool_use_id: Text
    content: Content = ""


def _kind(value: Any, key: str) -> str:
    """The tag of an object: what it says under the key."""
    return f"<{value.get(key) if isinstance(value, dict) else ''}>"


def _one_of_the_users(block: Any) -> str:
    return "<tool_result>" if _kind(block, "type") == "<tool_result>" else "<text>"


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResult, Tag("<tool_result>")], Discriminator(_one_of_the_users)
]


class OtherTurn(RequestModel):
    """Holds a turn of anybody but the assistant."""

    role: Annotated[Text, one_of(*_ROLES)]
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[Several[UserBlock], Tag("<blocks>")], text_or("<blocks>")
    ]

    def messages(self) -> list[Message]:
        """Return the turn as templates read it: each tool result is a message of its own."""
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        messages: list[Message] = []
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
                continue
            if texts:
                messages.append(Message(role=self.role, content="\n".join(texts)))
                texts = []
            messages.append(Message(role="tool", content=joined(block.content), tool_call_id=block.tool_use_id))
        if texts or not messages:
            messages.append(Message(role=self.role, content="\n".join(texts)))
        return messages


class AssistantBlock(RequestModel):
    """Holds a block of the assistant's turn; as itself, one whose contents are not shown."""

    type: Annotated[Text, one_of(*_BLOCKS)]

    def add_to(self, message: Message) -> None:
        """Add the block to the assistant's message; what is not shown adds nothing."""


class AssistantText(AssistantBlock):
    """Holds text of the assistant."""

    type: Annotated[Text, one_of("text")]
    text: Text = ""

    def add_to(self, message: Message) -> None:
        message["content"] += self.text


class Thinking(AssistantBlock):
    """Holds a thought of the assistant."""

    type: Annotated[Text, one_of("thinking")]
    thinking: Text = ""

    def add_to(self, message: Message) -> None:
        add_thought(message, self.thinking)


class ToolUse(AssistantBlock):
    """Holds a tool call of the assistant."""

    type: Annotated[Text, one_of("tool_use")]
    id: Text
    name: Text
    input: Object | None = None

    def add_to(self, message: Message) -> None:
        function = FunctionCall(name=self.name, arguments=json.dumps(self.input or {}, ensure_ascii=False))
        message.setdefault("tool_calls", []).append(ToolCall(id=self.id, type="function", function=function))


_OF_ASSISTANT = ("<text>", "<thinking>", "<tool_use>")


def _one_of_the_assistants(block: Any) -> str:
    kind = _kind(block, "type")
    return kind if kind in _OF_ASSISTANT else "<other>"


class AssistantTurn(RequestModel):
    """Holds a turn of the assistant."""

    role: Annotated[Text, one_of("assistant")]
    content: Annotated[
        Annotated[Text, Tag("<text>")]
        | Annotated[
            Several[
                Annotated[
                    Annotated[AssistantText, Tag("<text>")]
                    | Annotated[Thinking, Tag("<thinking>")]
                    | Annotated[ToolUse, Tag("<tool_use>")]
                    | Annotated[AssistantBlock, Tag("<other>")],
                    Discriminator(_one_of_the_assistants),
                ]
            ],
            Tag("<blocks>"),
        ],
        text_or("<blocks>"),
    ]

    def messages(self) -> list[Message]:
        """Return the turn as templates read it: one message."""
        if isinstance(self.content, str):
            return [Message(role="assistant", content=self.content)]
        message = Message(role="assistant", content="")
        for block in self.content:
            block.add_to(message)
        return [message]


AnyTurn = Annotated[
    Annotated[AssistantTurn, Tag("<assistant>")] | Annotated[OtherTurn, Tag("<other>")],
    Discriminator(lambda message: "<assistant>" if _kind(message, "role") == "<assistant>" else "<other>"),
]


class CustomTool(RequestModel):
    """Describes a tool that the model may call."""

    null_counts: ClassVar[frozenset[str]] = frozenset({"type"})
    type: Annotated[Any, only("only custom tools are supported here", None, "custom")] = "custom"
    name: Text
    description: Text = ""
    input_schema: Object | None = None

    def tool(self) -> Tool:
        """Return the tool as OpenAI's API writes it, which is what templates read."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema or {}}
        return {"type": "function", "function": function}


_SERVERS = re.compile(r"(web_search|web_fetch|code_execution|tool_search_tool_\w+|memory|advisor)_20\d{6}")
"""Types of tools that Anthropic's servers run, or that only its models can be told of."""


class ServerTool(RequestModel):
    """Names a tool that is left out."""

    type: Annotated[Text, matching(_SERVERS, "the type of a tool of Anthropic's servers")]


AnyTool = Annotated[
    Annotated[CustomTool, Tag("<custom>")] | Annotated[ServerTool, Tag("<server>")],
    Discriminator(
        lambda tool: "<server>" if isinstance(tool, dict) and _SERVERS.fullmatch(str(tool.get("type"))) else "<custom>"
    ),
]


class Choice(RequestModel):
    """Says which tools may be called: `any` and `tool` cannot be enforced, and count as `auto`."""

    type: Annotated[Text, one_of("auto", "any", "tool", "none")] = "auto"
    disable_parallel_tool_use: Flag = False


class ThinkingChoice(RequestModel):
    """Says whether the answer shows thoughts: unless it is `disabled`."""

    type: Text = "disabled"


class CountRequest(RequestModel):
    """Holds the body of a request that counts the tokens of a prompt."""

    system: Content = ""
    messages: SomeOf[AnyTurn]
    tools: Several[AnyTool] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the types of tools that are left out."""
        return tuple(tool.type for tool in self.tools if isinstance(tool, ServerTool))

    def prompt(self) -> tuple[tuple[Message, ...], tuple[Tool, ...], bool]:
        """Return messages, tools, and whether the reply continues the last message (a prefill)."""
        system = joined(self.system)
        messages = [Message(role="system", content=system)] if system else []
        for message in self.messages:
            messages += message.messages()
        tools = tuple(tool.tool() for tool in self.tools if isinstance(tool, CustomTool))
        return tuple(messages), tools, messages[-1]["role"] == "assistant"


class OutputConfig(RequestModel):
    """Says how answers are made: efforts are ignored, formats refused."""

    format: Annotated[Any, unsupported()] = None


class MessagesRequest(SamplingRequest, CountRequest):
    """Holds the body of a request for a message."""

    output_config: OutputConfig = OutputConfig()
    output_format: Annotated[Any, unsupported()] = None

    max_tokens: Length
    stop_sequences: StopStrings = ()
    tool_choice: Choice = Choice()
    thinking: ThinkingChoice = ThinkingChoice()


def read_messages(body: Json) -> CompletionRequest:
    """Return the body as a CompletionRequest. Raises ApiError."""
    request = read(MessagesRequest, body)
    messages, tools, prefilled = request.prompt()
    return CompletionRequest(
        model=request.model,
        messages=messages,
        tools=tools,
        left_out=request.left_out,
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
    """Return the response body."""
    [reply] = answer.replies
    body = {
        **_head(answer),
        "content": _content(answer),
        **_stop(reply),
        "usage": {**_usage(answer), "output_tokens": answer.completion_tokens},
    }
    if answer.request.token_ids:
        body["prompt_token_ids"] = reply.step.prompt_ids.tolist()
        body["token_ids"] = reply.step.completion_ids.tolist()
    return body


def _head(answer: Answer) -> Json:
    return {"id": answer.ident, "type": "message", "role": "assistant", "model": answer.request.model}


def _usage(answer: Answer) -> Json:
    return {"input_tokens": answer.prompt_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _stop(reply: Reply) -> Json:
    if reply.step.stop_reason is not StopReason.STOP:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reply.message.get("tool_calls"):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": "stop_sequence" if reply.stop else "end_turn", "stop_sequence": reply.stop}


def _content(answer: Answer) -> list[Json]:
    """Return the blocks: a thought if it is to be shown, the text, the calls."""
    message = answer.replies[0].message
    found: list[Json] = []
    if answer.request.thoughts and "reasoning_content" in message:
        found.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        found.append({"type": "text", "text": message["content"]})
    for call in calls:
        arguments = _input(call["function"]["arguments"])
        found.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return found


def _input(arguments: str) -> Json:
    """Arguments as the object that this API has; what is none, from a foreign parser, stands under a key of its own."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def events(answer: Answer) -> Iterator[str]:
    """Yield the response as server-sent events."""
    [reply] = answer.replies
    nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
    started = {**_head(answer), **nothing, "usage": {**_usage(answer), "output_tokens": 0}}
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
    """A block as it starts, and the deltas that fill it."""
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
    """Return Anthropic's error body."""
    kind = _ERRORS.get(problem.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def error_event(problem: ApiError) -> str:
    """Return an error as an event of a stream."""
    return f"event: error\ndata: {json.dumps(error(problem))}\n\n"


MESSAGES = Dialect("msg_", read_messages, write, events, error, error_event)
