"""Trackers: each library that is installed takes a real run, interrupted and resumed; no network."""

import importlib.util
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_callbacks import Recording, go, go_on
from tests.runs import check_finished, query, updates
from tests.worlds import Quiet
from treadle.core.errors import ConfigError, RunError, TrainingStopped
from treadle.record.run_directory import RunDirectory
from treadle.report.callback import Callback, RunStart
from treadle.report.samples import Sample
from treadle.report.trackers import Outcome, Tracker


def interrupted(path: Path, callback: str) -> None:
    """A run that is stopped after update 2 and saved, then goes on."""
    with pytest.raises(TrainingStopped):
        options = [f"callbacks=[{callback}]", "evaluation.greedy_too=true", "orchestration.traced_groups=1"]
        go(path, Recording(fails_at=("update", 2)), overrides=options)
    go_on(path)
    check_finished(path)


def check(path: Path, series: Callable[[str], Iterable[tuple[int, float]]]) -> None:
    """Compare what a tracker has, (update, value) by name, with metrics.jsonl."""
    rows = RunDirectory.open(path).metrics()
    evaluations = [e for e in rows if e["kind"] == "evaluation" and e["temperature"] == 1]
    wanted = {name: [(row["update"], row[name]) for row in updates(path)] for name in ("loss", "reward_mean")}
    wanted["evaluation/success"] = [(e["update"], e["success"]) for e in evaluations]
    for name, points in wanted.items():
        assert [value for point in series(name) for value in point] == pytest.approx([v for p in points for v in p])


def sampled(path: Path) -> dict[int, list[str]]:
    """Update -> the first attempts of the first group that it trained, in order of submission."""
    sql = (
        "SELECT trained_version + 1 AS number, trajectory_id FROM trajectories JOIN groups g USING (group_id) WHERE "
        "idx = (SELECT min(idx) FROM groups h WHERE h.trained_version = g.trained_version) ORDER BY trajectory_id"
    )
    rows = query(path, sql)
    return {number: [r["trajectory_id"] for r in rows if r["number"] == number] for number in (1, 2, 3, 4)}


def installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'treadle[{package}]'")


def tensorboard_events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard(tmp_path: Path) -> None:
    installed("tensorboard")
    run = tmp_path / "run"
    interrupted(run, "tensorboard")
    events = tensorboard_events(run)
    check(run, lambda name: [(e.step, e.value) for e in events.Scalars(name)])
    assert [e.step for e in events.Scalars("evaluation/greedy/success")] == [0, 4]
    assert "learning_rate" in str(events.Tensors("config/text_summary"))
    texts = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text_summary")}
    assert {step: re.findall(r"\*\*(g.*?)\*\*: ", text) for step, text in texts.items()} == sampled(run)


def test_tensorboard_hides_what_was_rolled_back(tmp_path: Path) -> None:
    """A run that dies after update 3, whose last checkpoint is of update 2."""
    installed("tensorboard")
    run = tmp_path / "run"
    dies = Recording(fails_at=("update", 3), error=RunError("power cut"))
    with pytest.raises(RunError, match="power cut"):
        go(run, dies, overrides=["callbacks=[tensorboard]"])
    go_on(run)
    events = tensorboard_events(run)
    check(run, lambda name: [(e.step, e.value) for e in events.Scalars(name)])


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline file: LevelDB's log format after a header of 7 bytes."""
    position, record, block = 7, b"", 32768
    while position + 7 <= len(data):
        if block - position % block < 7:  # no room for a header: the rest of the block is padding
            position += block - position % block
            continue
        size, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # full, last
            yield record
            record = b""


@pytest.mark.filterwarnings("default")
def test_wandb_offline(tmp_path: Path) -> None:
    installed("wandb")
    from wandb.proto import wandb_internal_pb2

    run = tmp_path / "run"
    interrupted(run, "{name: wandb, options: {project: p, mode: offline}}")
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    known = json.loads((run / "tracking.json").read_text())["wandb"]
    assert len(files) == 2
    assert {file.stem for file in files} == {f"run-{known}"}
    rows: list[dict[str, Any]] = []
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    check(run, lambda name: [(row["update"], row[name]) for row in rows if name in row])
    names = {}
    for row in (row for row in rows if "samples/path" in row):
        [file] = (run / "wandb").glob(f"offline-run-*/files/{row['samples/path']}")
        table = json.loads(file.read_text())
        assert table["columns"] == [field.name for field in fields(Sample)]
        names[row["update"]] = [attempt for attempt, *_ in table["data"]]
    assert names == sampled(run)


