"""summary.json says what was before and what after, whatever was evaluated in between, or again."""

from pathlib import Path
from typing import Any

import pytest

from tests.worlds import tiny
from treadle.cli.summary import _groups_of
from treadle.orchestration.reporting.summary import run_summary
from treadle.orchestration.store.ledger import Ledger, LoopState
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


def test_of_an_evaluation_that_was_repeated_the_last_time_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(Path(":memory:"))
    names = ["e000003", "e000003r1", "e000003r2", "e000003r10", "e000004g", "e000004gr1", "e000005"]
    monkeypatch.setattr(
        ledger, "query", lambda sql, pattern: [{"group_id": f"{n}-0000"} for n in names if n.startswith(pattern[:-6])]
    )
    assert _groups_of(ledger, "e000003") == "e000003r10-*"
    assert _groups_of(ledger, "e000004g") == "e000004gr1-*"
    assert _groups_of(ledger, "e000005") == "e000005-*"
    for name in names:
        found = _EVALUATION.match(f"{name}-0000")
        assert found is not None and int(found[1]) in (3, 4, 5)
