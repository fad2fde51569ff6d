"""The bytes of tokens are together those of the text, wherever characters are cut."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.rollout.families import small_vocabulary
from tests.worlds import PLAIN
from treadle.rendering.structure import TokenBytes, offsets


@cache
def tokenizer(kind: str) -> Any:
    if kind == "byte level":
        return small_vocabulary()
    if kind == "plain":
        return PLAIN.backend_tokenizer
    words = ["\u2581", "t", "h", "e", "th", "the", "\u2581the", "\u2581\u2581"]
    letters = {word: 256 + number for number, word in enumerate(words)}
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)}
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581")]
    made = Tokenizer(models.BPE({**fallback, **letters}, merges, byte_fallback=True, unk_token=None, fuse_unk=False))
    decoding = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "llama 2":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence(decoding)
    return made


@pytest.mark.parametrize("kind", ["byte level", "plain", "sentencepiece", "llama 2"])
@given(
    text=st.text(max_size=20) | st.sampled_from([" the  the", "日本語 the é", "e\u0301", "🙂 the"]),
    cut=st.integers(0, 9),
)
def test_together_they_are_the_text(kind: str, text: str, cut: int) -> None:
    """Also where the tokens begin or end within a character, for which the text has a replacement."""
    backend = tokenizer(kind)
    cut = (
        0 if kind in ("sentencepiece", "llama 2") else cut
    )  # whose decoder writes several bytes that are no text in its own way
    ids = backend.encode(text, add_special_tokens=False).ids[cut:]
    pieces = TokenBytes(backend).of(ids)
    assert len(pieces) == len(ids)
    assert b"".join(pieces).decode(errors="replace") == backend.decode(ids, skip_special_tokens=False)


@given(st.lists(st.binary(max_size=3)) | st.text().map(lambda text: [bytes([byte]) for byte in text.encode()]))
def test_offsets_are_places_in_the_text(pieces: list[bytes]) -> None:
    found, text = offsets(pieces), b"".join(pieces).decode(errors="replace")
    assert len(found) == len(pieces) and found == sorted(found)
    for number, at in enumerate(found):
        begun = b"".join(pieces[:number]).decode(errors="ignore")
        assert 0 <= at <= len(text) and at >= len(begun)
        if pieces[number : number + 1] != [b""] and not 0x80 <= pieces[number][0] < 0xC0:
            assert at == len(b"".join(pieces[:number]).decode(errors="replace"))


def test_a_character_that_is_cut_has_one_place() -> None:
    assert offsets([b"a", b"\xc3", b"\xa9", b"b"]) == [0, 1, 1, 2]
    assert offsets([b"\xed\xa0", b"b"]) == [0, 2]  # half a surrogate is no character, and so two
