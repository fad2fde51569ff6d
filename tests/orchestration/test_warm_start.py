"""The warm start of a run: learned once, then read from the cache, to the same bits."""

import json
from pathlib import Path

import pytest

from tests.orchestration.runs import check_finished, resume, start
from tests.worlds import Quiet
from treadle.core.errors import ConfigError, DataError, RunError, TrainingStopped

WARM = (
    "warm_start.demonstrations='tests.worlds:vowel_demonstration'",
    "warm_start.steps=6",
    "warm_start.batch_size=4",
    "warm_start.learning_rate=3e-3",
    "orchestration.updates=2",
    "data.held_out=null",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "warm_start"


def test_the_second_run_reads_the_first_ones_warm_start(tmp_path: Path, cache: Path) -> None:
    first = start(tmp_path / "first", *WARM)
    progress = Quiet()
    second = start(tmp_path / "second", *WARM, progress=progress)
    assert (first["warm_start"]["cached"], second["warm_start"]["cached"]) == (False, True)
    assert (first["warm_start"]["loss"], first["warm_start"]["steps"]) == (
        second["warm_start"]["loss"],
        second["warm_start"]["steps"],
    )
    assert first["warm_start"]["steps"] == 6
    assert any("read from the cache" in line for line in progress.lines)
    assert first["weights_sha256"] == second["weights_sha256"]
    check_finished(tmp_path / "second")
    assert len(list(cache.iterdir())) == 1
    cold = start(tmp_path / "cold", *WARM[-2:])
    assert cold["warm_start"] is None
    assert cold["weights_sha256"] != first["weights_sha256"]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "override",
    ["seed=1", "warm_start.steps=5", "warm_start.learning_rate=1e-3", "model.build.hidden_size=64"],
)
def test_another_warm_start_is_not_taken_for_this_one(override: str, tmp_path: Path, cache: Path) -> None:
    start(tmp_path / "first", *WARM)
    assert not start(tmp_path / "second", *WARM, override)["warm_start"]["cached"]
    assert len(list(cache.iterdir())) == 2


def test_a_warm_start_that_did_not_learn_stops_the_run_and_caches_nothing(tmp_path: Path, cache: Path) -> None:
    for name in ("first", "second"):
        with pytest.raises(TrainingStopped, match="did not learn its demonstrations"):
            start(tmp_path / name, *WARM, "warm_start.max_loss=0.01")
    assert not cache.exists()
    with pytest.raises(RunError, match="has recorded nothing yet"):
        resume(tmp_path / "first")


def test_a_damaged_entry_is_made_again(tmp_path: Path, cache: Path) -> None:
    start(tmp_path / "first", *WARM)
    [entry] = cache.iterdir()
    weights = entry / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert not start(tmp_path / "second", *WARM)["warm_start"]["cached"]
    assert start(tmp_path / "third", *WARM)["warm_start"]["cached"]


def test_a_cache_that_cannot_be_written_costs_a_line_and_no_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "file"))
    progress = Quiet()
    start(tmp_path / "run", *WARM, progress=progress)
    check_finished(tmp_path / "run")
    assert any("the warm start was not cached: could not write" in line for line in progress.lines)


def test_demonstrations_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "demonstrations.jsonl"
    line = {"messages": [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "aa"}]}
    file.write_text(json.dumps(line) + "\n")
    options = (*WARM, f"warm_start.demonstrations='{file}'")
    assert not start(tmp_path / "first", *options)["warm_start"]["cached"]
    assert start(tmp_path / "second", *options)["warm_start"]["cached"]
    file.write_text(json.dumps(line).replace("aa", "ee") + "\n")
    assert not start(tmp_path / "third", *options)["warm_start"]["cached"]


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("warm_start.demonstrations=missing.jsonl", ConfigError, "warm_start.demonstrations: .*'missing.jsonl'"),
        ("warm_start.demonstrations=nobody", ConfigError, "'nobody' is not registered"),
        ("warm_start.demonstrations='tests.worlds:nothing'", ConfigError, "has no 'nothing'"),
        ("warm_start.options={colour: red}", ConfigError, "do not fit"),
        (
            "warm_start={demonstrations: arithmetic, options: {expert: 2}}",
            ConfigError,
            "expert is a share and must lie between 0 and 1, got 2",
        ),
        ("warm_start.demonstrations='{}/empty.jsonl'", DataError, "has no demonstrations"),
    ],
)
def test_demonstrations_that_cannot_work_are_refused_before_the_run_exists(
    override: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(error, match=message):
        start(tmp_path / "run", *WARM, override.replace("{}", str(tmp_path)))
    assert not (tmp_path / "run").exists()
