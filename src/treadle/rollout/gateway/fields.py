"""Reading the fields of a request: typed, with an error that names the field and its value."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from treadle.rollout.gateway.request import ApiError, Json

T = TypeVar("T")
_NAMES = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    dict: "an object",
    list: "an array",
}


def bad_request(param: str, problem: str) -> ApiError:
    """400, naming the field."""
    return ApiError(400, f"{param}: {problem}", param)


def optional(body: Json, key: str, kind: type[T], default: T, where: str = "") -> T:
    """body[key], checked; `default` where it is missing or null."""
    value = body.get(key)
    if value is None:
        return default
    return checked(value, kind, where + key)


def required(body: Json, key: str, kind: type[T], where: str = "") -> T:
    """body[key], checked and not missing."""
    if body.get(key) is None:
        raise bad_request(where + key, "is missing")
    return checked(body[key], kind, where + key)


def checked(value: Any, kind: type[T], param: str) -> T:
    """`value` if it is of that JSON type; an integer is a number too."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > 2**53:
            raise bad_request(param, f"must be a number below 2**53, got {shown(value)}")
        return float(value)  # type: ignore[return-value]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_request(param, f"must be {_NAMES[kind]}, got {shown(value)}")
    return value


def between(body: Json, key: str, kind: type[T], low: float, high: float) -> T | None:
    """A number in [low, high], or None where it is missing or null."""
    if body.get(key) is None:
        return None
    value = checked(body[key], kind, key)
    if not low <= value <= high:  # type: ignore[operator]
        raise bad_request(key, f"must lie in [{low:g}, {high:g}], got {shown(value)}")
    return value


def one_of(body: Json, key: str, known: Sequence[str], default: str, where: str = "") -> str:
    """A string among `known`."""
    value = optional(body, key, str, default, where)
    if value not in known:
        raise bad_request(where + key, f"must be one of {', '.join(known)}, got {shown(value)}")
    return value


def objects(body: Json, key: str, where: str = "") -> list[Json]:
    """An array of objects; empty where it is missing or null."""
    return [checked(v, dict, f"{where}{key}[{i}]") for i, v in enumerate(optional(body, key, list, [], where))]


def required_list(body: Json, key: str) -> list[Json]:
    """A non-empty array of objects."""
    if not required(body, key, list):
        raise bad_request(key, "must not be empty")
    return objects(body, key)


def strings(body: Json, key: str, most: int = 64) -> tuple[str, ...]:
    """A string or an array of strings, none empty."""
    value = body.get(key)
    found = () if value is None else (value,) if isinstance(value, str) else checked(value, list, key)
    if len(found) > most:
        raise bad_request(key, f"at most {most} strings, got {len(found)}")
    for text in found:
        if not checked(text, str, key):
            raise bad_request(key, "must not hold an empty string")
    return tuple(found)


def unsupported(body: Json, **neutral: Any) -> None:
    """Refuse fields that ask for what no engine here does, unless they have their neutral value."""
    for key, value in neutral.items():
        if body.get(key) not in (None, value):
            raise bad_request(key, f"is not supported here, got {shown(body[key])}; leave it out")


def json_text(value: Any) -> str:
    """A value as JSON text, or text as it is."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def shown(value: Any, limit: int = 60) -> str:
    """A value for an error message; cut first, so that a huge one costs nothing."""
    if isinstance(value, str | list):
        text = repr(value[:limit])
    elif isinstance(value, dict):
        text = "an object"
    else:
        text = f"{value!r:.{limit}}" if not isinstance(value, int) or abs(value) < 2**64 else "a huge integer"
    return text if len(text) <= limit else text[: limit - 3] + "..."
