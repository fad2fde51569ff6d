"""The result of a benchmark: tables of figures, as plain data."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Row = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Report:
    """Holds one table. rows: one mapping of column to figure each, same columns. note: what was held fixed."""

    name: str
    note: str
    rows: Sequence[Row]

    @property
    def tables(self) -> Sequence[Report]:
        """Return the table as the only one, so that all results have `tables`."""
        return (self,)

    def data(self) -> dict[str, object]:
        """Return the table as plain data."""
        return {"benchmark": self.name, "note": self.note, "machine": machine(), "rows": list(self.rows)}


@dataclass(frozen=True, slots=True)
class Reports:
    """Holds several tables of one benchmark."""

    name: str
    tables: Sequence[Report]

    def data(self) -> dict[str, object]:
        """Return the tables as plain data."""
        tables = [{"table": t.name, "note": t.note, "rows": list(t.rows)} for t in self.tables]
        return {"benchmark": self.name, "machine": machine(), "tables": tables}


def machine() -> str:
    """Return a description of the machine on which the figures are taken."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def cpu_seconds(alternatives: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of each alternative, after one warm-up each."""
    for run in alternatives.values():
        run()
    return median_seconds(alternatives, repeats, time.process_time)


def median_seconds(
    alternatives: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return the median seconds of each alternative by the clock: `repeats` rounds of all of them in turn."""
    taken: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(repeats):
        for name, run in alternatives.items():
            started = clock()
            run()
            taken[name].append(clock() - started)
    return {name: median(values) for name, values in taken.items()}
