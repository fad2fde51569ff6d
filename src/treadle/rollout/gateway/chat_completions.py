"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from treadle.core.types import FunctionCall, Message, ToolCall, arguments_text
from treadle.rollout.gateway.request import (
    Answer,
    ApiError,
    Choices,
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
    StreamOptions,
    Text,
    TextFormat,
    Unsupported,
    finish_reason,
    read,
)
from treadle.rollout.session import CallOptions, Reply

_ROLES = {"developer": "system", "function": "tool"}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Part(RequestModel):
    """A part of a message's content: text, or the assistant's refusal."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: Text = ""
    refusal: Text = ""


Content = Annotated[
    Several[Part], BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value)
]
"""Text, or a list of parts; read as parts."""


def joined(content: Sequence[Part], joint: str = "\n") -> str:
    """Join the parts of content."""
    return joint.join(part.text + part.refusal for part in content)


class CalledFunction(RequestModel):
    """The function of a tool call. arguments: JSON text, or any JSON."""

    name: Text
    arguments: Any = "{}"


class RequestedCall(RequestModel):
    """A tool call of an earlier assistant message."""

    id: Text = ""
    function: CalledFunction

    def tool_call(self) -> ToolCall:
        function = FunctionCall(name=self.function.name, arguments=arguments_text(self.function.arguments))
        return ToolCall(id=self.id, type="function", function=function)


class _Message(RequestModel):
    role: str
    content: Content = ()
    name: Text = ""

    def message(self) -> Message:
        """Convert to a message as chat templates read it."""
        message = Message(role=_ROLES.get(self.role, self.role), content=joined(self.content))
        if self.name:
            message["name"] = self.name
        return message


class ChatMessage(_Message):
    """A message of anybody but the assistant and tools."""

    role: Literal["system", "developer", "user", "function"]


class ToolMessage(_Message):
    """A tool's answer."""

    role: Literal["tool"]
    tool_call_id: Text = ""

    def message(self) -> Message:
        return {**super().message(), "tool_call_id": self.tool_call_id}


class AssistantMessage(_Message):
    """An earlier reply. Clients send its thought back as `reasoning_content` or as `reasoning`."""

    role: Literal["assistant"]
    tool_calls: Several[RequestedCall] = ()
    reasoning_content: Any = None
    reasoning: Any = None
    function_call: Unsupported = None
    audio: Unsupported = None

    def message(self) -> Message:
        message: Message = {**super().message(), "content": joined(self.content, joint="")}
        thoughts = [text for text in (self.reasoning_content, self.reasoning) if isinstance(text, str)]
        if thoughts:
            message["reasoning_content"] = next(filter(None, thoughts), "")
        if self.tool_calls:
            message["tool_calls"] = [call.tool_call() for call in self.tool_calls]
        return message


AnyMessage = Annotated[ChatMessage | ToolMessage | AssistantMessage, Field(discriminator="role")]


class Function(RequestModel):
    """A function that the model may call. parameters: JSON schema of its arguments."""

    name: Text
    parameters: Object | None = None


class FunctionTool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: Function


ToolChoice = Literal["auto", "none", "required"] | Object
"""`required` or a named tool cannot be enforced, and counts as `auto`."""


