"""Learner ranks as processes that answer every call together.

    RankGang.call(name, *arguments) -> RankService.answer on rank 0 .. R-1 -> getattr(object, name)(*arguments)

`RankProcesses` are processes of this machine, `placement.rank_actors.RankActors` those of a cluster.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from inspect import isawaitable
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from transformers.utils import logging as hf_logging

from treadle.core.errors import RankError
from treadle.core.processes import return_large_blocks_when_freed
from treadle.training.ranks import Ranks
from treadle.training.sharding import join
from treadle.workers.child import ChildProcess, Pickled
from treadle.workers.gang import Gang, W

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_MEETING = 60.0  # seconds for a rank to reach the first one

Warned = list[tuple[type[Warning], str]]


class RankService:
    """One rank: meets the others, creates the object that answers, and calls its methods."""

    def __init__(self, rank: int) -> None:
        hf_logging.disable_progress_bar()  # the output is not a terminal
        return_large_blocks_when_freed()
        self._rank = rank
        self._store: TCPStore | None = None
        self._served: Any = None

    def place(self) -> tuple[str, str]:
        """Return the address where ranks meet, and the name of its network interface."""
        # Nothing outside this machine can reach it.
        return "127.0.0.1", _LOOPBACK

    async def open_store(self, size: int) -> tuple[str, int]:
        """Open the store where ranks meet, on a free port; return its address."""
        host, _ = self.place()
        listening = socket.create_server((host, 0))
        port: int = listening.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=_MEETING),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return host, port

    async def start(
        self, size: int, address: tuple[str, int], make: Callable[[Ranks], Any], *more: Any
    ) -> tuple[None, Warned]:
        """Meet the other ranks, and create the object that answers. more: see `sharding.join`."""

        def start() -> None:
            self._served = make(self._meet(size, address, *more))

        return await _with_warnings(start)

    async def answer(
        self, name: str, arguments: tuple[Any, ...], threads: int, deterministic: bool
    ) -> tuple[Any, Warned]:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        return await _with_warnings(partial(getattr(self._served, name), *arguments))

    def _meet(self, size: int, address: tuple[str, int], replicas: int, device: str, limit: float) -> Ranks:
        here, interface = self.place()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        store = self._store
        try:
            store = store or TCPStore(*address, size, wait_for_workers=False, timeout=timedelta(seconds=_MEETING))
        except RuntimeError as error:
            raise RankError(
                f"learner rank {self._rank} on {here} cannot reach the first one at {address[0]}:{address[1]}; "
                f"let nodes reach each other's ports ({error})"
            ) from error
        return join(store, self._rank, size, replicas, device, limit)


async def _with_warnings(work: Callable[[], Any]) -> tuple[Any, Warned]:
    with warnings.catch_warnings(record=True) as caught:
        value = work()
        value = await value if isawaitable(value) else value
    return value, [(warning.category, str(warning.message)) for warning in caught]


class RankGang(Gang[W]):
    """Ranks that have met, and answer calls of the objects they have made.

    ranks: workers that serve a `RankService`. share: prepares arguments for fast sending to all of them. make: returns
    the object that answers, called once the ranks have met. replicas, device, limit: see `sharding.join`.
    """

    def __init__(
        self,
        ranks: Sequence[W],
        share: Callable[[Any], Any],
        make: Callable[[Ranks], Any],
        replicas: int,
        device: str,
        limit: float,
    ) -> None:
        super().__init__(ranks)
        self._share = share
        try:
            address = self.call_first("open_store", len(ranks))
            self._all("start", len(ranks), address, make, replicas, device, limit)
        except BaseException:
            self.close()
            raise

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Return every rank's answer, and repeat the first one's warnings. They compute with this thread's settings."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return self._all("answer", name, self._share(arguments), torch.get_num_threads(), deterministic)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        answers = super().call(method, *arguments)
        for category, text in answers[0][1]:
            warnings.warn(text, category, stacklevel=3)
        return [value for value, _ in answers]


class RankProcesses(RankGang[ChildProcess]):
    """Learner ranks on this machine. See `RankGang`."""

    def __init__(
        self, make: Callable[[Ranks], Any], size: int, *, replicas: int = 1, device: str = "cpu", limit: float = 600.0
    ) -> None:
        ranks = [ChildProcess(f"rank {number}", partial(RankService, number)) for number in range(size)]
        super().__init__(ranks, Pickled, make, replicas, device, limit)
