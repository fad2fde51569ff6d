"""OpenAI's `/v1/completions`: raw prompts, text or token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treadle.rollout.gateway.chat import error, error_event, event, usage
from treadle.rollout.gateway.fields import bad_request, between, checked, optional, shown, unsupported
from treadle.rollout.gateway.request import MAX_CHOICES, Answer, CompletionRequest, Dialect, Json, finish_reason
from treadle.rollout.gateway.sampling_overrides import sampling_overrides
from treadle.rollout.session import CallOptions, Reply

_MOST_PROMPTS = 128


def read(body: Json) -> CompletionRequest:
    """The request. Raises ApiError."""
    unsupported(body, suffix="", echo=False)
    choices = between(body, "n", int, 1, MAX_CHOICES) or 1
    if (best := between(body, "best_of", int, 1, MAX_CHOICES)) not in (None, choices):
        raise bad_request("best_of", f"must equal n here, got {best}")
    if isinstance(body.get("logprobs"), bool):  # some clients write chat's form
        logprobs = body["logprobs"]
    else:  # 1: the most probable token as well, which nobody knows; the sampled one stands for it
        logprobs = between(body, "logprobs", int, 0, 1) is not None
    return CompletionRequest(
        model=optional(body, "model", str, ""),
        prompts=_prompts(body.get("prompt")),
        options=CallOptions(sampling_overrides=sampling_overrides(body, ("max_tokens",))),
        choices=choices,
        stream=optional(body, "stream", bool, False),
        usage_in_stream=optional(optional(body, "stream_options", dict, {}), "include_usage", bool, False),
        logprobs=logprobs,
        token_ids=optional(body, "return_token_ids", bool, False),
    )


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, a list of ids, or a list of either."""
    if isinstance(value, str):
        return (value,)
    found = checked(value, list, "prompt")
    if found and isinstance(found[0], int):
        return (_ids(found, "prompt"),)
    if not 1 <= len(found) <= _MOST_PROMPTS:
        raise bad_request("prompt", f"must hold 1 to {_MOST_PROMPTS} prompts, got {len(found)}")
    return tuple(
        p if isinstance(p, str) else _ids(checked(p, list, f"prompt[{i}]"), "prompt") for i, p in enumerate(found)
    )


def _ids(value: list[Any], param: str) -> tuple[int, ...]:
    for ident in value:
        if not isinstance(ident, int) or isinstance(ident, bool) or not 0 <= ident < 2**31:
            raise bad_request(param, f"token ids are integers in [0, 2**31), got {shown(ident)}")
    return tuple(value)


def write(answer: Answer) -> Json:
    """The response body."""
    return {**_head(answer), "choices": list(_choices(answer)), "usage": usage(answer)}


def events(answer: Answer) -> Iterator[str]:
    """The same as server-sent events: each choice is one."""
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
    texts = [answer.text_of(token) for token in reply.step.completion_ids.tolist()]
    logprobs = reply.step.logprobs.tolist()
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    top = [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


COMPLETIONS = Dialect("cmpl-", read, write, events, error, error_event)
