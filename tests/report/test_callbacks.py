"""Callbacks: what they are told, when, and what becomes of a run whose callback fails."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.runs import Summary, check_finished, query, updates
from tests.worlds import Quiet, tiny
from treadle.api.train import train_run
from treadle.core.errors import ConfigError, RunError, TrainingStopped
from treadle.core.registry import names
from treadle.core.types import Group, Trajectory
from treadle.plan.config import RunConfig, config_of
from treadle.plan.inputs import Inputs, load_inputs
from treadle.record.run_directory import RunDirectory
from treadle.report.callback import EVENTS, Callback, RunStart
from treadle.report.callbacks import load_callbacks
from treadle.report.metrics import EvaluationResult

pytestmark = pytest.mark.xdist_group("orchestration_callbacks")  # what its tests share is made once


class Recording(Callback):
    """Keeps what it is told; fails at one event if asked to."""

    def __init__(self, fails_at: tuple[str, Any] = ("", None), error: BaseException | None = None) -> None:
        self.events: list[tuple[str, Any]] = []
        self.trajectories: list[Trajectory] = []
        self.rows: list[Mapping[str, Any]] = []
        self.batches: list[Sequence[Group]] = []
        self.ends: list[tuple[Mapping[str, Any] | None, BaseException | None]] = []
        self._fails_at, self._error = fails_at, error or KeyError("mine")

    def _note(self, name: str, what: Any) -> None:
        self.events.append((name, what))
        if (name, what) == self._fails_at:
            raise self._error

    def start(self, run: RunStart) -> None:
        self.directory = run.directory
        self._note("start", run.update)

    def rollout(self, trajectory: Trajectory) -> None:
        on_record = "SELECT status FROM trajectories WHERE trajectory_id = ?"
        assert query(self.directory, on_record, trajectory.trajectory_id) == [{"status": trajectory.status}]
        self.trajectories.append(trajectory)
        self._note("rollout", len(self.trajectories))

    def batch(self, groups: Sequence[Group], version: int) -> None:
        self.batches.append(groups)
        self._note("batch", version)

    def update(self, row: Mapping[str, Any]) -> None:
        assert RunDirectory.open(self.directory).metrics()[-1] == row
        self.rows.append(row)
        self._note("update", row["update"])

    def publish(self, version: int) -> None:
        self._note("publish", version)

    def evaluate(self, result: EvaluationResult) -> None:
        self._note("evaluate", result.update)

    def checkpoint(self, directory: Path, update: int) -> None:
        assert (directory / "model.safetensors").is_file()
        self._note("checkpoint", update)

    def end(self, summary: Mapping[str, Any] | None, error: BaseException | None) -> None:
        self.ends.append((summary, error))
        self._note("end", None)

    def told(self) -> list[tuple[str, Any]]:
        return [event for event in self.events if event[0] != "rollout"]


def go(path: Path, *callbacks: Callback, overrides: Sequence[str] = (), progress: Quiet | None = None) -> Summary:
    config = tiny(*overrides)
    return train_run(config, given(config, callbacks), path, progress or Quiet())


def go_on(path: Path, *callbacks: Callback) -> Summary:
    config = config_of(RunDirectory.open(path))
    return train_run(config, given(config, callbacks), path, Quiet(), resume=True)


def given(config: RunConfig, callbacks: Sequence[Callback]) -> Inputs:
    """As configured, and followed by these callbacks too."""
    return replace(load_inputs(config), callbacks=load_callbacks(config.callbacks, callbacks))


BEFORE: list[tuple[str, Any]] = [("start", 0), ("publish", 0), ("evaluate", 0), ("checkpoint", 0)]
FIRST: list[tuple[str, Any]] = [("batch", 0), ("update", 1), ("publish", 1)]
SECOND: list[tuple[str, Any]] = [("batch", 1), ("update", 2), ("publish", 2), ("checkpoint", 2)]
AFTER: list[tuple[str, Any]] = [
    *(("batch", 2), ("update", 3), ("publish", 3)),
    *(("batch", 3), ("update", 4), ("publish", 4), ("checkpoint", 4), ("evaluate", 4), ("end", None)),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Summary]:
    recording = Recording()
    return recording, go(tmp_path_factory.mktemp("runs") / "reference", recording)


def test_events_of_a_synchronous_run_come_in_order(reference: tuple[Recording, Summary]) -> None:
    recording, summary = reference
    played = [("rollout", n) for n in range(1, 25)]
    assert recording.events == [
        *BEFORE,
        *(*played[:6], *FIRST),
        *(*played[6:12], *SECOND),
        *(*played[12:18], *AFTER[:3]),
        *(*played[18:], *AFTER[3:]),
    ]
    assert recording.ends == [(summary, None)]
    assert recording.rows == updates(recording.directory)
    batches = [[t.trajectory_id for g in groups for t in g.trajectories] for groups in recording.batches]
    for number, batch in enumerate(batches):
        played_then = recording.trajectories[6 * number : 6 * number + 6]
        assert sorted(batch) == sorted(t.trajectory_id for t in played_then)


def test_what_callbacks_get_is_read_only_and_they_change_no_weights(
    tmp_path: Path, reference: tuple[Recording, Summary]
) -> None:
    recording, summary = reference
    assert go(tmp_path / "alone")["weights_sha256"] == summary["weights_sha256"]
    assert isinstance(recording.rows[0], MappingProxyType)
    assert isinstance(recording.ends[0][0], MappingProxyType)
    with pytest.raises(ValueError, match="read-only"):
        recording.trajectories[0].steps[0].completion_ids[0] = 1


def test_events_of_an_asynchronous_run(tmp_path: Path) -> None:
    recording = Recording()
    go(tmp_path / "run", recording, overrides=["orchestration.max_staleness=1"])
    assert recording.told() == [*BEFORE, *FIRST, *SECOND, *AFTER]
    seen: set[str] = set()
    trajectories, batches = iter(recording.trajectories), iter(recording.batches)
    for name, _ in recording.events:
        if name == "rollout":
            seen.add(next(trajectories).trajectory_id)
        elif name == "batch":
            assert {t.trajectory_id for group in next(batches) for t in group.trajectories} <= seen
    on_record = query(
        tmp_path / "run", "SELECT trajectory_id FROM trajectories JOIN groups USING (group_id) WHERE split = 'train'"
    )
    assert {row["trajectory_id"] for row in on_record} == seen  # also what finished when the run was over


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("event", "saved", "staleness"),
    [(("rollout", 8), 2, 0), (("update", 3), 3, 0), (("publish", 0), 0, 0), (("rollout", 8), 2, 1)],
)
def test_a_callback_that_fails_stops_the_run_with_a_checkpoint(
    event: tuple[str, int], saved: int, staleness: int, tmp_path: Path, reference: tuple[Recording, Summary]
) -> None:
    failing, other = Recording(fails_at=event), Recording()
    with pytest.raises(
        TrainingStopped, match=rf"callback Recording \(1 .*: {event[0]} raised KeyError: 'mine'"
    ) as stopped:
        go(tmp_path / "run", failing, other, overrides=[f"orchestration.max_staleness={staleness}"])
    assert isinstance(stopped.value.__cause__, KeyError)
    assert failing.events[-2:] == [event, ("end", None)]  # switched off, but told of the end
    assert failing.ends == other.ends == [(None, stopped.value)]
    at = other.told()[-2][1]
    assert other.told()[-2:] == [("checkpoint", at), ("end", None)]
    assert f"A checkpoint of update {at} is saved" in str(stopped.value)
    if staleness == 0:
        assert at == saved

    again = Recording()
    summary = go_on(tmp_path / "run", again)
    assert again.told()[:2] == [("start", at), ("publish", at)]
    assert [row["update"] for row in again.rows] == list(range(at + 1, 5))
    if staleness == 0:
        check_finished(tmp_path / "run")
        assert summary["weights_sha256"] == reference[1]["weights_sha256"]


def test_a_callback_that_cannot_start_is_an_error_at_start(tmp_path: Path) -> None:
    first, failing = Recording(), Recording(fails_at=("start", 0), error=SystemExit(3))
    with pytest.raises(RunError, match=r"callback Recording \(2 of callbacks=\): start raised SystemExit: 3") as failed:
        go(tmp_path / "run", first, failing)
    assert first.told() == [("start", 0), ("end", None)]
    assert first.ends == [(None, failed.value)]


def test_what_end_raises_is_told_and_the_run_is_finished(tmp_path: Path) -> None:
    progress = Quiet()
    summary = go(tmp_path / "run", Recording(fails_at=("end", None)), progress=progress)
    assert summary["updates"] == 4
    assert progress.lines[-1] == "callback Recording (1 of callbacks=): end raised KeyError: 'mine'"


class Lines(Callback):
    """Writes a line per update into the run directory."""

    def __init__(self, file: str = "lines.jsonl") -> None:
        self._file = file

    def start(self, run: RunStart) -> None:
        self._path = run.directory / self._file

    def update(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row["update"]) + "\n")


class Async(Callback):
    async def update(self, row: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Never awaited."""


