"""OpenAI's `/v1/responses`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from treadle.core.types import Message, StopReason
from treadle.rollout.config import ImagesConfig
from treadle.rollout.gateway import request as api
from treadle.rollout.gateway.chat_completions import SeeingContent, ToolChoice, error, token_logprobs
from treadle.rollout.gateway.images import ImagePart, filled
from treadle.rollout.session import CallOptions

_RANKS = {"reasoning": 0, "message": 1, "function_call": 2}  # order of items within one assistant message


class MessageItem(api.RequestModel):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: SeeingContent = ()


class Thought(api.RequestModel):
    text: api.Text = ""


class ReasoningItem(api.RequestModel):
    """A thought of the assistant, or its summary if the client has only that."""

    type: Literal["reasoning"]
    content: api.Several[Thought] = ()
    summary: api.Several[Thought] = ()


class CallItem(api.RequestModel):
    type: Literal["function_call"]
    call_id: api.Text
    name: api.Text
    arguments: Any = "{}"


class OutputItem(api.RequestModel):
    type: Literal["function_call_output"]
    call_id: api.Text
    output: SeeingContent = ()


Item = MessageItem | ReasoningItem | CallItem | OutputItem


def _items(value: Any) -> Any:
    """Parse a text as the user's message, and items without a type as messages."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{**item, "type": item.get("type") or "message"} if isinstance(item, dict) else item for item in value]


_LEFT_OUT = (
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp"),
    *("computer_use_preview", "tool_search", "namespace", "custom", "local_shell"),
)
"""Types of tools that OpenAI's servers run, or that only its models support; they are left out."""


class ToolDescription(api.RequestModel):
    """A tool that the model may call: this API puts a function's fields beside its type."""

    type: api.Text = "function"
    name: api.Text = ""
    parameters: api.Object | None = None
    strict: api.Flag = False

    @model_validator(mode="after")
    def _is_function(self) -> Self:
        if self.type not in _LEFT_OUT and (self.type != "function" or not self.name):
            raise api.problem(
                f"must be a function with a name, got type {api.shown(self.type)}, name {api.shown(self.name)}"
            )
        return self


class TextOptions(api.RequestModel):
    format: api.Format | None = None


class ResponsesRequest(api.SamplingRequest):
    input: Annotated[api.SomeOf[Annotated[Item, Field(discriminator="type")]], BeforeValidator(_items)]
    instructions: api.Text = ""
    tools: api.Several[ToolDescription] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: api.Flag = True
    max_output_tokens: api.Length | None = None
    stop: api.StopStrings = ()
    include: tuple[Any, ...] = ()
    previous_response_id: api.Text = ""
    text: TextOptions = TextOptions()
    chat_template_kwargs: api.Object | None = None
    top_logprobs: Literal[0] = 0  # unknown for other tokens
    background: api.Unsupported = None
    conversation: api.Unsupported = None
    prompt: api.Unsupported = None


