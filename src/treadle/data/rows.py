"""From a row of a data set to a task.

{"question": "3 + 4?", "reward_model": {"ground_truth": "7"}}    a row as stored
select_fields with columns={prompt: question, ground_truth: reward_model.ground_truth}
{"prompt": "3 + 4?", "ground_truth": "7"}                        under Treadle's names
task_from_row
Task("sums-000001", prompt=({"role": "user", "content": "3 + 4?"},), ground_truth="7")
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from treadle.core.errors import DataError
from treadle.core.images import CHECKED, ImageLimits
from treadle.core.text import json_problem, read_json
from treadle.core.types import PLAYERS, Message, Task, as_messages
from treadle.data.config import Columns

KEYS = ("task_id", "prompt", *PLAYERS, "ground_truth", "extras")
"""Names of a task's parts in a row that needs no columns."""

OWN_NAMES = ("task_id", "prompt", "ground_truth", "extras")
"""Parts read under these names unless columns say otherwise."""

PROMPT = '[{"role": "user", "content": "..."}]'
_JSON: Mapping[type, str] = {str: "string", dict: "object"}


@runtime_checkable
class ArrowData(Protocol):
    """A table with Arrow's exchange interface: a pandas or polars DataFrame, a `pyarrow.Table`."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


class Row(NamedTuple):
    """A row of a source: a line of JSON, an object, or already a `Task`.

    where: prefix of errors. task_id: default for a row without one. folder: where the paths of its images begin; None:
    it cannot name files.
    """

    value: Any
    where: str
    task_id: str
    folder: Path | None = None


def make_task(row: Row, columns: Columns | None, limits: ImageLimits | None = None) -> Task:
    """Return a row's task. columns: None for rows with Treadle's own names. limits: of images. Raises DataError."""
    value = parse_json(row.value, row.where) if isinstance(row.value, bytes) else row.value
    if columns is not None and isinstance(value, Mapping):
        value = select_fields(value, columns, row.where)
    if isinstance(value, Mapping) and isinstance(value.get("prompt"), list):
        value = {**value, "prompt": _with_images(value["prompt"], row, limits)}
    return task_from_row(value, row.where, row.task_id, columns)


def _with_images(prompt: list[Any], row: Row, limits: ImageLimits | None) -> Any:
    """Return messages of a row as plain JSON, if they have images; otherwise themselves."""
    if not any(isinstance(m, Mapping) and (m.get("images") or _parts(m)) for m in prompt):
        return prompt
    messages = [
        {**_without_nulls(m), "content": [_part(part, row) for part in _parts(m)]}
        if isinstance(m, Mapping) and _parts(m)
        else _without_nulls(m)
        for m in prompt
    ]
    return list(as_messages(messages, f"{row.where}: prompt", limits))


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _without_nulls(value: Any) -> Any:
    """Return an object without the null that Arrow fills in for keys of other rows' objects."""
    return {key: part for key, part in value.items() if part is not None} if isinstance(value, Mapping) else value


def _part(part: Any, row: Row) -> Any:
    """Return a part of a message's content, with the place of its image: `{"type": "image", "path": "cat.png"}`, or
    `{"type": "image", "image": {"bytes": ..., "path": ...}}`, as Hugging Face data sets store it.
    """
    part = _without_nulls(part)
    if not isinstance(part, dict) or part.get("type") != "image":
        return part
    stored = part.get("image", part)
    if not isinstance(stored, Mapping):
        return part
    if (data := stored.get("bytes")) is None and (path := stored.get("path")) is not None:
        if row.folder is None or not isinstance(path, str):
            raise DataError(f"{row.where}: the image's path {path!r:.100} must be text, in a row of a file")
        data = row.folder / path
    return {"type": "image", "image": data}


