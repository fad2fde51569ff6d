"""`RankProcesses`: learner ranks that are processes of this machine, and answer every call together.

    call(name, *arguments) --pickle--> rank 0 .. R-1: getattr(object, name)(*arguments) --pickle--> all answers, or the
                                                                                                    first error

Ranks wait for each other in collectives. One that fails alone leaves the others waiting, and cannot be replaced: all of
them are then ended at once, and its own error is what the caller gets. `python -m treadle.training.rank_processes FD`
is one rank, at the other end of a channel.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from inspect import iscoroutine
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from transformers.utils import logging as hf_logging

from treadle.core.errors import RankError, TreadleError
from treadle.core.processes import (
    end_with_parent,
    exit_in_words,
    parent_has_ended,
    return_large_blocks_when_freed,
    start_child,
)
from treadle.training.ranks import Ranks
from treadle.training.sharding import join

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_MODULE = "treadle.training.rank_processes"
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
        self, make: Callable[[Ranks], Any], size: int, *, replicas: int = 1, device: str = "cpu", limit: float = 600.0
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
        for rank in self._ranks:
            rank.process.kill()

    def close(self) -> None:
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


def serve(channel: Connection, folders: list[str]) -> None:
    """Be one rank: make the object of the first message, and answer calls of its methods until the channel closes.

    If the caller was killed, its folder is removed, which it does itself otherwise; folders: has it from then on.
    """
    hf_logging.disable_progress_bar()  # the output is no terminal
    setup: RankSetup = channel.recv()
    folders.append(os.path.dirname(setup.store))
    served: Any = None

    def start() -> None:
        nonlocal served
        store = FileStore(setup.store, setup.size)
        served = setup.make(join(store, setup.rank, setup.size, setup.replicas, setup.device, setup.limit))

    with asyncio.Runner() as runner, suppress(EOFError, ConnectionError):  # the caller closed it, or was killed
        channel.send_bytes(_answer(setup.rank, start))
        while True:
            message = channel.recv_bytes()
            channel.send_bytes(_answer(setup.rank, partial(_call, served, message, runner)))
    if parent_has_ended():
        shutil.rmtree(folders[0], ignore_errors=True)
        os._exit(1)  # the store is gone, in which ranks say that they leave


def _call(served: Any, message: bytes, runner: asyncio.Runner) -> Any:
    call: RankCall = pickle.loads(message)
    torch.set_num_threads(call.threads)
    torch.use_deterministic_algorithms(call.deterministic)
    answer = getattr(served, call.name)(*call.arguments)
    return runner.run(answer) if iscoroutine(answer) else answer


def _answer(rank: int, work: Callable[[], Any]) -> bytes:
    """Return a pickled `RankAnswer`; what cannot be pickled is an error."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            value = work()
            return pickle.dumps(RankAnswer(value, warned=tuple((w.category, str(w.message)) for w in caught)))
        except TreadleError as error:
            return pickle.dumps(RankAnswer(error=error))
        except Exception as error:  # noqa: BLE001  # whatever it is ends this rank's work, and its caller must know
            text = "".join(traceback.format_exception(error))
            failure = RankError(f"rank {rank} failed with {type(error).__name__}: {error}\n{text}")
            return pickle.dumps(RankAnswer(error=failure))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # nothing outside this machine can reach it
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
    folders_of_caller: list[str] = []
    end_with_parent(folders_of_caller)
    return_large_blocks_when_freed()
    # of the module by its name: messages of `__main__` could not be unpickled
    import_module("treadle.training.rank_processes").serve(Connection(int(sys.argv[1])), folders_of_caller)
    if dist.is_initialized():
        dist.destroy_process_group()
