"""`open_ray`: a run's parts on a Ray cluster, in order: connect, reserve, check every place."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from treadle.core.errors import PlacementError
from treadle.core.processes import environment
from treadle.engines.staging import is_running
from treadle.loop.config import RuntimePlan
from treadle.loop.runtime import Runtime
from treadle.placement.reserve import Bundle, Place, Reservation, bundles_of, check_places, reserve, shortage

_CONNECTING = 5.0  # seconds
_OBJECT_STORE = 200 * 2**20  # bytes; any excess is spilled to disk
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@dataclass(frozen=True, slots=True)
class Placement:
    """A reservation, and the properties of each bundle's place."""

    reservation: Reservation
    places: list[Place]

    def __str__(self) -> str:
        nodes = len({place.node for place in self.places})
        return f"{len(self.places)} processes on {nodes} node{'s' * (nodes > 1)}"


@contextmanager
def placed(plan: RuntimePlan, directory: Path, log: Callable[[str], None]) -> Iterator[Placement]:
    """Reserve and check a run's resources inside the block. directory: parent of runs. Raises PlacementError."""
    section = plan.placement
    bundles = bundles_of(section, plan.device)
    with connected(section.address, bundles, log), reserve(bundles, section.wait) as reservation:
        placement = Placement(reservation, check_places(reservation, directory, plan.gateway))
        check_transfer(plan, placement)
        yield placement


def check_transfer(plan: RuntimePlan, placement: Placement) -> None:
    """Raise PlacementError for vLLM servers on other nodes than the first rank, which hands them a file."""
    if plan.engine.kind != "vllm" or plan.engine.vllm.transfer == "collective" or plan.adapters:
        # Adapters are in the run's directory, which all nodes see.
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
def open_ray(plan: RuntimePlan, path: Path, log: Callable[[str], None]) -> Iterator[Runtime]:
    """Yield factories of a run's parts on a cluster, holding its resources; see `OpenRuntime`."""
    with placed(plan, path.absolute().parent, log) as placement:
        log(f"placement: {placement}")
        from treadle.placement.engine_actors import open_engines  # these import ray and torch
        from treadle.placement.rank_actors import make_trainer
        from treadle.placement.rollout_actors import open_workers

        reservation = placement.reservation
        runtime = Runtime(
            make_trainer=partial(make_trainer, reservation), open_engine=partial(open_engines, plan, reservation)
        )
        if plan.placement.rollout.workers:
            runtime = replace(runtime, open_rollouts=partial(open_workers, reservation))
        yield runtime


_SETTINGS: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # By default Ray ends processes of the cluster when the machine runs short of memory, whichever program uses it.
    "RAY_memory_monitor_refresh_ms": "0",
    # Read when ray is imported. The default on macOS: every server binds the loopback interface.
    _LOOPBACK: "0",
    # Trajectories arrive with the answers (bytes): the object store would take the driver longer than a copy.
    "RAY_max_direct_call_object_size": str(4 << 20),
}


@contextmanager
def connected(address: str | None, bundles: Sequence[Bundle], log: Callable[[str], None]) -> Iterator[None]:
    """Stay connected to the cluster inside the block. Raises PlacementError.

    address: address of a running cluster; None to start one here, on the loopback interface, without dashboard and
    usage report, offering as many CPUs as the bundles need: on a local machine, processes take turns.
    """
    if address is None:
        with _local(bundles, log):
            yield
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise PlacementError(f"placement.address {address!r} is not an address and port; write it as 10.0.0.1:6379")
    # Ray itself would retry for minutes.
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECTING).close()
    except OSError as error:
        raise PlacementError(
            f"placement.address {address!r}: no answer from there: {error}; start the cluster with `ray start --head`, "
            "correct the address, or leave it out for a local cluster"
        ) from error
    import ray

    try:
        ray.init(address=address, **_common())
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PlacementError(
            f"placement.address {address!r}: no connection to a Ray cluster there: {error}; correct it, or leave it "
            "out for a local one; if it asks for a token, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "~/.ray/auth_token to the cluster's"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _local(bundles: Sequence[Bundle], log: Callable[[str], None]) -> Iterator[None]:
    if any(bundle.resources.get("GPU") for bundle in bundles):
        # The devices that ranks and engines will see.
        from torch.cuda import device_count

        if lacking := shortage(bundles, {"this machine": {"CPU": float("inf"), "GPU": device_count()}}):
            raise PlacementError(f"{lacking}; lower `placement`, or set placement.address to a cluster that has it")
    cores, wanted = os.cpu_count() or 1, int(sum(bundle.resources.get("CPU", 0) for bundle in bundles))
    if wanted > cores:
        log(f"placement wants {wanted} cores, and this machine has {cores}: processes take turns")
    if "ray" in sys.modules and os.environ.get(_LOOPBACK) != "0":
        log(f"ray was imported before: its cluster listens on all interfaces; set {_LOOPBACK}=0 to keep it on this one")
    folder = _folder()
    with environment(_SETTINGS):
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)  # it would log the token it created
        try:
            ray.init(
                address="local",
                num_cpus=max(cores, wanted),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE,
                _temp_dir=str(folder),
                **_common(),
            )
            yield
        finally:
            ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _common() -> dict[str, Any]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "runtime_env": {
            "env_vars": {
                "PYTHONPATH": path,
                "OMP_WAIT_POLICY": "PASSIVE",
                # Ray would kill children of an ending process, but not grandchildren; Treadle's end everything they
                # started.
                "RAY_kill_child_processes_on_worker_exit": "false",
            }
        },
    }


def _folder() -> Path:
    """Return a new directory for Ray's logs and sockets, limited to 107 bytes; removes those of killed processes."""
    parent = Path(tempfile.gettempdir()) / f"treadle-ray-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    for path in parent.iterdir():
        if path.name.isdigit() and not is_running(int(path.name)):
            shutil.rmtree(path, ignore_errors=True)
    folder = parent / str(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
