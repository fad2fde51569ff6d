"""Where a model computes: on the caller's thread, or on a dedicated one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class Compute:
    """Runs functions one at a time, inline or beside the event loop.

    OpenMP keeps a team of workers per calling thread, and several teams on a small machine slow each other down (1.5
    times on two cores): compute inline if nothing else has work meanwhile, as in synchronous training. A dedicated
    thread adopts the thread count of the first caller, as OpenMP and MKL keep one per thread. name: name of the thread;
    None: inline.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self.running = 0  # number of running and queued functions
        self._thread: ThreadPoolExecutor | None = None

    @property
    def is_inline(self) -> bool:
        return self._name is None

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return the result of `work` for these arguments; passes on its errors."""
        self.running += 1
        try:
            if self._name is None:
                return work(*arguments, **named)
            if self._thread is None:
                count = torch.get_num_threads()
                self._thread = ThreadPoolExecutor(1, self._name, initializer=torch.set_num_threads, initargs=(count,))
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **named))
        finally:
            self.running -= 1

    def close(self) -> None:
        """Wait for the running function, drop queued ones, and end the thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
