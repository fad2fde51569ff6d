"""Going on with other settings, and from earlier checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runs import check_finished, query, start, updates
from tests.worlds import Quiet, tiny
from treadle.api.train import train_run
from treadle.core.config_diff import Change, changes
from treadle.core.errors import ConfigError, RunError
from treadle.plan.config import config_of, load_recipe
from treadle.plan.device import settled
from treadle.plan.inputs import load_inputs
from treadle.plan.validation import check_changes
from treadle.record.checkpoint_retention import checkpoint_updates
from treadle.record.ledger import Ledger
from treadle.record.run_directory import RunDirectory

pytestmark = pytest.mark.xdist_group("orchestration_config_diff")  # what its tests share is made once


def go_on(path: Path, *overrides: str, checkpoint: str | None = None) -> tuple[dict[str, Any], Quiet]:
    config, progress = config_of(RunDirectory.open(path), overrides), Quiet()
    return train_run(config, load_inputs(config), path, progress, checkpoint=checkpoint, resume=True), progress


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe, finished."""
    path = tmp_path_factory.mktemp("runs") / "reference"
    start(path)
    return path


@pytest.fixture
def finished(reference: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    return shutil.copytree(reference, tmp_path / "finished")


# Changes


def test_changes_are_found_in_sections_too() -> None:
    vllm = ("engine.kind=vllm",)
    found = changes(tiny(*vllm), tiny(*vllm, "seed=3", "algorithm.kl.coef=0.1", "engine.options.args={a: 1}"))
    assert Change("seed", 0, 3) in found
    assert Change("algorithm.kl.coef", None, 0.1) in found
    assert Change("engine.options.args", None, {"a": 1}) in found
    assert changes(tiny(), tiny()) == []


@pytest.mark.parametrize(
    "override",
    [
        "orchestration.updates=8",
        "orchestration.updates=3",
        "orchestration.keep_best=held_out_success",
        "evaluation.every=7",
        "failures.causes.agent.retries=3",
        "training.threads=2",
        "training.packing=step",
        "data.table_by=kind",
        "training.optimizer.learning_rate=1e-5",
        "training.optimizer.warmup=9",
        "training.optimizer.decay_from=0.1",
        "training.optimizer.final_lr=0.1",
    ],
)
def test_what_may_change(override: str) -> None:
    check_changes(changes(tiny(), tiny(override)), 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=3", "seed is 3, the run was started with 0: it keys every draw"),
        ("data.train.options.count=7", "data.train.options.count is 7.* the data cursor counts its tasks"),
        ("training.group_size=4", "training.group_size is 4, the run was started with 3"),
        ("algorithm.kl.coef=0.1", "algorithm.kl.* a run has one objective"),
        ("orchestration.max_staleness=1", "orchestration.max_staleness is 1"),
        ("training.optimizer.weight_decay=0.1", "weight_decay is 0.1.* the optimizer's state belongs to it"),
        ("training.optimizer.betas=[0.9, 0.99]", "betas is .*0.99.* the optimizer's state belongs to it"),
        ("rollout.max_steps=2", "sampling depends on it"),
        ("orchestration.updates=2", "orchestration.updates is 2, but the checkpoint has 3 updates"),
    ],
)
def test_what_may_not(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_changes(changes(tiny(), tiny(override)), 3)


def test_a_longer_run_is_the_run_that_was_longer_from_the_start(tmp_path: Path) -> None:
    constant = ("training.optimizer.decay_from=1.0", "algorithm.entropy_coef=[0.01, 0.01]")
    long = start(tmp_path / "long", *constant, "orchestration.updates=6")
    start(tmp_path / "run", *constant)
    old = (tmp_path / "run" / "config.yaml").read_bytes()
    summary, progress = go_on(tmp_path / "run", "orchestration.updates=6", "training.packing=tree")
    assert summary["weights_sha256"] == long["weights_sha256"]
    assert "changed: orchestration.updates 4 -> 6" in progress.lines
    assert not any("learning rate" in line or "follows" in line for line in progress.lines)
    assert (tmp_path / "run" / "config-1.yaml").read_bytes() == old
    config = load_recipe(str(tmp_path / "run" / "config.yaml"))
    assert config == settled(tiny(*constant, "orchestration.updates=6"))
    check_finished(tmp_path / "run")


CONSTANT = (
    *(f"training.optimizer.{part}" for part in ("decay_from=1.0", "warmup=0", "learning_rate=1e-3")),
    "algorithm.entropy_coef=[0.01, 0.01]",
)


def rates(run: Path) -> list[float]:
    return [row["learning_rate"] for row in updates(run)]


def test_another_learning_rate_holds_from_the_next_update_on(tmp_path: Path) -> None:
    """Bit for bit as in a run whose schedule had that change, Adam's moments too; and it stays, however it goes on."""
    run, saved = tmp_path / "run", "orchestration.checkpoint_every=1"
    risen = ("training.optimizer.learning_rate=2e-3", "training.optimizer.warmup=2")  # half of it, then the whole
    whole = start(tmp_path / "whole", *CONSTANT, *risen, saved)
    assert rates(tmp_path / "whole") == [1e-3, 2e-3, 2e-3, 2e-3]
    start(run, *CONSTANT, saved, "orchestration.updates=1")
    _, said = go_on(run, "orchestration.updates=2", "training.optimizer.learning_rate=2e-3")
    assert said.lines.count("learning rate 0.001 -> 0.002 from update 2 on") == 1
    assert not any("training.optimizer" in line for line in said.lines)
    later, said = go_on(run, "orchestration.updates=4")
    assert not any("learning rate" in line for line in said.lines)
    assert later["weights_sha256"] == whole["weights_sha256"]
    assert rates(run) == [1e-3, 2e-3, 2e-3, 2e-3]
    configs = (load_recipe(str(run / name)).training.optimizer for name in ("config-1.yaml", "config.yaml"))
    assert [config.learning_rate for config in configs] == [1e-3, 2e-3]
    check_finished(run)


@pytest.mark.parametrize(
    ("override", "line", "later"),
    [
        ("decay_from=0.0", "learning rate 0.003 -> 0.0015 from update 3 on", [0.5, 0.1464]),
        ("final_lr=0.5", "changed: training.optimizer.final_lr 0.0 -> 0.5", [1.0, 0.75]),  # later than the next one
    ],
)
def test_another_schedule_is_said_in_a_line(override: str, line: str, later: list[float], finished: Path) -> None:
    old = rates(finished)
    _, progress = go_on(finished, f"training.optimizer.{override}", checkpoint="step-000002")
    assert [said for said in progress.lines if "rate" in said or "changed" in said] == [line]
    assert rates(finished)[:2] == old[:2]
    assert rates(finished)[2:] == pytest.approx([3e-3 * share for share in later], rel=1e-3)
    check_finished(finished)


# Earlier checkpoints

KEPT = ("orchestration.checkpoint_every=1", "orchestration.keep_every=2", "evaluation.every=1")


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [(), ("orchestration.max_staleness=2",), ("training.updates_per_batch=2",)])
def test_going_back_rolls_back_what_came_later(options: tuple[str, ...], tmp_path: Path) -> None:
    before = start(tmp_path, *options, *KEPT, "orchestration.keep_last=1")
    run = RunDirectory.open(tmp_path)
    assert checkpoint_updates(run.checkpoints) == [2, 4]
    [first] = query(tmp_path, "SELECT state FROM checkpoints WHERE update_number = 2")
    trained = query(tmp_path, "SELECT trajectory_id, step FROM steps WHERE state = 'trained'")
    total = len(query(tmp_path, "SELECT 1 FROM steps"))
    summary, progress = go_on(tmp_path, checkpoint="step-000002")
    [back] = [line for line in progress.lines if line.startswith("back from step-000004 to step-000002: ")]
    rolled = query(tmp_path, "SELECT trajectory_id, step FROM steps WHERE reason = 'rolled back'")
    assert f"{len(rolled)} steps are dropped as rolled back" in back
    kept = [row for row in trained if row not in rolled]
    now = query(tmp_path, "SELECT trajectory_id, step FROM steps WHERE state = 'trained'")
    assert kept and all(row in now for row in kept)
    assert len(query(tmp_path, "SELECT 1 FROM steps")) > total
    assert first in query(tmp_path, "SELECT state FROM checkpoints WHERE update_number = 2")
    assert [e["update"] for e in summary["evaluations"]] == [e["update"] for e in before["evaluations"]]
    rows = [row for row in run.metrics() if row["kind"] == "evaluation"]
    assert [row["update"] for row in rows] == [e["update"] for e in before["evaluations"]]
    assert [row["update"] for row in updates(tmp_path)] == [1, 2, 3, 4]
    if "orchestration.max_staleness=2" not in options:
        assert summary["weights_sha256"] == before["weights_sha256"]
        assert len(kept) == len(trained) // 2  # of updates 1 and 2
        assert len(now) == len(trained)
        check_finished(tmp_path)


def test_killed_after_going_back_it_is_still_back(tmp_path: Path) -> None:
    before = start(tmp_path, *KEPT)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.return_to("step-000002") > 0
    ledger.close()
    (tmp_path / "summary.json").unlink()
    summary, progress = go_on(tmp_path)
    assert any("after 2 of 4 updates" in line for line in progress.lines)
    assert summary["weights_sha256"] == before["weights_sha256"]
    check_finished(tmp_path)


def test_a_run_that_is_to_end_where_its_checkpoint_is_has_its_last_evaluation(finished: Path) -> None:
    summary, _ = go_on(finished, "orchestration.updates=2", checkpoint="step-000002")
    assert [e["update"] for e in summary["evaluations"]] == [0, 2]
    assert summary["held_out_success_after"] is not None
    check_finished(finished)
    with pytest.raises(RunError, match=r"is finished \(2 updates\)"):
        go_on(finished)
