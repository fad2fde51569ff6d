"""What a client asks of sampling: the fields that all dialects share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Strict

from treadle.rollout.gateway.fields import Flag, RequestModel, Text, between, shown

_COLDEST = 0.01  # dividing by less overflows; 0 itself is greedy
_NEUTRAL: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}

Number = Annotated[float, Strict()]
Integer = Annotated[int, Strict()]
Length = Annotated[Integer, between(1, 2**31)]


class SamplingRequest(RequestModel):
    """Holds the fields that requests of all dialects share: which model to call, and how to sample."""

    model: Text = ""
    stream: Flag = False
    return_token_ids: Flag = False
    temperature: Annotated[Number, between(0, 2)] | None = None
    top_p: Annotated[Number, between(0, 1, above=True)] | None = None
    top_k: Annotated[Integer, between(-1, 2**31)] | None = None
    min_p: Annotated[Number, between(0, 1)] | None = None
    seed: Annotated[Integer, between(-(2**63), 2**63 - 1)] | None = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None

    def overrides(self, max_tokens: int | None, stop: str | tuple[str, ...]) -> dict[str, Any]:
        """Return the fields of SamplingParams that the client sets, and those that engines here do not know.

        max_tokens, stop: of the request, under whatever names its dialect has for them.
        """
        found: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),  # some clients write -1 for all
            "min_p": self.min_p,
            "seed": None if self.seed is None else self.seed % 2**63,
            "max_tokens": max_tokens,
            "stop": ((stop,) if isinstance(stop, str) else stop) or None,
        }
        overrides = {name: value for name, value in found.items() if value is not None}
        if 0 < overrides.get("temperature", 0) < _COLDEST:
            overrides["temperature"] = _COLDEST
        for name, neutral in _NEUTRAL.items():
            if (value := getattr(self, name)) not in (None, neutral):
                overrides[name] = shown(value)
        return overrides
