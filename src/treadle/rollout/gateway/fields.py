"""What the fields of a request may hold: types that check a value, describe themselves, and name what is wrong.

A dialect writes its requests as models of them. The models are all there is: requests are validated by them, and the
OpenAPI description is made of them (`schemas`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

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

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        described = handler.resolve_ref_schema(handler(core))
        for name, field in described.get("properties", {}).items():
            if name not in described.get("required", ()) and name not in cls.null_counts:
                described["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        return described


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


@dataclass(frozen=True, eq=False)
class Checked:
    """Checks a value of `Annotated[type, ...]` once more, after its type, and writes the same into the JSON schema.

    problem: returns what is wrong with the value; nothing if it is as it should be. means: added to the type's schema.
    """

    problem: Callable[[Any], str]
    means: Json

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {**handler(core), **self.means}

    def _checked(self, value: T) -> T:
        if problem := self.problem(value):
            raise PydanticCustomError("request", "{problem}", {"problem": problem})
        return value


def between(low: float, high: float, *, above: bool = False) -> Checked:
    """Return the check of a number in [low, high]; above: in (low, high]."""

    def problem(value: float) -> str:
        if not low <= value <= high:
            return f"must lie in [{low:g}, {high:g}], got {shown(value)}"
        return f"must be above {low:g}" if above and value == low else ""

    return Checked(problem, {"exclusiveMinimum" if above else "minimum": low, "maximum": high})


def one_of(*known: str, here: tuple[str, ...] = ()) -> Checked:
    """Return the check of a string among these.

    here: in the JSON schema, only those that choose the member of a union that has this field.
    """
    return Checked(
        lambda value: "" if value in known else f"must be one of {', '.join(known)}, got {shown(value)}",
        {"enum": [*(here or known)]},
    )


def only(problem: str, *known: Any) -> Checked:
    """Return the check of one of a few values, in words: `only("only text is supported here", "text")`."""
    return Checked(lambda value: "" if value in known else f"{problem}, got {value!r:.40}", {"enum": [*known]})


def matching(pattern: re.Pattern[str], what: str) -> Checked:
    """Return the check of text that a pattern describes whole."""
    return Checked(
        lambda value: "" if pattern.fullmatch(value) else f"must be {what}, got {value!r:.40}",
        {"pattern": f"^{pattern.pattern}$"},
    )


def unsupported(*neutral: Any) -> Checked:
    """Return the check of a field that asks for what no engine here does, save for its neutral value."""
    known = (None, *neutral)
    return Checked(
        lambda value: "" if value in known else f"is not supported here, got {shown(value)}; leave it out",
        {"enum": [*known]},
    )


def count(low: int, high: int, what: str) -> Checked:
    """Return the check of an array of `low` to `high` elements."""
    return Checked(
        lambda value: "" if low <= len(value) <= high else f"must hold {low} to {high} {what}, got {len(value)}",
        {"minItems": low, "maxItems": high},
    )


NOT_EMPTY = Checked(lambda value: "" if value else "must not be empty", {"minLength": 1, "minItems": 1})
"""Of text, or of an array: JSON schema ignores the keyword of the other type."""


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
