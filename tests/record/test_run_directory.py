"""Who owns a run directory, and what is kept of its metrics."""

import asyncio
import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli import worlds
from tests.runs import check_finished, query, recorded, resume, start, updates
from tests.worlds import ROOT, Quiet, make_group, make_step, tiny
from treadle.core.errors import RunError
from treadle.core.files import new_directory
from treadle.core.types import Group, Status, Trajectory
from treadle.plan.config import config_of
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import LoopState
from treadle.record.run_directory import RunDirectory, find_run, make_directory
from treadle.record.run_store import RunStore

LOCKER = """
import sys, time
from pathlib import Path
from treadle.record.run_directory import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
run.lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_new_run_keeps_its_configuration(tmp_path: Path) -> None:
    config = tiny("seed=5")
    run = RunDirectory.create(tmp_path / "a" / "b", config)
    assert run.rollouts.is_dir()
    assert run.checkpoints.is_dir()
    assert config_of(RunDirectory.open(tmp_path / "a" / "b")) == config
    assert "# torch " in run.config_file.read_text()
    run.close()


def test_a_directory_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"already in use; choose another name"):
        RunDirectory.create(tmp_path, tiny())
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(RunError, match="could not create"):
        RunDirectory.create(tmp_path / "notes.txt", tiny())
    with pytest.raises(RunError, match="could not create"):
        RunDirectory.create(tmp_path / "notes.txt" / "run", tiny())


def test_a_run_that_has_recorded_nothing_is_begun_anew(tmp_path: Path) -> None:
    """Its process was killed in the warm start, or before the first checkpoint."""
    run = RunDirectory.create(tmp_path, tiny())
    with pytest.raises(RunError, match="another process is training in"):
        RunDirectory.create(tmp_path, tiny())
    run.close()
    Ledger(run.ledger_file).close()
    run.log_interval({"update": 0})
    (tmp_path / "notes.txt").write_text("mine")
    again = RunDirectory.create(tmp_path, tiny("seed=5"))
    again.close()
    names = ["checkpoints", "config.yaml", "lock", "notes.txt", "rollouts", "traces"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert config_of(again).seed == 5


@pytest.mark.parametrize("left", ["", "checkpoints/step-000000/model.safetensors", "metrics.jsonl"])
def test_a_run_without_a_checkpoint_on_record_is_begun_anew(left: str, tmp_path: Path) -> None:
    """Its process was killed between the first evaluation and the first checkpoint, or while that was being written."""
    run = RunDirectory.create(tmp_path, tiny())
    run.close()
    Ledger(run.ledger_file).close()
    for name in filter(None, ("rollouts/evaluation-e000000.parquet", "rollouts/.later.parquet.tmp", left)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert run.is_unsaved
    RunDirectory.create(tmp_path, tiny("seed=5")).close()
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == [
        "checkpoints",
        "config.yaml",
        "lock",
        "rollouts",
        "traces",
    ]
    assert config_of(run).seed == 5


def test_a_run_killed_while_it_made_its_ledger_is_begun_anew(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", tiny("recipe=tiny"))
    run.close()
    run.ledger_file.touch()
    assert config_of(run).recipe == "tiny" and find_run(tmp_path, "tiny") == run.path
    RunDirectory.create(run.path, tiny()).close()
    assert not run.ledger_file.exists()


def test_what_is_not_a_run_s_beginning_is_never_begun_anew(tmp_path: Path) -> None:
    """Nor what was sampled to train on, or is only shown as a run."""
    for name in ("checkpoints/step-000004", "summary.json", "recording.txt"):
        run = RunDirectory.create(tmp_path / name, tiny())
        run.close()
        Ledger(run.ledger_file).close()
        assert run.is_unsaved
        (run.path / name).touch()
        assert not run.is_unsaved
        with pytest.raises(RunError, match="already in use"):
            RunDirectory.create(run.path, tiny())
    worlds.record(tmp_path / "sampled")
    assert not RunDirectory(tmp_path / "sampled").is_unsaved
    run = RunDirectory.create(tmp_path / "saved", tiny())
    run.close()
    commit(run)
    assert not run.is_unsaved


@pytest.mark.parametrize(
    ("recorded", "advice"),
    [
        ("checkpoints/step-000000", r"resume it \(--resume, in Python resume=True\), or choose another name"),
        ("rollouts/evaluation-e000000.parquet", "it has no checkpoint to resume: delete it, or choose another name"),
        ("metrics.jsonl", "delete it, or choose another name"),
        ("summary.json", "delete it, or choose another name"),
    ],
)
def test_a_run_that_has_recorded_something_is_left_alone(recorded: str, advice: str, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, tiny())
    run.close()
    (tmp_path / recorded).touch()
    with pytest.raises(RunError, match=f"already in use; .*{advice}"):
        RunDirectory.create(tmp_path, tiny("seed=5"))
    assert config_of(run).seed == 0


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, tiny())
    run.close()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command, pipe = [sys.executable, "-c", LOCKER, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="another process is training in"):
            run.lock()
        other.kill()
        other.wait()
    run.lock()  # the lock died with its owner
    with pytest.raises(RunError, match="another process"):
        RunDirectory.open(tmp_path).lock()
    run.close()
    run.close()


def logged(number: int) -> dict[str, Any]:
    return {"kind": "update", "update": number, "x": 0.1 * number}


def evaluation(update: int, temperature: float = 1.0) -> dict[str, Any]:
    return {"update": update, "temperature": temperature, "x": "naïve"}


def test_who_looks_at_the_lock_keeps_no_run_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader holds it for a moment, to see whether a run has it."""
    RunDirectory.create(tmp_path / "run", tiny()).close()
    with (tmp_path / "run" / "lock").open() as looking:
        monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
        fcntl.flock(looking, fcntl.LOCK_SH)
        run = RunDirectory(tmp_path / "run")
        run.lock()
        assert run.state() == "in progress"
    run.close()
    assert run.state() == "stopped"


