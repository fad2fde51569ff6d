"""Running the tiny recipe, and what every run must satisfy afterwards."""

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import Quiet, make_group, tiny
from treadle.api.train import train_run
from treadle.core.draws import Stream, task_uniforms
from treadle.core.files import WrittenFile, write_atomically
from treadle.core.types import Step, Task, Trajectory
from treadle.loop.runtime import Runtime
from treadle.plan.config import RunConfig, config_of
from treadle.plan.inputs import Inputs, load_inputs, record_data
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import LedgerReader
from treadle.record.rollout_store import read_shard, read_traces, write_shard
from treadle.record.run_directory import RunDirectory

Summary = dict[str, Any]
MODEL = tiny().model.model_dump(exclude_none=True)
SETTINGS: dict[str, Any] = {
    "training.tasks_per_update": 2,
    "training.group_size": 3,
    "training.threads": 1,
    "rollout.max_steps": 2,
    "rollout.max_input_tokens": 64,
    "rollout.max_completion_tokens": 4,
    "orchestration.updates": 2,
}
"""Of `treadle.train`."""


def start(
    path: Path,
    *overrides: str,
    inputs: Inputs | None = None,
    progress: Quiet | None = None,
    runtime: Runtime | None = None,
) -> Summary:
    config = tiny(*overrides)
    return train_run(config, inputs or load_inputs(config), path, progress or Quiet(), runtime=runtime)


def resume(
    path: Path,
    *,
    inputs: Inputs | None = None,
    config: RunConfig | None = None,
    progress: Quiet | None = None,
    runtime: Runtime | None = None,
) -> Summary:
    config = config or config_of(RunDirectory.open(path))
    return train_run(config, inputs or load_inputs(config), path, progress or Quiet(), runtime=runtime, resume=True)


class Interrupting(Quiet):
    """Sends a signal to this process, as a terminal would, while a certain batch or evaluation is being played."""

    def __init__(self, number: signal.Signals = signal.SIGINT, which: int = 1, what: str = "rollout") -> None:
        super().__init__()
        self.number, self.left, self.what = number, which, what

    def began(self, name: str) -> None:
        self.left -= name == self.what
        if not self.left:
            self.left = -1
            os.kill(os.getpid(), self.number)


def recorded_run(path: Path, config: RunConfig, *attempts: Trajectory, task: Task | None = None) -> RunDirectory:
    """A run with one group of these attempts, as training records it before the first checkpoint."""
    run, group = RunDirectory.create(path, config), make_group(0, *attempts)
    run.close()
    group = group if task is None else replace(group, task=task)
    with closing(Ledger(run.ledger_file)) as ledger:
        ledger.record([group], "train", 0, write_shard(run.rollouts, "train-g000000", [group]))
    return run


def query(path: Path, sql: str, *values: Any) -> list[dict[str, Any]]:
    return LedgerReader(path / "ledger.sqlite").query(sql, *values)


def change_ledger(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path / "ledger.sqlite")) as db, db:
        for statement in statements:
            db.execute(statement)


def put_config(path: Path, content: str) -> None:
    """Give a run another configuration, as if it had been started with it."""
    put_file(path, "config.yaml", content.encode())


def put_data(path: Path, config: RunConfig) -> None:
    """Give a run the tasks of another configuration."""
    run = RunDirectory(path)
    record_data(run, load_inputs(config))
    with closing(Ledger(run.ledger_file)) as ledger:
        ledger.note_files(run.written)


def put_file(path: Path, name: str, content: bytes) -> None:
    """Write a file of a run as only the run itself does: the ledger knows of it."""
    with closing(Ledger(path / "ledger.sqlite")) as ledger:
        ledger.note_files([WrittenFile(name, write_atomically(path / name, content))])


def shard_of(path: Path, trajectory_id: str) -> str:
    """The file that holds a trajectory's tokens."""
    [row] = query(path, "SELECT shard FROM trajectories WHERE trajectory_id = ?", trajectory_id)
    return str(row["shard"])


def recorded(path: Path) -> list[tuple[str, list[Step]]]:
    """Ids and steps of all trajectories in the shards of a run; there is no other file beside them."""
    shards = RunDirectory.open(path).ledger().shards()
    assert shards.keys() == {file.name for file in (path / "rollouts").iterdir()}
    return [own for shard in shards.values() for own in read_shard(path / "rollouts", shard).items()]


def updates(path: Path) -> list[dict[str, Any]]:
    return [row for row in RunDirectory.open(path).metrics() if row["kind"] == "update"]


_UNTRAINED = (
    "resampled",
    "rolled back",
    "failed",
    "filtered",
    "stale",
    "damaged",
    "unused",
    "diverged",
)  # of trajectories with a reward


