"""`CalledRanks`: processes that answer every call together, each with an object of its own, wherever they are.

    call(name, arguments) --pickle--> rank 0 .. R-1: getattr(object, name)(*arguments) --pickle--> their answers, or the
                                                                                                   first error

Ranks wait for each other in collectives. One that fails alone leaves the others waiting, and cannot be replaced: all of
them are then ended at once, and its own error is what the caller gets.
"""

from __future__ import annotations

import asyncio
import pickle
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutine
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch

from treadle.core.errors import RankError, TreadleError
from treadle.training.ranks import Ranks

_GRACE = 2.0  # seconds for the other ranks to fail, too, before all are ended


@dataclass(frozen=True, slots=True)
class RankCall:
    """Holds one call: how many threads to compute with, and whether by deterministic kernels only, is the caller's."""

    name: str
    arguments: tuple[Any, ...]
    threads: int
    deterministic: bool


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """Holds a rank's answer, or the error that it raised. warned: category and text. ended: it will
    not answer any more. at: when, on a clock that the ranks of one machine share.
    """

    value: Any = None
    error: TreadleError | None = None
    warned: tuple[tuple[type[Warning], str], ...] = ()
    ended: bool = False
    at: float = field(default_factory=time.monotonic)


Packed = TypeVar("Packed")


class RankService(Generic[Packed]):
    """Answers calls on one rank, with an object that is made there.

    rank: its number. pack: makes of an answer what is sent; what cannot be packed is an error.
    """

    def __init__(self, rank: int, pack: Callable[[RankAnswer], Packed]) -> None:
        self._rank, self._pack = rank, pack
        self._served: Any = None
        self._runner = asyncio.Runner()

    def start(self, join: Callable[[], Ranks], make: Callable[[Ranks], Any]) -> Packed:
        """Meet the other ranks, and make the object; returns a packed `RankAnswer`."""

        def work() -> None:
            self._served = make(join())

        return self._answer(work)

    def call(self, message: bytes) -> Packed:
        """Answer a pickled `RankCall`; returns a packed `RankAnswer`."""

        def work() -> Any:
            call: RankCall = pickle.loads(message)
            torch.set_num_threads(call.threads)
            torch.use_deterministic_algorithms(call.deterministic)
            found = getattr(self._served, call.name)(*call.arguments)
            return self._runner.run(found) if iscoroutine(found) else found

        return self._answer(work)

    def close(self) -> None:
        """Close the event loop that coroutines ran on."""
        self._runner.close()

    def _answer(self, work: Callable[[], Any]) -> Packed:
        with warnings.catch_warnings(record=True) as found:
            try:
                value = work()
                return self._pack(RankAnswer(value, warned=tuple((w.category, str(w.message)) for w in found)))
            except TreadleError as error:
                return self._pack(RankAnswer(error=error))
            except Exception as error:  # noqa: BLE001  # whatever it is ends this rank's work, and its caller must know
                text = "".join(traceback.format_exception(error))
                failure = RankError(f"rank {self._rank} failed with {type(error).__name__}: {error}\n{text}")
                return self._pack(RankAnswer(error=failure))


class RankHandle(Protocol):
    """Reaches one rank."""

    def answer(self) -> RankAnswer:
        """Return what it answers, once it is ready to. If it has ended, the answer is an error that says how."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


Handle = TypeVar("Handle", bound=RankHandle)


class CalledRanks(ABC, Generic[Handle]):
    """Passes calls on to ranks, one at a time. Subclasses start and end the ranks.

    over: why no call is answered any more. busy: a call waits for its answers, perhaps on another thread.
    Raises the error of the rank that failed first: its own if it is Treadle's, else a `RankError`.
    """

    def __init__(self) -> None:
        self._ranks: list[Handle] = []
        self.over: str | None = None
        self.busy = False

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Return every rank's answer. All ranks failing with Treadle's own errors leave the ranks as they are."""
        return self._exchange(name, [self._message(name, arguments)] * len(self._ranks))

    def kill(self) -> None:
        """End the ranks at once, also while a call waits for them, which then fails."""
        for rank in self._ranks:
            rank.kill()

    @abstractmethod
    def _send(self, messages: Sequence[bytes]) -> None:
        """Send each rank its own message."""

    @abstractmethod
    def _ready(self, waiting: Sequence[Handle], timeout: float | None) -> Sequence[Handle]:
        """Wait for some of the ranks to have an answer, or to have ended; none after `timeout` seconds."""

    @abstractmethod
    def _end(self) -> None:
        """End all ranks, and release what they were started with. Idempotent."""

    def _message(self, name: str, arguments: tuple[Any, ...]) -> bytes:
        call = RankCall(name, arguments, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
        return pickle.dumps(call)

    def _exchange(self, name: str, messages: Sequence[bytes]) -> list[Any]:
        if self.over is not None:
            raise RankError(self.over)
        self.busy = True
        try:
            self._send(messages)
            return self._answers()
        except TreadleError:
            raise
        except BaseException:  # interrupted: answers that were not read would be taken for those of the next call
            self.over = f"the call {name!r} to the ranks was interrupted"
            self._end()
            raise
        finally:
            self.busy = False

    def _answers(self) -> list[Any]:
        """Return the answers of all ranks; after a first failure, wait for `_GRACE` seconds at most."""
        answers: dict[Handle, RankAnswer] = {}
        deadline = None
        while waiting := [rank for rank in self._ranks if rank not in answers]:
            ready = self._ready(waiting, None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in ready:
                answers[rank] = rank.answer()
                if answers[rank].error is not None:
                    deadline = deadline or time.monotonic() + _GRACE
        if deadline is not None:
            self._fail(answers)
        for category, text in answers[self._ranks[0]].warned:
            warnings.warn(text, category, stacklevel=5)
        return [answers[rank].value for rank in self._ranks]

    def _fail(self, answers: Mapping[Handle, RankAnswer]) -> NoReturn:
        """Raise the first rank's error, and end the ranks unless all raised Treadle's own and can go on."""
        failed = [rank for rank, answer in answers.items() if answer.error is not None]
        # a rank that died makes the others fail, perhaps before its end is seen
        first = min(failed, key=lambda rank: (not answers[rank].ended, answers[rank].at))
        error = answers[first].error
        assert error is not None
        if len(failed) < len(self._ranks) or any(isinstance(answers[rank].error, RankError) for rank in failed):
            self.over = str(error)
            self._end()
        raise error
