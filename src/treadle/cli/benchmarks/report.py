"""The result of a benchmark: rows of figures, printed as a table or as one JSON object."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from treadle.cli.console import make_console, make_table, print_table

Row = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Report:
    """rows: one mapping of column to figure each, same columns. note: what was held fixed."""

    name: str
    note: str
    rows: Sequence[Row]

    def print(self, as_json: bool) -> None:
        """To standard output."""
        machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        if as_json:
            print(json.dumps({"benchmark": self.name, "note": self.note, "machine": machine, "rows": list(self.rows)}))
            return
        columns = list(self.rows[0])
        text = tuple(column for column in columns if isinstance(self.rows[0][column], str))
        table = make_table(*columns, title=f"treadle bench {self.name}", text=text)
        for row in self.rows:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console = make_console()
        print_table(console, table)
        console.print(f"{self.note}; {machine}")


def cpu_seconds(alternatives: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median CPU seconds of each alternative: one warm-up each, then `repeats` rounds of all of them in turn."""
    for run in alternatives.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(repeats):
        for name, run in alternatives.items():
            started = time.process_time()
            run()
            taken[name].append(time.process_time() - started)
    return {name: median(values) for name, values in taken.items()}
