"""summary.json says what was before and what after, whatever was evaluated in between, or again."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import make_group, make_step, tiny
from treadle.core.files import WrittenFile
from treadle.core.types import Status, Trajectory
from treadle.orchestration.reporting.reporter import run_summary
from treadle.orchestration.store.ledger import Ledger
from treadle.orchestration.store.ledger_reader import LoopState
from treadle.view.groups import _EVALUATION


def evaluation(update: int, success: float, temperature: float = 1.0) -> dict[str, Any]:
    return {"update": update, "success": success, "temperature": temperature, "tasks": 3}


@pytest.mark.parametrize(
    ("evaluations", "before", "after"),
    [
        ([evaluation(0, 0.1), evaluation(4, 0.5)], 0.1, 0.5),
        ([evaluation(2, 0.3), evaluation(4, 0.5)], None, 0.5),  # held-out tasks that came with a resumption
        ([evaluation(4, 0.5)], None, 0.5),
        ([evaluation(0, 0.1)], 0.1, None),
        ([evaluation(0, 0.1, 0.0), evaluation(0, 0.2), evaluation(4, 0.6, 0.0)], 0.2, None),
        ([], None, None),
    ],
)
def test_before_is_before_the_first_update(
    evaluations: list[dict[str, Any]], before: float | None, after: float | None
) -> None:
    state = LoopState(update=4, evaluations=tuple(evaluations))
    made = run_summary(tiny(), Path("run"), state, weights_sha256="", stopped_early=False, warm_start=None)
    assert (made["held_out_success_before"], made["held_out_success_after"]) == (before, after)
    stopped = run_summary(tiny(), Path("run"), state, weights_sha256="", stopped_early=True, warm_start=None)
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
