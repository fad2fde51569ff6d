"""Types of the fields of requests, and the fields that requests of all dialects share."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from treadle.rollout.gateway.request import MAX_CHOICES, ApiError, Json

M = TypeVar("M", bound="RequestModel")
T = TypeVar("T")

_COLDEST = 0.01  # dividing by less overflows; 0 itself is greedy
_NEUTRAL: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
_KINDS = {
    "tuple_type": "Input should be an array",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "Input should be an object"),
    "too_short": "Array should not be empty",
}
_NO_VALUE = ("missing", "union_tag_invalid", "union_tag_not_found", "request")  # errors that need not show the value


class RequestModel(BaseModel):
    """Base of objects in requests. Unknown fields are ignored; null counts as missing."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        return {key: value for key, value in data.items() if value is not None}


def read(model: type[M], body: Json) -> M:
    """Validate a request. Raises ApiError (400), which names the first wrong field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = _KINDS.get(first["type"], first["msg"])  # pydantic names Python's types
        text = text if first["type"] in _NO_VALUE else f"{text}, got {shown(first['input'])}"
        discriminator = first.get("ctx", {}).get("discriminator", "").strip("'")  # of a union's tag, which is wrong
        param = _path(body, first["loc"] + ((discriminator,) if discriminator else ()))
        raise ApiError(400, f"{param}: {text}", param) from error


def _path(value: Any, location: tuple[int | str, ...]) -> str:
    """Write `messages[0].content`. Keys that the body lacks name members of unions, but for the last one."""
    path = ""
    for at, key in enumerate(location):
        if isinstance(value, list) and isinstance(key, int):
            path, value = f"{path}[{key}]", value[key]
        elif isinstance(value, dict) and (key in value or at == len(location) - 1):
            path, value = f"{path}.{key}", value.get(str(key))
    return path.removeprefix(".")


def problem(text: str) -> PydanticCustomError:
    """Make an error to raise in a validator, with this text as it is."""
    return PydanticCustomError("request", "{text}", {"text": text})


def shown(value: Any, limit: int = 60) -> str:
    """Write a value for an error message, cut to `limit` characters (before it is formatted: it may be huge)."""
    if isinstance(value, str | list | tuple):
        text = repr(value[:limit])
    elif isinstance(value, dict):
        text = "an object"
    else:
        text = f"{value!r:.{limit}}" if not isinstance(value, int) or abs(value) < 2**64 else "a huge integer"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _unsupported(value: Any) -> Any:
    if value:
        raise problem(f"not supported here, got {shown(value)}; leave it out")
    return value


def _only_text(value: Any) -> Any:
    if value != "text":
        raise problem(f"must be text, as no engine here constrains decoding, got {shown(value)}; leave it out")
    return value


Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Number = Annotated[float, Strict()]
Integer = Annotated[int, Strict()]
Object = dict[str, Any]
Unsupported = Annotated[Any, AfterValidator(_unsupported)]
"""A feature that no engine here has; only null, false and empty values are allowed."""
Length = Annotated[Integer, Field(ge=1, le=2**31)]
Choices = Annotated[Integer, Field(ge=1, le=MAX_CHOICES)]
Several = Annotated[tuple[T, ...], FailFast()]
SomeOf = Annotated[tuple[T, ...], Field(min_length=1), FailFast()]
StopStrings = Annotated[
    Several[Annotated[Text, Field(min_length=1)]],
    Field(max_length=64),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class TextFormat(RequestModel):
    """A format of answers."""

    type: Annotated[Any, AfterValidator(_only_text)] = "text"


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: Flag = False


class SamplingRequest(RequestModel):
    """Fields that all dialects share: which model to call, and how to sample."""

    model: Text = ""
    stream: Flag = False
    return_token_ids: Flag = False
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None

    def overrides(self, max_tokens: int | None, stop: tuple[str, ...]) -> dict[str, Any]:
        """Collect the fields of SamplingParams that the client sets, and those that engines here do not know."""
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),  # some clients write -1 for all
            "min_p": self.min_p,
            "seed": None if self.seed is None else self.seed % 2**63,
            "max_tokens": max_tokens,
            "stop": stop or None,
        }
        overrides = {name: value for name, value in fields.items() if value is not None}
        if 0 < overrides.get("temperature", 0) < _COLDEST:
            overrides["temperature"] = _COLDEST
        for name, neutral in _NEUTRAL.items():
            if (value := getattr(self, name)) not in (None, neutral):
                overrides[name] = shown(value)
        return overrides
