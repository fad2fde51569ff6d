"""`TokenBound`: how few tokens a text can have, from its length and the tokenizer alone, without encoding it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_Steps = list[Mapping[str, Any]]

# Into how few characters a step of a normalizer can turn so many, and into how many one. A composed character has up to
# four canonical parts; a compatibility character becomes up to 18 (U+FDFA), a lower-case one up to three.
_SHRINKS_AND_GROWS = {
    **{"NFC": (4, 4), "NFD": (1, 4), "NFKC": (4, 18), "NFKD": (1, 18)},
    **{"Lowercase": (1, 3), "ByteLevel": (1, 4)},
}
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_SPLITTING = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")  # pre-tokenizers that never drop a character
_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
BYTE_LEVEL = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)},
}
"""How byte-level vocabularies write a byte -> the byte."""
_BYTE_FALLBACK = {f"<0x{byte:02X}>" for byte in range(256)}
_SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]


class TokenBound:
    """Bounds how much text one token of a tokenizer (as JSON data) can stand for.

    characters: of normalized text. None where one token can stand for any length: words that are not in the vocabulary
    as a whole, normalizers and pre-tokenizers that drop characters, or that are not known here.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        added: list[Any] = spec["added_tokens"]
        self._strips = any(token["lstrip"] or token["rstrip"] for token in added)  # with all white space beside it
        normalizer, pre_tokenizer = _steps(spec["normalizer"]), _steps(spec["pre_tokenizer"])
        self._keeps_ascii = all(step["type"] in _UNICODE_FORMS for step in normalizer)
        words = _words(spec["model"])
        self.characters: int | None = None
        factors = _factors(normalizer)
        if factors and _only_splits(pre_tokenizer) and _is_lossless(spec["model"], words, normalizer + pre_tokenizer):
            self._shrinks, grows = factors
            longest = [len(token["content"]) * (grows if token["normalized"] else 1) for token in added]
            self.characters = max([1, *map(len, words), *longest])

    def least(self, text: str) -> int:
        """Return a number of tokens that no encoding of the text stays below; 0 where nothing is known."""
        if self.characters is None:
            return 0
        spaces = sum(map(text.count, _SPACES)) if self._strips else 0
        normalized = -(-(len(text) - spaces) // self._shrinks)
        if self._keeps_ascii:  # what is composed holds one ASCII character at most
            normalized = max(normalized, len(text.encode("ascii", "ignore")) - spaces)
        return -(-normalized // self.characters)


def _words(model: Mapping[str, Any]) -> Sequence[str]:
    """The model's tokens as they are written: in byte-level vocabularies, a byte is a character."""
    vocabulary = model["vocab"]
    return list(vocabulary) if isinstance(vocabulary, Mapping) else [token for token, _score in vocabulary]


def _steps(part: Mapping[str, Any] | None) -> _Steps:
    """The steps of a normalizer or pre-tokenizer, sequences laid out flat."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
    return [step for one in inner for step in _steps(one)]


def _factors(normalizer: _Steps) -> tuple[int, int] | None:
    """How many characters can become one, and one how many; None if any number can become none."""
    shrinks = grows = 1
    for step in normalizer:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            old, new = len(step["pattern"]["String"]), len(step["content"])
            if new < old or not old:
                return None
            factors = 1, -(-new // old)
        elif step["type"] == "Prepend":
            factors = 1, 1 + len(step["prepend"])
        elif step["type"] in _SHRINKS_AND_GROWS:
            factors = _SHRINKS_AND_GROWS[step["type"]]
        else:
            return None
        shrinks, grows = shrinks * factors[0], grows * factors[1]
    return shrinks, grows


def _only_splits(pre_tokenizer: _Steps) -> bool:
    """Whether a pre-tokenizer drops nothing."""
    return all(
        step["type"] in _SPLITTING or (step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed")
        for step in pre_tokenizer
    )


def _is_lossless(model: Mapping[str, Any], words: Sequence[str], steps: _Steps) -> bool:
    """Whether every character gets a token of its own or a share in one of the vocabulary."""
    if model["type"] not in ("BPE", "Unigram"):
        return False
    known = set(words)
    if any(step["type"] == "ByteLevel" for step in steps) and known >= BYTE_LEVEL.keys():
        return True
    if model.get("byte_fallback") and known >= _BYTE_FALLBACK:
        return True
    return model["type"] == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")
