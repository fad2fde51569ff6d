"""What a run needs of a cluster, and what is said where it cannot have it."""

import time

import pytest

from tests.until import CEILING
from treadle.core.config import build
from treadle.core.errors import ConfigError, PlacementError
from treadle.loop.config import PlacementConfig
from treadle.placement.reserve import Bundle, bundles_of, reserve, shortage
from treadle.placement.runtime import connected

CPU = {"CPU": 1.0}


def test_what_a_run_needs() -> None:
    config = build(PlacementConfig, {"kind": "ray", "learner": {"ranks": 2}, "engines": {"gpus": 2}})
    assert bundles_of(config, "cuda") == [
        Bundle("learner rank", 0, {"CPU": 1, "GPU": 1}),
        Bundle("learner rank", 1, {"CPU": 1, "GPU": 1}),
        Bundle("engine", 0, {"CPU": 1, "GPU": 2}),
    ]


def test_only_a_cluster_has_several_engines() -> None:
    with pytest.raises(ConfigError, match=r"placement\.engines is set, but .* 'embedded' has no cluster; leave it out"):
        build(PlacementConfig, {"engines": {"count": 2}})


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({"a": {"CPU": 2}}, ""),
        ({"a": {"CPU": 1}, "b": {"CPU": 1}}, ""),
        ({}, "engine 0 needs 1 CPU, and no node has that (there are none)"),
        ({"a": {}}, "engine 0 needs 1 CPU, and no node has that (a: 0 CPU)"),
        ({"a": {"CPU": 1}}, "engine 1 needs 1 CPU, and no node has that beside the 1 before it (a: 0 CPU)"),
    ],
)
def test_the_first_shortage_is_named(nodes: dict[str, dict[str, float]], expected: str) -> None:
    assert shortage([Bundle("engine", number, CPU) for number in range(2)], nodes) == expected


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "127.0.0.1:9",
            r"'127\.0\.0\.1:9': no answer from there: .*refused; start the cluster with `ray start --head`",
        ),
        ("auto", "'auto' is not an address and port; write it as 10.0.0.1:6379"),
        ("10.0.0.1:", "is not an address and port"),
    ],
)
def test_an_address_without_a_cluster_is_told_at_once(address: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message), connected(address, [], print):
        pass


def test_a_gpu_that_this_machine_lacks_is_told_before_a_cluster_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    ranks = [Bundle("learner rank", number, {"CPU": 64, "GPU": 1}) for number in range(2)]
    told = r"^learner rank 1 needs 64 CPU, 1 GPU, .* beside the 1 before it \(this machine: inf CPU, 0 GPU\); lower"
    with pytest.raises(PlacementError, match=told), connected(None, ranks, print):
        pass


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
class TestOnACluster:
    def test_what_no_node_has_is_told_at_once(self, cluster: None) -> None:
        with (
            pytest.raises(PlacementError, match=r"engine 0 needs 1 CPU, 1 GPU, and no node has that \(127\.0\.0\.1: "),
            reserve([Bundle("engine", 0, {"CPU": 1, "GPU": 1})], None),
        ):
            pass

    def test_what_others_hold_is_waited_for(self, cluster: None) -> None:
        many = [Bundle("engine", number, CPU) for number in range(6)]
        with reserve(many, None):
            before = time.monotonic()
            with (
                pytest.raises(
                    PlacementError, match=r"after 1 s the run needs 1 CPU, and 0 CPU of the cluster are free; wait"
                ),
                reserve(many[:1], 1),
            ):
                pass
            assert time.monotonic() - before >= 1
        with reserve(many, CEILING):
            pass