def parse_json(line: bytes, where: str) -> Any:
    """Parse a line of JSON. Raises DataError."""
    try:
        return read_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}; write one object a line") from error
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def task_from_row(row: Any, where: str, task_id: str, columns: Columns | None = None) -> Task:
    """Return the task in a row with Treadle's own names.

    where: prefix of errors. task_id: default for a row without one. columns: original paths of the parts, for errors.
    Raises DataError for anything else.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a row must be a JSON object, got {type(row).__name__}")
    if unknown := [key for key in row if key not in KEYS]:
        raise DataError(f"{where}: {unknown_key(unknown[0], row)}")
    if problem := json_problem(dict(row)):
        raise DataError(f"{where}: column {problem._replace(path=_column(problem.path, columns))}")
    task_id = _typed(row, "task_id", task_id, str, where)
    players = {kind: name for kind in PLAYERS if (name := _typed(row, kind, "", str, where))}
    prompt = as_prompt(row.get("prompt", []), where, _column("prompt", columns))
    extras = _typed(row, "extras", {}, dict, where)
    if not task_id:
        raise DataError(f"{where}: task_id must not be empty; leave it out to get one from the row's number")
    if len(players) > 1:
        named = " and ".join(f"{kind} {name!r}" for kind, name in players.items())
        raise DataError(f"{where}: names both {named}; leave one out")
    return Task(task_id, prompt, ground_truth=row.get("ground_truth"), extras=extras, **players)


def _column(path: str, columns: Columns | None) -> str:
    """Return the original path of a task's part in the stored row: `meta.level.0` for `extras.level.0`."""
    name, _, rest = path.partition(".")
    named: Mapping[Any, Any] = columns or {}
    column = named.get(name, name)
    if not isinstance(column, str):
        key, _, rest = rest.partition(".")
        column = column.get(key, f"{name}.{key}")
    return f"{column}.{rest}".rstrip(".")


def unknown_key(key: str, keys: Collection[str]) -> str:
    """Return the error text for a key unknown to Treadle. keys: all keys of the row."""
    part = next((part for part in ("prompt", "ground_truth") if part not in keys), f"extras.{key}")
    return (
        f"unknown key {key!r}; keys are {', '.join(KEYS)} (put your own into extras, or say where each is in "
        f"data.columns: data.columns.{part}={key})"
    )


def as_prompt(value: Any, where: str, column: str = "prompt") -> tuple[Message, ...]:
    """Return a row's prompt as messages; text becomes one user message, empty text none. Raises DataError."""
    if isinstance(value, str):
        if _is_messages(value):
            raise DataError(
                f"{where}: column {column!r} has messages as text, {value!r:.60}; store them as a list, with "
                "json.loads (if this is what the user says, store it as the content of a message)"
            )
        return (Message(role="user", content=value),) if value else ()
    if not isinstance(value, list):
        raise DataError(f"{where}: prompt must be text or a JSON array of messages, got {value!r:.100}; write {PROMPT}")
    return as_messages([*map(_without_nulls, value)], f"{where}: prompt", CHECKED)


def _is_messages(text: str) -> bool:
    """Return whether a text is a message or a list of messages, written as JSON or by Python."""
    if not text.lstrip().startswith(("[", "{")) or "role" not in text:
        return False
    for read in (read_json, ast.literal_eval):
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        messages = value if isinstance(value, list) else [value]
        return bool(messages) and all(isinstance(message, dict) and "role" in message for message in messages)
    return False


def select_fields(row: Mapping[str, Any], columns: Columns, where: str) -> dict[str, Any]:
    """Return the row under Treadle's names. Raises DataError for a missing path."""
    fields = {name: row[name] for name in OWN_NAMES if name in row}
    for name, paths in columns.items():
        if isinstance(paths, str):
            fields[name] = lookup(row, paths, f"{where}: data.columns.{name}")
        else:
            fields[name] = {
                key: lookup(row, path, f"{where}: data.columns.{name}.{key}") for key, path in paths.items()
            }
    if "task_id" in fields and isinstance(fields["task_id"], int) and not isinstance(fields["task_id"], bool):
        fields["task_id"] = str(fields["task_id"])
    return fields


def lookup(row: Mapping[str, Any], path: str, where: str) -> Any:
    """Return the value at a path: a literal key, or keys of objects and list indices separated by dots.

    Raises DataError that says how far the path leads.
    """
    if path in row:
        return row[path]
    value: Any = row
    passed: list[str] = []
    for key in path.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            place = f"{'.'.join(passed)!r}" if passed else "the row"
            raise DataError(f"{where} is {path!r}, but {place} {_contents(value, key)}; correct the row or the path")
        passed.append(key)
    return value


def _contents(value: Any, key: str) -> str:
    if isinstance(value, Mapping):
        return f"has no {key!r}, only {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, list):
        return f"is a list of {len(value)}, and has no element {key!r}"
    return f"is {value!r:.60}, which has no {key!r}"


def _typed(row: Mapping[str, Any], key: str, default: Any, kind: type, where: str) -> Any:
    value = row.get(key, default)
    if not isinstance(value, kind):
        raise DataError(
            f"{where}: {key} must be a JSON {_JSON[kind]}, got {value!r:.100}; correct it, or data.columns.{key}"
        )
    return value
