"""What the fields of a request may hold: types that check a value and name what is wrong with it.

A dialect writes its requests as models of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    Strict,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from treadle.rollout.gateway.request import ApiError, Json

M = TypeVar("M", bound="RequestModel")
T = TypeVar("T")

_KINDS = {
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "dict_type": "an object",
    "model_type": "an object",
    "tuple_type": "an array",
}


class RequestModel(BaseModel):
    """Validates an object of a request. Unknown fields are ignored, and null is as if the field were missing.

    null_counts: fields for which it is not.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    null_counts: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        return {key: value for key, value in data.items() if value is not None or key in cls.null_counts}


def read(model: type[M], body: Json) -> M:
    """Return the request as this model. Raises ApiError, naming the first field that is wrong and its value."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        param = _path(problem["loc"])
        raise bad_request(param, _text(problem["type"], problem["msg"], problem["input"])) from error


def bad_request(param: str, problem: str) -> ApiError:
    """Return an error of status 400 that names the field."""
    return ApiError(400, f"{param}: {problem}", param)


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`, without the tags of unions, `<parts>`."""
    keys = [key for key in location if not (isinstance(key, str) and key.startswith("<"))]
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def _text(kind: str, message: str, value: Any) -> str:
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, got {shown(value)}"
    return "is missing" if kind == "missing" else message


# Types of fields


Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Object = dict[str, Any]


def checked(problem: Callable[[Any], str]) -> AfterValidator:
    """Check a value once more, after its type. problem: what is wrong with the value; "" if nothing."""

    def check(value: T) -> T:
        if text := problem(value):
            raise PydanticCustomError("request", "{problem}", {"problem": text})
        return value

    return AfterValidator(check)


def between(low: float, high: float, *, above: bool = False) -> AfterValidator:
    """Check a number in [low, high]; above: in (low, high]."""

    def problem(value: float) -> str:
        if not low <= value <= high:
            return f"must lie in [{low:g}, {high:g}], got {shown(value)}"
        return f"must be above {low:g}" if above and value == low else ""

    return checked(problem)


def one_of(*known: str) -> AfterValidator:
    """Check a string among these."""
    return checked(lambda value: "" if value in known else f"must be one of {', '.join(known)}, got {shown(value)}")


def only(problem: str, *known: Any) -> AfterValidator:
    """Check one of a few values, in words: `only("only text is supported here", "text")`."""
    return checked(lambda value: "" if value in known else f"{problem}, got {value!r:.40}")


def matching(pattern: re.Pattern[str], what: str) -> AfterValidator:
    """Check text that a pattern describes whole."""
    return checked(lambda value: "" if pattern.fullmatch(value) else f"must be {what}, got {value!r:.40}")


def unsupported(*neutral: Any) -> AfterValidator:
    """Check a field that asks for what no engine here does, save for its neutral value."""
    known = (None, *neutral)
    return checked(lambda value: "" if value in known else f"is not supported here, got {shown(value)}; leave it out")


def count(low: int, high: int, what: str) -> AfterValidator:
    """Check an array of `low` to `high` elements."""
    return checked(
        lambda value: "" if low <= len(value) <= high else f"must hold {low} to {high} {what}, got {len(value)}"
    )


NOT_EMPTY = checked(lambda value: "" if value else "must not be empty")


class FirstWrong:
    """Stops the validation of an array at its first wrong element."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}  # of a tuple, as used here


def text_or(tag: str) -> Discriminator:
    """Return the discriminator of text, tagged `<text>`, from everything else, which gets the other tag."""
    return Discriminator(lambda value: "<text>" if isinstance(value, str) else tag)


Several = Annotated[tuple[T, ...], FirstWrong()]
SomeOf = Annotated[tuple[T, ...], FirstWrong(), NOT_EMPTY]
StopStrings = Annotated[
    Annotated[Text, NOT_EMPTY, Tag("<text>")]
    | Annotated[Several[Annotated[Text, NOT_EMPTY]], count(0, 64, "strings"), Tag("<texts>")],
    text_or("<texts>"),
]


def shown(value: Any, limit: int = 60) -> str:
    """Return a value as text for an error message; it is cut first, so that a huge one costs nothing."""
    if isinstance(value, str | list):
        text = repr(value[:limit])
    elif isinstance(value, dict):
        text = "an object"
    else:
        text = f"{value!r:.{limit}}" if not isinstance(value, int) or abs(value) < 2**64 else "a huge integer"
    return text if len(text) <= limit else text[: limit - 3] + "..."
