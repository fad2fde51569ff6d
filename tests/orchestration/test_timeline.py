"""A run says when its phases and its engine calls were, and which messages each prompt is made of."""

import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.orchestration.runs import query, recorded, start, updates
from treadle.orchestration.store.run_directory import RunDirectory

CLOCKS = 0.05  # seconds by which two clocks may differ


def test_a_synchronous_run(tmp_path: Path) -> None:
    run, before = tmp_path / "run", time.time()
    start(run)
    after = time.time()
    intervals = RunDirectory.open(run).intervals()
    assert Counter((row["phase"], row["update"]) for row in intervals) >= Counter(
        [
            *((phase, update) for phase in ("rollout", "update", "publish") for update in range(1, 5)),
            *(("checkpoint", update) for update in (0, 2, 4)),
            *(("evaluation", update) for update in (0, 4)),
        ]
    )
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
        for one, next_one in pairwise(steps):
            assert one.started is not None and next_one.started is not None
            assert one.started + one.seconds <= next_one.started + CLOCKS
