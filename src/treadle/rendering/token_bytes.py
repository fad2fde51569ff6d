"""The bytes that each token stands for: characters may be cut over several, so that no token's text can tell.

"é" as two tokens     b"\\xc3", b"\\xa9"      byte-level vocabularies, and SentencePiece with bytes (`<0xC3>`)
"▁the"                b" the"               SentencePiece
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
BYTE_LEVEL = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)},
}
"""How byte-level vocabularies write a byte -> the byte."""
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class TokenBytes:
    """Looks up the bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec = json.loads(tokenizer.to_str())
        self._tokenizer = tokenizer
        self._added = {int(token["id"]): str(token["content"]) for token in spec["added_tokens"]}
        kinds = set(_kinds(spec.get("decoder")))
        self._byte_level = "ByteLevel" in kinds
        self._spaces = bool(kinds & {"Metaspace", "Replace"})

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token of a text; an unknown id stands for none.

        Where the decoder leaves out a blank at the beginning, as SentencePiece does, so does the first token.
        """
        pieces = [self._of(ident) for ident in ids]
        if pieces and pieces[0] == b" " + self._tokenizer.decode(ids[:1], skip_special_tokens=False).encode():
            pieces[0] = pieces[0][1:]
        return pieces

    def _of(self, ident: int) -> bytes:
        if ident in self._added:
            return self._added[ident].encode()
        token = self._tokenizer.id_to_token(ident) or ""
        if self._byte_level and all(character in BYTE_LEVEL for character in token):
            return bytes(BYTE_LEVEL[character] for character in token)
        if match := _FALLBACK.fullmatch(token):
            return bytes([int(match[1], 16)])
        return (token.replace(_SPACE, " ") if self._spaces else token).encode()


def _kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, Mapping):
        yield str(decoder.get("type"))
        for part in decoder.get("decoders") or ():
            yield from _kinds(part)


def offsets(pieces: Sequence[bytes]) -> list[int]:
    """Return where in the text of all pieces, in characters, each begins; within a character, that is where it does."""
    decoder, places, at = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for piece in pieces:
        pending = decoder.getstate()[0]
        is_cut = piece and not 0x80 <= piece[0] < 0xC0  # what is pending ends before this token, for good
        places.append(at + len(pending.decode(errors="replace")) if is_cut else at)
        at += len(decoder.decode(piece))
    return places
