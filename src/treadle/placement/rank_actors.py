"""`RankActors`: learner ranks that are Ray actors. With `RankGroup` they are a `Trainer`.

    RankGroup -> RankActors.call --(actor calls, one to each)--> RankActor -> RankTrainer

Ranks wait for each other in collectives. One that fails alone leaves the others waiting, and cannot be replaced: all of
them are then ended at once, and its own error is what the caller gets.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from inspect import isawaitable
from typing import Any

import psutil
import ray
import torch
from ray.exceptions import RayError
from torch._C._distributed_c10d import TCPStore
from transformers.utils import logging as hf_logging

from treadle.core.errors import PlacementError, RankError, TreadleError, WorkerLost
from treadle.core.trainer import Trainer
from treadle.placement.actors import Actor, Placed
from treadle.placement.reserve import Reservation
from treadle.placement.turns import ColocatedTrainer
from treadle.training.config import TrainerSpec
from treadle.training.rank_group import RankGroup, make_rank_trainer
from treadle.training.ranks import Ranks
from treadle.training.sharding import join

_MEETING = 60.0  # seconds for a rank to reach the first one
_GRACE = 2.0  # seconds for the other ranks to fail, too, before all are ended


class RankActor(Placed):
    """One rank, in a process of its own."""

    def __init__(self, rank: int) -> None:
        hf_logging.disable_progress_bar()  # the output is no terminal
        self._rank = rank
        self._store: TCPStore | None = None
        self._served: Any = None

    async def open_store(self, size: int) -> tuple[str, int]:
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

    async def start(
        self, size: int, address: tuple[str, int], make: Callable[[Ranks], Any], *more: Any
    ) -> list[tuple[type[Warning], str]]:
        """Meet the other ranks, make the object that answers calls; return its warnings. more: see `sharding.join`."""
        with warnings.catch_warnings(record=True) as caught:
            self._served = make(self._meet(size, address, *more))
        return [(warning.category, str(warning.message)) for warning in caught]

    async def answer(self, name: str, arguments: tuple[Any, ...], threads: int, deterministic: bool) -> Any:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        answer = getattr(self._served, name)(*arguments)
        return await answer if isawaitable(answer) else answer

    def _meet(self, size: int, address: tuple[str, int], replicas: int, device: str, limit: float) -> Ranks:
        here, places = ray.util.get_node_ip_address(), psutil.net_if_addrs().items()
        interface = next((name for name, addresses in places if any(each.address == here for each in addresses)), "")
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


class RankActors:
    """Starts the actors, one at each place (`rank_group.Calls`).

    places: options of each. make: returns the object that answers, called once the ranks have met. replicas, device,
    limit: see `sharding.join`. over: why no call is answered any more. busy: a call waits for its answers, perhaps on
    another thread.

    Raises the error of the rank that failed first: its own if it is Treadle's, else a `RankError`.
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
        self.over: str | None = None
        self.busy = False
        self._actors = [Actor(f"learner rank {n}", RankActor, options, n) for n, options in enumerate(places)]
        try:
            for actor, (process, log) in zip(self._actors, self._all("process"), strict=True):
                actor.process, actor.log = process, log
            [address] = self._answers([self._actors[0].handle.open_store.remote(len(places))])
            warned, *_ = self._all("start", len(places), address, make, replicas, device, limit)
        except BaseException:
            self.kill()
            raise
        for category, text in warned:
            warnings.warn(text, category, stacklevel=2)

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Return every rank's answer. All ranks failing with Treadle's own errors leave the ranks as they are."""
        if self.over is not None:
            raise RankError(self.over)
        self.busy = True
        try:
            stored = ray.put(arguments)  # once for all
            return self._all(
                "answer", name, stored, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
            )
        except TreadleError:
            raise
        except BaseException:  # interrupted: the ranks are in the middle of it
            self.over = f"the call {name!r} to the ranks was interrupted"
            self.kill()
            raise
        finally:
            self.busy = False

    def kill(self) -> None:
        """End the ranks at once, also while a call waits for them, which then fails."""
        for actor in self._actors:
            actor.kill()

    def close(self) -> None:
        self.over = self.over or "the ranks were closed"
        self.kill()

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self._answers([getattr(actor.handle, method).remote(*arguments) for actor in self._actors])

    def _answers(self, answers: Sequence[Any]) -> list[Any]:
        """Return the answers of the first ranks; after a first failure, wait for `_GRACE` seconds at most."""
        waiting, errors = list(answers), list[TreadleError]()
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=_GRACE if errors else None, fetch_local=False)
            if not ready:
                break
            for answer in ready:
                try:
                    ray.get(answer)
                except RayError as error:
                    errors.append(_translated(self._actors[answers.index(answer)], error))
        if not errors:
            return list(ray.get(list(answers)))
        # a rank that died makes the others fail, perhaps before its end is seen
        first = min(errors, key=lambda error: not isinstance(error.__cause__, WorkerLost))
        if len(errors) < len(answers) or any(isinstance(error, RankError) for error in errors):
            self.over = str(first)
            self.kill()
        raise first


def _translated(actor: Actor, error: RayError) -> TreadleError:
    """Return a Treadle error that the rank raised, or a RankError caused by one of placement."""
    translated = actor.translate(error)
    if not isinstance(translated, PlacementError):
        return translated
    failure = RankError(str(translated))
    failure.__cause__ = translated
    return failure


def make_trainer(reservation: Reservation, spec: TrainerSpec) -> Trainer:
    """Return a trainer whose ranks are actors; it takes turns with engines beside it. Raises RankError."""
    section = spec.placement
    ranks = RankActors(
        partial(make_rank_trainer, spec),
        [reservation.options(bundle) for bundle in reservation.of("learner rank")],
        replicas=section.replicas,
        device=spec.device,
    )
    colocated = any(bundle.beside is not None for bundle in reservation.bundles)
    return ColocatedTrainer(ranks) if colocated else RankGroup(ranks)
