"""OpenAI's `/v1/completions`: raw prompts, text or token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Discriminator, Tag

from treadle.rendering.token_bytes import offsets
from treadle.rollout.gateway.chat_completions import StreamOptions, error, error_event, event, usage
from treadle.rollout.gateway.fields import (
    NOT_EMPTY,
    Flag,
    Several,
    StopStrings,
    Text,
    bad_request,
    between,
    checked,
    count,
    read,
    shown,
    text_or,
    unsupported,
)
from treadle.rollout.gateway.request import MAX_CHOICES, Answer, CompletionRequest, Dialect, Json, finish_reason
from treadle.rollout.gateway.sampling_overrides import Integer, Length, SamplingRequest
from treadle.rollout.session import CallOptions, Reply

_MOST_PROMPTS = 128


def _unknown_id(ids: tuple[int, ...]) -> str:
    wrong = next((ident for ident in ids if not 0 <= ident < 2**31), None)
    return "" if wrong is None else f"token ids are integers in [0, 2**31), got {shown(wrong)}"


TokenIds = Annotated[Several[Integer], checked(_unknown_id)]
OnePrompt = Annotated[Annotated[Text, Tag("<text>")] | Annotated[TokenIds, Tag("<ids>")], text_or("<ids>")]


def _prompt_kind(prompt: Any) -> str:
    if isinstance(prompt, str):
        return "<text>"
    return "<ids>" if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else "<prompts>"


Prompts = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[TokenIds, NOT_EMPTY, Tag("<ids>")]
    | Annotated[Several[OnePrompt], count(1, _MOST_PROMPTS, "prompts"), Tag("<prompts>")],
    Discriminator(_prompt_kind),
]
"""A text, a list of ids, or a list of either."""

Logprobs = Annotated[
    Annotated[Flag, Tag("<flag>")] | Annotated[Integer, between(0, 1), Tag("<count>")],
    Discriminator(lambda value: "<flag>" if isinstance(value, bool) else "<count>"),
]
"""A flag, as in chat, from some clients. 1 asks for the most probable token, too, which is not known: the sampled one
stands for it."""


class RawRequest(SamplingRequest):
    """Holds the body of a request for raw completions."""

    prompt: Prompts
    max_tokens: Length | None = None
    stop: StopStrings = ()
    n: Annotated[Integer, between(1, MAX_CHOICES)] = 1
    best_of: Annotated[Integer, between(1, MAX_CHOICES)] | None = None
    logprobs: Logprobs | None = None
    stream_options: StreamOptions = StreamOptions()
    suffix: Annotated[Any, unsupported("")] = None
    echo: Annotated[Any, unsupported(False)] = None


def read_completion(body: Json) -> CompletionRequest:
    """Return the body as a CompletionRequest. Raises ApiError."""
    request = read(RawRequest, body)
    if request.best_of not in (None, request.n):
        raise bad_request("best_of", f"must equal n here, got {request.best_of}")
    return CompletionRequest(
        model=request.model,
        prompts=_prompts(request.prompt),
        options=CallOptions(sampling_overrides=request.overrides(request.max_tokens, request.stop)),
        choices=request.n,
        stream=request.stream,
        usage_in_stream=request.stream_options.include_usage,
        logprobs=request.logprobs is not None and request.logprobs is not False,  # 0 asks for them, too
        token_ids=request.return_token_ids,
    )


def _prompts(given: str | tuple[Any, ...]) -> tuple[str | tuple[int, ...], ...]:
    return (given,) if isinstance(given, str) or isinstance(given[0], int) else given


def write(answer: Answer) -> Json:
    """Return the response body."""
    return {**_head(answer), "choices": list(_choices(answer)), "usage": usage(answer)}


def events(answer: Answer) -> Iterator[str]:
    """Yield the response as server-sent events, one for each choice."""
    for choice in _choices(answer):
        yield event({**_head(answer), "choices": [choice]})
    if answer.request.usage_in_stream:
        yield event({**_head(answer), "choices": [], "usage": usage(answer)})
    yield "data: [DONE]\n\n"


def _head(answer: Answer) -> Json:
    return {
        "id": answer.ident,
        "object": "text_completion",
        "created": answer.created,
        "model": answer.request.model,
    }


def _choices(answer: Answer) -> Iterator[Json]:
    for i, reply in enumerate(answer.replies):
        choice: Json = {
            "index": i,
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
