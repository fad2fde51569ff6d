"""Text and JSON from models, clients and files, made safe: to show on a terminal, to handle, to be read again.

A line of JSON may carry a checksum: `{"update": 3, "loss": 0.25, "checksum": "5b1f3a9c"}`, the CRC-32 of the line up to
it. Any JSON parser reads such a line.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from math import isfinite
from typing import Any

_STEERS = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_STEERS_IN_A_LINE = re.compile(f"[{_STEERS}]")
_STEERS_IN_A_TEXT = re.compile(f"[{_STEERS}]".replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def escape_line(text: str) -> str:
    """Return the text as one line that cannot steer a terminal: "\\x1b[2J\\n" is shown as `\\x1b[2J\\n`.

    Control characters (C0, DEL, C1), Unicode's line breaks, marks that change the direction of writing and lone
    surrogates, which no encoding can write, are replaced by their escapes.
    """
    return _STEERS_IN_A_LINE.sub(_escape, text)


def escape_text(text: str) -> str:
    """Return the text like `escape_line`, with its newlines and tabs left as they are."""
    return _STEERS_IN_A_TEXT.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


DEEPEST = 64  # levels; Python's own limit is reached somewhere above 400, and not always where it can be caught
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(text: str, *, strict: bool = True, unique: bool = False) -> Any:
    """Return the value of JSON text.

    strict: whether control characters within strings are refused. unique: whether objects that have a key twice are;
    else the last one counts.

    Raises ValueError for broken text, numbers that are not finite, more than `DEEPEST` levels, and lone surrogates.
    """
    try:
        pairs = _unique if unique else None
        value = json.loads(text, strict=strict, parse_constant=_refused, parse_float=_finite, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        items = [i for outer in level for i in (outer.values() if isinstance(outer, dict) else outer)]
        if not (level := [item for item in items if isinstance(item, dict | list)]):
            break
    else:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a character
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"one of the keys {[key for key, _ in pairs]!r:.200} stands there twice")
    return value


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise ValueError(f"{digits:.40} is too large a number")
    return number


_CHECKED = re.compile(rb'(\{.+), "checksum": "([0-9a-f]{8})"\}', re.DOTALL)


def checked_json(row: Mapping[str, Any]) -> str:
    """Return the object, of one key or more, as a line of JSON with its checksum."""
    text = json.dumps(row)[:-1]
    return f'{text}, "checksum": "{zlib.crc32(text.encode()):08x}"}}'


def parse_checked_json(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of `checked_json`, without the checksum; None for a line that is anything else."""
    match = _CHECKED.fullmatch(line)
    if match is None or zlib.crc32(match[1]) != int(match[2], 16):
        return None
    parsed: dict[str, Any] = json.loads(match[1] + b"}")
    return parsed


def is_unfinished(line: bytes) -> bool:
    """Return whether the last line of a file that is being written is incomplete, short of its checksum."""
    return _CHECKED.match(line) is None
