"""The event loop whose clock jumps."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from treadle.testing import VirtualLoop


def virtually(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_takes_no_time_and_limits_are_kept() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 86_400 * 3)
        assert now() == pytest.approx(86_400 * 3)

    started = time.perf_counter()
    virtually(main())
    assert time.perf_counter() - started < 5


def test_time_stands_still_while_a_thread_computes() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(1000, ticks.append, 1)
        await asyncio.to_thread(time.sleep, 0.05)
        assert not ticks
        return now()

    ticks: list[int] = []
    assert virtually(main()) == 0


def test_a_failing_thread_lets_time_go_on() -> None:
    def fail() -> None:
        raise LookupError("gone")

    async def main() -> float:
        with pytest.raises(LookupError):
            await asyncio.to_thread(fail)
        await asyncio.sleep(3)
        return now()

    before = set(threading.enumerate())  # other tests' libraries may keep some
    assert virtually(main()) == 3
    assert set(threading.enumerate()) <= before


def test_waiting_for_nothing_is_an_error_instead_of_a_hang() -> None:
    async def main() -> None:
        await asyncio.sleep(2)
        await asyncio.Event().wait()

    loop = VirtualLoop()
    waiting = loop.create_task(main())
    with pytest.raises(RuntimeError, match="at 2 virtual seconds every coroutine waits"):
        loop.run_until_complete(waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(waiting)
    loop.close()