def test_metrics_after_the_checkpoint_are_forgotten_and_so_is_an_unfinished_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.metrics() == []
    assert run.roll_back_metrics(0, []) is None  # killed before the first line
    rows = [logged(number) for number in range(1, 6)]
    rows.insert(2, {"kind": "evaluation", **evaluation(2)})
    for row in rows:
        run.log(row)
        run.log_interval(row)
    for file in (run.metrics_file, run.intervals_file):
        with file.open("a") as log:
            log.write('{"kind": "update", "upd')
    assert run.metrics() == run.intervals() == rows
    assert run.roll_back_metrics(3, [evaluation(2)]) is None
    assert run.metrics() == run.intervals() == rows[:4]
    run.log(rows[4])
    assert run.metrics() == rows[:5]


def test_evaluations_are_rolled_back_to_those_of_the_state(tmp_path: Path) -> None:
    """One that was logged after the checkpoint of its own update is made again, and one that was lost is there."""
    run = RunDirectory(tmp_path)
    for row in ({"kind": "evaluation", **evaluation(0)}, logged(1), {"kind": "evaluation", **evaluation(1)}):
        run.log(row)
    assert run.roll_back_metrics(1, [evaluation(0), evaluation(0, 0.0)]) is None
    expected = [{"kind": "evaluation", **evaluation(0)}, {"kind": "evaluation", **evaluation(0, 0.0)}, logged(1)]
    assert run.metrics() == expected


