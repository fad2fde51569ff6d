"""`Structure`: a tokenizer in which only the template can write structural tokens.

Structural tokens (`<|im_start|>`, `<|im_end|>`, ...) are the special tokens declared by a tokenizer, and the stop
tokens. A copy of the tokenizer knows them only by private names, so that their usual names are ordinary text:

    the template's constants  --claim-->   the same, with private names for structural strings
    rendering                 --encode-->  ids: a private name proves that the template wrote it

A private name contains a secret, so that no message text can be or become one, however a template cuts and joins it:
half a structural string completed by the template's own text is ordinary text too.

Text is encoded piece by piece, between structural tokens; tokenizers never look across those. The pieces are memoized:
most of a conversation is the same in the next call.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.core.errors import DataError
from treadle.core.types import Ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_BYTE = re.compile("<0x[0-9A-F]{2}>")  # byte fallback: ordinary characters, even if declared special
_MEMOIZED = ((2**8, 65536), (2**13, 4096), (2**20, 64))  # (longest piece in characters, number of pieces)
_LONG = 2**14  # characters above which encoding releases the GIL, which costs a little


def secret_text() -> str:
    """Return twelve random hieroglyphs: 120 bits of secret. Letters, so that no normalizer drops them."""
    return "".join(chr(0x13000 + secrets.randbits(10)) for _ in range(12))


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of text. Long texts release the GIL. Raises DataError for a lone surrogate."""
    try:
        if len(text) < _LONG:
            return tokenizer.encode(text, add_special_tokens=False).ids
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    except TypeError as error:
        surrogate = next((at for at, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), 0)
        raise DataError(
            f"a lone surrogate cannot be tokenized: {text[max(0, surrogate - 40) : surrogate + 1]!r}; "
            "decode bytes with errors='replace'"
        ) from error
    return encoding.ids


class Structure:
    """Encodes text with one tokenizer's structural tokens. stop_ids: ids that end a completion.

    names: usual name -> private name, `<|im_end|>` between secret texts. stops: private name -> id.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        stops = set(stop_ids)
        spec = json.loads(tokenizer.to_str())
        added = [token for token in spec["added_tokens"] if not _BYTE.fullmatch(token["content"])]
        ids = {t["content"]: int(t["id"]) for t in added if t["special"] or t["id"] in stops}
        self._secret = secret_text()
        self.names = {usual: f"{self._secret}{usual}{self._secret}" for usual in ids}
        self.stops = {self.names[usual]: ident for usual, ident in ids.items() if ident in stops}
        self._name_of = {ident: self.names[usual] for usual, ident in ids.items()}
        self._ids = {name: ident for ident, name in self._name_of.items()}
        self._strips = {self.names[token["content"]] for token in added if token["content"] in ids and token["lstrip"]}
        self._copy = type(tokenizer).from_str(json.dumps(_renamed(spec, self.names)))
        self._usual = any_of(ids)
        self.pattern = re.compile(f"{self._secret}.+?{self._secret}", re.DOTALL)  # a private name
        self._memos = [(longest, lru_cache(maxsize=pieces)(self._piece)) for longest, pieces in _MEMOIZED]

    def claim(self, text: str) -> str:
        """Replace structural strings in a template's own text by private names; `plain` undoes it."""
        return self._usual.sub(lambda match: self.names[match[0]], text)

    def plain(self, text: str) -> str:
        return text.replace(self._secret, "")

    def unclaimed(self, text: str) -> list[str]:
        """List the structural strings that occur as ordinary text in rendered text."""
        return self._usual.findall(self.pattern.sub(self._secret, text))

    def encode(self, text: str, after: int | None = None) -> list[Ids]:
        """Encode rendered text, in pieces. after: the preceding id, if it is a structural token."""
        if not text:
            return []
        cuts = [0, *(m.start() for m in self.pattern.finditer(text) if m.start()), len(text)]
        pieces = []
        for start, end in pairwise(cuts):
            piece, match = text[start:end], self.pattern.match(text, end) if self._strips else None
            following = match[0] if match and match[0] in self._strips else None
            encode = next((memo for longest, memo in self._memos if len(piece) <= longest), self._piece)
            pieces.append(encode(piece, after if start == 0 else None, following))
        return pieces

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def text(self, ids: Iterable[int]) -> str:
        """Decode, writing structural tokens by their private names."""
        runs = groupby(map(int, ids), key=self._name_of.get)
        return "".join(name * len(list(run)) if name else self.decode(run) for name, run in runs)

    def ident(self, name: str) -> int:
        return self._ids[name]

    def is_structural(self, ident: int) -> bool:
        return ident in self._name_of

    def _piece(self, piece: str, after: int | None, before: str | None) -> Ids:
        """Encode a piece between the structural tokens around it."""
        leading = "" if piece.startswith(self._secret) or after is None else self._name_of.get(after, "")
        tokens = encode_text(self._copy, leading + piece + (before or ""))
        ids = np.array(tokens[1 if leading else 0 : -1 if before else None], np.int32)
        ids.flags.writeable = False
        return ids


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for any of the strings, the longest first; without any, it matches nothing."""
    ordered = sorted(strings, key=lambda s: (-len(s), s))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _renamed(spec: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename tokens in a tokenizer (as JSON data), so that its model cannot make them of other text either."""
    model = spec["model"]
    # Token -> id; in Unigram models [token, score] in order of ids.
    vocabulary = model["vocab"]
    if isinstance(vocabulary, Mapping):
        renamed: dict[str, Any] = {"vocab": {names.get(token, token): ident for token, ident in vocabulary.items()}}
    else:
        renamed = {"vocab": [(names.get(token, token), score) for token, score in vocabulary]}
    # Merges of converted SentencePiece models can produce structural tokens.
    if "merges" in model:
        renamed["merges"] = [(a, b) for a, b in model["merges"] if not (a in names or b in names or a + b in names)]
    if isinstance(model.get("unk_token"), str):
        renamed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in spec["added_tokens"]]
    return {**spec, "model": {**model, **renamed}, "added_tokens": added, "truncation": None, "padding": None}


_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
BYTE_LEVEL = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)},
}
"""Character of byte-level vocabularies -> byte."""
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class TokenBytes:
    """Bytes of each token. A character may span several tokens, and their texts then do not show it.

    "é" as two tokens     b"\\xc3", b"\\xa9"      byte-level vocabularies, and SentencePiece with bytes (`<0xC3>`)
    "▁the"                b" the"               SentencePiece
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        spec = json.loads(tokenizer.to_str())
        self._tokenizer = tokenizer
        self._added = {int(token["id"]): str(token["content"]) for token in spec["added_tokens"]}
        kinds = set(_kinds(spec.get("decoder")))
        self._byte_level = "ByteLevel" in kinds
        self._spaces = bool(kinds & {"Metaspace", "Replace"})

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token of a text; empty for an unknown id.

        If the decoder drops a leading blank, as SentencePiece does, so does the first token.
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
    """Return the start of each piece in the joined text, in characters; within a character, that character's start."""
    decoder, places, at = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for piece in pieces:
        pending = decoder.getstate()[0]
        # Pending bytes end before this token.
        is_cut = piece and not 0x80 <= piece[0] < 0xC0
        places.append(at + len(pending.decode(errors="replace")) if is_cut else at)
        at += len(decoder.decode(piece))
    return places
