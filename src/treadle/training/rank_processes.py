"""`RankProcesses`: ranks that are processes of this machine (`training.rank_calls`)."""

from __future__ import annotations

import pickle
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from treadle.core.child_process import exit_in_words, start_child
from treadle.core.errors import RankError
from treadle.training.rank_calls import CalledRanks, RankAnswer
from treadle.training.ranks import Ranks

_MODULE = "treadle.training.rank_worker"
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


class RankProcesses(CalledRanks["_Rank"]):
    """Starts the processes. make, replicas, device, limit: see `RankSetup`. Raises as `CalledRanks` does."""

    def __init__(
        self,
        make: Callable[[Ranks], Any],
        size: int,
        *,
        replicas: int = 1,
        device: str = "cpu",
        limit: float = 600.0,
    ) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-ranks-")
        try:
            for number in range(size):
                setup = RankSetup(make, number, size, replicas, device, f"{self._folder.name}/store", limit)
                self._ranks.append(_Rank(setup))
            self._answers()
        except BaseException:
            self._end()
            raise

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return every rank's answer to a call with arguments of its own. Raises as `call`."""
        return self._exchange(name, [self._message(name, own) for own in arguments])

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

    def _send(self, messages: Sequence[bytes]) -> None:
        for rank, message in zip(self._ranks, messages, strict=True):
            rank.send(message)

    def _ready(self, waiting: Sequence[_Rank], timeout: float | None) -> Sequence[_Rank]:
        channels = {rank.channel: rank for rank in waiting}
        return [channels[found] for found in wait(list(channels), timeout) if isinstance(found, Connection)]

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
        self.send(pickle.dumps(setup))

    def send(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # it has ended, which `answer` tells
            self.channel.send_bytes(message)

    def answer(self) -> RankAnswer:
        """Return what it answers. If it has ended, the answer is an error with the end of its output."""
        try:
            found: RankAnswer = pickle.loads(self.channel.recv_bytes())
            return found
        except (EOFError, ConnectionError):
            self.process.wait()
            return RankAnswer(error=RankError(self._ending()), ended=True)

    def kill(self) -> None:
        self.process.kill()

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
