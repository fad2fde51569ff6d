"""Calls of an object in another process, by number.

Calls.call --(number, method, arguments)--> Service.take -> await object.method(*arguments)
Calls.take <--(number, value, error)----------'

Standard library only, and no syntax newer than Python 3.9's: `foreign_child` uses it, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

Request = tuple["int | None", str, "tuple[Any, ...]"]
"""Number (None: no answer is wanted), method and arguments; an empty method cancels the call of that number."""
Answer = tuple[int, Any, Any]
"""Number, value and error of a call: an exception, or a description of one."""


class Calls:
    """The caller's end.

    send: carries a request to the `Service`. failure: makes an exception from the description of one.
    """

    def __init__(self, send: Callable[[Request], None], failure: Callable[[Any], Exception]) -> None:
        self._send, self._failure = send, failure
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the answer; cancelling this cancels the call."""
        number, answer = self.start(method, *arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancel(number)
            raise

    def start(self, method: str, *arguments: Any) -> tuple[int, asyncio.Future[Any]]:
        """Make a call; return its number and its answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._send((number, method, arguments))
        self._answers[number] = answer
        answer.add_done_callback(partial(self._forget, number))
        return number, answer

    def cancel(self, number: int) -> None:
        """Cancel a call. It ends by itself, or has ended."""
        self._send((number, "", ()))

    def post(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting for an answer; it begins before calls that are made later."""
        self._send((None, method, arguments))

    @property
    def waiting(self) -> list[asyncio.Future[Any]]:
        """The calls without an answer."""
        return [answer for answer in self._answers.values() if not answer.done()]

    def take(self, number: int, value: Any, error: Any) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():  # cancelled
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error if isinstance(error, Exception) else self._failure(error))

    def fail(self, error: Exception) -> None:
        """Fail all waiting calls."""
        for answer in self.waiting:
            answer.set_exception(error)

    def _forget(self, number: int, answer: asyncio.Future[Any]) -> None:
        del self._answers[number]
        # Retrieve it so that asyncio does not log it.
        answer.cancelled() or answer.exception()


class Service:
    """The called end: runs the object's asynchronous methods, and sends each answer when it is ready.

    described: makes an error from an exception, CancelledError included; None: send nothing.
    """

    def __init__(self, served: Any, send: Callable[[Answer], None], described: Callable[[BaseException], Any]) -> None:
        self._served, self._send, self._described = served, send, described
        self._running: dict[object, asyncio.Task[Any]] = {}

    def take(self, number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        """Start a call, or cancel it."""
        if not method:
            if number in self._running:
                self._running[number].cancel()
            return
        call = asyncio.get_running_loop().create_task(self._call(method, arguments))
        self._running[call if number is None else number] = call
        call.add_done_callback(partial(self._answer, number))

    @property
    def running(self) -> list[asyncio.Task[Any]]:
        return list(self._running.values())

    def close(self) -> None:
        """Cancel all calls."""
        for call in self.running:
            call.cancel()

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return await getattr(self._served, method)(*arguments)

    def _answer(self, number: int | None, call: asyncio.Task[Any]) -> None:
        del self._running[call if number is None else number]
        try:
            value = call.result()
            if number is not None:
                self._send((number, value, None))
        except BaseException as failure:  # noqa: BLE001  # a boundary: the caller gets it, including errors of pickling
            error = self._described(failure)
            if number is not None and error is not None:
                self._send((number, None, error))
