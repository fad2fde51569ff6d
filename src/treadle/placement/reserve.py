"""Reserving everything that a run needs of a cluster at once, before anything is loaded.

An actor without resources waits for ever without a word. So none is made outside of one placement group, and that is
either there in time or an error that names the process and what it lacks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from treadle.core.errors import PlacementError
from treadle.orchestration.config import PlacementConfig

Role = Literal["learner rank", "engine", "rollout worker"]
Resources = Mapping[str, float]

_WAIT = 30.0  # seconds for resources that others hold
_SURE = 2.0  # seconds for which Ray must find a group infeasible: nodes may just be joining


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one process needs, on one node: `Bundle("learner rank", 1, {"CPU": 4, "GPU": 1})`.

    beside: the number of the rank whose place it shares, if it does.
    """

    role: Role
    number: int
    resources: Resources
    beside: int | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.number}"


def bundles_of(config: PlacementConfig) -> list[Bundle]:
    """Return what a run needs: learner ranks first, then engines, then rollout workers."""
    learner, engines, rollout = config.learner, config.engines, config.rollout
    gpus = (1.0 if learner.device == "cuda" else 0.0), float(engines.gpus)
    if config.colocate:
        gpus = gpus[0] / 2, gpus[0] / 2
    of_rank, of_engine = ({"CPU": 1.0} | ({"GPU": share} if share else {}) for share in gpus)
    return [
        *(Bundle("learner rank", number, of_rank) for number in range(learner.ranks)),
        *(Bundle("engine", n, of_engine, beside=n if config.colocate else None) for n in range(engines.count)),
        *(Bundle("rollout worker", number, {"CPU": 1.0}) for number in range(rollout.workers)),
    ]


def places_of(bundles: Sequence[Bundle]) -> list[list[Bundle]]:
    """Return the bundles of each place: those that share one are a rank and the engine beside it."""
    alone = [bundle for bundle in bundles if bundle.beside is None]
    return [[own, *(b for b in bundles if own.role == "learner rank" and b.beside == own.number)] for own in alone]


class Reservation:
    """Resources held for each bundle. Processes are started with the `options` of theirs."""

    def __init__(self, group: Any, bundles: Sequence[Bundle]) -> None:
        self._group, self.bundles = group, bundles

    def options(self, bundle: Bundle) -> dict[str, Any]:
        """Return the options of a Ray actor or task that takes the bundle's place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        [index] = [number for number, place in enumerate(places_of(self.bundles)) if bundle in place]
        return {
            "num_cpus": bundle.resources.get("CPU", 0),
            "num_gpus": bundle.resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        }

    def of(self, role: Role) -> list[Bundle]:
        """Return the bundles of a role, by number."""
        return [bundle for bundle in self.bundles if bundle.role == role]


@contextmanager
def reserve(bundles: Sequence[Bundle], wait: float | None) -> Iterator[Reservation]:
    """Hold the bundles within. wait: see `PlacementConfig`. Raises PlacementError."""
    from ray.util.placement_group import placement_group, remove_placement_group

    wanted = [sum((Counter(bundle.resources) for bundle in place), Counter()) for place in places_of(bundles)]
    group = placement_group([dict(resources) for resources in wanted], strategy="PACK")
    try:
        _wait_for(group, bundles, wait)
        yield Reservation(group, bundles)
    finally:
        remove_placement_group(group)


def _wait_for(group: Any, bundles: Sequence[Bundle], wait: float | None) -> None:
    """Wait until the group is placed. Raises PlacementError that names what is missing."""
    import ray
    from ray.util.placement_group import placement_group_table

    began = feasible = time.monotonic()
    limit = _WAIT if wait is None else wait
    while not group.wait(0.25):
        now = time.monotonic()
        if placement_group_table(group)["stats"]["scheduling_state"] != "INFEASIBLE":
            feasible = now
        elif wait is None and now - feasible > _SURE:
            raise PlacementError(
                f"{shortage(bundles, _nodes())}; lower `placement`, add nodes, or set placement.wait for a cluster "
                "that grows on demand"
            )
        if now - began > limit:
            needs, free = sum((Counter(bundle.resources) for bundle in bundles), Counter()), ray.available_resources()
            held = f"the run needs {_amounts(needs, needs)}, and {_amounts(free, needs)} of the cluster are free"
            raise PlacementError(
                f"after {limit:g} s {shortage(bundles, _nodes()) or held}; wait until others have ended, lower "
                "`placement`, or raise placement.wait"
            )


def shortage(bundles: Sequence[Bundle], nodes: Mapping[str, Resources]) -> str:
    """Return what the first bundle lacks for which no node has room beside those before it; "" if all have room."""
    free = {node: dict(resources) for node, resources in nodes.items()}
    for bundle in bundles:
        needs = bundle.resources
        fits = [node for node in free.values() if all(node.get(name, 0) >= amount for name, amount in needs.items())]
        if not fits:
            rest = "; ".join(f"{node}: {_amounts(resources, needs)}" for node, resources in free.items())
            beside = f" beside the {len(bundles[: bundles.index(bundle)])} before it" if bundle != bundles[0] else ""
            return f"{bundle} needs {_amounts(needs, needs)}, and no node has that{beside} ({rest or 'there are none'})"
        for name, amount in needs.items():
            fits[0][name] -= amount
    return ""


def _amounts(resources: Resources, names: Resources) -> str:
    """`1 CPU, 0 GPU`."""
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def _nodes() -> dict[str, Resources]:
    """Address and resources of each node that is alive."""
    import ray

    return {f"{node['NodeManagerAddress']}": node["Resources"] for node in ray.nodes() if node["Alive"]}
