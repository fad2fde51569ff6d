"""What a client wishes about sampling: the fields that all dialects share."""

from __future__ import annotations

from typing import Any

from treadle.rollout.gateway.asked import Json
from treadle.rollout.gateway.fields import between, refuse, shown, strings

_COLDEST = 0.01  # dividing by less overflows; 0 itself is greedy
_NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}


def sampling_wishes(body: Json, longest: tuple[str, ...], stop: str = "stop") -> dict[str, Any]:
    """Fields of SamplingParams by name, and those that engines here do not know, which a session may refuse.

    longest: names of the field that bounds the completion, the first that is there counts. stop: name of the field of
    stop strings. Raises Refusal for values out of range.
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
    wishes = {name: value for name, value in found.items() if value is not None}
    if 0 < wishes.get("temperature", 0) < _COLDEST:
        wishes["temperature"] = _COLDEST
    if wishes.get("top_p") == 0:
        raise refuse("top_p", "must be above 0")
    if "top_k" in wishes:
        wishes["top_k"] = max(0, wishes["top_k"])  # some clients write -1 for all
    if "seed" in wishes:
        wishes["seed"] %= 2**63
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in (None, neutral):
            wishes[name] = shown(body[name])
    return wishes
