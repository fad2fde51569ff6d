"""`treadle report`: every step accounted for, whatever happened to the run."""

import fcntl
import json
import shutil
import sqlite3
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Place, Trained
from tests.cli.worlds import files, treadle
from treadle.cli.facts import _calls
from treadle.packing.flat import Span


def facts(run: Trained) -> dict[str, Any]:
    done = treadle("report", run.path, "--json")
    assert (done.status, done.err) == (0, "")
    found: dict[str, Any] = json.loads(done.out)
    return found


def states(found: dict[str, Any], split: str = "train") -> dict[tuple[str, str | None], int]:
    return {(row["state"], row["reason"]): row["count"] for row in found["steps"] if row["split"] == split}


def test_a_finished_run(finished: Trained) -> None:
    found = facts(finished)
    assert (found["state"], found["update"], found["updates"]) == ("finished", 4, 4)
    train, held_out = found["splits"]
    assert (train["split"], train["groups"], train["trajectories"], train["steps"]) == ("train", 16, 64, 64)
    assert (held_out["split"], held_out["trajectories"]) == ("held_out", 60)  # twice greedy, three times sampled
    assert states(found) == {("trained", None): 64} and states(found, "held_out") == {("evaluated", None): 60}
    assert found["failures"] == [] and found["latest_checkpoint"] == "step-000004"
    assert found["checkpoints"] == ["step-000002", "step-000004"]
    assert [row["update"] for row in found["evaluations"]] == [0, 0, 2, 4, 4]


def test_tokens_agree_with_the_rollouts(finished: Trained) -> None:
    found = facts(finished)
    tables = [pq.read_table(path) for path in (finished.path / "rollouts").glob("train-*.parquet")]
    lengths = [(len(row["prompt_ids"]), len(row["completion_ids"])) for table in tables for row in table.to_pylist()]
    assert found["splits"][0]["prompt_tokens"] == sum(p for p, _ in lengths)
    assert found["splits"][0]["completion_tokens"] == sum(c for _, c in lengths)
    packing = found["packing"]
    assert packing["trajectories"] == 64 and packing["missing_shards"] == []
    assert packing["step"] == packing["chain"] == sum(p + c for p, c in lengths if c)  # one step each
    assert packing["ratio"] == 1.0
    logged = sum(row["packed_tokens"] for row in metrics(finished) if row["kind"] == "update")
    assert packing["chain"] == logged


def metrics(run: Trained) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_chains_are_counted_once(monkeypatch: pytest.MonkeyPatch, finished: Trained) -> None:
    """Three steps, each continuing the one before: 2+1, 4+1, 6+1 tokens; packed as a chain, 7."""

    def calls(shard: object) -> Any:
        ids = np.arange(7, dtype=np.int32)
        shared = [Span(ids[:2], ids[2:3], 0, 0), Span(ids[:4], ids[4:5], 0, 0), Span(ids[:6], ids[6:7], 0, 0)]
        yield from (("g000000.0", span) for span in shared)

    monkeypatch.setattr("treadle.cli.facts._calls", calls)
    packing = facts(finished)["packing"]
    shards = len(list((finished.path / "rollouts").glob("train-*.parquet")))
    assert (packing["step"], packing["chain"]) == (15, 7)  # the other shards do not hold g000000.0
    assert shards == 4


def test_shards_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, finished: Trained) -> None:
    whole = facts(finished)["packing"]
    monkeypatch.setattr("treadle.cli.facts._ROWS", 3)
    assert facts(finished)["packing"] == whole
    shard = next((finished.path / "rollouts").glob("train-*.parquet"))
    rows = pq.read_table(shard).to_pylist()
    assert [(name, span.prompt_ids.tolist(), span.completion_ids.tolist()) for name, span in _calls(shard)] == [
        (row["trajectory_id"], row["prompt_ids"], row["completion_ids"]) for row in rows
    ]