def check_finished(path: Path) -> None:
    """Conservation, one line an update, an engine that samples from what is trained, and nothing older than allowed."""
    config = config_of(RunDirectory.open(path))
    rows = updates(path)
    assert [row["update"] for row in rows] == list(range(1, config.orchestration.updates + 1))
    if not config.orchestration.max_staleness:
        assert max(row.get("logprob_gap_max", 0) for row in rows) < 1e-4
    states = query(
        path,
        "SELECT g.idx, g.split, t.reward IS NULL AS failed, s.state, s.reason, "
        "count(DISTINCT g.group_id || t.attempt) AS n FROM steps s JOIN trajectories t USING (trajectory_id) "
        "JOIN groups g USING (group_id) GROUP BY g.idx, g.split, failed, s.state, s.reason",
    )
    trained: dict[int, int] = {}
    for row in states:
        if row["reason"] in ("rejected", "masked", "replayed"):  # of steps alone
            assert row["state"] == "dropped"
        elif row["split"] == "held_out":
            assert (row["state"], row["reason"]) == ("evaluated", None)
        elif row["failed"]:
            assert (row["state"], row["reason"]) == ("dropped", "failed")
        else:
            ends = (("trained", None), *(("dropped", reason) for reason in _UNTRAINED))
            assert (row["state"], row["reason"]) in ends, row
            if row["state"] == "trained":
                trained[row["idx"]] = trained.get(row["idx"], 0) + row["n"]
    assert len(trained) == (
        config.training.groups_per_batch * config.orchestration.updates // config.training.updates_between_publications
    )
    if not any(row["failed"] for row in states) and not config.orchestration.max_staleness:
        assert set(trained.values()) == {config.training.group_size}  # each index once, however often it was sampled
    _check_trained(path, config)
    _check_counted(path, rows, config.training.epochs_per_batch)
    _check_traces(path, config)
    names = sorted(p.name for p in (path / "checkpoints").iterdir())
    section = config.orchestration
    for_ever = section.updates // section.keep_every if section.keep_every else 0
    assert len(names) <= section.keep_last + (section.keep_best is not None) + for_ever
    assert names[-1] == f"step-{config.orchestration.updates:06d}"
    assert (path / "summary.json").is_file()
    assert (path / "curve.png").is_file()


def _check_counted(path: Path, rows: list[dict[str, Any]], epochs: int) -> None:
    """What the metrics say of each batch, in every epoch, is what the ledger says became of its steps."""
    found = query(
        path,
        "SELECT g.trained_version AS version, s.state, s.reason, count(*) AS n FROM steps s JOIN trajectories t USING "
        "(trajectory_id) JOIN groups g USING (group_id) WHERE g.trained_version IS NOT NULL GROUP BY 1, 2, 3",
    )
    ledger, metrics = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for step in found:
        ledger[step["version"], f"dropped_{step['reason']}" if step["reason"] else "sequences"] += epochs * step["n"]
    for row in rows:
        metrics.update(
            {(row["version"], name): row[name] for name in row if name == "sequences" or name.startswith("dropped_")}
        )
    assert metrics == ledger


def _check_traces(path: Path, config: RunConfig) -> None:
    """Each trained step of a group that is drawn has a trace of each update that trained it, and nothing else has."""
    ledger = RunDirectory.open(path).ledger()
    files = ledger.traces()
    rows = ledger.query(
        "SELECT trained_version AS version, epoch, position, trajectory_id, step, s.completion_tokens AS tokens "
        "FROM steps s JOIN trajectories USING (trajectory_id) JOIN groups USING (group_id) WHERE state = 'trained'"
    )
    assert files.keys() == {file.name for file in (path / "traces").iterdir()}
    drawn = task_uniforms(config.seed, Stream.TRACE, [r["epoch"] for r in rows], [r["position"] for r in rows])
    kept = [row for row, draw in zip(rows, drawn, strict=True) if draw < config.orchestration.traced_groups]
    expected = Counter(
        {(r["version"], r["trajectory_id"], r["step"], r["tokens"]): config.training.epochs_per_batch for r in kept}
    )
    traces = [trace for file in files.values() for trace in read_traces(path / "traces", file)]
    per_batch = config.training.updates_between_publications
    assert expected == Counter(
        ((trace.update - 1) // per_batch, trace.trajectory_id, trace.step, len(trace.logprobs)) for trace in traces
    )
    assert len({(trace.update, trace.trajectory_id, trace.step) for trace in traces}) == len(traces)


def _check_trained(path: Path, config: RunConfig) -> None:
    """Each batch once and whole, each token of it once among the shards and no older than allowed. Pinned attempts have
    one version.
    """
    size = config.training.groups_per_batch
    rows = query(
        path,
        "SELECT trained_version AS version, count(*) AS n, count(DISTINCT idx) AS indices FROM groups "
        "WHERE trained_version IS NOT NULL GROUP BY 1 ORDER BY 1",
    )
    versions = config.orchestration.updates // config.training.updates_between_publications
    assert [(row["version"], row["n"], row["indices"]) for row in rows] == [(v, size, size) for v in range(versions)]
    assert not query(path, "SELECT idx FROM groups WHERE trained_version IS NOT NULL GROUP BY idx HAVING count(*) > 1")
    stored = Counter[tuple[str, int]]()
    sampled: dict[tuple[str, int], Any] = {}
    for trajectory, steps in recorded(path):
        for number, step in enumerate(steps):
            stored[trajectory, number] += 1
            sampled[trajectory, number] = step.policy_versions
    on_record = query(
        path,
        "SELECT s.*, g.trained_version AS version, g.split FROM steps s "
        "JOIN trajectories t USING (trajectory_id) JOIN groups g USING (group_id)",
    )
    assert stored == Counter((row["trajectory_id"], row["step"]) for row in on_record)
    for row in on_record:
        if row["state"] == "trained":
            lag = row["version"] - sampled[row["trajectory_id"], row["step"]]
            assert (lag >= 0).all() and (lag <= config.orchestration.max_staleness).all()
    if config.loop.pinned is not None:
        pinned = {row["trajectory_id"]: set[int]() for row in on_record if row["state"] == "trained"}
        for (trajectory, _), sampled_by in sampled.items():
            pinned.get(trajectory, set()).update(map(int, sampled_by))
        assert not [trajectory for trajectory, several in pinned.items() if len(several) > 1]


@pytest.fixture(scope="module", autouse=True)
def undrawn() -> Iterator[None]:
    """Let runs end with an empty picture, in rooms with many runs; tests/cli/test_report.py looks at a real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.api.run.draw_runs", lambda runs, path: path.touch())
        yield
