"""A node of a given cluster is lost in the middle of a run: it goes on, on the others."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.placement.conftest import SharedCluster
from tests.runs import check_finished, updates
from tests.until import wait_until
from tests.worlds import Quiet, tiny
from treadle.api.train import train_run
from treadle.plan.inputs import load_inputs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
SIZE: dict[str, Any] = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
SETTINGS = (
    "placement.kind=ray",
    "placement.wait=120",
    "placement.learner.ranks=2",
    "placement.engines.count=2",
    "training.threads=1",
    "orchestration.updates=8",
    "data.train.options.seconds=0.1",
)


@pytest.fixture
def nodes(shared_cluster: SharedCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster on this machine: three nodes of two CPUs each for four processes, beside the first one."""
    shared_cluster.close()
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**SIZE, "num_cpus": 0})
    for kind in ("a", "b", "c"):
        cluster.add_node(**SIZE, num_cpus=2, resources={kind: 1})
    yield cluster
    cluster.shutdown()


def has(node: Any, title: str) -> bool:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return any(" ".join(child.cmdline()).startswith(f"ray::{title}") for child in raylet.children())


@pytest.mark.parametrize("title", ["RankActor", "EngineActor"])
def test_a_run_goes_on_when_a_node_is_lost(nodes: Any, tmp_path: Path, title: str) -> None:
    config = tiny(*SETTINGS, f"placement.address={nodes.address}")
    run, progress = tmp_path / "run", Quiet()

    def lose_one() -> None:
        wait_until(lambda: (run / "metrics.jsonl").is_file() and len(updates(run)) >= 3)
        nodes.remove_node(next(node for node in nodes.worker_nodes if has(node, title)), allow_graceful=False)

    thread = threading.Thread(target=lose_one, daemon=True)
    thread.start()
    summary = train_run(config, load_inputs(config), run, progress)
    thread.join(0)
    assert not thread.is_alive() and not summary["stopped_early"]
    print(*progress.lines, sep="\n")
    expected = "continuing from the checkpoint" if title == "RankActor" else "restarting it"
    assert any(expected in line for line in progress.lines), progress.lines
    check_finished(run)
