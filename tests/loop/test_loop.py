"""Whole runs of a tiny model: what is counted, what is trained, what is reproducible."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas
import pytest

from tests.runs import Interrupting, Summary, check_finished, put_config, query, recorded, resume, start, updates
from tests.worlds import Quiet, Ragged, Vowels, make_step, tiny, user, vowel_tasks
from treadle.api import run as api_run
from treadle.core.config import dump_yaml
from treadle.core.errors import CheckpointError, ConfigError, RunError, TrainingStopped
from treadle.core.rewards import Reward
from treadle.core.trainer import Trainer
from treadle.core.types import Form, Group, Task, Trajectory
from treadle.envs.base import EnvStep
from treadle.loop.loop import Checkpointer
from treadle.packing.checks import split_untrainable
from treadle.plan.device import settled
from treadle.plan.inputs import Inputs, make_inputs
from treadle.plan.validation import check_settings
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import SCHEMA_VERSION
from treadle.record.run_directory import RunDirectory
from treadle.report.metrics import DECLARED
from treadle.report.status import RunStatus
from treadle.rollout.attempt import Players

pytestmark = pytest.mark.xdist_group("orchestration_loop")  # what its tests share is made once


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """The tiny recipe, never interrupted."""
    path = tmp_path_factory.mktemp("runs") / "reference"
    return path, start(path)


def test_a_run_leaves_what_it_promises(reference: tuple[Path, Summary]) -> None:
    path, summary = reference
    check_finished(path)
    assert json.loads((path / "summary.json").read_text()) == summary
    assert (summary["updates"], summary["stopped_early"], summary["held_out_tasks"]) == (4, False, 3)
    assert [e["update"] for e in summary["evaluations"]] == [0, 4]
    assert summary["held_out_success_after"] == summary["evaluations"][-1]["success"]
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    rows = query(path, "SELECT split, count(*) AS n FROM groups GROUP BY split")
    assert {row["split"]: row["n"] for row in rows} == {"train": 8, "held_out": 6}
    assert {row["version"] for row in updates(path)} == {0, 1, 2, 3}
    for row in query(path, "SELECT g.batch, t.oldest_version FROM trajectories t JOIN groups g USING (group_id)"):
        assert row["batch"] == row["oldest_version"]  # synchronous: sampled by the version that is trained


def test_what_the_learner_refuses_is_dropped_told_and_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every first attempt gets a step that nothing can be learned from."""

    def with_an_empty_step(trajectory: Trajectory) -> Trajectory:
        empty = make_step([1], [])
        return replace(trajectory, steps=(*trajectory.steps, empty)) if trajectory.attempt == 0 else trajectory

    def spoilt(groups: Sequence[Group], *model: Any) -> tuple[list[Group], dict[str, str]]:
        made = [replace(g, trajectories=tuple(map(with_an_empty_step, g.trajectories))) for g in groups]
        return split_untrainable(made, *model)

    monkeypatch.setattr("treadle.training.learner.split_untrainable", spoilt)
    progress = Quiet()
    start(tmp_path / "run", progress=progress)
    rows = query(tmp_path / "run", "SELECT DISTINCT trajectory_id, state, reason FROM steps WHERE state != 'evaluated'")
    assert len(rows) == 24
    for row in rows:
        refused = row["trajectory_id"].endswith(".0")
        assert (row["state"], row["reason"]) == (("dropped", "refused") if refused else ("trained", None))
    assert [row["refused"] for row in updates(tmp_path / "run")] == [2] * 4
    told = [line for line in progress.lines if line.startswith("not trained: task ")]
    assert len(told) == 8 and all("the completion is empty" in line for line in told)
    with pytest.raises(TrainingStopped, match=r"2 of 6 trajectories of update 1 could not be trained .* is empty"):
        start(tmp_path / "stricter", "failures.max_failed_fraction=0.3")


def test_no_two_calls_of_a_run_share_a_seed(reference: tuple[Path, Summary]) -> None:
    """Evaluation included: it has draws of its own."""
    tables = [pandas.read_parquet(shard) for shard in (reference[0] / "rollouts").iterdir()]
    seeds = pandas.concat(tables).seed
    assert len(seeds) == 2 * (8 * 3 + 2 * 3)
    assert seeds.is_unique


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("evaluation.every=1", "evaluation.greedy_too=true"),
        ("evaluation.attempts=3", "evaluation.greedy_too=true", "evaluation.top_p=0.9"),
        ("data.held_out=null",),
        ("orchestration.checkpoint_every=1", "orchestration.keep_last=1"),
    ],
    ids=str,
)
def test_evaluations_and_checkpoints_do_not_change_the_weights(
    overrides: tuple[str, ...], tmp_path: Path, reference: tuple[Path, Summary]
) -> None:
    assert start(tmp_path / "run", *overrides)["weights_sha256"] == reference[1]["weights_sha256"]
    check_finished(tmp_path / "run")


