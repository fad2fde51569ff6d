"""The value of a tool's argument from text that does not say its type: as the schema allows it, or not at all.

Formats with tags write `5` for the number and for the text, and templates write `true` as JSON or as Python does. The
text is read in each way; what the schema does not allow is out:

    5    {"type": "integer"}             -> 5
    5    {"type": "string"}              -> "5"
    5    {"type": ["string", "integer"]} -> Ambiguous: either may have been meant, and a tool must not get the other one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treadle.core.text import read_json

Schema = Any
"""A JSON schema, by whoever wrote the tool: usually a mapping, `true` or `false`."""

_PYTHON = {"True": True, "False": False, "None": None}
_DEEPEST = 8  # levels of $ref, anyOf and so on, which may refer to themselves, and several times
_OF_TYPE: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "integer": (int,),
    "number": (int, float),
}


class Ambiguous(ValueError):
    """Raised for text that may stand for several values."""


def value_of(text: str, schema: Schema, root: Schema) -> Any:
    """Return the value that the text stands for. root: the schema of all arguments, for references.

    Text that the schema allows in no reading is JSON if it can be read as such, else text. Raises Ambiguous.
    """
    readings = list(_readings(text))
    allowed = [reading for reading in readings if _allows(schema, reading, root)]
    if len(allowed) > 1:
        raise Ambiguous(f"{text:.40} may be one of {allowed!r:.200}")
    return (allowed or readings[1:] or readings)[0]


def _readings(text: str) -> Iterator[Any]:
    yield text
    if text.strip() in _PYTHON:
        yield _PYTHON[text.strip()]
        return
    try:
        value = read_json(text, strict=False, unique=True)
    except ValueError:
        return
    if not isinstance(value, str):  # texts are written as they are, never as JSON
        yield value


def _allows(schema: Schema, value: Any, root: Schema, depth: int = 0) -> bool:
    """Whether a schema allows a value, by types, enums, references and combinations; other keywords are ignored."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema is not False
    if value is None and schema.get("nullable") is True:  # OpenAPI's
        return True
    if "$ref" in schema and not _allows(_referred(schema["$ref"], root), value, root, depth + 1):
        return False
    types = schema.get("type")
    names = [types] if isinstance(types, str) else types if isinstance(types, Sequence) else []
    if names and not any(_is(value, name) for name in names):
        return False
    if isinstance(schema.get("enum"), list) and not any(_same(value, one) for one in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and not enough(_allows(part, value, root, depth + 1) for part in parts):
            return False
    return True


def _is(value: object, name: object) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _OF_TYPE.get(name, ()) if isinstance(name, str) else ())


def _same(a: Any, b: Any) -> bool:
    """Whether two values are the same JSON: 1 is 1.0, and not true."""
    return isinstance(a, bool) is isinstance(b, bool) and bool(a == b)


def _referred(reference: Any, root: Schema) -> Schema:
    """Resolve `#/$defs/name`; a reference to nothing allows anything."""
    path, schema = str(reference), root
    for step in path.removeprefix("#").strip("/").split("/") if path.startswith("#") else ["?"]:
        schema = schema.get(step.replace("~1", "/").replace("~0", "~"), True) if isinstance(schema, Mapping) else True
    return schema