def test_callbacks_of_the_configuration_are_there_again_on_resume(tmp_path: Path) -> None:
    here = "tests.report.test_callbacks:Lines"
    failing = Recording(fails_at=("update", 2))
    given = [f"callbacks=[{{name: '{here}', options: {{file: mine}}}}]"]
    with pytest.raises(TrainingStopped):
        go(tmp_path / "run", failing, overrides=given)
    assert (tmp_path / "run" / "mine").read_text() == "1\n2\n"
    go_on(tmp_path / "run")
    assert (tmp_path / "run" / "mine").read_text() == "1\n2\n3\n4\n"
    go(tmp_path / "plain", overrides=[f"callbacks=['{here}']", "orchestration.updates=1"])
    assert (tmp_path / "plain" / "lines.jsonl").read_text() == "1\n"


HERE = "tests.report.test_callbacks"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[tensorbord]", "did you mean 'tensorboard'"),
        (f"[{{name: '{HERE}:Lines', options: {{path: x}}}}]", "unexpected keyword argument 'path'"),
        (f"['{HERE}:Async']", r"async methods \(update\)"),
        ("['tests.worlds:plain_renderer']", "not a treadle.Callback"),
        (f"['{HERE}:Lines', '{HERE}:Lines']", "listed twice"),
    ],
)
def test_what_is_no_callback_is_refused_before_there_is_a_run(given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        go(tmp_path / "run", overrides=[f"callbacks={given}"])
    assert not (tmp_path / "run").exists()


def test_the_page_has_every_method_and_every_tracker() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracking.md").read_text()
    for signature in re.findall(r"^\| `(\w+\(.*?\))` \|", page, re.MULTILINE):
        name, arguments = re.fullmatch(r"(\w+)\((.*)\)", signature).groups()  # type: ignore[union-attr]
        assert ", ".join(["self", *inspect.signature(getattr(Callback, name)).parameters][2:]) == arguments
    assert set(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)) == set(EVENTS)
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(names("callbacks"))