@pytest.mark.parametrize("override", ["seed=1", "training.optimizer.learning_rate=2e-3", "rollout.temperature=0.9"])
def test_what_should_change_the_weights_does(override: str, tmp_path: Path, reference: tuple[Path, Summary]) -> None:
    assert start(tmp_path / "run", override)["weights_sha256"] != reference[1]["weights_sha256"]
    check_finished(tmp_path / "run")


# Metrics


def ragged(task_id: str, *rewards: float) -> Task:
    return Task(task_id, (user(f"play {task_id}"),), "world", extras={"turns": len(rewards), "rewards": rewards})


def test_metrics_are_per_trajectory_not_per_row(tmp_path: Path) -> None:
    """Rows would weigh the long trajectories more: reward 0.67 and steps 2.33 instead of these."""
    tasks = [ragged("a", 1.0), ragged("b", 0.0, 0.0), ragged("c", 0.5, 0.0, 0.25)]
    held_out = [ragged("d", 1.0, 0.5), ragged("e", 0.0, 0.0, 0.0)]
    inputs = make_inputs(tasks, held_out, Players({"world": Ragged}))
    start(tmp_path / "run", "training.tasks_per_update=3", "orchestration.updates=1", inputs=inputs)
    check_finished(tmp_path / "run")
    [row] = updates(tmp_path / "run")
    assert (row["reward_mean"], row["steps_mean"]) == (pytest.approx(1.75 / 3), 2.0)
    assert [row[name] for name in ("success", "pass_at_1", "pass_at_3")] == [pytest.approx(1 / 3)] * 3
    assert (row["equal_reward_groups"], row["zero_advantage_groups"]) == (1, 1)
    assert (row["sequences"], row["staleness_max"], row["token_staleness_mean"]) == (18, 0, 0)
    assert (row["ratio_mean"], row["ratio_max"], row["trainable_fraction"]) == (1, 1, 1)
    assert (row["trajectories"], row["failed"], row["ended_done"]) == (9, 0, 1.0)
    steps = query(
        tmp_path / "run",
        "SELECT trajectory_id, sum(s.completion_tokens) AS c, sum(s.prompt_tokens) AS p FROM steps s "
        "JOIN trajectories USING (trajectory_id) JOIN groups g USING (group_id) WHERE split = 'train' GROUP BY 1",
    )
    assert row["completion_tokens_mean"] == pytest.approx(np.mean([s["c"] for s in steps]))
    assert row["prompt_tokens_mean"] == pytest.approx(np.mean([s["p"] for s in steps]))
    evaluation = RunDirectory.open(tmp_path / "run").metrics()[0]
    assert (evaluation["reward_mean"], evaluation["steps_mean"], evaluation["success"]) == (0.75, 2.5, 0.5)
    [equal] = query(tmp_path / "run", "SELECT DISTINCT advantage FROM trajectories WHERE advantage IS NOT NULL")
    assert equal["advantage"] == 0.0  # equal rewards in every group


