"""Reserving everything that a run needs from a cluster together, before anything is loaded.

An actor without resources would wait forever, silently. So none is made outside one placement group, which is either
ready in time or an error that names the process and its missing resource.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import treadle
from treadle.core.errors import ConfigError, PlacementError
from treadle.loop.config import PlacementConfig
from treadle.rollout.config import GatewayConfig, listen

Role = Literal["learner rank", "engine", "rollout worker"]
Resources = Mapping[str, float]

_WAIT = 30.0  # seconds to wait for resources held by others
_SURE = 2.0  # seconds that Ray must report a group as infeasible, as nodes may be joining
_LIMIT = 120.0  # seconds for all places to answer
_COMPUTES = ("torch", "transformers")  # packages that rollout workers do not need


@dataclass(frozen=True, slots=True)
class Bundle:
    """One process's needs, on one node: `Bundle("engine", 1, {"CPU": 4}, beside=1)` shares the place of rank 1."""

    role: Role
    number: int
    resources: Resources
    beside: int | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.number}"


def bundles_of(config: PlacementConfig, device: str = "cpu") -> list[Bundle]:
    """Return a run's needs: learner ranks first, then engines, then rollout workers. device: device of each rank."""
    learner, engines, rollout = config.learner, config.engines, config.rollout
    gpus = (1.0 if device == "cuda" else 0.0), float(engines.gpus)
    if config.colocate:
        gpus = gpus[0] / 2, gpus[0] / 2
    of_rank, of_engine = ({"CPU": 1.0} | ({"GPU": share} if share else {}) for share in gpus)
    return [
        *(Bundle("learner rank", number, of_rank) for number in range(learner.ranks)),
        *(Bundle("engine", n, of_engine, beside=n if config.colocate else None) for n in range(engines.count)),
        *(Bundle("rollout worker", number, {"CPU": 1.0}) for number in range(rollout.workers)),
    ]


def places_of(bundles: Sequence[Bundle]) -> list[list[Bundle]]:
    alone = [bundle for bundle in bundles if bundle.beside is None]
    return [[own, *(b for b in bundles if own.role == "learner rank" and b.beside == own.number)] for own in alone]


class Reservation:
    """Resources held for each bundle. Processes are started with their bundle's `options`."""

    def __init__(self, group: Any, bundles: Sequence[Bundle]) -> None:
        self._group, self.bundles = group, bundles

    def options(self, bundle: Bundle) -> dict[str, Any]:
        """Return the options for a Ray actor or task in the bundle's place."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        [index] = [number for number, place in enumerate(places_of(self.bundles)) if bundle in place]
        return {
            "num_cpus": bundle.resources.get("CPU", 0),
            "num_gpus": bundle.resources.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
        }

    def of(self, role: Role) -> list[Bundle]:
        return [bundle for bundle in self.bundles if bundle.role == role]


@contextmanager
def reserve(bundles: Sequence[Bundle], wait: float | None) -> Iterator[Reservation]:
    """Hold the bundles inside the block. wait: see `PlacementConfig`. Raises PlacementError."""
    from ray.util.placement_group import placement_group, remove_placement_group

    wanted = [sum((Counter(bundle.resources) for bundle in place), Counter()) for place in places_of(bundles)]
    group = placement_group([dict(resources) for resources in wanted], strategy="PACK")
    try:
        _wait_for(group, bundles, wait)
        yield Reservation(group, bundles)
    finally:
        remove_placement_group(group)


def _wait_for(group: Any, bundles: Sequence[Bundle], wait: float | None) -> None:
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
    """Return the missing resources of the first bundle that fits no node beside the earlier ones; "" if all fit."""
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
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def _nodes() -> dict[str, Resources]:
    import ray

    return {f"{node['NodeManagerAddress']}": node["Resources"] for node in ray.nodes() if node["Alive"]}


@dataclass(frozen=True, slots=True)
class Place:
    """Properties of a bundle's place. versions: of software that must be equal everywhere; "" if missing.

    sees_directory: whether the directory of runs is the shared one. gpus: number visible to torch; None if none is
    needed.
    gateway: why the gateway cannot listen there; "" if it can, or is not needed.
    """

    node: str
    versions: dict[str, str]
    sees_directory: bool
    gpus: int | None
    gateway: str = ""


def versions() -> dict[str, str]:
    installed = {"Python": platform.python_version(), "treadle": treadle.__version__}
    for package in ("ray", *_COMPUTES):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = ""
    return installed


def look(nonce: Path, needs_gpu: bool, gateway: GatewayConfig | None) -> Place:
    """Return this process's view of its place. nonce: a file in the run's directory that contains its own name."""
    import ray

    sees = nonce.exists() and nonce.read_text() == nonce.name
    gpus, problem = None, ""
    if needs_gpu:
        import torch

        gpus = torch.cuda.device_count()
    if gateway is not None:
        try:
            listen(gateway).close()
        except ConfigError as error:
            problem = str(error)
    return Place(ray.util.get_node_ip_address(), versions(), sees, gpus, problem)


def problems(bundle: Bundle, place: Place, here: dict[str, str], directory: Path) -> list[str]:
    where = f"{bundle} on {place.node}"
    lines = [
        f"{where}: {name} is {place.versions[name] or 'missing'}, here it is {wanted}; install the same version there"
        for name, wanted in here.items()
        if place.versions[name] != wanted and not (bundle.role == "rollout worker" and name in _COMPUTES)
    ]
    if not place.sees_directory:
        lines.append(f"{where}: does not see {directory}; put runs where all nodes see them (--runs)")
    if place.gateway:
        lines.append(f"{where}: {place.gateway}")
    gpus = bundle.resources.get("GPU", 0)
    if place.gpus is not None and place.gpus < gpus:
        lines.append(
            f"{where}: torch {place.versions['torch']} sees {place.gpus} of {gpus:g} GPUs; install its CUDA build"
        )
    return lines


def check_places(reservation: Reservation, directory: Path, gateway: GatewayConfig) -> list[Place]:
    """Return each bundle's place. directory: parent of runs. Raises PlacementError for problems."""
    import ray

    directory.mkdir(parents=True, exist_ok=True)
    nonce = directory.absolute() / f".treadle-{uuid4().hex}"
    nonce.write_text(nonce.name)
    try:
        places: list[Place] = ray.get(
            [
                ray.remote(look)
                .options(**reservation.options(bundle), max_retries=0)
                .remote(nonce, "GPU" in bundle.resources, gateway if bundle.role == "rollout worker" else None)
                for bundle in reservation.bundles
            ],
            timeout=_LIMIT,
        )
    except ray.exceptions.RayError as error:
        raise PlacementError(
            f"a place of the run cannot be used, or did not answer within {_LIMIT:g} s; see Ray's logs on the nodes, "
            f"and whether treadle is installed there: {error}"
        ) from error
    finally:
        nonce.unlink()
    here, pairs = versions(), list(zip(reservation.bundles, places, strict=True))
    lines = [line for bundle, place in pairs for line in problems(bundle, place, here, directory)]
    workers = Counter(place.node for bundle, place in pairs if bundle.role == "rollout worker")
    lines += [
        f"{number} rollout workers on {node} cannot all listen on rollout.gateway.port={gateway.port}; set it to "
        "0, for any free one"
        for node, number in workers.items()
        if number > 1 and gateway.port
    ]
    if lines:
        raise PlacementError("\n".join(lines))
    return places
