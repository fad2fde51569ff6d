"""What a client overrides about sampling: the fields that all dialects share."""

from __future__ import annotations

from typing import Any

from treadle.rollout.gateway.fields import bad_request, between, shown, strings
from treadle.rollout.gateway.request import Json

_COLDEST = 0.01  # dividing by less overflows; 0 itself is greedy
_NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}


def sampling_overrides(body: Json, longest: tuple[str, ...], stop: str = "stop") -> dict[str, Any]:
    """Fields of SamplingParams by name, and those that engines here do not know, which a session may refuse.

    longest: names of the field that bounds the completion, the first that is there counts. stop: name of the field of
    stop strings. Raises ApiError for values out of range.
    """
    found: dict[str, Any] = {
        "temperature": between(body, "temperature", float, 0, 2),
        "top_p": between(body, "top_p", float, 0, 1),
        "top_k": between(body, "top_k", int, -1, 2**31),
        "min_p": between(body, "min_p", float, 0, 1),
        "seed": between(body, "seed", int, -(2**63), 2**63 - 1),
        "max_tokens": next((n for key in longest if (n := between(body, key, int, 1, 2**31)) is not None), None),
        "stop": strings(body, stop) or None,
    }
    overrides = {name: value for name, value in found.items() if value is not None}
    if 0 < overrides.get("temperature", 0) < _COLDEST:
        overrides["temperature"] = _COLDEST
    if overrides.get("top_p") == 0:
        raise bad_request("top_p", "must be above 0")
    if "top_k" in overrides:
        overrides["top_k"] = max(0, overrides["top_k"])  # some clients write -1 for all
    if "seed" in overrides:
        overrides["seed"] %= 2**63
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in (None, neutral):
            overrides[name] = shown(body[name])
    return overrides
