"""Text that was sampled, named or recorded, as it may be shown on a terminal."""

from __future__ import annotations

import re

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
