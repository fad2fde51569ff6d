"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Tag, model_validator

from treadle.core.types import FunctionCall, Message, ToolCall, arguments_text
from treadle.rollout.gateway.fields import (
    Flag,
    Object,
    RequestModel,
    Several,
    SomeOf,
    StopStrings,
    Text,
    between,
    one_of,
    only,
    read,
    text_or,
    unsupported,
)
from treadle.rollout.gateway.request import (
    MAX_CHOICES,
    Answer,
    ApiError,
    CompletionRequest,
    Dialect,
    Json,
    finish_reason,
)
from treadle.rollout.gateway.sampling_overrides import Integer, Length, SamplingRequest
from treadle.rollout.session import CallOptions, Reply

_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_ROLES = ("system", "user", "assistant", "tool", *_ROLES)
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


# What a request may hold. What of it goes to the chat template as JSON (tools) goes there as it was sent.


class TextPart(RequestModel):
    """Holds one text of a message's content."""

    type: Annotated[Any, only("only text is supported here", "text", "input_text", "output_text")]
    text: Text = ""


class RefusalPart(RequestModel):
    """Holds a refusal of the assistant within a message's content."""

    type: Annotated[Text, one_of("refusal")]
    refusal: Text = ""

    @property
    def text(self) -> str:
        """Return the refusal, which counts as any text does."""
        return self.refusal


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(lambda part: "<refusal>" if isinstance(part, dict) and part.get("type") == "refusal" else "<text>"),
]
Content = Annotated[Annotated[Text, Tag("<text>")] | Annotated[Several[Part], Tag("<parts>")], text_or("<parts>")]


def joined(content: str | Sequence[TextPart | RefusalPart], joint: str = "\n") -> str:
    """Return content as one text, its parts joined by `joint`."""
    return content if isinstance(content, str) else joint.join(part.text for part in content)


class CalledFunction(RequestModel):
    """Says which function was called, with what: arguments as JSON text, or any JSON."""

    null_counts: ClassVar[frozenset[str]] = frozenset({"arguments"})
    name: Text
    arguments: Any = "{}"


class RequestedCall(RequestModel):
    """Holds a tool call of an earlier assistant message."""

    id: Text = ""
    function: CalledFunction

    def tool_call(self) -> ToolCall:
        """Return the call as a `Message` holds it."""
        function = FunctionCall(name=self.function.name, arguments=arguments_text(self.function.arguments))
        return ToolCall(id=self.id, type="function", function=function)


class ChatMessage(RequestModel):
    """Holds a message of anybody but the assistant and tools."""

    role: Annotated[Text, one_of(*_KNOWN_ROLES)]
    content: Content = ""
    name: Text = ""

    def message(self) -> Message:
        """Return the message as chat templates read it."""
        found = Message(role=_ROLES.get(self.role, self.role), content=joined(self.content))
        if self.name:
            found["name"] = self.name
        return found


class ToolMessage(ChatMessage):
    """Holds what a tool answered."""

    role: Annotated[Text, one_of("tool")]
    tool_call_id: Text = ""

    def message(self) -> Message:
        return {**super().message(), "tool_call_id": self.tool_call_id}


class AssistantMessage(ChatMessage):
    """Holds an earlier reply. reasoning_content, reasoning: its thought, under the one name or the other."""

    role: Annotated[Text, one_of("assistant")]
    tool_calls: Several[RequestedCall] = ()
    reasoning_content: Any = None
    reasoning: Any = None
    function_call: Annotated[Any, unsupported()] = None
    audio: Annotated[Any, unsupported()] = None

    def message(self) -> Message:
        found: Message = {**super().message(), "content": joined(self.content, joint="")}
        thoughts = [text for text in (self.reasoning_content, self.reasoning) if isinstance(text, str)]
        if thoughts:
            found["reasoning_content"] = next(filter(None, thoughts), "")
        if self.tool_calls:
            found["tool_calls"] = [call.tool_call() for call in self.tool_calls]
        return found


