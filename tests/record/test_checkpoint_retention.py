"""Which checkpoints stay."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.runs import check_finished, start
from tests.worlds import make_group, make_step, tiny
from treadle.core.errors import RunError
from treadle.core.files import WrittenFile
from treadle.core.types import Status, Trajectory
from treadle.loop.evaluation import pending_evaluations
from treadle.record.checkpoint_retention import (
    best_update,
    checkpoint_name,
    checkpoint_updates,
    find_checkpoint,
    retained,
)
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import LoopState
from treadle.record.run_directory import RunDirectory
from treadle.report.reporter import run_summary
from treadle.view.groups import _EVALUATION


def evaluation(update: int, success: float | None, temperature: float = 1.0) -> dict[str, Any]:
    return {"update": update, "temperature": temperature, "success": success, "reward_mean": success}


SEEN = [evaluation(0, 0.1), evaluation(4, 0.5), evaluation(4, 0.9, 0.0), evaluation(8, 0.5), evaluation(10, None)]


def test_the_best_is_the_earliest_of_equals_at_the_evaluations_temperature() -> None:
    assert best_update(SEEN, "held_out_success", 1.0) == 4
    assert best_update(SEEN, "held_out_reward", 1.0, among=[0, 8, 10]) == 8
    assert best_update(SEEN, "held_out_success", 0.5) is None
    assert best_update(SEEN, "held_out_success", 1.0, among=[]) is None


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), [9, 10]),
        (("orchestration.keep_last=1",), [10]),
        (("orchestration.keep_every=3",), [3, 6, 9, 10]),
        (("orchestration.keep_best=held_out_success",), [4, 9, 10]),
        (("orchestration.keep_every=5", "orchestration.keep_best=held_out_reward"), [4, 5, 9, 10]),
    ],
)
def test_what_is_retained(options: tuple[str, ...], kept: list[int]) -> None:
    names = retained(range(11), tiny(*options).loop.retention, SEEN)
    assert names == [f"step-{update:06d}" for update in kept]


def test_a_run_keeps_the_best_and_every_so_many(tmp_path: Path) -> None:
    options = ("evaluation.every=1", "orchestration.keep_best=held_out_reward", "orchestration.keep_last=1")
    start(tmp_path, *options, "orchestration.keep_every=3", "orchestration.checkpoint_every=100")
    run = RunDirectory.open(tmp_path)
    rows = [row for row in run.metrics() if row["kind"] == "evaluation"]
    assert [row["update"] for row in rows] == [0, 1, 2, 3, 4]
    best = best_update(rows, "held_out_reward", 1.0)
    assert best is not None
    assert checkpoint_updates(run.checkpoints) == sorted({best, 3, 4})
    check_finished(tmp_path)
    assert find_checkpoint(tmp_path, "best").directory.name == checkpoint_name(best)
    for other in checkpoint_updates(run.checkpoints):
        (run.checkpoints / checkpoint_name(other)).rename(tmp_path / f"away-{other}")
    with pytest.raises(
        RunError, match=f"was best at update {best}, whose checkpoint is gone: it was removed; it has none"
    ):
        find_checkpoint(tmp_path, "best")


def test_evaluations_are_due_after_a_batch_that_steps_over_a_multiple_and_at_both_ends() -> None:
    """And each temperature once: what is on record of an update is not made again."""
    options = ("evaluation.every=3", "evaluation.greedy_too=true", "orchestration.updates=10")
    config = tiny("training.updates_per_batch=2", *options)
    due = {update: pending_evaluations(config.loop, LoopState(update=update)) for update in range(0, 11, 2)}
    assert due == {0: [1.0, 0.0], 2: [], 4: [1.0], 6: [1.0], 8: [], 10: [1.0, 0.0]}
    assert pending_evaluations(config.loop, LoopState(update=4, evaluations=(evaluation(4, 0.5),))) == []
    assert pending_evaluations(config.loop, LoopState(update=4, evaluations=(evaluation(2, 0.5),))) == [1.0]
    assert pending_evaluations(config.loop, LoopState(update=10, evaluations=(evaluation(10, 0.5),))) == [0.0]


def evaluated(update: int, success: float, temperature: float = 1.0) -> dict[str, Any]:
    return {"update": update, "success": success, "temperature": temperature, "tasks": 3}


@pytest.mark.parametrize(
    ("evaluations", "before", "after"),
    [
        ([evaluated(0, 0.1), evaluated(4, 0.5)], 0.1, 0.5),
        ([evaluated(2, 0.3), evaluated(4, 0.5)], None, 0.5),  # held-out tasks that came with a resumption
        ([evaluated(4, 0.5)], None, 0.5),
        ([evaluated(0, 0.1)], 0.1, None),
        ([evaluated(0, 0.1, 0.0), evaluated(0, 0.2), evaluated(4, 0.6, 0.0)], 0.2, None),
        ([evaluated(0, 0.1), evaluated(2, 0.4), evaluated(4, 0.6, 0.0)], 0.1, None),  # then switched off
        ([], None, None),
    ],
)
def test_before_is_before_the_first_update(
    evaluations: list[dict[str, Any]], before: float | None, after: float | None
) -> None:
    state = LoopState(update=4, evaluations=tuple(evaluations))
    named: dict[str, Any] = {"recipe": "tiny", "seed": 0, "temperature": 1.0}
    made = run_summary(Path("run"), state, **named, weights_sha256="", stopped_early=False, warm_start=None)
    assert (made["held_out_success_before"], made["held_out_success_after"]) == (before, after)
    stopped = run_summary(Path("run"), state, **named, weights_sha256="", stopped_early=True, warm_start=None)
    assert (stopped["held_out_success_before"], stopped["held_out_success_after"]) == (before, None)


def test_of_an_evaluation_that_was_repeated_the_last_time_is_shown(tmp_path: Path) -> None:
    names = ["e000003", *(f"e000003r{time}" for time in range(1, 11)), "e000004g", "e000004gr1", "e000005"]
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        for name in names:
            trajectory = Trajectory(f"{name}-0000.0", "t", 0, (make_step(),), 0.0, Status.DONE)
            group = make_group(0, trajectory, name=f"{name}-0000")
            ledger.record([group], "held_out", 0, WrittenFile("shard", "0" * 64))
        assert ledger.before_and_after("e000003", "e000004g", 1.0, None) == ("e000003r10-0000.0", "e000004gr1-0000.0")
        assert ledger.before_and_after("e000005", "e000005", 1.0, "a") == ("e000005-0000.0", "e000005-0000.0")
        assert [ledger.times_evaluated(name) for name in ("e000003", "e000005", "e000006")] == [11, 1, 0]
    for name in names:
        found = _EVALUATION.match(f"{name}-0000")
        assert found is not None and int(found[1]) in (3, 4, 5)
