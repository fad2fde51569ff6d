"""A run whose engine is in a process of its own."""

from pathlib import Path

from tests.orchestration.runs import check_finished, start


def test_the_engine_in_a_process_of_its_own_trains_the_same_weights(tmp_path: Path) -> None:
    here = start(tmp_path / "here")
    there = start(tmp_path / "there", "engine.own_process=true")
    assert there["weights_sha256"] == here["weights_sha256"]
    assert there["evaluations"] == here["evaluations"]
    check_finished(tmp_path / "there")
    assert (tmp_path / "there" / "engine.log").is_file()
