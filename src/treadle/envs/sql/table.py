"""How the agent reads the rows of a query: as the text of a pandas table.

columns are numbered, 0, 1, ...; integers beside NULL become 1.0 and NaN; a text's line ends are written as \\n
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from treadle.envs.sql.sandbox import Cell

if find_spec("pandas") is None:  # missed at the start of a run; loaded for the first table, because it is large
    raise ModuleNotFoundError("No module named 'pandas'", name="pandas")

LONGEST = 9000
"""Characters of a table that is shown whole."""
SHOWN = 50
"""Rows that are shown of a longer one."""
ENOUGH = LONGEST // 2 + 1
"""Rows of which a table is too long, whatever is in them: each takes two characters."""

_TRUNCATED = f"Truncated to {SHOWN} lines since returned response too long: "


def render_table(rows: Sequence[tuple[Cell, ...]]) -> str:
    """Return the rows as text; the first `SHOWN`, with a note, if that is longer than `LONGEST` characters."""
    frame = _frame(rows)
    if not _is_surely_long(rows):
        text: str = frame.to_string(index=False)
        if len(text) <= LONGEST:
            return text
    return _TRUNCATED + str(frame.head(SHOWN).to_string(index=False))


def _is_surely_long(rows: Sequence[tuple[Cell, ...]]) -> bool:
    """Return whether no table of these rows fits, to save making it: all cells of a column are of one width."""
    widths = (max((len(cell) for cell in column if isinstance(cell, str)), default=1) for column in zip(*rows))  # noqa: B905
    return len(rows) * sum(1 + width for width in widths) > LONGEST


def _frame(rows: Sequence[tuple[Cell, ...]]) -> Any:
    """Return a data frame. Columns with a text stay as they are: what pandas makes of them depends on its version."""
    import pandas

    columns = {}
    for number, cells in enumerate(zip(*rows, strict=True)):
        has_text = any(isinstance(cell, str) for cell in cells)
        columns[number] = pandas.Series(cells, dtype=object if has_text else None)
    return pandas.DataFrame(columns)
