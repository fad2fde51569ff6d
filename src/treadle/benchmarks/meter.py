"""Seconds and memory of a piece of work, by device or of several processes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.autograd.profiler import profile

MIB = 2**20
_PAUSE = 0.05  # seconds between two looks at memory


def clock(device: torch.device) -> Callable[[], float]:
    """Return a clock of seconds since some moment.

    On a CPU it counts CPU time of this process, on a GPU wall time, read once the GPU has nothing left to do.
    """
    return _cuda_clock if device.type == "cuda" else time.process_time


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes of tensors that `run` has allocated at a time, beyond those there before.

    On a CPU every allocation of torch is counted: unlike the process's resident memory, that is the same in every run
    and does not depend on earlier work.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    gc.collect()  # or earlier tensors may be freed meanwhile, and count as less
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
    with profile(profile_memory=True) as found:
        run()
    assert found.kineto_results is not None
    changes = sorted((e.start_ns(), e.nbytes()) for e in found.kineto_results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _cuda_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def child_cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU seconds that these processes have taken so far, all together. Linux only."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    return sum(int(number) for own in ticks for number in own) / os.sysconf("SC_CLK_TCK")


def pss_bytes(pids: Sequence[int]) -> list[int]:
    """Return the resident bytes of each process; what n of them share counts as an nth of each. Linux only."""
    rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return [1024 * int(text.partition("\nPss:")[2].split()[0]) for text in rollups]


@contextmanager
def largest(look: Callable[[], Sequence[int]]) -> Iterator[list[int]]:
    """Look at several numbers again and again; the list that is yielded holds the largest of each, in the end."""
    found, done = list(look()), threading.Event()

    def watch() -> None:
        while not done.wait(_PAUSE):
            found[:] = map(max, found, look())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield found
    finally:
        done.set()
        watching.join()
