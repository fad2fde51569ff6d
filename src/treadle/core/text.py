"""Text and JSON from models, clients and files: safe to print on a terminal, to parse, and to read back.

A line of JSON may carry a checksum: `{"update": 3, "loss": 0.25, "checksum": "5b1f3a9c"}`, the CRC-32 of the preceding
part of the line. Any JSON parser reads such a line.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import isfinite
from typing import Any, NamedTuple
from urllib.parse import unquote

_STEERS = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_STEERS_IN_A_LINE = re.compile(f"[{_STEERS}]")
_STEERS_IN_A_TEXT = re.compile(f"[{_STEERS}]".replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
DEEPEST = 64  # levels; Python's own limit lies above 400, and cannot always be caught
_HALF = re.compile("[\ud800-\udfff]")  # lone surrogates
_SHORTEST_KEY, _HIDDEN = 8, "[hidden]"
_NAMES_KEY = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/?#\s'\"@]+(?=@)")
_CHECKED = re.compile(rb'(\{.+), "checksum": "([0-9a-f]{8})"\}', re.DOTALL)


def escape_line(text: str) -> str:
    """Return the text as one line that cannot steer a terminal: "\\x1b[2J\\n" is shown as `\\x1b[2J\\n`.

    Control characters (C0, DEL, C1), Unicode line breaks, bidirectional marks and lone surrogates, which no encoding
    can write, are replaced by their escapes.
    """
    return _STEERS_IN_A_LINE.sub(_escape, text)


def escape_text(text: str) -> str:
    """Escape the text as `escape_line` does, but keep newlines and tabs."""
    return _STEERS_IN_A_TEXT.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def redacted(text: str, *keys: str) -> str:
    """Return an error's text without keys: `Incorrect API key provided: [hidden]`. Apply it before shortening the text.

    Hides the given keys, the values of environment variables named like keys, and user information in URLs.
    """
    named = (value for name, value in os.environ.items() if _NAMES_KEY.search(name))
    for key in filter(None, map(str.strip, keys)):
        text = _spelled(key).sub(_HIDDEN, text)
    return _USERINFO.sub(_HIDDEN, without_keys(text, *named))


def without_keys(text: str, *keys: str) -> str:
    """Remove the given keys from the text. Keys shorter than 8 characters are placeholders ("EMPTY") and are kept."""
    for key in (key for key in map(str.strip, keys) if len(key) >= _SHORTEST_KEY):
        text = _spelled(key).sub(_HIDDEN, text)
    return text


def keys_in(url: str) -> tuple[str, ...]:
    """Return the user information of a URL, in the forms in which a server receives it."""
    if (match := _USERINFO.search(url)) is None:
        return ()
    user = unquote(match[0])
    return user, user.partition(":")[2], b64encode(user.encode()).decode()


@lru_cache(maxsize=256)
def _spelled(key: str) -> re.Pattern[str]:
    """Match a key verbatim, escaped in JSON, or percent-encoded; a placeholder only as a whole word."""
    spelled = ""
    for letter in key:
        encoded = "".join(f"%{byte:02x}" for byte in letter.encode(errors="surrogatepass"))
        spelled += rf"\\{{0,4}}(?:{re.escape(letter)}|(?i:u{ord(letter):04x}|{encoded}))"
    return re.compile(spelled if len(key) >= _SHORTEST_KEY else rf"(?<!\w){spelled}(?!\w)")


def read_json(text: str, *, strict: bool = True, unique: bool = False) -> Any:
    """Return the value of JSON text.

    strict: refuse control characters within strings. unique: refuse objects with duplicate keys; otherwise the last one
    wins.

    Raises ValueError for broken text (a JSONDecodeError), and for a `json_problem`.
    """
    try:
        value = json.loads(text, strict=strict, object_pairs_hook=_unique if unique else None)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if problem := json_problem(value):
        raise ValueError(str(problem))
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"one of the keys {[key for key, _ in pairs]!r:.200} appears twice")
    return value


class JsonProblem(NamedTuple):
    """Why a value does not survive a JSON round trip: `JsonProblem("scores.1", "is nan, which ...")`.

    path: keys and list indices, separated by dots; "" for the value itself.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{f'{self.path!r:.60}' if self.path else 'the value'} {self.reason}"


def json_problem(value: Any, levels: int = DEEPEST) -> JsonProblem | None:
    """Return the first part of a value that is not plain JSON data; None if all of it is.

    Refused: non-finite numbers, lone surrogates, keys that are not text, more than `levels` levels, and types other
    than None, bool, int, float, str, dict, list and tuple.
    """
    if isinstance(value, str):
        is_whole = value.isascii() or not _HALF.search(value)
        return None if is_whole else JsonProblem("", f"has half a character in {value!r:.60}")
    if value is None or isinstance(value, int):
        return None
    if isinstance(value, float):
        return None if isfinite(value) else JsonProblem("", f"is {value}, which JSON cannot represent; write null")
    if not isinstance(value, dict | list | tuple):
        kind = type(value).__name__
        return JsonProblem("", f"is of type {kind}, which is not plain JSON data; store it as text or numbers")
    if not levels:
        return JsonProblem("", f"is nested deeper than {DEEPEST} levels; flatten it")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return JsonProblem("", f"has the key {key!r:.60}, which is not text")
            if _HALF.search(key):
                return JsonProblem("", f"has the key {key!r:.60}, with half a character")
        items: Iterable[tuple[Any, Any]] = value.items()
    elif {*map(type, value)} == {int}:  # often thousands of token ids
        return None
    else:
        items = enumerate(value)
    for key, inner in items:
        if problem := json_problem(inner, levels - 1):
            return problem._replace(path=f"{key}.{problem.path}".rstrip("."))
    return None


def checked_json(row: Mapping[str, Any]) -> str:
    """Return a non-empty object as a line of JSON with its checksum."""
    text = json.dumps(row)[:-1]
    return f'{text}, "checksum": "{zlib.crc32(text.encode()):08x}"}}'


def parse_checked_json(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line written by `checked_json`, without the checksum; None for any other line."""
    match = _CHECKED.fullmatch(line)
    if match is None or zlib.crc32(match[1]) != int(match[2], 16):
        return None
    parsed: dict[str, Any] = json.loads(match[1] + b"}")
    return parsed


def is_unfinished(line: bytes) -> bool:
    """Return whether the last line of a growing file is incomplete, without its checksum."""
    return _CHECKED.match(line) is None


def shown_bytes(number: int) -> str:
    """Return `1.6 GB`, or `4.8 MB`."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