def test_the_text(finished: Trained) -> None:
    done = treadle("report", finished.path)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"{finished.path}: tiny, seed 0, finished, 4 of 4 updates\n")
    assert "train     steps         trained 64\n" in done.out
    assert "held_out  steps         evaluated 60\n" in done.out
    assert "checkpoints: step-000002, step-000004 (latest)\n" in done.out
    assert "\x1b" not in done.out


def test_failures_by_cause_with_an_example(troubled: Trained) -> None:
    found = facts(troubled)
    [failure] = found["failures"]
    assert failure["cause"] == "environment"
    assert failure["message"].startswith("step raised ZeroDivisionError: ")
    dropped = states(found)["dropped", "failed"]
    failed = {row["split"]: row["count"] for row in found["statuses"] if row["status"] == "failed"}
    assert dropped == failed["train"] > 0
    assert failure["count"] == failed["train"] + failed["held_out"]
    assert states(found)["trained", None] + dropped == found["splits"][0]["steps"]
    assert (
        f"failed {failure['count']}x environment, as {failure['trajectory_id']}: "
        in treadle("report", troubled.path).out
    )


def test_a_stopped_run_says_how_to_go_on(stopped: Trained) -> None:
    found = facts(stopped)
    assert (found["state"], found["update"], found["latest_checkpoint"]) == ("stopped", 3, "step-000003")
    assert states(found) == {("trained", None): 48}
    command = f"treadle train tiny --resume --name run --runs {stopped.path.parent}"
    assert f"go on from step-000003 with: {command}\n" in treadle("report", stopped.path).out


def test_a_run_in_progress(finished: Trained, place: Place) -> None:
    """Locked, with steps in no checkpoint yet, a half-written line of metrics and a shard the ledger does not know."""
    run = place.runs / "run"
    shutil.copytree(finished.path, run)
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "upd')
    shutil.copy(next((run / "rollouts").glob("train-*")), run / "rollouts" / ".train-g000099.parquet.tmp")
    database = sqlite3.connect(run / "ledger.sqlite")
    with database:
        database.execute("UPDATE steps SET state = 'recorded' WHERE trajectory_id LIKE 'g000012.%'")
    database.close()
    with (run / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = json.loads(treadle("report", run, "--json").out)
    assert found["state"] == "in progress"
    assert states(found) == {("trained", None): 60, ("recorded", None): 4}
    assert found["packing"]["trajectories"] == 64
    assert json.loads(treadle("report", run, "--json").out)["state"] == "stopped"


def test_a_shard_that_is_gone_is_named(finished: Trained, place: Place) -> None:
    shutil.copytree(finished.path, place.runs / "run")
    (place.runs / "run" / "rollouts" / "train-g000004.parquet").unlink()
    done = treadle("report", place.runs / "run")
    assert done.status == 0 and "missing, not counted: train-g000004.parquet\n" in done.out


def test_a_damaged_ledger(finished: Trained, place: Place) -> None:
    shutil.copytree(finished.path, place.runs / "run", ignore=shutil.ignore_patterns("ledger*"))
    (place.runs / "run" / "ledger.sqlite").write_bytes(b"no database" * 100)
    for command in ("report", "show"):
        done = treadle(command, place.runs / "run")
        assert done.status == 1 and "ledger.sqlite cannot be read: file is not a database" in done.error


def test_looking_changes_nothing(finished: Trained) -> None:
    before = files(finished.path)
    treadle("report", finished.path)
    treadle("show", finished.path)
    assert files(finished.path) == before


def test_no_run_and_a_run_in_its_warm_start(finished: Trained, place: Place) -> None:
    for command in ("report", "show"):
        done = treadle(command, place.path)
        assert done.status == 1 and "is no run directory: it has no config.yaml" in done.error
    shutil.copy(finished.path / "config.yaml", place.path)
    for command in ("report", "show"):
        done = treadle(command, place.path)
        assert done.status == 1 and "has recorded nothing yet" in done.error
