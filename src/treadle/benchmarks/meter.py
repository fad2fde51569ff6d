"""Seconds and memory of a piece of work, by device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch.autograd.profiler import profile

MIB = 2**20


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
