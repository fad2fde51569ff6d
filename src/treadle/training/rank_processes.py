"""`RankProcesses`: several processes of this machine that answer every call together, each with an object of its own.

    call(name, arguments) --pickle--> rank 0 .. R-1: getattr(object, name)(*arguments) --pickle--> their answers, or the
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NoReturn

import torch

from treadle.core.child_process import exit_in_words, start_child
from treadle.core.errors import RankError, TreadleError
from treadle.training.ranks import Ranks

_MODULE = "treadle.training.rank_worker"
_GRACE = 2.0  # seconds for the other ranks to fail, too, before all are ended
_PATIENCE = 10.0  # seconds for a rank to end by itself
_TAIL = 15  # lines of a rank's output that an error shows


@dataclass(frozen=True, slots=True)
class RankSetup:
    """Holds what one rank is made from.

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
    """Holds one call: how many threads to compute with, and whether by deterministic kernels only, is the caller's."""

    name: str
    arguments: tuple[Any, ...]
    threads: int
    deterministic: bool


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """Holds a rank's answer, or the error that it raised. warned: category and text. ended: it will
    not answer any more. at: when, on a clock that all ranks share.
    """

    value: Any = None
    error: TreadleError | None = None
    warned: tuple[tuple[type[Warning], str], ...] = ()
    ended: bool = False
    at: float = field(default_factory=time.monotonic)


class RankProcesses:
    """Starts the processes and passes calls on to them, one at a time.

    make, replicas, device, limit: see `RankSetup`. over: why no call is answered any more. busy: a call waits for
    its answers, perhaps on another thread.
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
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-ranks-")
        self._ranks: list[_Rank] = []
        self.over: str | None = None
        self.busy = False
        try:
            for number in range(size):
                setup = RankSetup(make, number, size, replicas, device, f"{self._folder.name}/store", limit)
                self._ranks.append(_Rank(setup))
            self._answers()
        except BaseException:
            self._end()
            raise

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Return every rank's answer. All ranks failing with Treadle's own errors leave the processes as they are."""
        return self.call_each(name, [arguments] * len(self._ranks))

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return every rank's answer to a call with arguments of its own. Raises as `call`."""
        if self.over is not None:
            raise RankError(self.over)
        threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        self.busy = True
        try:
            for rank, own in zip(self._ranks, arguments, strict=True):
                rank.send(RankCall(name, own, threads, deterministic))
            return self._answers()
        except TreadleError:
            raise
        except BaseException:  # interrupted: answers that were not read would be taken for those of the next call
            self.over = f"the call {name!r} to the ranks was interrupted"
            self._end()
            raise
        finally:
            self.busy = False

    def close(self) -> None:
        """End the processes. Idempotent."""
        self.over = self.over or "the ranks were closed"
        for rank in self._ranks:
            rank.channel.close()
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(_PATIENCE)
        self._end()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def kill(self) -> None:
        """End the processes at once, also while a call waits for them, which then fails."""
        for rank in self._ranks:
            rank.process.kill()

    def _answers(self) -> list[Any]:
        """Return the answers of all ranks; after a first failure, wait for `_GRACE` seconds at most."""
        answers: dict[_Rank, RankAnswer] = {}
        deadline = None
        while len(answers) < len(self._ranks):
            waiting = {rank.channel: rank for rank in self._ranks if rank not in answers}
            ready = wait(list(waiting), None if deadline is None else deadline - time.monotonic())
            if not ready:
                break
            for rank in (waiting[channel] for channel in ready if isinstance(channel, Connection)):
                answers[rank] = rank.answer()
                if answers[rank].error is not None:
                    deadline = deadline or time.monotonic() + _GRACE
        if deadline is not None:
            self._fail(answers)
        for category, text in answers[self._ranks[0]].warned:
            warnings.warn(text, category, stacklevel=4)
        return [answers[rank].value for rank in self._ranks]

    def _fail(self, answers: Mapping[_Rank, RankAnswer]) -> NoReturn:
        """Raise the first rank's error, and end the processes unless all raised Treadle's own and can go on."""
        failed = [rank for rank, answer in answers.items() if answer.error is not None]
        # a rank that died makes the others fail, perhaps before its end is seen
        first = min(failed, key=lambda rank: (not answers[rank].ended, answers[rank].at))
        error = answers[first].error
        assert error is not None
        if len(failed) < len(self._ranks) or any(isinstance(answers[rank].error, RankError) for rank in failed):
            self.over = str(error)
            self._end()
        raise error

    def _end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._folder.cleanup()


class _Rank:
    """One process and the channel to it."""

    def __init__(self, setup: RankSetup) -> None:
        self._number = setup.rank
        ours, theirs = socket.socketpair()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        with theirs:
            self.process = start_child(_MODULE, theirs, self.output)
        self.channel = Connection(ours.detach())
        self.send(setup)

    def send(self, message: RankSetup | RankCall) -> None:
        with suppress(BrokenPipeError):  # it has ended, which `answer` tells
            self.channel.send_bytes(pickle.dumps(message))

    def answer(self) -> RankAnswer:
        """Return what it answers. If it has ended, the answer is an error with the end of its output."""
        try:
            found: RankAnswer = pickle.loads(self.channel.recv_bytes())
            return found
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
