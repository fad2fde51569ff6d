"""CPU seconds of `import treadle`, and of what comes after it, each in a fresh interpreter."""

from __future__ import annotations

import resource
import subprocess
import sys
from statistics import median

from treadle.benchmarks.report import Report, Row


def measure(threads: int, repeats: int) -> Report:
    """Measure the median CPU seconds of each import; `threads` has no effect."""
    statements = ("pass", "import treadle", "import treadle; treadle.Step", "import treadle.cli.main")
    rows: list[Row] = [{"statement": s, "CPU s": median(_cpu_seconds(s) for _ in range(repeats))} for s in statements]
    return Report("import", f"fresh interpreter each, median of {repeats}", rows)


def _cpu_seconds(statement: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
