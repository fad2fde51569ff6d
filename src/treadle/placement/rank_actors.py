"""`RankActors`: learner ranks as Ray actors. With `RankGroup` they are a `Trainer`.

RankGroup -> RankActors.call --(actor calls, one to each)--> RankActor -> RankTrainer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import psutil
import ray

from treadle.core.trainer import Trainer
from treadle.placement.actors import Actor, Placed
from treadle.placement.reserve import Reservation
from treadle.placement.turns import ColocatedTrainer
from treadle.training.config import TrainerSpec
from treadle.training.rank_group import RankGroup, make_rank_trainer
from treadle.training.rank_processes import RankGang, RankService
from treadle.training.ranks import Ranks


class RankActor(Placed, RankService):
    """One rank, in a separate process."""

    def place(self) -> tuple[str, str]:
        here, names = ray.util.get_node_ip_address(), psutil.net_if_addrs().items()
        return here, next((name for name, addresses in names if any(each.address == here for each in addresses)), "")


class RankActors(RankGang[Actor]):
    """Learner ranks, one per place. places: options of each. See `RankProcesses`."""

    def __init__(
        self,
        make: Callable[[Ranks], Any],
        places: Sequence[Mapping[str, Any]],
        *,
        replicas: int = 1,
        device: str = "cpu",
        limit: float = 600.0,
    ) -> None:
        actors = [Actor(f"learner rank {n}", RankActor, options, n) for n, options in enumerate(places)]
        super().__init__(actors, ray.put, make, replicas, device, limit)


def make_trainer(reservation: Reservation, spec: TrainerSpec) -> Trainer:
    """Return a trainer with actors as ranks; it takes turns with colocated engines. Raises RankError."""
    section = spec.placement
    ranks = RankActors(
        partial(make_rank_trainer, spec),
        [reservation.options(bundle) for bundle in reservation.of("learner rank")],
        replicas=section.replicas,
        device=spec.device,
    )
    colocated = any(bundle.beside is not None for bundle in reservation.bundles)
    return ColocatedTrainer(ranks) if colocated else RankGroup(ranks)
