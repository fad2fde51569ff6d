"""What is checked at each place of a reservation before anything is loaded there: one line for each problem."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import treadle
from treadle.core.errors import ConfigError, PlacementError
from treadle.placement.reserve import Bundle, Reservation
from treadle.rollout.gateway.address import GatewayConfig, listen

_LIMIT = 120.0  # seconds for all places to answer
_COMPUTES = ("torch", "transformers")  # packages that rollout workers do without


@dataclass(frozen=True, slots=True)
class Place:
    """Describes where a bundle is. versions: of what must be equal everywhere; "" for what is missing.

    sees_directory: whether the run's directory is the same one. gpus: that torch sees; None if none is needed.
    gateway: why the gateway cannot listen there; "" if it can, or is not needed.
    """

    node: str
    versions: dict[str, str]
    sees_directory: bool
    gpus: int | None
    gateway: str = ""


def versions() -> dict[str, str]:
    """Return the versions that must be equal everywhere."""
    found = {"Python": platform.python_version(), "treadle": treadle.__version__}
    for package in ("ray", *_COMPUTES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def look(nonce: Path, needs_gpu: bool, gateway: GatewayConfig | None) -> Place:
    """Return what is found in this process.

    nonce: a file of the run's directory that holds its own name. gateway: which is to listen here.
    """
    import ray

    try:
        sees = nonce.read_text() == nonce.name
    except OSError:
        sees = False
    gpus = None
    if needs_gpu:
        import torch

        gpus = torch.cuda.device_count()
    return Place(ray.util.get_node_ip_address(), versions(), sees, gpus, "" if gateway is None else _unheard(gateway))


def _unheard(gateway: GatewayConfig) -> str:
    try:
        listen(gateway).close()
    except ConfigError as error:
        return str(error)
    return ""


def problems(bundle: Bundle, place: Place, here: dict[str, str], directory: Path) -> list[str]:
    """Return what is wrong at a place. here: versions of this process."""
    where = f"{bundle} on {place.node}"
    found = [
        f"{where}: {name} is {place.versions[name] or 'missing'}, here it is {wanted}; install the same version there"
        for name, wanted in here.items()
        if place.versions[name] != wanted and not (bundle.role == "rollout worker" and name in _COMPUTES)
    ]
    if not place.sees_directory:
        found.append(f"{where}: does not see {directory}; put runs where all nodes see them (--runs)")
    if place.gateway:
        found.append(f"{where}: {place.gateway}")
    wanted = bundle.resources.get("GPU", 0)
    if place.gpus is not None and place.gpus < wanted:
        found.append(
            f"{where}: torch {place.versions['torch']} sees {place.gpus} of {wanted:g} GPUs; install its CUDA build"
        )
    return found


def check_places(reservation: Reservation, directory: Path, gateway: GatewayConfig) -> list[Place]:
    """Return what is found at each bundle's place. directory: where runs are. gateway: of each rollout worker.

    Raises PlacementError for problems.
    """
    import ray

    with _nonce(directory) as nonce:
        task = ray.remote(look)
        asked = [
            task.options(**reservation.options(bundle), max_retries=0).remote(
                nonce, "GPU" in bundle.resources, gateway if bundle.role == "rollout worker" else None
            )
            for bundle in reservation.bundles
        ]
        try:
            places: Sequence[Place] = ray.get(asked, timeout=_LIMIT)
        except ray.exceptions.GetTimeoutError as error:
            raise PlacementError(
                f"not every place answered within {_LIMIT:g} s; see Ray's logs on the nodes, and whether treadle is "
                "installed there"
            ) from error
        except ray.exceptions.RayError as error:
            raise PlacementError(f"a place of the run cannot be used: {error}") from error
    here = versions()
    found = [
        problem
        for bundle, place in zip(reservation.bundles, places, strict=True)
        for problem in problems(bundle, place, here, directory)
    ]
    workers = Counter(p.node for b, p in zip(reservation.bundles, places, strict=True) if b.role == "rollout worker")
    found += [
        f"{number} rollout workers on {node} cannot all listen on rollout.gateway.port={gateway.port}; set it to "
        "0, for any free one"
        for node, number in workers.items()
        if number > 1 and gateway.port
    ]
    if found:
        raise PlacementError("\n".join(found))
    return list(places)


@contextmanager
def _nonce(directory: Path) -> Iterator[Path]:
    """A file that only this process can have written, for as long as others look for it."""
    directory.mkdir(parents=True, exist_ok=True)
    nonce = directory.absolute() / f".treadle-{uuid4().hex}"
    nonce.write_text(nonce.name)
    try:
        yield nonce
    finally:
        nonce.unlink()
