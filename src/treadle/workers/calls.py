"""Calls of an object in another process, by number.

Calls.call --(number, method, arguments)--> Service.take -> await object.method(*arguments)
Calls.take <--(number, value, error)----------'
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from itertools import count
from typing import Any

from treadle.core.errors import TreadleError

Request = tuple[int | None, str, tuple[Any, ...]]
"""Number (None: no answer is wanted), method and arguments; an empty method cancels the call of that number."""
Answer = tuple[int, Any, TreadleError | str | None]
"""Number, value and error of a call; a text describes an error other than Treadle's."""


class Calls:
    """The caller's end.

    send: carries a request to the `Service`. failure: makes an error from the text of one that is not Treadle's.
    """

    def __init__(self, send: Callable[[Request], None], failure: Callable[[str], TreadleError]) -> None:
        self._send, self._failure = send, failure
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the answer; cancelling this cancels the call."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send((number, method, arguments))
            return await answer
        except asyncio.CancelledError:
            self._send((number, "", ()))
            raise
        finally:
            del self._answers[number]

    def post(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting for an answer; it begins before calls that are made later."""
        self._send((None, method, arguments))

    def take(self, number: int, value: Any, error: TreadleError | str | None) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():  # cancelled
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(self._failure(error) if isinstance(error, str) else error)

    def fail(self, error: TreadleError) -> None:
        """Fail all waiting calls."""
        for number in self._answers:
            self.take(number, None, error)


class Service:
    """The called end: runs the object's asynchronous methods, and sends each answer when it is ready."""

    def __init__(self, served: Any, send: Callable[[Answer], None]) -> None:
        self._served, self._send = served, send
        self._running: dict[object, asyncio.Task[None]] = {}

    def take(self, number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        """Start a call, or cancel it."""
        if not method:
            if number in self._running:
                self._running[number].cancel()
            return
        call = asyncio.get_running_loop().create_task(self._run(number, method, arguments))
        key = call if number is None else number
        self._running[key] = call
        call.add_done_callback(lambda _: self._running.pop(key))

    def close(self) -> None:
        """Cancel all calls."""
        for call in self._running.values():
            call.cancel()

    async def _run(self, number: int | None, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._answer(number, await getattr(self._served, method)(*arguments), None)
        except TreadleError as error:
            self._answer(number, None, error)
        except Exception as error:  # noqa: BLE001  # a boundary: the caller gets it, including errors of pickling
            traceback.print_exception(error)
            self._answer(number, None, f"{type(error).__name__}: {error}")

    def _answer(self, number: int | None, value: Any, error: TreadleError | str | None) -> None:
        if number is not None:
            self._send((number, value, error))
