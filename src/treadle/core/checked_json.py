"""JSON objects that carry a checksum, one a line: `{"update": 3, "loss": 0.25, "checksum": "5b1f3a9c"}`.

The checksum is the CRC-32 of the line up to it. Any JSON parser reads such a line.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

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
