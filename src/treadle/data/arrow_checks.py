"""Fast validation of Arrow batches, without a Python object for any row.

A batch that fails is not an error yet: its rows are then made into tasks one by one, which names the faulty one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from treadle.core.types import PLAYERS

_MESSAGE_TEXT = ("role", "content")
_MESSAGE_MORE = ("name", "reasoning_content", "tool_call_id")


def is_well_formed(batch: Any, paths: Mapping[str, str | Mapping[str, str]]) -> bool:
    """Return whether each row of a `pyarrow.RecordBatch` certainly makes a task, with a prompt if there is a column.

    paths: where the parts of a task are, by name; those of extras also as a mapping.
    """
    try:
        batch.validate(full=True)  # among others, that text is UTF-8
    except pa.ArrowInvalid:
        return False
    return not any(player in paths for player in PLAYERS) and all(
        _is_part(batch, name, where) for name, where in paths.items()
    )


def _is_part(batch: Any, name: str, where: str | Mapping[str, str]) -> bool:
    arrays = [leaf(batch, path) for path in ([where] if isinstance(where, str) else where.values())]
    if any(array is None for array in arrays):
        return False
    match name:
        case "prompt":
            return _is_prompt(*arrays)
        case "task_id":
            return _is_id(*arrays)
        case "extras" if isinstance(where, str):
            return pa.types.is_struct(arrays[0].type) and arrays[0].null_count == 0 and _is_json(arrays[0].type)
        case _:
            return all(_is_json(array.type) for array in arrays)


def leaf(batch: Any, path: str) -> Any:
    """Return the array at a path; None where any object on the way is missing, or it leads into a list."""
    if path in batch.schema.names:
        array, rest = batch.column(path), []
    else:
        first, *rest = path.split(".")
        array = batch.column(first)
    for key in rest:
        if array.null_count or not pa.types.is_struct(array.type):
            return None
        array = array.field(key)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _is_prompt(array: Any) -> bool:
    if is_text(array.type):
        return _has_no_empty(array, pc.binary_length)
    if not (is_list(array.type) and pa.types.is_struct(array.type.value_type)):
        return False
    if not _has_no_empty(array, pc.list_value_length):
        return False
    messages = array.flatten()
    fields = {field.name: messages.field(number) for number, field in enumerate(messages.type)}
    complete = messages.null_count == 0 and set(_MESSAGE_TEXT) <= fields.keys()
    return complete and all(_is_message_part(name, array) for name, array in fields.items())


def _is_message_part(name: str, array: Any) -> bool:
    if name in _MESSAGE_TEXT:
        return is_text(array.type) and array.null_count == 0
    return array.null_count == len(array) or (name in _MESSAGE_MORE and is_text(array.type))


def _is_id(array: Any) -> bool:
    return (is_text(array.type) and _has_no_empty(array, pc.binary_length)) or (
        pa.types.is_integer(array.type) and array.null_count == 0
    )


def _has_no_empty(array: Any, length: Any) -> bool:
    return array.null_count == 0 and bool(pc.all(pc.greater(length(array), 0)).as_py())


def _is_json(kind: Any) -> bool:
    """Return whether values of an Arrow type are plain JSON data as Python objects."""
    if is_list(kind):
        return _is_json(kind.value_type)
    if pa.types.is_struct(kind):
        return all(_is_json(field.type) for field in kind)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return number or is_text(kind) or pa.types.is_null(kind)


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is a list."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
