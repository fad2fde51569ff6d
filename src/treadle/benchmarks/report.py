"""The result of a benchmark: rows of figures, printed as a table or as one JSON object."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from treadle.cli.console import Console, make_table

Row = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Report:
    """rows: one mapping of column to figure each, same columns. note: what was held fixed."""

    name: str
    note: str
    rows: Sequence[Row]

    def data(self) -> dict[str, object]:
        """As plain data."""
        return {"benchmark": self.name, "note": self.note, "machine": machine(), "rows": list(self.rows)}

    def print(self, as_json: bool) -> None:
        """To standard output."""
        if as_json:
            Console().json(self.data(), indent=None)
            return
        columns = list(self.rows[0])
        text = tuple(column for column in columns if isinstance(self.rows[0][column], str))
        table = make_table(*columns, title=f"treadle bench {self.name}", text=text)
        for row in self.rows:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console = Console()
        console.table(table)
        console.line(f"{self.note}; {machine()}", wrap=True)


@dataclass(frozen=True, slots=True)
class Reports:
    """Several tables of one benchmark."""

    name: str
    tables: Sequence[Report]

    def data(self) -> dict[str, object]:
        """As plain data."""
        tables = [{"table": t.name, "note": t.note, "rows": list(t.rows)} for t in self.tables]
        return {"benchmark": self.name, "machine": machine(), "tables": tables}

    def print(self, as_json: bool) -> None:
        """To standard output."""
        if as_json:
            Console().json(self.data(), indent=None)
            return
        for number, table in enumerate(self.tables):
            if number:
                Console().line()
            table.print(as_json=False)


def machine() -> str:
    """What the figures were taken on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def cpu_seconds(alternatives: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each alternative, after one warm-up each."""
    for run in alternatives.values():
        run()
    return median_seconds(alternatives, repeats, time.process_time)


def median_seconds(
    alternatives: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each alternative by the clock: `repeats` rounds of all of them in turn."""
    taken: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(repeats):
        for name, run in alternatives.items():
            started = clock()
            run()
            taken[name].append(clock() - started)
    return {name: median(values) for name, values in taken.items()}
