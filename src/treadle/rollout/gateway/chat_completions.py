"""OpenAI's `/v1/chat/completions`, and `/v1/completions`: raw prompts, text or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from treadle.core.types import Message
from treadle.rendering.structure import offsets
from treadle.rollout.config import ImagesConfig
from treadle.rollout.gateway import request as api
from treadle.rollout.gateway.images import ImagePart, filled
from treadle.rollout.session import CallOptions

_ROLES = {"developer": "system", "function": "tool"}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Part(api.RequestModel):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: api.Text = ""
    refusal: api.Text = ""

    @property
    def said(self) -> str:
        return self.text + self.refusal


Content = Annotated[api.Several[Part], api.AS_PARTS]
SeeingContent = Annotated[api.Several[Annotated[Part | ImagePart, Field(discriminator="type")]], api.AS_PARTS]


def joined(content: Sequence[Part], joint: str = "\n") -> str:
    return joint.join(part.said for part in content)


class CalledFunction(api.RequestModel):
    name: api.Text
    arguments: Any = "{}"  # JSON text, or any JSON


class RequestedCall(api.RequestModel):
    id: api.Text = ""
    function: CalledFunction


class _Message(api.RequestModel):
    role: str
    content: SeeingContent = ()
    name: api.Text = ""

    def message(self) -> Message:
        message = filled(Message(role=_ROLES.get(self.role, self.role), content=""), self.content)
        if self.name:
            message["name"] = self.name
        return message


class ChatMessage(_Message):
    role: Literal["system", "developer", "user", "function"]


class ToolMessage(_Message):
    role: Literal["tool"]
    tool_call_id: api.Text = ""

    def message(self) -> Message:
        return {**super().message(), "tool_call_id": self.tool_call_id}


class AssistantMessage(_Message):
    """An earlier reply. Clients send its thought as `reasoning_content` or as `reasoning`."""

    role: Literal["assistant"]
    content: Content = ()
    tool_calls: api.Several[RequestedCall] = ()
    reasoning_content: Any = None
    reasoning: Any = None
    function_call: api.Unsupported = None
    audio: api.Unsupported = None

    def message(self) -> Message:
        message: Message = {**super().message(), "content": joined(self.content, joint="")}
        thoughts = [text for text in (self.reasoning_content, self.reasoning) if isinstance(text, str)]
        if thoughts:
            message["reasoning_content"] = next(filter(None, thoughts), "")
        if self.tool_calls:
            called = ((call.id, call.function) for call in self.tool_calls)
            message["tool_calls"] = [api.tool_call(ident, made.name, made.arguments) for ident, made in called]
        return message


AnyMessage = Annotated[ChatMessage | ToolMessage | AssistantMessage, Field(discriminator="role")]


class Function(api.RequestModel):
    name: api.Text
    parameters: api.Object | None = None
    strict: api.Flag = False


class FunctionTool(api.RequestModel):
    type: Literal["function"] = "function"
    function: Function


def _choice(choice: Any) -> Any:
    """Parse a choice of tools to `auto`, `none`, `required` or a tool's name."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "allowed_tools":
        raise api.problem("allowed_tools is not supported: the model sees all `tools`; offer only the allowed ones")
    if isinstance(choice, dict) and kind == "function":
        function = choice.get("function", choice)  # of chat completions; the Responses API has its fields here
        if isinstance(function, dict) and isinstance(name := function.get("name"), str) and name:
            return name
    elif kind in ("auto", "none", "required"):
        return kind
    raise api.problem(f"must be auto, none, required or a function with a name, got {json.dumps(choice):.60}")


ToolChoice = Annotated[str, BeforeValidator(_choice)]


