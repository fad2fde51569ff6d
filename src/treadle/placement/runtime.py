"""`open_ray`: a run's parts on a Ray cluster, in order: connect, reserve everything, check every place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from treadle.core.errors import PlacementError
from treadle.orchestration.config import RunConfig
from treadle.orchestration.runtime import Runtime
from treadle.placement.checks import Place, check_places
from treadle.placement.cluster import connected
from treadle.placement.reserve import Reservation, bundles_of, reserve


@dataclass(frozen=True, slots=True)
class Placement:
    """A reservation, and what was found at the place of each bundle."""

    reservation: Reservation
    places: list[Place]

    def __str__(self) -> str:
        nodes = len({place.node for place in self.places})
        return f"{len(self.places)} processes on {nodes} node{'s' * (nodes > 1)}"


@contextmanager
def placed(config: RunConfig, directory: Path, log: Callable[[str], None]) -> Iterator[Placement]:
    """Hold what a run needs within, checked. directory: where runs are. Raises PlacementError."""
    section = config.placement
    bundles = bundles_of(section)
    with connected(section.address, bundles, log), reserve(bundles, section.wait) as reservation:
        placement = Placement(reservation, check_places(reservation, directory, config.rollout.gateway))
        check_transfer(config, placement)
        yield placement


def check_transfer(config: RunConfig, placement: Placement) -> None:
    """Raise PlacementError for vLLM servers that are on other nodes than the first rank, which hands them a file."""
    if config.engine.kind != "vllm" or config.engine.vllm.transfer == "collective":
        return
    nodes = {
        str(bundle): place.node
        for bundle, place in zip(placement.reservation.bundles, placement.places, strict=True)
        if bundle.role == "engine" or str(bundle) == "learner rank 0"
    }
    if len(set(nodes.values())) > 1:
        where = ", ".join(f"{name} on {node}" for name, node in nodes.items())
        raise PlacementError(
            f"engine.options.transfer 'shared_memory' hands weights over on one node, and there are {where}; set "
            "engine.options.transfer=collective"
        )


@contextmanager
def open_ray(config: RunConfig, path: Path, log: Callable[[str], None]) -> Iterator[Runtime]:
    """Yield what makes a run's parts on a cluster, whose resources it holds; see `OpenRuntime`."""
    with placed(config, path.absolute().parent, log) as placement:
        log(f"placement: {placement}")
        from treadle.placement.engine_actors import open_engines  # these import ray, and what computes
        from treadle.placement.rank_actors import make_trainer
        from treadle.placement.rollout_actors import open_workers

        reservation = placement.reservation
        runtime = Runtime(
            make_trainer=partial(make_trainer, reservation), open_engine=partial(open_engines, config, reservation)
        )
        if config.placement.rollout.workers:
            runtime = replace(runtime, open_rollouts=partial(open_workers, reservation))
        yield runtime