class ChatRequest(SamplingRequest):
    """Body of a request for chat completions."""

    messages: SomeOf[AnyMessage]
    tools: Several[FunctionTool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: Flag = True
    max_completion_tokens: Length | None = None
    max_tokens: Length | None = None
    stop: StopStrings = ()
    n: Choices = 1
    logprobs: Flag = False
    top_logprobs: Literal[0] = 0  # those of other tokens are unknown
    stream_options: StreamOptions = StreamOptions()
    response_format: TextFormat = TextFormat()
    modalities: tuple[Literal["text"], ...] = ()
    chat_template_kwargs: Object | None = None
    continue_final_message: Flag = False
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    prediction: Unsupported = None


def read_chat(body: Json) -> CompletionRequest:
    """Validate a body and convert it. Raises ApiError."""
    request = read(ChatRequest, body)
    return CompletionRequest(
        model=request.model,
        messages=tuple(message.message() for message in request.messages),
        tools=tuple(body.get("tools") or ()),  # goes to the chat template as JSON, as it was sent
        options=CallOptions(
            sampling_overrides=request.overrides(request.max_completion_tokens or request.max_tokens, request.stop),
            tool_calls=request.tool_choice != "none",
            parallel_tool_calls=request.parallel_tool_calls,
            template_kwargs=request.chat_template_kwargs or None,
            continue_final_message=request.continue_final_message,
        ),
        choices=request.n,
        stream=request.stream,
        usage_in_stream=request.stream_options.include_usage,
        logprobs=request.logprobs,
        token_ids=request.return_token_ids,
    )


def write(answer: Answer) -> Json:
    """Build the response body."""
    choices = []
    for index, reply in enumerate(answer.replies):
        message: Json = {**reply.message, "refusal": None}
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choices.append(
            {"index": index, "message": message, "finish_reason": finish_reason(reply), **_tokens(answer, reply)}
        )
    return {**_head(answer, "chat.completion"), "choices": choices, "usage": usage(answer), **_prompt_ids(answer)}


def events(answer: Answer) -> Iterator[str]:
    """Yield the response as server-sent events."""
    head = _head(answer, "chat.completion.chunk")
    if answer.request.usage_in_stream:
        head["usage"] = None
    for index, reply in enumerate(answer.replies):
        prompt = _prompt_ids(answer) if index == 0 else {}
        yield _chunk({**head, **prompt}, index, {"role": "assistant", "content": ""})
        if "reasoning_content" in reply.message:
            yield _chunk(head, index, {"reasoning_content": reply.message["reasoning_content"]})
        if reply.message["content"]:
            yield _chunk(head, index, {"content": reply.message["content"]})
        if calls := reply.message.get("tool_calls"):
            yield _chunk(head, index, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        yield _chunk(head, index, {}, finish_reason(reply), **_tokens(answer, reply))
    if answer.request.usage_in_stream:
        yield event({**head, "choices": [], "usage": usage(answer)})
    yield "data: [DONE]\n\n"


def _chunk(head: Json, index: int, delta: Json, reason: str | None = None, **more: Any) -> str:
    return event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": reason, **more}]})


def event(data: Json) -> str:
    """Write a server-sent event without a name."""
    return f"data: {json.dumps(data)}\n\n"


def _head(answer: Answer, kind: str) -> Json:
    return {"id": answer.ident, "object": kind, "created": answer.created, "model": answer.request.model}


def _prompt_ids(answer: Answer) -> Json:
    return {"prompt_token_ids": answer.replies[0].step.prompt_ids.tolist()} if answer.request.token_ids else {}


def _tokens(answer: Answer, reply: Reply) -> Json:
    logprobs = {"content": token_logprobs(answer, reply), "refusal": None} if answer.request.logprobs else None
    ids = {"token_ids": reply.step.completion_ids.tolist()} if answer.request.token_ids else {}
    return {"logprobs": logprobs, **ids}


def token_logprobs(answer: Answer, reply: Reply) -> list[Json]:
    """List each sampled token with its bytes and log-probability, in OpenAI's form."""
    return [
        {"token": piece.decode(errors="replace"), "bytes": list(piece), "logprob": logprob, "top_logprobs": []}
        for piece, logprob in zip(answer.bytes_of(reply), reply.step.logprobs.tolist(), strict=True)
    ]


def usage(answer: Answer) -> Json:
    """Count the tokens of the request and its answer, in OpenAI's form."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error(problem: ApiError) -> Json:
    """Build OpenAI's error body."""
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def error_event(problem: ApiError) -> str:
    """Write an error as an event of a stream."""
    return event(error(problem))


CHAT = Dialect("chatcmpl-", read_chat, write, events, error, error_event)
