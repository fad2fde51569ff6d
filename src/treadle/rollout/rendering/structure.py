"""`Structure`: a tokenizer in which only the template can write structural tokens.

Structural tokens (`<|im_start|>`, `<|im_end|>`, ...) are those that a tokenizer declares special, and the stop tokens.
A copy of the tokenizer knows them by private names alone, so that their usual names are ordinary text:

    content     --guard-->   the same text, its structural strings and reserved characters made harmless
    rendering   --encode-->  ids: what still looks structural was written by the template, and gets its private name

Text is encoded piece by piece, each from one structural token to the next; tokenizers never look across those. The
pieces are memoised: most of a conversation is the same in the next call.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from treadle.core.types import Ids

GUARD = "\U0010fffd"  # behind the first character of a structural string in content, and before a reserved character
FIRST_MARK, LAST_MARK = 0xF0000, 0xF7FFF  # reserved for the marks of `marks.py`
_HIDDEN = 0x100000  # where content's own reserved characters are moved to, behind a guard
_AS_JSON = r"\\udbff\\udffd"  # a guard where a template writes content as ASCII JSON
_RESERVED = f"[\U000f0000-\U000f7fff{GUARD}]|{_AS_JSON}"
_UNGUARD = re.compile(f"{GUARD}(?:([\U00100000-\U00107fff])|(\U00108000))?|{_AS_JSON}")
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # of byte fallback: characters, even where they are declared special
_SHORT = 256  # characters; long pieces are memoised too, but fewer of them


class Backend(Protocol):
    """What is needed of a `tokenizers.Tokenizer`."""

    def to_str(self) -> str:
        """All of it as JSON."""
        ...

    def get_vocab_size(self) -> int:
        """How many tokens it has, added ones among them."""
        ...

    def id_to_token(self, id: int) -> str | None:
        """A token as the vocabulary writes it."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """The opposite."""
        ...

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any:
        """An encoding with `.ids`."""
        ...

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
        """Text."""
        ...


class Structure:
    """Structural tokens of one tokenizer. stop_ids: the ids that end a completion."""

    def __init__(self, tokenizer: Backend, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        stops = set(stop_ids)
        spec = json.loads(tokenizer.to_str())
        added = [token for token in spec["added_tokens"] if not _BYTE.fullmatch(token["content"])]
        self.ids = {t["content"]: int(t["id"]) for t in added if t["special"] or t["id"] in stops}
        self.stop_ids = {name: i for name, i in self.ids.items() if i in stops}
        secret = secrets.token_hex(8)  # no content can hold a name
        self._names = {name: f"\U0010fffc{secret}-{ident}\U0010fffc" for name, ident in self.ids.items()}
        self._strips = {token["content"] for token in added if token["content"] in self.ids and token["lstrip"]}
        self._copy: Backend = type(tokenizer).from_str(json.dumps(_renamed(spec, self._names)))  # type: ignore[attr-defined]
        self._token_at = {ident: name for name, ident in self.ids.items()}
        self.pattern = _any_of(self.ids)
        self._harmful = re.compile("|".join([_RESERVED, *([self.pattern.pattern] if self.ids else [])]))
        self.guard = lru_cache(maxsize=8192)(self._guard)
        self._short = lru_cache(maxsize=65536)(self._piece)
        self._long = lru_cache(maxsize=4096)(self._piece)

    def _guard(self, text: str) -> str:
        """Content in which nothing is structural or reserved; `plain` undoes it."""
        return self._harmful.sub(_harmless, text)

    def encode(self, text: str, after: int | None = None) -> list[Ids]:
        """Ids of guarded text, in pieces. after: the id before it, where that is a structural token."""
        if not text:
            return []
        cuts = [0, *(m.start() for m in self.pattern.finditer(text) if m.start()), len(text)]
        found = []
        for start, end in pairwise(cuts):
            piece, behind = text[start:end], self._leading(text, end) if self._strips else None
            memo = self._short if len(piece) <= _SHORT else self._long
            found.append(memo(piece, after if start == 0 else None, behind if behind in self._strips else None))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids, structural tokens by their usual names."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def tokens(self, text: str) -> Iterator[re.Match[str]]:
        """The structural tokens in guarded text."""
        return self.pattern.finditer(text)

    def _leading(self, text: str, at: int = 0) -> str | None:
        found = self.pattern.match(text, at)
        return found[0] if found else None

    def _piece(self, piece: str, after: int | None, before: str | None) -> Ids:
        """Ids of one piece, encoded between the structural tokens that stand around it."""
        leading = self._leading(piece)
        if leading is not None:
            text, behind = self._names[leading] + plain(piece[len(leading) :]), 0
        elif after is not None and after in self._token_at:
            text, behind = self._names[self._token_at[after]] + plain(piece), 1
        else:
            text, behind = plain(piece), 0
        text += self._names[before] if before else ""
        ids = self._copy.encode(text, add_special_tokens=False).ids[behind:]
        ids = ids[:-1] if before else ids
        found = np.array(ids, np.int32)
        found.flags.writeable = False
        return found


def plain(text: str) -> str:
    """Guarded text as it was."""
    return _UNGUARD.sub(_restored, text) if GUARD in text or "\\udbff" in text else text


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Any of the strings, the longest first; of none, nothing."""
    found = sorted(strings, key=lambda s: (-len(s), s))
    return re.compile("|".join(map(re.escape, found)) if found else r"(?!)")


def _harmless(found: re.Match[str]) -> str:
    text = found[0]
    if text == GUARD:
        return GUARD + chr(_HIDDEN + 0x8000)
    if FIRST_MARK <= ord(text[0]) <= LAST_MARK:
        return GUARD + chr(ord(text[0]) - FIRST_MARK + _HIDDEN)
    return text[0] + GUARD + text[1:]


def _restored(found: re.Match[str]) -> str:
    if found[1]:
        return chr(ord(found[1]) - _HIDDEN + FIRST_MARK)
    return GUARD if found[2] else ""


def _renamed(spec: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer (as JSON data) that knows tokens by these names alone: nor can its model make them of other text."""
    model = spec["model"]
    renamed = {"vocab": _renamed_vocabulary(model["vocab"], names)}
    if "merges" in model:  # converted SentencePiece models have merges that lead to structural tokens
        renamed["merges"] = [(a, b) for a, b in model["merges"] if not (a in names or b in names or a + b in names)]
    if isinstance(model.get("unk_token"), str):
        renamed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in spec["added_tokens"]]
    return {**spec, "model": {**model, **renamed}, "added_tokens": added, "truncation": None, "padding": None}


def _renamed_vocabulary(vocabulary: Any, names: Mapping[str, str]) -> Any:
    """token -> id, or in Unigram models [token, score] in order of ids."""
    if isinstance(vocabulary, Mapping):
        return {names.get(token, token): ident for token, ident in vocabulary.items()}
    return [(names.get(token, token), score) for token, score in vocabulary]
