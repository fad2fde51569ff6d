"""Anthropic's `/v1/messages`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from treadle.core.types import FunctionCall, Message, StopReason, ToolCall
from treadle.rollout.gateway.fields import bad_request, checked, objects, one_of, optional, required, required_list
from treadle.rollout.gateway.request import Answer, ApiError, CompletionRequest, Dialect, Json
from treadle.rollout.gateway.sampling_overrides import sampling_overrides
from treadle.rollout.replies import Tool
from treadle.rollout.session import CallOptions, Reply

_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def read(body: Json) -> CompletionRequest:
    """The request. Raises ApiError."""
    required(body, "max_tokens", int)
    choice = optional(body, "tool_choice", dict, {})
    kind = one_of(choice, "type", ("auto", "any", "tool", "none"), "auto", "tool_choice.")
    messages, tools, prefilled = read_prompt(body)
    return CompletionRequest(
        model=optional(body, "model", str, ""),
        messages=messages,
        tools=tools,
        options=CallOptions(
            sampling_overrides=sampling_overrides(body, ("max_tokens",), stop="stop_sequences"),
            tool_calls=kind != "none",
            parallel_tool_calls=not optional(choice, "disable_parallel_tool_use", bool, False, "tool_choice."),
            continue_final_message=prefilled,
        ),
        stream=optional(body, "stream", bool, False),
        token_ids=optional(body, "return_token_ids", bool, False),
        thoughts=optional(optional(body, "thinking", dict, {}), "type", str, "disabled", "thinking.") != "disabled",
    )


def read_prompt(body: Json) -> tuple[tuple[Message, ...], tuple[Tool, ...], bool]:
    """Messages, tools, and whether the reply goes on with the last message (a prefill). Raises ApiError."""
    system = _text(body.get("system"), "system")
    messages = [Message(role="system", content=system)] if system else []
    for i, message in enumerate(required_list(body, "messages")):
        messages += _messages(message, f"messages[{i}]")
    return tuple(messages), _tools(objects(body, "tools")), messages[-1]["role"] == "assistant"


def _tools(tools: Sequence[Json]) -> tuple[Tool, ...]:
    found: list[Tool] = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]."
        if tool.get("type", "custom") not in (None, "custom"):
            raise bad_request(f"{where}type", f"only custom tools are supported here, got {tool['type']!r:.40}")
        function = {
            "name": required(tool, "name", str, where),
            "description": optional(tool, "description", str, "", where),
            "parameters": optional(tool, "input_schema", dict, {}, where),
        }
        found.append({"type": "function", "function": function})
    return tuple(found)


def _messages(message: Json, where: str) -> list[Message]:
    """A turn as our messages: what tools answered is a message of its own."""
    role = one_of(message, "role", ("user", "assistant", "system"), "", f"{where}.")
    content = message.get("content")
    if isinstance(content, str):
        return [Message(role=role, content=content)]
    blocks = [
        checked(b, dict, f"{where}.content[{i}]") for i, b in enumerate(required(message, "content", list, f"{where}."))
    ]
    if role == "assistant":
        return [_assistant(blocks, f"{where}.content")]
    return _user(role, blocks, f"{where}.content")


def _assistant(blocks: Sequence[Json], where: str) -> Message:
    message = Message(role="assistant", content="")
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]."
        match one_of(block, "type", ("text", "tool_use", "thinking", "redacted_thinking"), "", at):
            case "text":
                message["content"] += optional(block, "text", str, "", at)
            case "thinking":
                message["reasoning_content"] = optional(block, "thinking", str, "", at)
            case "tool_use":
                arguments = json.dumps(optional(block, "input", dict, {}, at), ensure_ascii=False)
                function = FunctionCall(name=required(block, "name", str, at), arguments=arguments)
                call = ToolCall(id=required(block, "id", str, at), type="function", function=function)
                message.setdefault("tool_calls", []).append(call)
    return message


def _user(role: str, blocks: Sequence[Json], where: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[str] = []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        if block.get("type") != "tool_result":
            texts.append(_block(block, at))
            continue
        if texts:
            messages.append(Message(role=role, content="\n".join(texts)))
            texts = []
        content = _text(block.get("content"), f"{at}.content")
        messages.append(
            Message(role="tool", content=content, tool_call_id=required(block, "tool_use_id", str, f"{at}."))
        )
    if texts or not messages:
        messages.append(Message(role=role, content="\n".join(texts)))
    return messages


def _text(content: Any, where: str) -> str:
    """Text, or the texts of its blocks, a line each."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = [checked(b, dict, f"{where}[{i}]") for i, b in enumerate(checked(content, list, where))]
    return "\n".join(_block(b, f"{where}[{i}]") for i, b in enumerate(blocks))


def _block(block: Json, where: str) -> str:
    if block.get("type") != "text":
        raise bad_request(f"{where}.type", f"only text is supported here, got {block.get('type')!r:.40}")
    return optional(block, "text", str, "", f"{where}.")


def write(answer: Answer) -> Json:
    """The response body."""
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
    """The blocks: a thought if asked for, the text, the calls."""
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
    """The same as server-sent events."""
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
    """Anthropic's error body."""
    kind = _ERRORS.get(problem.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def error_event(problem: ApiError) -> str:
    """An error within a stream."""
    return f"event: error\ndata: {json.dumps(error(problem))}\n\n"


MESSAGES = Dialect("msg_", read, write, events, error, error_event)