def _kind(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return f"<{role}>" if role in ("assistant", "tool") else "<other>"


AnyMessage = Annotated[
    Annotated[ChatMessage, Tag("<other>")]
    | Annotated[ToolMessage, Tag("<tool>")]
    | Annotated[AssistantMessage, Tag("<assistant>")],
    Discriminator(_kind),
]


class Function(RequestModel):
    """Names a tool, with the JSON schema of its arguments."""

    name: Text
    parameters: Object | None = None


class FunctionTool(RequestModel):
    """Describes a tool that the model may call."""

    null_counts: ClassVar[frozenset[str]] = frozenset({"type"})
    type: Annotated[Any, only("only function tools are supported here", "function")] = "function"
    function: Function


ToolChoice = Annotated[
    Annotated[Text, one_of("auto", "none", "required"), Tag("<mode>")] | Annotated[Object, Tag("<tool>")],
    Discriminator(lambda choice: "<tool>" if isinstance(choice, dict) else "<mode>"),
]
"""`required` or a named tool cannot be enforced, and counts as `auto`."""


class TextFormat(RequestModel):
    """Refuses every format that only constrained decoding could keep to."""

    type: Annotated[
        Any, only("only plain text is supported here: no engine of this server constrains decoding", "text")
    ] = "text"


class StreamOptions(RequestModel):
    """Says what a stream holds beside the answer."""

    include_usage: Flag = False


class ChatRequest(SamplingRequest):
    """Holds the body of a request for chat completions."""

    messages: SomeOf[AnyMessage]
    tools: Several[FunctionTool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: Flag = True
    max_completion_tokens: Length | None = None
    max_tokens: Length | None = None
    stop: StopStrings = ()
    n: Annotated[Integer, between(1, MAX_CHOICES)] = 1
    logprobs: Flag = False
    top_logprobs: Annotated[
        Integer, only("only the sampled token's log-probability is known; leave it out or use 0", 0)
    ] = 0
    stream_options: StreamOptions = StreamOptions()
    response_format: TextFormat = TextFormat()
    modalities: Annotated[Any, only("only text is supported here", None, ["text"])] = None
    chat_template_kwargs: Object | None = None
    continue_final_message: Flag = False
    functions: Annotated[Any, unsupported([])] = None
    function_call: Annotated[Any, unsupported()] = None
    audio: Annotated[Any, unsupported()] = None
    web_search_options: Annotated[Any, unsupported()] = None
    prediction: Annotated[Any, unsupported()] = None

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, data: Any) -> Any:
        """Drop `max_tokens`, whatever it says, where its new name is given."""
        if isinstance(data, dict) and data.get("max_completion_tokens") is not None:
            return {key: value for key, value in data.items() if key != "max_tokens"}
        return data


def read_chat(body: Json) -> CompletionRequest:
    """Return the body as a CompletionRequest. Raises ApiError."""
    request = read(ChatRequest, body)
    longest = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return CompletionRequest(
        model=request.model,
        messages=tuple(message.message() for message in request.messages),
        tools=tuple(body.get("tools") or ()),
        options=CallOptions(
            sampling_overrides=request.overrides(longest, request.stop),
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
    """Return the response body."""
    return {
        **_head(answer, "chat.completion"),
        "choices": [
            {
                "index": i,
                "message": _message(reply.message),
                "finish_reason": finish_reason(reply),
                "logprobs": _logprobs(answer, reply),
                **({"token_ids": reply.step.completion_ids.tolist()} if answer.request.token_ids else {}),
            }
            for i, reply in enumerate(answer.replies)
        ],
        "usage": usage(answer),
        **_prompt_ids(answer),
    }


def events(answer: Answer) -> Iterator[str]:
    """Yield the response as server-sent events."""
    head = _head(answer, "chat.completion.chunk")
    if answer.request.usage_in_stream:
        head["usage"] = None
    for i, reply in enumerate(answer.replies):
        first = {"role": "assistant", "content": ""}
        yield _chunk({**head, **(_prompt_ids(answer) if i == 0 else {})}, i, first)
        for delta in _deltas(reply.message):
            yield _chunk(head, i, delta)
        last: Json = {"logprobs": _logprobs(answer, reply)}
        if answer.request.token_ids:
            last["token_ids"] = reply.step.completion_ids.tolist()
        yield _chunk(head, i, {}, finish_reason=finish_reason(reply), **last)
    if answer.request.usage_in_stream:
        yield event({**head, "choices": [], "usage": usage(answer)})
    yield "data: [DONE]\n\n"


def _deltas(message: Message) -> Iterator[Json]:
    if "reasoning_content" in message:
        yield {"reasoning_content": message["reasoning_content"]}
    if message["content"]:
        yield {"content": message["content"]}
    if calls := message.get("tool_calls"):
        yield {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}


def _chunk(head: Json, index: int, delta: Json, finish_reason: str | None = None, **more: Any) -> str:
    return event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": finish_reason, **more}]})


def event(data: Json) -> str:
    """Return one server-sent event without a name."""
    return f"data: {json.dumps(data)}\n\n"


def _head(answer: Answer, kind: str) -> Json:
    return {"id": answer.ident, "object": kind, "created": answer.created, "model": answer.request.model}


def _message(message: Message) -> Json:
    found: Json = {**message, "refusal": None}
    if "tool_calls" in message:
        found["content"] = message["content"] or None
    return found


def _prompt_ids(answer: Answer) -> Json:
    if not answer.request.token_ids:
        return {}
    return {"prompt_token_ids": answer.replies[0].step.prompt_ids.tolist()}


def _logprobs(answer: Answer, reply: Reply) -> Json | None:
    if not answer.request.logprobs:
        return None
    return {"content": token_logprobs(answer, reply), "refusal": None}


def token_logprobs(answer: Answer, reply: Reply) -> list[Json]:
    """Return each sampled token with its bytes and log-probability, in OpenAI's form."""
    return [
        {"token": piece.decode(errors="replace"), "bytes": list(piece), "logprob": logprob, "top_logprobs": []}
        for piece, logprob in zip(answer.bytes_of(reply), reply.step.logprobs.tolist(), strict=True)
    ]


def usage(answer: Answer) -> Json:
    """Return how many tokens the request and its answer have, in OpenAI's form."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error(problem: ApiError) -> Json:
    """Return OpenAI's error body."""
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def error_event(problem: ApiError) -> str:
    """Return an error as an event of a stream."""
    return event(error(problem))


CHAT = Dialect("chatcmpl-", read_chat, write, events, error, error_event)