@pytest.mark.parametrize("line", [b"", b"[1]", b"\xff\xfe", b'{"kind": "update"}'])
def test_lines_of_metrics_that_are_broken_or_missing_are_told(line: bytes, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for number in range(1, 6):
        run.log(logged(number))
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    run.metrics_file.write_bytes(b"".join([lines[0], line + b"\n", *lines[2:]]))
    assert run.metrics() == [logged(number) for number in (1, 3, 4, 5)]
    told = "metrics.jsonl cannot be read in line 2 and has no line of update 2"
    assert run.metrics_log().problem(5) == run.roll_back_metrics(4, []) == told
    assert run.metrics() == [logged(number) for number in (1, 3, 4)]
    assert run.metrics_log().problem(4) == "metrics.jsonl has no line of update 2"
    run.metrics_file.unlink()
    assert run.metrics_log().problem(8) == "metrics.jsonl has no line of update 1, 2, 3, 4, 5 and 3 more"


def commit(run: RunDirectory) -> None:
    """A checkpoint, empty, on record."""
    with new_directory(run.checkpoints / "step-000000") as new:
        pass
    ledger = Ledger(run.ledger_file)
    ledger.note_files(run.written)
    ledger.commit_checkpoint("step-000000", LoopState(), manifest_sha256=new.manifest_sha256)
    ledger.close()


def test_the_newest_unfinished_run_of_a_recipe_is_found(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="run of 'tiny' under"):
        find_run(tmp_path, "tiny")
    (tmp_path / "empty").mkdir()
    for age, (name, recipe) in enumerate({"done": "tiny", "z": "other", "b": "tiny", "a": "tiny"}.items()):
        run = RunDirectory.create(tmp_path / name, tiny(f"recipe={recipe}"))
        run.close()
        commit(run)
        os.utime(run.config_file, (1000 - age, 1000 - age))
    (tmp_path / "done" / "summary.json").write_text("{}")
    assert find_run(tmp_path, "tiny").name == "b"
    assert find_run(tmp_path, "other").name == "z"
    RunDirectory.create(tmp_path / "killed before its first checkpoint", tiny("recipe=tiny")).close()
    assert find_run(tmp_path, "tiny").name == "killed before its first checkpoint"


def test_runs_that_start_in_the_same_second_get_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    with ThreadPoolExecutor(16) as threads:
        made = list(threads.map(lambda _: make_directory(tmp_path / "runs", "tiny", 7), range(40)))
    name = "tiny-seed7-20260102-030405"
    assert sorted(path.name for path in made) == sorted([name, *(f"{name}-{n}" for n in range(2, 41))])
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for place in ("file", "nowhere"):
        with pytest.raises(RunError, match=f"could not create run directory '.*/{place}/.*; choose other --runs"):
            make_directory(tmp_path / place, "tiny", 0)


@pytest.mark.parametrize("content", [b"\xff", b"[]"])
def test_a_summary_that_cannot_be_read_is_none(content: bytes, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.summary_file.write_bytes(content)
    assert run.state() == "stopped"
    run.summary_file.write_bytes(b"{}")
    assert run.state() == "finished"


def part(index: int) -> Group:
    return make_group(index, Trajectory(f"g{index:06d}.0", "t", 0, (make_step(),), 1.0, Status.DONE))


def record(run: Path, ledger: Ledger, count: int) -> list[BaseException | None]:
    """Several at once, then one more; what each got."""

    async def everyone() -> list[BaseException | None]:
        store = RunStore(RunDirectory(run), ledger)
        first = await asyncio.gather(*(store.record(part(index), 0) for index in range(count)), return_exceptions=True)
        return [*first, *await asyncio.gather(store.record(part(count), 0), return_exceptions=True)]

    return asyncio.run(everyone())


def test_those_that_finish_together_share_a_shard(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    (tmp_path / "rollouts").mkdir()
    assert record(tmp_path, ledger, 3) == [None] * 4
    assert ledger.shards().keys() == {"train-g000000.0.parquet", "train-g000003.0.parquet"}
    assert ledger.shards().keys() == {file.name for file in (tmp_path / "rollouts").iterdir()}
    ledger.close()


def test_a_write_that_fails_fails_for_all_that_were_in_it_and_after_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    got = record(tmp_path / "nowhere", ledger, 3)
    assert [type(error) for error in got] == [RunError] * 4
    assert not ledger.query("SELECT * FROM groups")
    ledger.close()


class Refusing(Quiet):
    """After the second update the run's rollouts cannot be written any more."""

    def __init__(self, rollouts: Path) -> None:
        super().__init__()
        self.rollouts = rollouts

    def update(self, row: object) -> None:
        super().update(row)
        if len(self.rows) == 2:
            self.rollouts.rename(self.rollouts.with_name("away"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_disk_that_refuses_ends_the_run_which_can_be_gone_on_with(staleness: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    options = (f"orchestration.max_staleness={staleness}", "data.train.options.seconds=0.01")
    with pytest.raises(RunError, match=r"could not write .*\.parquet.* then --resume"):
        start(path, *options, "orchestration.updates=6", progress=Refusing(path / "rollouts"))
    (path / "away").rename(path / "rollouts")
    (path / "rollouts" / "train-g000099.0.parquet").write_bytes(b"written, and killed before it was on record")
    resume(path)
    check_finished(path)
    assert not query(path, "SELECT * FROM steps WHERE state = 'recorded'")


CLOCKS = 0.05  # seconds by which two clocks may differ


def test_a_synchronous_run(tmp_path: Path) -> None:
    run, before = tmp_path / "run", time.time()
    start(run)
    after = time.time()
    intervals = RunDirectory.open(run).intervals()
    expected = {(phase, update) for phase in ("rollout", "update", "publish") for update in range(1, 5)}
    expected |= {*(("checkpoint", update) for update in (0, 2, 4)), ("evaluation", 0), ("evaluation", 4)}
    assert {(row["phase"], row["update"]) for row in intervals} >= expected
    for row in intervals:
        assert before - CLOCKS <= row["started"] <= row["started"] + row["seconds"] <= after + CLOCKS
    for row in updates(run):
        for phase in ("rollout", "update", "publish"):
            [own] = [i for i in intervals if (i["phase"], i["update"]) == (phase, row["update"])]
            assert own["seconds"] == pytest.approx(row[f"seconds_{phase}"])
        assert "seconds_evaluation" not in row
    trained = {
        row["trajectory_id"]: row["trained_version"] + 1
        for row in query(run, "SELECT trajectory_id, trained_version FROM trajectories JOIN groups USING (group_id)")
        if row["trained_version"] is not None
    }
    rollouts = {row["update"]: row for row in intervals if row["phase"] == "rollout"}
    for trajectory, steps in recorded(run):
        for step in steps:
            assert step.started is not None and step.waited is not None
            assert 0 <= step.waited <= step.seconds
            if trajectory in trained:
                rollout = rollouts[trained[trajectory]]
                assert rollout["started"] - CLOCKS <= step.started
                assert step.started + step.seconds <= rollout["started"] + rollout["seconds"] + CLOCKS
