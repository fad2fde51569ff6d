"""What is shown cannot steer a terminal."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.text import checked_json, escape_line, escape_text, is_unfinished, parse_checked_json

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
        *(("10%\r100%", r"10%\r100%"), ("a\nb\tc", r"a\nb\tc"), ("\x9b31m\x7f", r"\x9b31m\x7f")),
        *(("user\u202etxt.exe", r"user\u202etxt.exe"), ("half \ud83d", r"half \ud83d")),
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


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
rows = st.dictionaries(st.text(), values, min_size=1, max_size=4).filter(lambda row: "checksum" not in row)


@given(rows)
def test_a_row_is_read_back_and_any_parser_reads_it(row: dict[str, object]) -> None:
    line = checked_json(row).encode()
    assert b"\n" not in line
    assert parse_checked_json(line) == row
    plain = json.loads(line)
    assert len(plain.pop("checksum")) == 8 and plain == row
    assert not is_unfinished(line)


@given(rows, st.data())
def test_no_changed_or_shortened_line_passes(row: dict[str, object], data: st.DataObject) -> None:
    line = checked_json(row).encode()
    changed = bytearray(line)
    changed[data.draw(st.integers(0, len(line) - 1))] ^= data.draw(st.integers(1, 255))
    assert parse_checked_json(bytes(changed)) is None
    short = line[: data.draw(st.integers(0, len(line) - 1))]
    assert parse_checked_json(short) is None and is_unfinished(short)
    assert parse_checked_json(line + b" ") is None and not is_unfinished(line + b" ")
