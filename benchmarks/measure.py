"""Options, clocks, memory and tables that benchmarks share."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.autograd.profiler import profile

from treadle.cli.console import Console, make_table

MIB = 2**20
RESULTS = Path(__file__).parent / "results"
_INTERVAL = 0.05  # seconds between two looks at memory
Row = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class Table:
    """Figures of a benchmark. rows: column -> figure, the same columns each. note: what was held fixed."""

    title: str
    note: str
    rows: Sequence[Row]


def make_parser(doc: str | None, repeats: int | None = None, threads: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options `--small` and `--json`, and `--repeats` and `--threads` where they apply.

    doc: the benchmark's docstring, which is the help text.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the smallest sizes: only to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats, help=f"rounds, for medians (default: {repeats})")
    if threads:
        parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    return parser


def show(file: Path | None, *tables: Table) -> None:
    """Print the tables, and write them to a JSON file if there is one."""
    console = Console()
    for table in tables:
        first = table.rows[0]
        printed = make_table(*first, title=table.title, text=[name for name in first if isinstance(first[name], str)])
        for row in table.rows:
            printed.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.table(printed)
        console.line(f"{table.note}; {machine()}", wrap=True)
        console.line()
    if file is not None:
        data = [{"title": table.title, "note": table.note, "rows": list(table.rows)} for table in tables]
        file.write_text(json.dumps({"machine": machine(), "tables": data}) + "\n", encoding="utf-8")


def machine() -> str:
    """Return a description of this machine."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def median_seconds(
    alternatives: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Return the median seconds of each alternative; each round runs all of them in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(repeats):
        for name, run in alternatives.items():
            started = clock()
            run()
            seconds[name].append(clock() - started)
    return {name: median(values) for name, values in seconds.items()}


def cpu_seconds(alternatives: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median CPU seconds of each alternative, after one warm-up each."""
    for run in alternatives.values():
        run()
    return median_seconds(alternatives, repeats, time.process_time)


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds: CPU time on a CPU; on a GPU, wall time read when the GPU is idle."""
    return _cuda_clock if device.type == "cuda" else time.process_time


def _cuda_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the bytes of tensors that `run` allocates.

    On a CPU all allocations of torch are counted, so the figure is the same in every run.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    gc.collect()  # tensors freed while `run` runs would count as less
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
    with profile(profile_memory=True) as recorded:
        run()
    assert recorded.kineto_results is not None
    events = sorted((e.start_ns(), e.nbytes()) for e in recorded.kineto_results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, change in events:
        now += change
        peak = max(peak, now)
    return peak


def process_cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU seconds that these processes have spent so far, all together. Linux only."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    return sum(int(number) for pair in ticks for number in pair) / os.sysconf("SC_CLK_TCK")


def pss_bytes(pids: Sequence[int]) -> list[int]:
    """Return the proportional set size of each process in bytes. Linux only."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return [1024 * int(text.partition("\nPss:")[2].split()[0]) for text in rollups]


@contextmanager
def largest(read: Callable[[], Sequence[int]]) -> Iterator[list[int]]:
    """Poll some numbers in a thread; on exit, the yielded list holds the maximum of each."""
    maxima, done = list(read()), threading.Event()

    def watch() -> None:
        while not done.wait(_INTERVAL):
            maxima[:] = map(max, maxima, read())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield maxima
    finally:
        done.set()
        watching.join()
