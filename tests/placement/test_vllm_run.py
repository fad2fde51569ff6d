"""A run whose learner is two ranks and whose engines are two vLLM servers, all of them on a cluster."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.engines.vllm.conftest import SIZES, TOKENIZER, python_with_vllm, sized
from tests.placement.conftest import memory_of_test, of_ray, of_test, start_driver, wait_for_updates
from tests.runs import check_finished, query, start, updates
from tests.until import wait_until
from tests.worlds import Quiet
from treadle.engines.staging import temporary_directory
from treadle.training.checkpoint import export_model
from treadle.workers.reaper import SHARED

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]


def settings() -> list[str]:
    return [
        *(f"model.build.{name}={value}" for name, value in {**SIZES, "num_hidden_layers": 2}.items()),
        "placement.kind=ray",
        "placement.learner.ranks=2",
        "placement.engines.count=2",
        "placement.rollout.workers=2",
        "training.threads=1",
        "engine.kind=vllm",
        "engine.batch=16",
        f"engine.options.python={python_with_vllm()}",
    ]


@pytest.mark.parametrize("address", ["a_cluster_of_its_own", "a_given_cluster"])
def test_nothing_is_left_of_servers_whose_run_is_killed(
    tmp_path: Path, request: pytest.FixtureRequest, address: str
) -> None:
    mark, run = uuid4().hex, tmp_path / "run"
    placed = request.getfixturevalue(address)(mark)
    before, cluster = of_ray(), of_test(mark)
    driver = start_driver(run, mark, *settings(), *placed, "orchestration.updates=1000")
    wait_for_updates(driver, run, 2)
    left = memory_of_test(mark)
    assert len(of_test(mark)) > len(cluster) + 8 and left
    driver.kill()
    driver.wait()
    wait_until(lambda: all(each in cluster or each.startswith("ray::IDLE") for each in of_test(mark)))
    temporary_directory(SHARED).rmdir()  # the next process that publishes removes weights of killed ones
    wait_until(lambda: not of_ray() - before and not any(path.exists() for path in left))


@pytest.fixture
def a_cluster_of_its_own() -> Callable[[str], list[str]]:
    return lambda mark: []


@pytest.fixture
def a_given_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[str]]]:
    from ray.cluster_utils import Cluster

    clusters = []

    def given(mark: str) -> list[str]:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
        monkeypatch.setenv("TREADLE_TEST", mark)
        options = {"num_cpus": 8, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        clusters.append(Cluster(initialize_head=True, head_node_args=options))
        return [f"placement.address={clusters[0].address}"]

    yield given
    for cluster in clusters:
        cluster.shutdown()


@pytest.mark.parametrize(
    ("lora", "asked"), [("null", "POST /update_weights"), ("{rank: 4}", "POST /v1/load_lora_adapter")]
)
def test_two_servers_are_fed_from_two_ranks(tmp_path: Path, lora: str, asked: str) -> None:
    run, base, progress = tmp_path / "run", tmp_path / "base", Quiet()
    export_model(base, sized("qwen3", 0), TOKENIZER)
    model = ["model.build=null", "model.tokenizer=null", f"model.path={base}", f"training.lora={lora}"]
    start(run, *settings(), *model, "orchestration.updates=3", progress=progress)
    check_finished(run)  # what was sampled has the learner's log-probabilities to 1e-4
    versions = query(run, "SELECT DISTINCT oldest_version FROM trajectories ORDER BY 1")
    assert [row["oldest_version"] for row in versions] == [0, 1, 2, 3]
    for number in range(2):
        said = (run / f"vllm-{number}.log").read_text()
        assert said.count(asked) >= 3 and "POST /inference/v1/generate" in said
    print(json.dumps([row["logprob_gap_max"] for row in updates(run)]), *progress.lines, sep="\n")
    assert all(row["logprob_gap_max"] <= 1e-4 for row in updates(run))
    assert not list(run.glob("treadle_weights*"))
