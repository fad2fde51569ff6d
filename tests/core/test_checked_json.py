"""Lines of JSON that say whether they are as they were written."""

import json

from hypothesis import given
from hypothesis import strategies as st

from treadle.core.checked_json import checked_json, is_unfinished, parse_checked_json

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
