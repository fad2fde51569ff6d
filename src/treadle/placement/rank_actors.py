"""`RankActors`: ranks that are Ray actors (`training.rank_calls`). With `RankGroup` they are a `Trainer`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError
from torch._C._distributed_c10d import TCPStore
from transformers.utils import logging as hf_logging

from treadle.core.errors import RankError
from treadle.core.trainer import Trainer
from treadle.placement.reserve import Reservation
from treadle.placement.turns import ColocatedTrainer
from treadle.placement.warden import start_warden
from treadle.training.config import TrainerSpec
from treadle.training.rank_calls import CalledRanks, RankAnswer, RankService
from treadle.training.rank_group import RankGroup, make_rank_trainer
from treadle.training.ranks import Ranks
from treadle.training.sharding import join

_MEETING = 60.0  # seconds for a rank to reach the first one


@dataclass(frozen=True, slots=True)
class Meeting:
    """Says how ranks meet: at a store that the first one opens. See `sharding.join`."""

    size: int
    replicas: int
    device: str
    limit: float


class RankActor:
    """Is one rank, in a process of its own."""

    def __init__(self, rank: int) -> None:
        hf_logging.disable_progress_bar()  # the output is no terminal
        self._rank = rank
        self._service = RankService(rank, lambda answer: answer)
        self._store: TCPStore | None = None
        self._warden = start_warden()  # of weights that it stages

    def open_store(self, size: int) -> tuple[str, int]:
        """Open the store where ranks meet, on a free port of this node's address; returns both."""
        host = ray.util.get_node_ip_address()
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

    def start(self, meeting: Meeting, address: tuple[str, int], make: Callable[[Ranks], Any]) -> RankAnswer:
        """Meet the other ranks at the address, and make the object that answers."""
        return self._service.start(partial(self._meet, meeting, address), make)

    def call(self, message: bytes) -> RankAnswer:
        """Answer a pickled `RankCall`."""
        return self._service.call(message)

    def _meet(self, meeting: Meeting, address: tuple[str, int]) -> Ranks:
        interface = _interface(ray.util.get_node_ip_address())
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        store = self._store or self._reached(meeting, address)
        return join(store, self._rank, meeting.size, meeting.replicas, meeting.device, meeting.limit)

    def _reached(self, meeting: Meeting, address: tuple[str, int]) -> TCPStore:
        try:
            return TCPStore(*address, meeting.size, wait_for_workers=False, timeout=timedelta(seconds=_MEETING))
        except RuntimeError as error:
            host, port = address
            raise RankError(
                f"learner rank {self._rank} on {ray.util.get_node_ip_address()} cannot reach the first one at "
                f"{host}:{port}; let nodes reach each other's ports ({error})"
            ) from error


def _interface(address: str) -> str:
    """Return the name of the network interface that has the address."""
    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if any(each.address == address for each in own)), "")


class RankActors(CalledRanks["_Rank"]):
    """Starts the actors, one at each place.

    places: options of each. make: see `RankSetup`. Raises as `CalledRanks` does.
    """

    def __init__(
        self,
        make: Callable[[Ranks], Any],
        places: Sequence[Mapping[str, Any]],
        *,
        replicas: int = 1,
        device: str = "cpu",
        limit: float = 600.0,
    ) -> None:
        super().__init__()
        self._ranks = [_Rank(number, options) for number, options in enumerate(places)]
        meeting = Meeting(len(places), replicas, device, limit)
        try:
            address = self._ranks[0].open_store(meeting.size)
            for rank in self._ranks:
                rank.pending = rank.actor.start.remote(meeting, address, make)
            self._answers()
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End the actors. Idempotent."""
        self.over = self.over or "the ranks were closed"
        self._end()

    def _send(self, messages: Sequence[bytes]) -> None:
        stored = {id(message): ray.put(message) for message in messages}  # once, if all get the same
        for rank, message in zip(self._ranks, messages, strict=True):
            rank.pending = rank.actor.call.remote(stored[id(message)])

    def _ready(self, waiting: Sequence[_Rank], timeout: float | None) -> Sequence[_Rank]:
        ranks = {rank.pending: rank for rank in waiting}
        ready, _ = ray.wait(list(ranks), timeout=timeout, fetch_local=False)
        return [ranks[reference] for reference in ready]

    def _end(self) -> None:
        for rank in self._ranks:
            rank.kill()


class _Rank:
    """One actor, and the answer that is awaited of it."""

    def __init__(self, number: int, options: Mapping[str, Any]) -> None:
        self._number = number
        self.actor = ray.remote(RankActor).options(max_restarts=0, max_task_retries=0, **options).remote(number)
        self.pending: Any = None

    def open_store(self, size: int) -> tuple[str, int]:
        try:
            address: tuple[str, int] = ray.get(self.actor.open_store.remote(size))
            return address
        except RayError as error:
            raise RankError(self._ending(error)) from error

    def answer(self) -> RankAnswer:
        """Return what it answers, as of now: clocks of nodes differ. If it has ended, the answer is an error."""
        try:
            answer: RankAnswer = ray.get(self.pending)
        except RayError as error:
            ended = isinstance(error, RayActorError)
            return RankAnswer(error=RankError(self._ending(error)), ended=ended)
        return replace(answer, at=time.monotonic())

    def kill(self) -> None:
        ray.kill(self.actor, no_restart=True)

    def _ending(self, error: RayError) -> str:
        return f"learner rank {self._number} ended: {error}"


def make_trainer(reservation: Reservation, spec: TrainerSpec) -> Trainer:
    """Return a trainer whose ranks are actors; it takes turns with engines beside it.

    Raises what making a trainer raises, and RankError.
    """
    section = spec.placement
    group = RankGroup(
        RankActors(
            partial(make_rank_trainer, spec),
            [reservation.options(bundle) for bundle in reservation.of("learner rank")],
            replicas=section.replicas,
            device=section.device,
        )
    )
    colocated = any(bundle.beside is not None for bundle in reservation.bundles)
    return ColocatedTrainer(group) if colocated else group
