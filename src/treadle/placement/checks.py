"""Checks made at each place of a reservation before anything is loaded there: one line for each problem."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import treadle
from treadle.core.errors import ConfigError, PlacementError
from treadle.placement.reserve import Bundle, Reservation
from treadle.rollout.config import GatewayConfig, listen

_LIMIT = 120.0  # seconds for all places to answer
_COMPUTES = ("torch", "transformers")  # packages that rollout workers do without


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bundle is. versions: of what must be equal everywhere; "" for what is missing.

    sees_directory: whether the directory of runs is the same one. gpus: that torch sees; None if none is needed.
    gateway: why the gateway cannot listen there; "" if it can, or is not needed.
    """

    node: str
    versions: dict[str, str]
    sees_directory: bool
    gpus: int | None
    gateway: str = ""


def versions() -> dict[str, str]:
    """Return the versions that must be equal everywhere."""
    installed = {"Python": platform.python_version(), "treadle": treadle.__version__}
    for package in ("ray", *_COMPUTES):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = ""
    return installed


def look(nonce: Path, needs_gpu: bool, gateway: GatewayConfig | None) -> Place:
    """Return what this process sees.

    nonce: a file of the run's directory that holds its own name. gateway: which is to listen here.
    """
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
    """Return what is wrong at a place. here: versions of this process."""
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
    """Return what is at each bundle's place. directory: where runs are. gateway: of each rollout worker.

    Raises PlacementError for problems.
    """
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