def test_an_environments_metrics_are_in_every_row_and_durable(tmp_path: Path) -> None:
    """The lookup world as it ships, played by a model that knows nothing of it: its replies are invalid."""
    world = ["environment=lookup", "rollout.max_input_tokens=110", "data.train.options.count=8"]
    world += [f"data.{split}.source=lookup" for split in ("train", "held_out")]
    start(tmp_path / "run", *world, "orchestration.updates=2", "training.group_size=2")
    check_finished(tmp_path / "run")
    recorded = query(
        tmp_path / "run", "SELECT g.split, g.idx, t.metrics FROM trajectories t JOIN groups g USING (group_id)"
    )
    for number, row in enumerate(updates(tmp_path / "run")):
        own = [json.loads(t["metrics"]) for t in recorded if t["split"] == "train" and t["idx"] // 2 == number]
        assert len(own) == 4 and row["env/invalid"] == np.mean([t["invalid"]["value"] for t in own])
        assert row["env/searches"] == np.mean([t["searches"]["value"] for t in own])
    assert row["env/invalid"] > 0.5
    patterns = [m.name.replace("*", "?*") for m in DECLARED] + ["env/?*", "kind", "update", "version"]
    assert [key for key in row if not any(fnmatchcase(key, pattern) for pattern in patterns)] == []
    evaluation = RunDirectory.open(tmp_path / "run").metrics()[0]
    assert evaluation["metrics"].keys() >= {"env/searches", "env/invalid"}


# Failed trajectories


class Failing(Vowels):
    """Attempts fail as the switch says; a module-level switch because every attempt is a new instance."""

    made = 0
    every = 0  # each so many-th attempt fails; 0: none

    def __init__(self) -> None:
        type(self).made += 1
        self.fails = bool(self.every) and self.made % self.every == 0

    async def step(self, text: str) -> EnvStep:
        if self.fails:
            raise LookupError("the page is gone")
        return await super().step(text)


def failing(every: int) -> Inputs:
    class Fresh(Failing):
        made = 0

    Fresh.every = every
    tasks = [replace(task, environment="world") for task in vowel_tasks("train", 6)]
    return make_inputs(tasks, [], Players({"world": Fresh}))


def test_failed_trajectories_are_counted_and_in_no_baseline(tmp_path: Path) -> None:
    progress = Quiet()
    start(tmp_path / "run", "training.group_size=4", inputs=failing(3), progress=progress)
    check_finished(tmp_path / "run")
    rows = query(
        tmp_path / "run",
        "SELECT t.*, g.idx FROM trajectories t JOIN groups g USING (group_id) ORDER BY g.idx, t.attempt",
    )
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) in (10, 11)
    for row in failed:
        assert (row["reward"], row["advantage"], row["failure_cause"]) == (None, None, "environment")
        assert row["failure_message"] == "step raised LookupError: the page is gone"
        assert row["steps"] == 1
    for index in range(8):
        own = [row for row in rows if row["idx"] == index and row["status"] != "failed"]
        rewards = np.array([row["reward"] for row in own])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        assert np.allclose([row["advantage"] for row in own], expected, atol=1e-9)
    logged = updates(tmp_path / "run")
    assert sum(row["failed"] for row in logged) == len(failed)
    for number, row in enumerate(logged):
        graded = [r["reward"] for r in rows if r["idx"] // 2 == number and r["reward"] is not None]
        assert row["reward_mean"] == pytest.approx(np.mean(graded))
    assert [line for line in progress.lines if "the page is gone" in line] != []


class Breaking(Quiet):
    """After some updates, every other attempt fails."""

    def __init__(self, world: type[Failing], after: int) -> None:
        super().__init__()
        self.world, self.after = world, after

    def update(self, row: Any) -> None:
        if row["update"] == self.after:
            self.world.every = 2


def test_too_many_failures_stop_the_run_which_can_be_resumed(tmp_path: Path, reference: tuple[Path, Summary]) -> None:
    path = tmp_path / "run"
    inputs = failing(0)
    world = inputs.players.environments["world"]
    assert isinstance(world, type)
    assert issubclass(world, Failing)
    with pytest.raises(TrainingStopped) as caught:
        start(path, "failures.max_failed_fraction=0.4", inputs=inputs, progress=Breaking(world, after=3))
    assert "3 of 6 trajectories of update 4 failed" in str(caught.value)
    assert "most often (3x) environment: step raised LookupError: the page is gone" in str(caught.value)
    assert "A checkpoint of update 3 is saved" in str(caught.value)
    world.every = 0
    assert resume(path, inputs=inputs)["weights_sha256"] == reference[1]["weights_sha256"]
    check_finished(path)
    rows = query(path, "SELECT state, reason, count(*) AS n FROM steps GROUP BY state, reason")
    assert {(row["state"], row["reason"]): row["n"] for row in rows} == {
        ("trained", None): 8 * 3 * 2,
        ("dropped", "failed"): 3 + 2,  # each in its first call, and one attempt that was left alone in its group
        ("dropped", "resampled"): 2 * 2,
    }


# Interruption and resuming


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("number", "per_batch", "batch"), [(signal.SIGINT, 1, 1), (signal.SIGTERM, 1, 3), (signal.SIGINT, 2, 1)]
)
def test_an_interrupted_run_resumes_to_the_same_weights(
    number: signal.Signals, per_batch: int, batch: int, tmp_path: Path, reference: tuple[Path, Summary]
) -> None:
    path, option = tmp_path / "run", f"training.updates_per_batch={per_batch}"
    handled = (signal.SIGINT, signal.SIGTERM)
    original = {n: signal.signal(n, signal.SIG_IGN) for n in handled}  # whatever a user's program has set, it keeps
    try:
        summary = start(path, option, progress=Interrupting(number, batch))
        assert {signal.getsignal(n) for n in handled} == {signal.SIG_IGN}
    finally:
        for n, handler in original.items():
            signal.signal(n, handler)
    done = batch * per_batch
    assert (summary["stopped_early"], summary["updates"], summary["held_out_success_after"]) == (True, done, None)
    assert not (path / "summary.json").exists()
    assert (path / "checkpoints" / f"step-{done:06d}").is_dir()
    status = RunStatus.read(path / "status.json")
    assert status is not None and status.interrupted
    assert f" after update {done} of 4; resume with: " in status.doing(RunDirectory(path))
    resumed = resume(path)
    check_finished(path)
    if per_batch == 1:
        assert resumed["weights_sha256"] == reference[1]["weights_sha256"]
        assert [e["update"] for e in resumed["evaluations"]] == [0, 4]
    else:
        assert resumed["weights_sha256"] == start(tmp_path / "straight", option)["weights_sha256"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("which", "done", "made"), [(1, 0, 0), (2, 0, 1), (3, 2, 0), (4, 4, 0), (5, 4, 1)])