class ChatRequest(api.SamplingRequest):
    messages: api.SomeOf[AnyMessage]
    tools: api.Several[FunctionTool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: api.Flag = True
    max_completion_tokens: api.Length | None = None
    max_tokens: api.Length | None = None
    stop: api.StopStrings = ()
    n: api.Choices = 1
    logprobs: api.Flag = False
    top_logprobs: Literal[0] = 0  # unknown for other tokens
    stream_options: api.StreamOptions = api.StreamOptions()
    response_format: api.ChatFormat | None = None
    modalities: tuple[Literal["text"], ...] = ()
    chat_template_kwargs: api.Object | None = None
    continue_final_message: api.Flag = False
    documents: api.Unsupported = None
    chat_template: api.Unsupported = None
    functions: api.Unsupported = None
    function_call: api.Unsupported = None
    audio: api.Unsupported = None
    web_search_options: api.Unsupported = None
    prediction: api.Unsupported = None


def _read_chat(body: api.Json, images: ImagesConfig) -> api.CompletionRequest:
    request = api.read(ChatRequest, body, images)
    return api.CompletionRequest(
        model=request.model,
        messages=tuple(message.message() for message in request.messages),
        # Passed to the chat template as the JSON received.
        tools=tuple(body.get("tools") or ()),
        options=CallOptions(
            sampling_overrides=request.overrides(request.max_completion_tokens or request.max_tokens, request.stop),
            tool_calls=request.tool_choice != "none",
            form=request.form(api.form_of(request.response_format, "response_format")),
            tool_choice=request.tool_choice,
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


def _write_chat(answer: api.Answer) -> api.Json:
    choices = []
    for index, reply in enumerate(answer.replies):
        message: api.Json = {**reply.message, "refusal": None}
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choices.append(
            {"index": index, "message": message, "finish_reason": api.finish_reason(reply), **_tokens(answer, reply)}
        )
    return {**_head(answer, "chat.completion"), "choices": choices, "usage": _usage(answer), **_prompt_ids(answer)}


def _chat_events(answer: api.Answer) -> Iterator[str]:
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
        yield _chunk(head, index, {}, api.finish_reason(reply), **_tokens(answer, reply))
    if answer.request.usage_in_stream:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


def _chunk(head: api.Json, index: int, delta: api.Json, reason: str | None = None, **more: Any) -> str:
    return _event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": reason, **more}]})


def _event(data: api.Json) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _head(answer: api.Answer, kind: str) -> api.Json:
    return {"id": answer.ident, "object": kind, "created": answer.created, "model": answer.request.model}


def _prompt_ids(answer: api.Answer) -> api.Json:
    return {"prompt_token_ids": api.step_of(answer.replies[0]).prompt_ids.tolist()} if answer.request.token_ids else {}


def _tokens(answer: api.Answer, reply: api.AnyReply) -> api.Json:
    logprobs = {"content": token_logprobs(answer, reply), "refusal": None} if answer.request.logprobs else None
    ids = {"token_ids": api.step_of(reply).completion_ids.tolist()} if answer.request.token_ids else {}
    return {"logprobs": logprobs, **ids}


def token_logprobs(answer: api.Answer, reply: api.AnyReply) -> list[api.Json]:
    """List each sampled token with its bytes and log-probability, in OpenAI's form."""
    return [
        {"token": piece.decode(errors="replace"), "bytes": list(piece), "logprob": logprob, "top_logprobs": []}
        for piece, logprob in zip(answer.bytes_of(reply), api.step_of(reply).logprobs.tolist(), strict=True)
    ]


def _usage(answer: api.Answer) -> api.Json:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error(problem: api.ApiError) -> api.Json:
    """Build OpenAI's error body."""
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def _error_event(problem: api.ApiError) -> str:
    return _event(error(problem))


CHAT = api.Dialect("chatcmpl-", _read_chat, _write_chat, _chat_events, error, _error_event)


# Raw completions

_MAX_PROMPTS = 128


def _prompts(value: Any) -> list[str | list[int]]:
    """Parse a text, a list of token ids, or a list of either, into a list of prompts."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    prompts = [value] if is_one else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= _MAX_PROMPTS:
        raise api.problem(
            f"must be a text, a list of token ids, or 1 to {_MAX_PROMPTS} of either, got {api.shown(value)}"
        )
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, list) or not all(type(ident) is int and 0 <= ident < 2**31 for ident in prompt):
            raise api.problem(f"must be a text or token ids, integers in [0, 2**31), got {api.shown(prompt)}")
    return prompts


class RawRequest(api.SamplingRequest):
    """A raw completion. logprobs: 0 for sampled tokens only; 1 adds the most probable ones, reported as sampled.

    Some clients send a flag, as in chat.
    """

    prompt: Annotated[Any, AfterValidator(_prompts)]
    max_tokens: api.Length | None = None
    stop: api.StopStrings = ()
    n: api.Choices = 1
    best_of: api.Choices | None = None
    logprobs: Literal[0, 1, False, True] | None = None
    stream_options: api.StreamOptions = api.StreamOptions()
    response_format: api.ChatFormat | None = None
    suffix: api.Unsupported = None
    echo: api.Unsupported = None


def _read_raw(body: api.Json, images: ImagesConfig) -> api.CompletionRequest:
    request = api.read(RawRequest, body)
    if request.best_of not in (None, request.n):
        raise api.ApiError(400, f"best_of: must equal n here, got {request.best_of}", "best_of")
    return api.CompletionRequest(
        model=request.model,
        prompts=tuple(request.prompt),
        options=CallOptions(
            sampling_overrides=request.overrides(request.max_tokens, request.stop),
            form=request.form(api.form_of(request.response_format, "response_format")),
        ),
        choices=request.n,
        stream=request.stream,
        usage_in_stream=request.stream_options.include_usage,
        logprobs=request.logprobs is not None and request.logprobs is not False,
        token_ids=request.return_token_ids,
    )


def _write_raw(answer: api.Answer) -> api.Json:
    return {**_head(answer, "text_completion"), "choices": list(_choices(answer)), "usage": _usage(answer)}


def _raw_events(answer: api.Answer) -> Iterator[str]:
    for choice in _choices(answer):
        yield _event({**_head(answer, "text_completion"), "choices": [choice]})
    if answer.request.usage_in_stream:
        yield _event({**_head(answer, "text_completion"), "choices": [], "usage": _usage(answer)})
    yield "data: [DONE]\n\n"


def _choices(answer: api.Answer) -> Iterator[api.Json]:
    for index, reply in enumerate(answer.replies):
        yield {
            "index": index,
            "text": reply.message["content"],
            "finish_reason": api.finish_reason(reply),
            "logprobs": _logprobs(answer, reply) if answer.request.logprobs else None,
            **answer.ids_of(reply),
        }


def _logprobs(answer: api.Answer, reply: api.AnyReply) -> api.Json:
    pieces, logprobs = answer.bytes_of(reply), api.step_of(reply).logprobs.tolist()
    texts = [piece.decode(errors="replace") for piece in pieces]
    top = [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets(pieces)}


COMPLETIONS = api.Dialect("cmpl-", _read_raw, _write_raw, _raw_events, error, _error_event)
