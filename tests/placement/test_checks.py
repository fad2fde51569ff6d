"""What is checked at each place before anything is loaded."""

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import tiny
from treadle.core.errors import PlacementError
from treadle.placement import reserve
from treadle.placement.reserve import Bundle, Place, Reservation, check_places, problems, versions
from treadle.placement.runtime import Placement, check_transfer
from treadle.rollout.config import GatewayConfig

HERE = {"Python": "3.11.7", "torch": "2.13.0"}
RANK = Bundle("learner rank", 1, {"CPU": 1, "GPU": 1})


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ((HERE, True, 1), ""),
        (({**HERE, "torch": "2.9.0"}, True, 1), "torch is 2.9.0, here it is 2.13.0; install the same version there"),
        (({**HERE, "torch": ""}, True, None), "torch is missing, here it is 2.13.0; install the same version there"),
        ((HERE, False, 1), "does not see /runs; put runs where all nodes see them (--runs)"),
        ((HERE, True, 1, "rollout.gateway.port=80 needs rights"), "rollout.gateway.port=80 needs rights"),
        ((HERE, True, 0), "torch 2.13.0 sees 0 of 1 GPUs; install its CUDA build"),
    ],
)
def test_each_problem_is_one_line(seen: tuple[Any, ...], problem: str) -> None:
    lines = problems(RANK, Place("10.0.0.2", *seen), HERE, Path("/runs"))
    assert lines == ([f"learner rank 1 on 10.0.0.2: {problem}"] if problem else [])


def test_a_file_of_weights_stays_on_its_node() -> None:
    bundles = [Bundle("learner rank", 0, {}), Bundle("rollout worker", 0, {}), Bundle("engine", 0, {})]

    def check(*nodes: str, **vllm: str) -> None:
        config = tiny("placement.kind=ray", "engine.kind=vllm", *(f"engine.options.{k}={v}" for k, v in vllm.items()))
        places = [Place(node, HERE, True, None) for node in nodes]
        check_transfer(config.runtime, Placement(Reservation(None, bundles), places))

    check("a", "b", "a")
    check("a", "a", "b", transfer="collective")
    with pytest.raises(PlacementError, match="there are learner rank 0 on a, engine 0 on b; set"):
        check("a", "a", "b")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_places_are_looked_at(reservation: Reservation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        check_places(reservation, tmp_path / "runs", GatewayConfig())
        == [Place("127.0.0.1", versions(), True, None)] * 6
    )
    assert list((tmp_path / "runs").iterdir()) == []
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(PlacementError) as raised:
            check_places(reservation, tmp_path, GatewayConfig(port=port))
    first, second, both = str(raised.value).splitlines()
    assert first == (
        f"rollout worker 0 on 127.0.0.1: rollout.gateway.port={port} is in use; choose another, or "
        "rollout.gateway.port=0 for any free one"
    )
    assert second.startswith("rollout worker 1 on ")
    assert both.startswith(f"2 rollout workers on 127.0.0.1 cannot all listen on rollout.gateway.port={port}; set")
    monkeypatch.setattr(reserve, "versions", lambda: {**versions(), "treadle": "0.0"})
    with pytest.raises(PlacementError, match=r"(?m)^engine 1 on 127\.0\.0\.1: treadle is .*, here it is 0\.0; install"):
        check_places(reservation, tmp_path, GatewayConfig())
