"""Running the tiny recipe, and what every run must satisfy afterwards."""

from pathlib import Path
from typing import Any

from tests.worlds import Quiet, tiny
from treadle.orchestration.config import RunConfig
from treadle.orchestration.inputs import Inputs, load_inputs
from treadle.orchestration.ledger import Ledger
from treadle.orchestration.run_directory import RunDirectory
from treadle.orchestration.train import resume_run, start_run

Summary = dict[str, Any]


def start(path: Path, *overrides: str, inputs: Inputs | None = None, progress: Quiet | None = None) -> Summary:
    config = tiny(*overrides)
    return start_run(config, inputs or load_inputs(config), path, progress or Quiet())


def resume(path: Path, *, inputs: Inputs | None = None, config: RunConfig | None = None) -> Summary:
    config = config or RunDirectory.open(path).config()
    return resume_run(config, inputs or load_inputs(config), path, Quiet())


def query(path: Path, sql: str, *values: Any) -> list[dict[str, Any]]:
    ledger = Ledger(path / "ledger.sqlite", read_only=True)
    rows = ledger.query(sql, *values)
    ledger.close()
    return rows


def shard_of(path: Path, trajectory_id: str) -> str:
    """The file that holds a trajectory's tokens."""
    [row] = query(path, "SELECT shard FROM trajectories WHERE trajectory_id = ?", trajectory_id)
    return str(row["shard"])


def updates(path: Path) -> list[dict[str, Any]]:
    return [row for row in RunDirectory.open(path).metrics() if row["kind"] == "update"]


_UNTRAINED = ("resampled", "rolled back", "failed", "filtered", "stale")  # of trajectories with a reward


def check_finished(path: Path) -> None:
    """Conservation, one line an update, and an engine that samples from what is trained."""
    config = RunDirectory.open(path).config()
    rows = updates(path)
    assert [row["update"] for row in rows] == list(range(1, config.orchestration.updates + 1))
    assert max(row["logprob_gap_max"] for row in rows) < 1e-4
    states = query(
        path,
        "SELECT g.idx, g.split, t.reward IS NULL AS failed, s.state, s.reason, count(DISTINCT t.trajectory_id) AS n "
        "FROM steps s JOIN trajectories t USING (trajectory_id) JOIN groups g USING (group_id) "
        "GROUP BY g.idx, g.split, failed, s.state, s.reason",
    )
    trained: dict[int, int] = {}
    for row in states:
        if row["split"] == "held_out":
            assert (row["state"], row["reason"]) == ("evaluated", None)
        elif row["failed"]:
            assert (row["state"], row["reason"]) == ("dropped", "failed")
        else:
            assert (row["state"], row["reason"]) in (("trained", None), *(("dropped", reason) for reason in _UNTRAINED))
            if row["state"] == "trained":
                trained[row["idx"]] = trained.get(row["idx"], 0) + row["n"]
    assert len(trained) == (
        config.groups_per_batch * config.orchestration.updates // config.training.updates_between_publications
    )
    if not any(row["failed"] for row in states) and not config.orchestration.max_staleness:
        assert set(trained.values()) == {config.training.group_size}  # each index once, however often it was sampled
    names = sorted(p.name for p in (path / "checkpoints").iterdir())
    section = config.orchestration
    for_ever = section.updates // section.keep_every if section.keep_every else 0
    assert len(names) <= section.keep_last + (section.keep_best is not None) + for_ever
    assert names[-1] == f"step-{config.orchestration.updates:06d}"
    assert (path / "summary.json").is_file()
    assert (path / "curve.png").is_file()
