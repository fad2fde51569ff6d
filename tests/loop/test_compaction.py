"""Runs whose conversations are summed up: conserved, and the same however their steps are packed."""

from collections import Counter
from pathlib import Path

import pytest

from tests.runs import check_finished, query, recorded, start, updates
from treadle.core.types import BreakCause, DropReason

LONG = (
    "rollout.compaction.at=20",  # tokens: every second prompt is longer
    "rollout.compaction.keep_last=0",
    "rollout.compaction.max_tokens=4",
    "rollout.compaction.attempts=3",
    "rollout.compaction.prompt=sum up",
    "rollout.max_input_tokens=96",
    'rollout.stop=["a","e","i","o","u"," "]',  # so that a model that knows nothing ends its summaries
    "orchestration.updates=2",
)
BY_SEGMENT = ("algorithm.advantage=step_return", "algorithm.advantage_options={scope: segment, gamma: 0.5}")


@pytest.mark.slow
def test_summaries_are_trained_alike_under_every_packing(tmp_path: Path) -> None:
    for packing in ("step", "chain", "tree"):
        start(tmp_path / packing, *LONG, *BY_SEGMENT, f"training.packing={packing}")
        check_finished(tmp_path / packing)
    found = Counter((s.summary, s.dropped, s.break_cause) for _, steps in recorded(tmp_path / "tree") for s in steps)
    assert found.keys() == {
        (False, None, None),
        (True, DropReason.REJECTED, None),
        (True, None, None),
        (False, None, BreakCause.SUMMARY),
    }
    assert found[True, None, None] == found[False, None, BreakCause.SUMMARY]
    wanted, *others = (updates(tmp_path / packing) for packing in ("step", "chain", "tree"))
    for rows in others:
        for row, one in zip(rows, wanted, strict=True):
            for name in ("loss", "gradient_norm", "compactions_mean", "rejected_share", "trainable_tokens"):
                assert row[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
        assert rows[0]["packed_tokens"] < wanted[0]["packed_tokens"]


@pytest.mark.slow
def test_masked_summaries_are_played_and_dropped(tmp_path: Path) -> None:
    start(tmp_path / "run", *LONG, "rollout.compaction.trained=false")
    check_finished(tmp_path / "run")
    rows = query(
        tmp_path / "run",
        "SELECT g.split, s.reason FROM steps s JOIN trajectories USING (trajectory_id) JOIN groups g USING (group_id)",
    )
    found = Counter((row["split"], row["reason"]) for row in rows)
    assert found["train", "masked"] == sum(row["dropped_masked"] for row in updates(tmp_path / "run")) > 0
    assert not found["held_out", "masked"]
    assert all(row["compactions_mean"] > 0 for row in updates(tmp_path / "run"))
