"""Waiting for a state. Tests wait for what they need, not for a time; the ceiling is reached by what hangs only."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

CEILING = 300.0  # seconds


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; what runs in this event loop goes on meanwhile."""
    async with asyncio.timeout(CEILING):
        while not condition():
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, where no event loop runs."""
    deadline = time.monotonic() + CEILING
    while not condition():
        assert time.monotonic() < deadline, "waited for five minutes"
        time.sleep(0.005)
