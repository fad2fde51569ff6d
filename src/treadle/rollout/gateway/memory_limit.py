"""`MemoryLimit`: how many bytes of requests a gateway holds at a time."""

from __future__ import annotations

import asyncio
from collections import deque


class MemoryLimit:
    """Limits the bytes of requests held at a time; a request that finds no room waits, first come, first served.

    What is taken is given back once the request's prompt is rendered, which waits for nothing but work of this process:
    the queue cannot block itself.
    """

    def __init__(self, most: int) -> None:
        self.most = self._left = most
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is taken."""
        return self._left == self.most

    async def take(self, size: int) -> None:
        """Take that many bytes, at most `most`, waiting until there is room for them."""
        if not self._queue and size <= self._left:
            self._left -= size
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)
            else:
                self._queue.remove((size, turn))
                self.give(0)  # those behind it may fit now
            raise

    def give(self, size: int) -> None:
        """Give that many bytes back; requests that waited for them go on."""
        self._left += size
        while self._queue and self._queue[0][0] <= self._left:
            taken, turn = self._queue.popleft()
            self._left -= taken
            turn.set_result(None)