def read_response(body: api.Json, images: ImagesConfig) -> api.CompletionRequest:
    request = api.read(ResponsesRequest, body, images)
    return api.CompletionRequest(
        model=request.model,
        instructions=request.instructions,
        messages=read_items(request.input),
        tools=tuple(
            {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
            for tool in body.get("tools") or ()
            if tool.get("type") not in _LEFT_OUT
        ),
        left_out=tuple(tool.type for tool in request.tools if tool.type in _LEFT_OUT),
        options=CallOptions(
            sampling_overrides=request.overrides(request.max_output_tokens, request.stop),
            tool_calls=request.tool_choice != "none",
            form=request.form(api.form_of(request.text.format, "text.format")),
            tool_choice=request.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls,
            template_kwargs=request.chat_template_kwargs or None,
        ),
        stream=request.stream,
        logprobs="message.output_text.logprobs" in request.include,
        token_ids=request.return_token_ids,
        previous=request.previous_response_id or None,
        echoed={key: body[key] for key in ("text", "tool_choice") if body.get(key) is not None},
    )


def read_items(items: Sequence[Item]) -> tuple[Message, ...]:
    """Convert items to messages. Consecutive reasoning, text and calls form one assistant message."""
    messages: list[Message] = []
    rank: int | None = None  # rank of the last item of the assistant message in progress
    for item in items:
        if isinstance(item, OutputItem):
            messages.append(filled(Message(role="tool", content="", tool_call_id=item.call_id), item.output))
            rank = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append(filled(Message(role=role, content=""), item.content))
            rank = None
        else:
            if rank is None or _RANKS[item.type] < rank or rank == _RANKS[item.type] == _RANKS["message"]:
                messages.append(Message(role="assistant", content=""))
            rank = _RANKS[item.type]
            _add(messages[-1], item)
    return tuple(messages)


def _add(message: Message, item: MessageItem | ReasoningItem | CallItem) -> None:
    if isinstance(item, MessageItem):
        message["content"] = ""
        for part in item.content:
            if isinstance(part, ImagePart):
                raise api.ApiError(400, "input: images cannot be in an assistant's message", "input")
            message["content"] += part.said
    elif isinstance(item, ReasoningItem):
        api.add_thought(message, "".join(part.text for part in item.content or item.summary))
    else:
        message.setdefault("tool_calls", []).append(api.tool_call(item.call_id, item.name, item.arguments))


def write(answer: api.Answer) -> api.Json:
    [reply] = answer.replies
    cut = reply.stop_reason is not StopReason.STOP
    return {
        **_head(answer),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
        **answer.ids_of(reply),
    }


def _head(answer: api.Answer) -> api.Json:
    request, step = answer.request, answer.replies[0].step
    sampling = request.options.sampling_overrides if step is None else asdict(step.sampling)
    return {
        "id": answer.ident,
        "object": "response",
        "created_at": answer.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions or None,
        "max_output_tokens": sampling.get("max_tokens"),
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.options.parallel_tool_calls,
        "previous_response_id": request.previous,
        "store": True,
        "temperature": sampling.get("temperature", 1.0),
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [
            {"strict": False, "parameters": {}, **tool["function"], "type": "function"} for tool in request.tools
        ],
        "top_p": sampling.get("top_p", 1.0),
        "truncation": "disabled",
        "usage": None,
        **request.echoed,
    }


def _output(answer: api.Answer) -> list[api.Json]:
    """Build the output items: the thought, the text, the calls."""
    message, tail = answer.replies[0].message, answer.ident.removeprefix(RESPONSES.prefix)
    items: list[api.Json] = []
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{tail}", "summary": [], "content": content})
    calls = message.get("tool_calls", [])
    done = {"status": "completed"}
    if message["content"] or not calls:
        logprobs = token_logprobs(answer, answer.replies[0]) if answer.request.logprobs else []
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "id": f"msg_{tail}", "role": "assistant", **done, "content": [part]})
    for i, call in enumerate(calls):
        item = {"type": "function_call", "id": f"fc_{tail}_{i}", "call_id": call["id"], **call["function"], **done}
        items.append(item)
    return items


def events(answer: api.Answer) -> Iterator[str]:
    for number, (kind, data) in enumerate(_events(answer)):
        yield api.named_event(kind, sequence_number=number, **data)


def _events(answer: api.Answer) -> Iterator[tuple[str, api.Json]]:
    yield "response.created", {"response": _head(answer)}
    yield "response.in_progress", {"response": _head(answer)}
    for index, item in enumerate(_output(answer)):
        at = {"output_index": index}
        opened: Any = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        status = {} if item["type"] == "reasoning" else {"status": "in_progress"}
        yield "response.output_item.added", {**at, "item": {**item, **opened, **status}}
        yield from _deltas(item, {**at, "item_id": item["id"]})
        yield "response.output_item.done", {**at, "item": item}
    # Not `response.incomplete`, which makes OpenAI's SDK raise when asked for the final response: its status suffices.
    yield "response.completed", {"response": write(answer)}


def _deltas(item: api.Json, at: api.Json) -> Iterator[tuple[str, api.Json]]:
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


def error_event(problem: api.ApiError) -> str:
    fields = {"code": problem.code, "message": problem.message, "param": problem.param}
    return api.named_event("error", sequence_number=0, **fields, **error(problem))


RESPONSES = api.Dialect("resp_", read_response, write, events, error, error_event)
