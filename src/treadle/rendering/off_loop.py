"""Large pieces of work beside the event loop, so that one long conversation does not halt everybody's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 2**15
"""Characters (or bytes) from which on work goes to a thread: some 30 ms of tokenizing."""
_THREADS = 2


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns. size: of what it works on; small work is done at once, without awaiting anything."""
    if size < LARGE:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads(), lambda: work(*args, **kwargs))


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="treadle-render")
