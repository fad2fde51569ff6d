"""What is shown cannot steer a terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.text import escape_line, escape_text

DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = {"LEFT-TO-RIGHT MARK", "RIGHT-TO-LEFT MARK", "ARABIC LETTER MARK"}
ANY = st.text(st.characters())  # surrogates too


def steers(character: str) -> bool:
    """By Unicode's own tables: control characters, line breaks, surrogates, and what changes the direction."""
    turns = unicodedata.bidirectional(character) in DIRECTIONS or unicodedata.name(character, "") in MARKS
    return turns or unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]52;c;aGk=\x07", r"\x1b[2J\x1b]52;c;aGk=\x07"),
        ("10%\r100%", r"10%\r100%"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("user\u202etxt.exe", r"user\u202etxt.exe"),
        ("half \ud83d", r"half \ud83d"),
        ("Zürich 北京 👩\u200d🚀 \\x1b", "Zürich 北京 👩\u200d🚀 \\x1b"),
    ],
)
def test_examples(text: str, shown: str) -> None:
    assert escape_line(text) == shown


@given(ANY)
def test_a_text_keeps_its_newlines_and_tabs_alone(text: str) -> None:
    assert escape_text(text).count("\n") == text.count("\n") and escape_text(text).count("\t") == text.count("\t")
    assert escape_line(escape_text(text)) == escape_line(text)


def test_every_character_of_unicode() -> None:
    for code in range(0x110000):
        character = chr(code)
        assert (escape_line(character) != character) == steers(character), hex(code)
