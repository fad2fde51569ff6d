"""Finding stop strings in a growing completion without decoding all of it after each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_UNFINISHED = "�"  # what decoders write for a character whose bytes have not all come


class StopStrings:
    """Watches one growing completion for stop strings.

    Only the newest tokens are decoded, with those of the piece before them: what a token contributes to the text can
    depend on its predecessor (spaces, characters of several tokens).
    """

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop, self._decode = stop, decode
        self._reach = max(map(len, stop)) - 1  # characters before a token's text in which a match may begin
        self._tail = ""
        self._tokens: list[int] = []  # of the last finished piece, then of the unfinished one
        self._read = 0  # how many of them belong to the finished piece
        self._known = ""  # that piece's text

    def completes(self, token: int) -> bool:
        """Return whether the text holds a stop string with this token added."""
        self._tokens.append(token)
        fresh = self._decode(self._tokens)[len(self._known) :]
        if any(s in self._tail + fresh for s in self._stop):
            return True
        if fresh and not fresh.endswith(_UNFINISHED):
            self._tail = (self._tail + fresh)[-self._reach :] if self._reach else ""
            self._tokens = self._tokens[self._read :]
            self._read, self._known = len(self._tokens), self._decode(self._tokens)
        return False
