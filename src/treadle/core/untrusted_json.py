"""Strict parsing of JSON from clients and models: whatever is accepted can be handled and written back."""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any

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