@pytest.mark.filterwarnings("default")
def test_trackio(tmp_path: Path) -> None:
    """In a process of its own: it decides on import where its files are."""
    installed("trackio")
    script = f"""
import sys
sys.path[:] = {sys.path!r}
from pathlib import Path
from tests.report.test_trackers import check, interrupted
from trackio.sqlite_storage import SQLiteStorage

run = Path({str(tmp_path / "run")!r})
interrupted(run, "{{name: trackio, options: {{project: p}}}}")
logs = SQLiteStorage.get_logs("p", "run")
check(run, lambda name: [(row["step"], row[name]) for row in logs if name in row])
print("all there")
"""
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "all there" in done.stdout, done.stdout + done.stderr


@pytest.mark.filterwarnings("default")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("mlflow")
    import mlflow

    monkeypatch.chdir(tmp_path)  # where MLflow keeps artifacts
    run, uri = tmp_path / "run", f"sqlite:///{tmp_path}/mlflow.db"
    interrupted(run, f"{{name: mlflow, options: {{experiment: e, tracking_uri: '{uri}'}}}}")
    client = mlflow.MlflowClient(tracking_uri=uri)
    [found] = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["training.group_size"] == "3"
    check(run, lambda name: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, name)])
    artifacts = {int(file.path[-9:-3]): file.path for file in client.list_artifacts(found.info.run_id, "samples")}
    for update, names in sampled(run).items():
        text = Path(client.download_artifacts(found.info.run_id, artifacts.pop(update))).read_text()
        assert re.findall(r"\*\*(g.*?)\*\*: ", text) == names
    assert not artifacts


class Flaky(Tracker):
    """A tracker whose server is down at times. Its library is one that everybody has."""

    package = "json"

    def __init__(self, down_at: Sequence[int] = (), start_fails: bool = False) -> None:
        super().__init__()
        self._down_at, self._start_fails = down_at, start_fails
        self.logged: list[int] = []
        self.outcomes: list[Outcome] = []
        self.known: str | None = None

    def open(self, run: RunStart, known: str | None) -> str:
        if self._start_fails:
            raise ConnectionError("no server")
        self.known = known
        return "id-7"

    def log(self, figures: Mapping[str, float], update: int) -> None:
        if update in self._down_at:
            raise ConnectionError(f"down at {update}")
        self.logged.append(update)

    def close(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def test_an_outage_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    progress, tracker = Quiet(), Flaky(down_at=(2, 3))
    go(tmp_path / "run", tracker, progress=progress)
    assert tracker.logged == [0, 1, 4, 4]
    assert [line for line in progress.lines if "down" in line] == [
        "json raised ConnectionError: down at 2; the run continues, and metrics.jsonl has everything"
    ]
    assert tracker.outcomes == ["finished"]


def test_a_resumed_run_goes_on_under_its_own_id(tmp_path: Path) -> None:
    first, again = Flaky(), Flaky()
    with pytest.raises(TrainingStopped):
        go(tmp_path / "run", first, Recording(fails_at=("update", 2)))
    go_on(tmp_path / "run", again)
    assert (first.known, first.outcomes) == (None, ["failed"])
    assert (again.known, again.outcomes, again.logged) == ("id-7", ["finished"], [3, 4, 4])


class Interrupt(Callback):
    """Ctrl-C after update 2."""

    def update(self, row: Mapping[str, Any]) -> None:
        if row["update"] == 2:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_tracker_knows_a_stopped_run_from_a_finished_one(tmp_path: Path) -> None:
    tracker = Flaky()
    assert go(tmp_path / "run", tracker, Interrupt())["stopped_early"]
    assert (tracker.outcomes, tracker.logged) == (["stopped"], [0, 1, 2])


class Missing(Flaky):
    package = "nobody_has_this"


def test_a_missing_package_is_refused_naming_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = "callbacks=['tests.report.test_trackers:Missing']"
    (tmp_path / "nobody_has_this").mkdir()  # what a tracker leaves where it ran is no package
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'nobody_has_this' is not installed; install the package with 'nobody"):
        go(tmp_path / "run", overrides=[here])
    assert not (tmp_path / "run").exists()
