"""OpenAI's `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from treadle.core.types import FunctionCall, Message, StopReason, ToolCall
from treadle.rollout.gateway.chat import error, read_content, read_tools, text_only, tool_choice
from treadle.rollout.gateway.fields import bad_request, json_text, objects, one_of, optional, required, unsupported
from treadle.rollout.gateway.request import Answer, ApiError, CompletionRequest, Dialect, Json
from treadle.rollout.gateway.sampling_overrides import sampling_overrides
from treadle.rollout.replies import Tool
from treadle.rollout.session import CallOptions

_ROLES = ("user", "assistant", "system", "developer")
_RANKS = {"reasoning": 0, "message": 1, "function_call": 2}  # the order of items within one assistant message


def read(body: Json) -> CompletionRequest:
    """The request. Raises ApiError."""
    unsupported(body, background=False, conversation=None, prompt=None)
    text_only(optional(optional(body, "text", dict, {}), "format", dict, {}, "text."), "text.format")
    given = body.get("input")
    messages = (Message(role="user", content=given),) if isinstance(given, str) else read_items(objects(body, "input"))
    if not messages:
        raise bad_request("input", "is missing or empty")
    return CompletionRequest(
        model=optional(body, "model", str, ""),
        instructions=optional(body, "instructions", str, ""),
        messages=messages,
        tools=_tools(objects(body, "tools")),
        options=CallOptions(
            sampling_overrides=sampling_overrides(body, ("max_output_tokens",)),
            tool_calls=tool_choice(body),
            parallel_tool_calls=optional(body, "parallel_tool_calls", bool, True),
            template_kwargs=optional(body, "chat_template_kwargs", dict, {}) or None,
        ),
        stream=optional(body, "stream", bool, False),
        logprobs="message.output_text.logprobs" in optional(body, "include", list, []),
        token_ids=optional(body, "return_token_ids", bool, False),
        previous=optional(body, "previous_response_id", str, "") or None,
    )


def _tools(tools: Sequence[Json]) -> tuple[Tool, ...]:
    """This API writes a function's fields beside its type."""
    return read_tools(
        [
            {"type": tool.get("type", "function"), "function": {k: v for k, v in tool.items() if k != "type"}}
            for tool in tools
        ]
    )


def read_items(items: Sequence[Json]) -> tuple[Message, ...]:
    """Messages of the input items. Reasoning, text and calls that follow each other are one assistant message."""
    found: list[Message] = []
    rank: int | None = None  # of the last item, while an assistant message is being put together
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = one_of(item, "type", (*_RANKS, "function_call_output"), "message", f"{where}.")
        if kind == "function_call_output":
            content = read_content(item.get("output"), f"{where}.output")
            found.append(
                Message(role="tool", content=content, tool_call_id=required(item, "call_id", str, f"{where}."))
            )
            rank = None
        elif kind == "message" and (role := one_of(item, "role", _ROLES, "", f"{where}.")) != "assistant":
            content = read_content(item.get("content"), f"{where}.content")
            found.append(Message(role="system" if role == "developer" else role, content=content))
            rank = None
        else:
            if rank is None or _RANKS[kind] < max(rank, 1) or kind == "message" == _kind(rank):
                found.append(Message(role="assistant", content=""))
            rank = _RANKS[kind]
            _add(found[-1], kind, item, where)
    return tuple(found)


def _kind(rank: int) -> str:
    return list(_RANKS)[rank]


def _add(message: Message, kind: str, item: Json, where: str) -> None:
    """Put an assistant's item into its message."""
    if kind == "message":
        message["content"] = read_content(item.get("content"), f"{where}.content", joint="")
    elif kind == "reasoning":
        parts = objects(item, "content", f"{where}.")
        message["reasoning_content"] = "".join(optional(p, "text", str, "", f"{where}.content.") for p in parts)
    else:
        function = FunctionCall(
            name=required(item, "name", str, f"{where}."), arguments=json_text(item.get("arguments", "{}"))
        )
        call = ToolCall(id=required(item, "call_id", str, f"{where}."), type="function", function=function)
        message.setdefault("tool_calls", []).append(call)


def write(answer: Answer) -> Json:
    """The response body."""
    [reply] = answer.replies
    cut = reply.step.stop_reason is not StopReason.STOP
    body = {
        **_head(answer),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
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
    if not answer.request.logprobs:
        return []
    step = answer.replies[0].step
    texts = [answer.text_of(token) for token in step.completion_ids.tolist()]
    return [
        {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
        for text, logprob in zip(texts, step.logprobs.tolist(), strict=True)
    ]


def events(answer: Answer) -> Iterator[str]:
    """The same as server-sent events."""
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
    """An error within a stream."""
    told = {"code": problem.code, "message": problem.message, "param": problem.param}
    return _event("error", {"sequence_number": 0, **told, **error(problem)})


RESPONSES = Dialect("resp_", read, write, events, error, error_event)
