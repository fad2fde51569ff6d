"""`RankProcesses`: learner ranks that are processes of this machine, and answer every call together.

    call(name, *arguments) --pickle--> rank 0 .. R-1: getattr(object, name)(*arguments) --pickle--> all answers, or the
                                                                                                    first error

Ranks wait for each other in collectives. One that fails alone leaves the others waiting, and cannot be replaced: all of
them are then ended at once, and its own error is what the caller gets.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NoReturn

import torch

from treadle.core.errors import RankError, TreadleError
from treadle.core.processes import exit_in_words, start_child
from treadle.training.ranks import Ranks

_MODULE = "treadle.training.rank_worker"
_GRACE = 2.0  # seconds for the other ranks to fail, too, before all are ended
_PATIENCE = 10.0  # seconds for a rank to end by itself
_TAIL = 15  # lines of a rank's output that an error shows


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What one rank is made from.

    make: called once the ranks have met; returns the object that answers. store: the file in which they find each
    other. replicas, device, limit: see `sharding.join`.
    """

    make: Callable[[Ranks], Any]
    rank: int
    size: int
    replicas: int
    device: str
    store: str
    limit: float


@dataclass(frozen=True, slots=True)
class RankCall:
    """One call. Thread count and determinism are copied from the caller."""

    name: str
    arguments: tuple[Any, ...]
    threads: int
    deterministic: bool


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """A rank's answer, or the error that it raised.

    warned: category and text. ended: the rank has ended. at: when, on a clock that the ranks share.
    """

    value: Any = None
    error: TreadleError | None = None
    warned: tuple[tuple[type[Warning], str], ...] = ()
    ended: bool = False
    at: float = field(default_factory=time.monotonic)


class RankProcesses:
    """Starts the processes, and passes calls on to them, one at a time (`rank_group.Calls`).

    make, replicas, device, limit: see `RankSetup`. over: why no call is answered any more. busy: a call waits for its
    answers, perhaps on another thread.

    Raises the error of the rank that failed first: its own if it is Treadle's, else a `RankError`.
    """

    def __init__(
        self,
        make: Callable[[Ranks], Any],
        size: int,
        *,
        replicas: int = 1,
        device: str = "cpu",
        limit: float = 600.0,
    ) -> None:
        self.over: str | None = None
        self.busy = False
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-ranks-")
        try:
            for number in range(size):
                setup = RankSetup(make, number, size, replicas, device, f"{self._folder.name}/store", limit)
                self._ranks.append(_Rank(setup))
            self._answers()
        except BaseException:
            self._end()
            raise

    @property
    def pids(self) -> list[int]:
        """The ids of the processes, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Return every rank's answer. All ranks failing with Treadle's own errors leave the ranks as they are."""
        if self.over is not None:
            raise RankError(self.over)
        message = pickle.dumps(
            RankCall(name, arguments, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
        )
        self.busy = True
        try:
            for rank in self._ranks:
                rank.send(message)
            return self._answers()
        except TreadleError:
            raise
        except BaseException:  # interrupted: answers that were not read would be taken for those of the next call
            self.over = f"the call {name!r} to the ranks was interrupted"
            self._end()
            raise
        finally:
            self.busy = False

    def kill(self) -> None:
        """End the ranks at once, also while a call waits for them, which then fails."""
        for rank in self._ranks:
            rank.process.kill()

    def close(self) -> None:
        """End the processes. Idempotent."""
        self.over = self.over or "the ranks were closed"
        for rank in self._ranks:
            rank.channel.close()
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(_PATIENCE)
        self._end()

    def _end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._folder.cleanup()

    def _answers(self) -> list[Any]:
        """Return the answers of all ranks; after a first failure, wait for `_GRACE` seconds at most."""
        answers: dict[_Rank, RankAnswer] = {}
        deadline = None
        while waiting := {rank.channel: rank for rank in self._ranks if rank not in answers}:
            ready = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for channel in ready:
                assert isinstance(channel, Connection)
                answer = answers[waiting[channel]] = waiting[channel].answer()
                if answer.error is not None:
                    deadline = deadline or time.monotonic() + _GRACE
        if deadline is not None:
            self._fail(answers)
        for category, text in answers[self._ranks[0]].warned:
            warnings.warn(text, category, stacklevel=5)
        return [answers[rank].value for rank in self._ranks]

    def _fail(self, answers: Mapping[_Rank, RankAnswer]) -> NoReturn:
        """Raise the first rank's error, and end the ranks unless all raised Treadle's own and can go on."""
        failures = [answer for answer in answers.values() if answer.error is not None]
        # a rank that died makes the others fail, perhaps before its end is seen
        error = min(failures, key=lambda answer: (not answer.ended, answer.at)).error
        assert error is not None
        if len(failures) < len(self._ranks) or any(isinstance(each.error, RankError) for each in failures):
            self.over = str(error)
            self._end()
        raise error


class _Rank:
    """One process and the channel to it."""

    def __init__(self, setup: RankSetup) -> None:
        self._number = setup.rank
        ours, theirs = socket.socketpair()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        with theirs:
            self.process = start_child(_MODULE, theirs, self.output)
        self.channel = Connection(ours.detach())
        self.send(pickle.dumps(setup))

    def send(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # it has ended, which `answer` finds
            self.channel.send_bytes(message)

    def answer(self) -> RankAnswer:
        """Return what it answers. If it has ended, the answer is an error with the end of its output."""
        try:
            answer: RankAnswer = self.channel.recv()
            return answer
        except (EOFError, ConnectionError):
            self.process.wait()
            return RankAnswer(error=RankError(self._ending()), ended=True)

    def end(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.output.close()

    def _ending(self) -> str:
        self.output.seek(0)
        lines = self.output.read().decode(errors="replace").splitlines()[-_TAIL:]
        said = "\n".join(["; its output ends:", *lines]) if lines else ""
        return f"rank {self._number} ended with {exit_in_words(self.process.returncode)}{said}"
