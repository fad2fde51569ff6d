"""OpenAI's `/v1/completions`: raw prompts, text or token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from treadle.rendering.structure import offsets
from treadle.rollout.gateway.chat_completions import error, error_event, event, usage
from treadle.rollout.gateway.request import (
    Answer,
    ApiError,
    Choices,
    CompletionRequest,
    Dialect,
    Json,
    Length,
    SamplingRequest,
    StopStrings,
    StreamOptions,
    Unsupported,
    finish_reason,
    problem,
    read,
    shown,
)
from treadle.rollout.session import CallOptions, Reply

_MAX_PROMPTS = 128


def _prompts(value: Any) -> list[str | list[int]]:
    """Read a text, a list of token ids, or a list of either, as a list of prompts."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    prompts = [value] if is_one else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= _MAX_PROMPTS:
        raise problem(f"must be a text, a list of token ids, or 1 to {_MAX_PROMPTS} of either, got {shown(value)}")
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, list) or not all(type(ident) is int and 0 <= ident < 2**31 for ident in prompt):
            raise problem(f"must be a text or token ids, integers in [0, 2**31), got {shown(prompt)}")
    return prompts


class RawRequest(SamplingRequest):
    """Body of a request for raw completions.

    logprobs: 0 asks for those of the sampled tokens. 1 asks for the most probable token's too, which is unknown: the
    sampled one stands for it. Some clients send a flag, as in chat.
    """

    prompt: Annotated[Any, AfterValidator(_prompts)]
    max_tokens: Length | None = None
    stop: StopStrings = ()
    n: Choices = 1
    best_of: Choices | None = None
    logprobs: Literal[0, 1, False, True] | None = None
    stream_options: StreamOptions = StreamOptions()
    suffix: Unsupported = None
    echo: Unsupported = None


def read_completion(body: Json) -> CompletionRequest:
    """Validate a body and convert it. Raises ApiError."""
    request = read(RawRequest, body)
    if request.best_of not in (None, request.n):
        raise ApiError(400, f"best_of: must equal n here, got {request.best_of}", "best_of")
    return CompletionRequest(
        model=request.model,
        prompts=tuple(request.prompt),
        options=CallOptions(sampling_overrides=request.overrides(request.max_tokens, request.stop)),
        choices=request.n,
        stream=request.stream,
        usage_in_stream=request.stream_options.include_usage,
        logprobs=request.logprobs is not None and request.logprobs is not False,
        token_ids=request.return_token_ids,
    )


def write(answer: Answer) -> Json:
    """Build the response body."""
    return {**_head(answer), "choices": list(_choices(answer)), "usage": usage(answer)}


def events(answer: Answer) -> Iterator[str]:
    """Yield the response as server-sent events, one for each choice."""
    for choice in _choices(answer):
        yield event({**_head(answer), "choices": [choice]})
    if answer.request.usage_in_stream:
        yield event({**_head(answer), "choices": [], "usage": usage(answer)})
    yield "data: [DONE]\n\n"


def _head(answer: Answer) -> Json:
    return {"id": answer.ident, "object": "text_completion", "created": answer.created, "model": answer.request.model}


def _choices(answer: Answer) -> Iterator[Json]:
    for index, reply in enumerate(answer.replies):
        choice: Json = {
            "index": index,
            "text": reply.message["content"],
            "finish_reason": finish_reason(reply),
            "logprobs": _logprobs(answer, reply) if answer.request.logprobs else None,
        }
        if answer.request.token_ids:
            choice["prompt_token_ids"] = reply.step.prompt_ids.tolist()
            choice["token_ids"] = reply.step.completion_ids.tolist()
        yield choice


def _logprobs(answer: Answer, reply: Reply) -> Json:
    pieces, logprobs = answer.bytes_of(reply), reply.step.logprobs.tolist()
    texts = [piece.decode(errors="replace") for piece in pieces]
    top = [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets(pieces)}


COMPLETIONS = Dialect("cmpl-", read_completion, write, events, error, error_event)