def test_an_evaluation_that_is_interrupted_is_made_when_the_run_is_resumed(
    which: int, done: int, made: int, tmp_path: Path, reference: tuple[Path, Summary]
) -> None:
    """Two before training, sampled and greedy, one amid it, two afterwards. made: before it, of the same weights."""
    path, options = tmp_path / "run", ("evaluation.every=2", "evaluation.temperature=1", "evaluation.greedy_too=true")
    summary = start(path, *options, progress=Interrupting(signal.SIGINT, which, "evaluation"))
    assert (summary["stopped_early"], summary["updates"], summary["held_out_success_after"]) == (True, done, None)
    assert not (path / "summary.json").exists()
    assert (path / "checkpoints" / f"step-{done:06d}").is_dir()
    assert len([e for e in summary["evaluations"] if e["update"] == done]) == made
    resumed = resume(path)
    check_finished(path)
    assert [(e["update"], e["temperature"]) for e in resumed["evaluations"]] == [(0, 1), (0, 0), (2, 1), (4, 1), (4, 0)]
    assert resumed["weights_sha256"] == reference[1]["weights_sha256"]


class Dying(Quiet):
    """Dies when the n-th evaluation is on record and nothing after it."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.left = which

    def evaluate(self, result: Any) -> None:
        self.left -= 1
        if not self.left:
            raise SystemExit("killed")


@pytest.mark.quick(1)
@pytest.mark.parametrize("which", [2, 3])
def test_an_evaluation_that_no_checkpoint_knows_is_logged_once(which: int, tmp_path: Path) -> None:
    """The last two are made after the checkpoint of their update."""
    path = tmp_path / "run"
    with pytest.raises(SystemExit):
        start(path, "evaluation.greedy_too=true", progress=Dying(which + 1))
    resumed = resume(path)
    made = [(0, 1.0), (0, 0.0), (4, 1.0), (4, 0.0)]
    assert [(e["update"], e["temperature"]) for e in resumed["evaluations"]] == made
    logged = [row for row in RunDirectory.open(path).metrics() if row["kind"] == "evaluation"]
    assert [(row["update"], row["temperature"]) for row in logged] == made
    check_finished(path)


def test_a_run_goes_on_without_lines_of_metrics_that_are_broken_and_says_so(tmp_path: Path) -> None:
    path, progress = tmp_path / "run", Quiet()
    start(path, progress=Interrupting(signal.SIGINT, 2))
    metrics = path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([lines[0], b"\x00" + lines[1], *lines[2:]]))
    resume(path, progress=progress)
    problem = "metrics.jsonl cannot be read in line 2 and has no line of update 1"
    assert f"{problem}; the run continues without" in progress.lines
    assert [row["update"] for row in updates(path)] == [2, 3, 4]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("options", "batch", "done"),
    [
        (("algorithm.advantage=gae", "algorithm.value.clip=0.1"), 2, 2),
        (("algorithm.kl.coef=0.1", "algorithm.kl.reset_every=3", "algorithm.kl.target=1e-4"), 4, 4),
        (("algorithm.kl.coef=0.1", "algorithm.kl.where=reward", "training.epochs_per_batch=2"), 2, 4),
        (("training.epochs_per_batch=2", "training.updates_per_batch=2"), 1, 4),
    ],
    ids=["value head", "reference that is reset", "reference and epochs", "epochs of several updates"],
)
def test_whatever_a_learner_carries_along_is_resumed(
    options: tuple[str, ...], batch: int, done: int, tmp_path: Path
) -> None:
    options = (*options, "orchestration.updates=8")
    summary = start(tmp_path / "run", *options, progress=Interrupting(signal.SIGINT, batch))
    assert (summary["stopped_early"], summary["updates"]) == (True, done)
    straight = start(tmp_path / "straight", *options)
    assert resume(tmp_path / "run")["weights_sha256"] == straight["weights_sha256"]
    for name in ("run", "straight"):
        check_finished(tmp_path / name)


def test_a_second_signal_interrupts_at_once_and_the_run_still_resumes(
    tmp_path: Path, reference: tuple[Path, Summary]
) -> None:
    class Impatient(Interrupting):
        def began(self, name: str) -> None:
            twice = self.left == 1 and name == "rollout"
            super().began(name)
            if twice:
                os.kill(os.getpid(), self.number)

    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        start(path, progress=Impatient(signal.SIGINT, 2))
    assert resume(path)["weights_sha256"] == reference[1]["weights_sha256"]
    check_finished(path)


def test_a_finished_run_cannot_be_resumed(reference: tuple[Path, Summary]) -> None:
    with pytest.raises(RunError, match=r"is finished \(4 updates\); nothing to resume"):
        resume(reference[0])


def test_a_run_killed_before_its_summary_is_finished_by_resuming(
    tmp_path: Path, reference: tuple[Path, Summary]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(reference[0], path)
    (path / "summary.json").unlink()
    summary = resume(path)
    assert summary["weights_sha256"] == reference[1]["weights_sha256"]
    assert [e["update"] for e in summary["evaluations"]] == [0, 4]  # the last evaluation is not played twice
    check_finished(path)


def test_an_interrupt_does_not_wait_for_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_run, "_TO_CLOSE", 0.01)
    computed = threading.Event()
    with pytest.raises(KeyboardInterrupt), api_run._closing(cast(Trainer, SimpleNamespace(close=computed.wait))):
        raise KeyboardInterrupt
    computed.set()


def test_a_run_without_a_checkpoint_is_begun_anew_or_says_so(tmp_path: Path, reference: tuple[Path, Summary]) -> None:
    path, progress = tmp_path / "run", Quiet()
    RunDirectory.create(path, tiny()).close()
    assert resume(path, progress=progress)["weights_sha256"] == reference[1]["weights_sha256"]
    assert progress.lines[0] == f"run {str(path)!r} has no checkpoint yet: it starts over"
    RunDirectory.create(tmp_path / "played", tiny()).close()
    (tmp_path / "played" / "rollouts" / "evaluation-e000000.parquet").touch()
    with pytest.raises(RunError, match="has recorded nothing yet: it is, or was stopped, in its warm start"):
        resume(tmp_path / "played")
    with pytest.raises(RunError, match="is not a run directory: there is nothing of that name"):
        resume(tmp_path / "nothing", config=tiny())


@pytest.mark.parametrize("again", [start, resume])
@pytest.mark.parametrize("left", ["evaluation", "checkpoint"])
def test_a_run_that_ended_before_its_first_checkpoint_is_begun_anew(
    left: str,
    again: Callable[..., Summary],
    tmp_path: Path,
    reference: tuple[Path, Summary],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first evaluation is on record, and the directory of a checkpoint there that the ledger does not know."""

    def interrupted(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    owner, name = {"evaluation": (Checkpointer, "save"), "checkpoint": (Ledger, "commit_checkpoint")}[left]
    path, progress = tmp_path / "run", Quiet()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        start(path)
    assert [file.name for file in (path / "rollouts").iterdir()] and (path / "metrics.jsonl").is_file()
    assert any((path / "checkpoints").iterdir()) is (left == "checkpoint")
    assert again(path, progress=progress)["weights_sha256"] == reference[1]["weights_sha256"]
    assert progress.lines[0] == f"run {str(path)!r} has no checkpoint yet: it starts over"
    check_finished(path)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first update. Tests must leave it as it is."""
    path = tmp_path_factory.mktemp("runs") / "stopped"
    start(path, progress=Interrupting(signal.SIGINT, 1))
    return path


def test_a_checkpoint_of_another_model_is_refused(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    config = dump_yaml(settled(tiny("model.build.hidden_size=64")))
    put_config(tmp_path / "run", f"schema_version: {SCHEMA_VERSION}\n{config}")
    with pytest.raises(CheckpointError, match="another model: hidden_size is 32 there, 64 in the configured"):
        resume(tmp_path / "run")


# Learning


def mean_reward(rows: Sequence[dict[str, Any]]) -> float:
    return float(np.mean([row["reward_mean"] for row in rows]))


def test_the_reward_rises(tmp_path: Path) -> None:
    """From the share of vowels a random model writes to mostly vowels, in twenty updates."""
    start(
        tmp_path / "run",
        *("orchestration.updates=20", "training.tasks_per_update=3", "training.group_size=6"),
        *("training.optimizer={learning_rate: 0.04}", "data.held_out=null", "orchestration.checkpoint_every=20"),
    )
    rows = updates(tmp_path / "run")
    assert mean_reward(rows[:5]) < 0.45
    assert mean_reward(rows[-5:]) > 0.7
    check_finished(tmp_path / "run")


@pytest.mark.parametrize(("advantage", "lines"), [("rloo", 1), ("step_return", 0)])
def test_an_advantage_that_ignores_when_steps_were_rewarded_says_so_once(
    advantage: str, lines: int, tmp_path: Path
) -> None:
    progress = Quiet()
    start(tmp_path / "run", f"algorithm.advantage={advantage}", progress=progress)
    told = [line for line in progress.lines if line.startswith("the environment rewards single steps")]
    assert len(told) == lines
    assert all("algorithm.advantage rloo only uses their sum" in line for line in told)


class Named(Vowels):
    """The same rewards by name, and of tokens."""

    async def step(self, text: str) -> EnvStep:
        answer = await super().step(text)
        return answer._replace(reward=Reward({"vowels": answer.reward, "turn": 1.0}))  # type: ignore[dict-item]


def half_a_point(task: Task, trajectory: Trajectory) -> list[Reward]:
    """For each first token."""
    return [Reward(tokens=np.array([0.5, *[0.0] * (len(s.completion_ids) - 1)], np.float32)) for s in trajectory.steps]


def test_components_are_weighed_shaped_recorded_and_evaluated_raw(tmp_path: Path) -> None:
    progress = Quiet()
    start(
        tmp_path / "run",
        *("environment=tests.loop.test_loop:Named", "rewards.weights={turn: -1.0, turns: 2.0}"),
        *("rewards.shaping=tests.loop.test_loop:half_a_point", "algorithm.advantage=step_return"),
        *("rewards.length_penalty={free: 0, limit: 10}", "evaluation.success_of=turn", "evaluation.success_at=2"),
        progress=progress,
    )
    check_finished(tmp_path / "run")
    for row in updates(tmp_path / "run"):
        penalty = row["reward_length_penalty_mean"]
        assert -1 <= penalty < 0
        assert row["reward_mean"] == pytest.approx(row["reward_vowels_mean"] - row["reward_turn_mean"])
        assert row["reward_turn_mean"] == 2.0 and row["reward_tokens_mean"] == 1.0
        assert row["shaped_reward_mean"] == pytest.approx(row["reward_mean"] + 1.0 + penalty)
        assert row["success"] == 1.0
    for row in query(tmp_path / "run", "SELECT * FROM trajectories JOIN groups USING (group_id)"):
        components = json.loads(row["components"])
        assert row["reward"] == pytest.approx(components["vowels"] - 2.0)
        assert ("length_penalty" in components) == (row["split"] == "train") == (row["trained_reward"] is not None)
    [weights] = [line for line in progress.lines if line.startswith("rewards.weights")]
    assert "nothing in the first batch was given as turns; components: length_penalty, tokens, turn, vowels" in weights
    [tokens] = [line for line in progress.lines if line.startswith("there are rewards of single tokens")]
    assert "step_return only uses the sum over a step" in tokens


def test_overlong_trajectories_are_dropped_by_name_and_enter_nothing(tmp_path: Path) -> None:
    """Nothing but a stop token ends a reply before its five tokens: most are cut off, and none of those is trained."""
    options = ("orchestration.updates=1", "evaluation.success_at=0.2", "training.min_group_size=1")
    start(tmp_path / "run", "rewards.overlong=drop", "failures.max_sampled=100", *options)
    rows = query(
        tmp_path / "run",
        "SELECT t.trained_reward IS NULL AS out, t.reward IS NULL AS ungraded, t.advantage IS NULL AS no_advantage, "
        "s.state, s.reason, t.status, last.stop_reason FROM steps s JOIN trajectories t USING (trajectory_id) "
        "JOIN groups g USING (group_id) "
        "JOIN steps last ON last.trajectory_id = t.trajectory_id AND last.step = t.steps - 1 WHERE g.split = 'train'",
    )
    assert {row["out"] for row in rows} == {0, 1} or all(row["out"] for row in rows)
    for row in rows:
        assert row["out"] == row["no_advantage"] == (row["stop_reason"] == "length" or row["status"] == "context")
        assert (row["state"], row["reason"]) == (("dropped", "overlong") if row["out"] else ("trained", None))
        assert not row["ungraded"]
    assert sum(row["dropped_overlong"] for row in updates(tmp_path / "run")) > 0


def test_kl_may_be_from_another_model(tmp_path: Path, reference: tuple[Path, Summary]) -> None:
    """One of `models`, here a checkpoint; what is wrong with it is told before there is a run."""
    path, kl = reference[0] / "checkpoints" / "step-000004", "algorithm.kl={coef: 0.1, model: first}"
    start(tmp_path / "run", kl, f"models.first.path={path}", "seed=3", "orchestration.updates=1")
    assert updates(tmp_path / "run")[0]["kl"] > 1e-6  # from itself it would be 0
    kept = tmp_path / "run" / "checkpoints" / "step-000001" / "reference.safetensors"
    assert kept.read_bytes()[-4096:] == (path / "model.safetensors").read_bytes()[-4096:]
    with pytest.raises(ConfigError, match=r"models\.first\.path: no config\.json"):
        start(tmp_path / "not", kl, f"models.first.path={tmp_path}")
    with pytest.raises(ConfigError, match=r"reset_every is 2, but algorithm\.kl\.model has other weights"):
        deeper = ("algorithm.kl.reset_every=2", "model.build.num_hidden_layers=2")
        start(tmp_path / "not", kl, f"models.first.path={path}", *deeper)
    assert not (tmp_path / "not").exists()


def test_filters_of_sampling_are_those_of_training_and_refuse_what_compares_with_the_engine(tmp_path: Path) -> None:
    start(tmp_path / "run", "rollout.top_k=5", "rollout.top_p=0.9", "orchestration.updates=1")
    tables = [pandas.read_parquet(shard) for shard in (tmp_path / "run" / "rollouts").iterdir()]
    rows = pandas.concat(tables)
    assert {(k, p) for k, p, group in zip(rows.top_k, rows.top_p, rows.group_id, strict=True) if group[0] == "g"} == {
        (5, 0.9)
    }
    assert {(k, p) for k, p, group in zip(rows.top_k, rows.top_p, rows.group_id, strict=True) if group[0] == "e"} == {
        (0, 1.0)
    }
    with pytest.raises(ConfigError, match="refer to a truncated distribution"):
        check_settings(
            tiny("rollout.min_p=0.1", "algorithm.correction.token_tis=2.0", f"engine.kind={__name__}:nobody")
        )


@pytest.mark.parametrize("setting", ["min_p=0.1", "top_p=0.9", "top_k=257"])
def test_vllm_filters_with_a_top_k_that_shows_what_was_left(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.top_k is \d+, and with a filter .* only for a top_k of 1 to 256"):
        check_settings(tiny("engine.kind=vllm", f"rollout.{setting}"))
    shown = setting.replace("257", "256"), "top_k=256"
    loss = "algorithm.policy_loss=importance_sampling", "algorithm.correction.token_mask=[0.5, 2]"
    check_settings(tiny("engine.kind=vllm", *(f"rollout.{each}" for each in shown), *loss))


@pytest.mark.parametrize("lock_step", [True, False])
def test_with_filters_ratios_compare_one_distribution(tmp_path: Path, lock_step: bool) -> None:
    """The learner scores over what the filters left, also of steps that were read from the disk again."""
    filters = "rollout.top_k=20", "rollout.top_p=0.8", "rollout.min_p=0.01", "rollout.temperature=0.7"
    settings = (*filters, "algorithm.policy_loss=importance_sampling", f"engine.lock_step={json.dumps(lock_step)}")
    whole = start(tmp_path / "run", *settings)
    for row in updates(tmp_path / "run"):
        assert row["logprob_gap_max"] < 1e-4 and row["ratio_max"] - row["ratio_min"] < 1e-3
    found = [s.support for name, steps in recorded(tmp_path / "run") if name.startswith("g") for s in steps]
    sizes = np.concatenate([support.counts for support in found if support is not None])
    assert all(support is not None for support in found)
    assert 1 <= sizes.min() <= sizes.max() <= 20 and len(sizes) > 100
    stopped = start(tmp_path / "part", *settings, progress=Interrupting(which=3))
    assert stopped["stopped_early"]
    resumed = resume(tmp_path / "part")
    assert not lock_step or resumed["weights_sha256"] == whole["weights_sha256"]


class Spelled(Vowels):
    form = Form("regex", "[a-z]{2,6}[.!]")


def spelled() -> Inputs:
    tasks = [replace(task, environment="world") for task in vowel_tasks("train", 4)]
    return make_inputs(tasks, [], Players({"world": Spelled}))


@pytest.mark.parametrize("filters", [(), ("rollout.top_k=5",)])
def test_what_follows_a_form_is_trained_over_what_was_possible(tmp_path: Path, filters: tuple[str, ...]) -> None:
    """Also in steps that were read from the disk again, where no mask is: it follows from grammar and tokens."""
    settings = (*filters, "algorithm.policy_loss=importance_sampling", "rollout.max_completion_tokens=12")
    whole = start(tmp_path / "run", *settings, inputs=spelled())
    for row in updates(tmp_path / "run"):
        assert row["logprob_gap_max"] < 1e-4 and row["ratio_max"] - row["ratio_min"] < 1e-3
        assert 0 < row["forced_share"] < 1
    steps = [step for name, steps in recorded(tmp_path / "run") if name.startswith("g") for step in steps]
    assert len(steps) > 10
    assert all(step.sampling.grammar and (step.support is not None) == bool(filters) for step in steps)
    stopped = start(tmp_path / "part", *settings, inputs=spelled(), progress=Interrupting(which=3))
    assert stopped["stopped_early"]
    assert resume(tmp_path / "part", inputs=spelled())["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize(
    ("scores", "filters", "form"),
    [
        ("top_k", (), False),
        ("vocabulary", (), False),
        ("support", ("rollout.top_k=20", "rollout.top_p=0.8"), False),
        ("vocabulary", ("rollout.top_k=5", "rollout.max_completion_tokens=12"), True),
    ],
)
def test_centered_scores_are_of_what_was_recorded(
    tmp_path: Path, scores: str, filters: tuple[str, ...], form: bool
) -> None:
    """Also of steps that were read from the disk again."""
    settings, inputs = (f"algorithm.centered_scores={scores}", "engine.lock_step=true", *filters), spelled()
    begin, go_on = (partial(how, inputs=inputs) if form else how for how in (start, resume))
    plain, whole = begin(tmp_path / "plain", *settings[1:]), begin(tmp_path / "run", *settings)
    assert whole["weights_sha256"] != plain["weights_sha256"]
    for name, steps in recorded(tmp_path / "run"):
        for step in steps:
            tempered = step.sampling.temperature > 0
            assert (step.probabilities is not None) == tempered, name
            if step.probabilities is not None and step.support is not None:
                assert step.support.counts.tolist() == step.probabilities.of.counts.tolist()
    assert all(step.probabilities is None for _, steps in recorded(tmp_path / "plain") for step in steps)
    assert begin(tmp_path / "part", *settings, progress=Interrupting(which=3))["stopped_early"]
    assert go_on(tmp_path / "part")["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["support"], "is 'support', but no filter leaves tokens out; set rollout"),
        (["vocabulary", "engine.kind=vllm"], "vLLM's servers report the most probable tokens only; set engine.kind=t"),
    ],
)
def test_centered_scores_of_which_nothing_is_recorded_are_refused(settings: list[str], message: str) -> None:
    scores, *others = settings
    with pytest.raises(ConfigError, match=message):
        check_settings(tiny(f"algorithm.centered_scores={scores}", *others))


# Dynamic sampling


class Decided(Vowels):
    """Tasks 0, 3, ... reward every attempt alike."""

    async def step(self, text: str) -> EnvStep:
        answer = await super().step(text)
        return answer._replace(reward=1.0) if int(self.task.task_id.split("-")[1]) % 3 == 0 else answer


def decided() -> Inputs:
    return make_inputs(
        [replace(task, environment="world") for task in vowel_tasks("train", 6)], [], Players({"world": Decided})
    )


def trained_indices(path: Path) -> set[int]:
    return {row["idx"] for row in query(
        path, "SELECT DISTINCT idx FROM groups JOIN trajectories USING (group_id) JOIN steps USING (trajectory_id) "
        "WHERE state = 'trained'"
    )}  # fmt: skip


def test_filtered_groups_are_replaced_exactly_in_the_order_of_tasks(tmp_path: Path) -> None:
    path, options = tmp_path / "run", ("algorithm.dynamic_sampling=filter", "data.shuffle=false")
    summary = start(path, *options, inputs=decided())
    check_finished(path)
    assert trained_indices(path) == {1, 2, 4, 5, 7, 8, 10, 11}
    reasons = query(path, "SELECT DISTINCT idx, reason FROM groups JOIN trajectories USING (group_id) "
                    "JOIN steps USING (trajectory_id) WHERE state = 'dropped' ORDER BY idx")  # fmt: skip
    assert [(row["idx"], row["reason"]) for row in reasons] == [(n, "filtered") for n in (0, 3, 6, 9)]
    assert [row["zero_advantage_groups"] for row in updates(path)] == [0] * 4
    again = start(tmp_path / "again", *options, inputs=decided())
    assert again["weights_sha256"] == summary["weights_sha256"]


def test_a_filtered_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    options = ("algorithm.dynamic_sampling=filter", "data.shuffle=false")
    expected = start(tmp_path / "straight", *options, inputs=decided())["weights_sha256"]
    start(tmp_path / "run", *options, inputs=decided(), progress=Interrupting(signal.SIGINT, 2))
    assert resume(tmp_path / "run", inputs=decided())["weights_sha256"] == expected
    check_finished(tmp_path / "run")


def test_replaced_groups_give_their_weight_to_the_others_and_nothing_is_sampled_anew(tmp_path: Path) -> None:
    """The update is that of the other group alone."""
    option = "data.shuffle=false"
    both = start(
        tmp_path / "both", option, "algorithm.dynamic_sampling=replace", "orchestration.updates=1", inputs=decided()
    )
    rows = query(tmp_path / "both", "SELECT DISTINCT idx, state, reason FROM groups JOIN trajectories USING (group_id) "
                 "JOIN steps USING (trajectory_id) ORDER BY idx")  # fmt: skip
    assert [tuple(row.values()) for row in rows] == [(0, "dropped", "filtered"), (1, "trained", None)]
    filtered = start(
        tmp_path / "one", option, "algorithm.dynamic_sampling=filter", "training.tasks_per_update=1",
        "orchestration.updates=1", inputs=decided(),
    )  # fmt: skip
    assert trained_indices(tmp_path / "one") == {1}
    assert both["updates"] == filtered["updates"] == 1
    [row], [alone] = updates(tmp_path / "both"), updates(tmp_path / "one")
    assert row["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-3)
    assert (row["dropped_filtered"], row["trainable_tokens"]) == (6, alone["trainable_tokens"])


def test_a_run_whose_groups_teach_nothing_stops_and_says_so(tmp_path: Path) -> None:
    class Same(Vowels):
        async def step(self, text: str) -> EnvStep:
            return (await super().step(text))._replace(reward=1.0)

    inputs = make_inputs(
        [replace(task, environment="world") for task in vowel_tasks("train", 6)], [], Players({"world": Same})
    )
    with pytest.raises(
        TrainingStopped, match="16 groups were sampled for update 1, which needs 2; discarded: 16 filtered"
    ):
        start(tmp_path / "run", "algorithm.dynamic_sampling=filter", inputs=inputs)
    with pytest.raises(
        ConfigError, match=r"dynamic_sampling is 'filter', but advantage 'reinforce\+\+' has no group baseline"
    ):
        start(tmp_path / "not", "algorithm.dynamic_sampling=filter", "algorithm.advantage=reinforce++")


def test_attempts_that_are_made_again_do_not_stop_a_run(tmp_path: Path) -> None:
    """Every other one fails, and the next in its place does not: of those that count, none has failed."""
    options = ("failures.causes.environment={retries: 5, backoff: 0}",)
    start(tmp_path / "run", *options, "failures.max_failed_fraction=0.01", inputs=failing(2))
    check_finished(tmp_path / "run")
    failed = query(tmp_path / "run", "SELECT count(*) AS n FROM trajectories WHERE status = 'failed'")
    assert failed[0]["n"] > 8
