"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from treadle.core.types import FunctionCall, Message, ToolCall
from treadle.rollout.gateway.fields import (
    bad_request,
    between,
    checked,
    json_text,
    objects,
    one_of,
    optional,
    required,
    required_list,
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
from treadle.rollout.gateway.sampling_overrides import sampling_overrides
from treadle.rollout.replies import Tool
from treadle.rollout.session import CallOptions, Reply

_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_ROLES = ("system", "user", "assistant", "tool", *_ROLES)
_REASONING = ("reasoning_content", "reasoning")  # the second is what newer servers call it
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def read(body: Json) -> CompletionRequest:
    """The request. Raises ApiError."""
    unsupported(body, functions=[], function_call=None, audio=None, web_search_options=None, prediction=None)
    if body.get("modalities") not in (None, ["text"]):
        raise bad_request("modalities", "only text is supported here")
    if top := between(body, "top_logprobs", int, 0, 20):
        raise bad_request("top_logprobs", f"only the sampled token's log-probability is known; use 0 instead of {top}")
    text_only(optional(body, "response_format", dict, {}), "response_format")
    messages = tuple(read_message(m, f"messages[{i}]") for i, m in enumerate(required_list(body, "messages")))
    tools, tool_calls = read_tools(objects(body, "tools")), tool_choice(body)
    stream_options = optional(body, "stream_options", dict, {})
    return CompletionRequest(
        model=optional(body, "model", str, ""),
        messages=messages,
        tools=tools,
        options=CallOptions(
            sampling_overrides=sampling_overrides(body, ("max_completion_tokens", "max_tokens")),
            tool_calls=tool_calls,
            parallel_tool_calls=optional(body, "parallel_tool_calls", bool, True),
            template_kwargs=optional(body, "chat_template_kwargs", dict, {}) or None,
            continue_final_message=optional(body, "continue_final_message", bool, False),
        ),
        choices=between(body, "n", int, 1, MAX_CHOICES) or 1,
        stream=optional(body, "stream", bool, False),
        usage_in_stream=optional(stream_options, "include_usage", bool, False, "stream_options."),
        logprobs=optional(body, "logprobs", bool, False),
        token_ids=optional(body, "return_token_ids", bool, False),
    )


def text_only(form: Json, param: str) -> None:
    """Refuse a response format that only constrained decoding could keep."""
    if form.get("type", "text") != "text":
        raise bad_request(param, "only plain text is supported here: no engine of this server constrains decoding")


def tool_choice(body: Json) -> bool:
    """Whether tool calls are looked for. `required` or a named tool cannot be enforced and counts as `auto`."""
    choice = body.get("tool_choice")
    if not isinstance(choice, dict):
        choice = one_of(body, "tool_choice", ("auto", "none", "required"), "auto")
    return choice != "none"


def read_tools(tools: Sequence[Json]) -> tuple[Tool, ...]:
    """OpenAI's function tools, checked."""
    for i, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise bad_request(f"tools[{i}].type", f"only function tools are supported here, got {tool['type']!r:.40}")
        function = required(tool, "function", dict, f"tools[{i}].")
        required(function, "name", str, f"tools[{i}].function.")
        optional(function, "parameters", dict, {}, f"tools[{i}].function.")
    return tuple(tools)


def read_message(message: Json, where: str) -> Message:
    """One message of the conversation. Raises ApiError for content that is no text."""
    role = one_of(message, "role", _KNOWN_ROLES, "", f"{where}.")
    content = read_content(message.get("content"), f"{where}.content", joint="" if role == "assistant" else "\n")
    found = Message(role=_ROLES.get(role, role), content=content)
    if name := optional(message, "name", str, "", f"{where}."):
        found["name"] = name
    if role == "tool":
        found["tool_call_id"] = optional(message, "tool_call_id", str, "", f"{where}.")
    if role != "assistant":
        return found
    unsupported(message, function_call=None, audio=None)
    for key in _REASONING:
        if isinstance(message.get(key), str):
            found["reasoning_content"] = message[key]
            break
    if calls := objects(message, "tool_calls", f"{where}."):
        found["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return found


def read_content(content: Any, where: str, joint: str = "\n") -> str:
    """Text, or the texts of its parts with `joint` between them. Raises ApiError for images and other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = enumerate(checked(content, list, where))
    return joint.join(_part(checked(part, dict, f"{where}[{i}]"), f"{where}[{i}]") for i, part in parts)


def _part(part: Json, where: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise bad_request(f"{where}.type", f"only text is supported here, got {kind!r:.40}")
    return optional(part, "refusal" if kind == "refusal" else "text", str, "", f"{where}.")


def _tool_call(call: Json, where: str) -> ToolCall:
    function = required(call, "function", dict, f"{where}.")
    return ToolCall(
        id=optional(call, "id", str, "", f"{where}."),
        type="function",
        function=FunctionCall(
            name=required(function, "name", str, f"{where}.function."),
            arguments=json_text(function.get("arguments", "{}")),
        ),
    )


def write(answer: Answer) -> Json:
    """The response body."""
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
    """The same as server-sent events."""
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
    """One server-sent event without a name."""
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
    tokens = zip(reply.step.completion_ids.tolist(), reply.step.logprobs.tolist(), strict=True)
    return {"content": [_token(answer.text_of(token), logprob) for token, logprob in tokens], "refusal": None}


def _token(text: str, logprob: float) -> Json:
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}


def usage(answer: Answer) -> Json:
    """Tokens of the request."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error(problem: ApiError) -> Json:
    """OpenAI's error body."""
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def error_event(problem: ApiError) -> str:
    """An error within a stream."""
    return event(error(problem))


CHAT = Dialect("chatcmpl-", read, write, events, error, error_event)
