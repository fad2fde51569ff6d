"""When the calls of an update's attempts were made."""

from __future__ import annotations

import json
from typing import Any

from treadle.core.errors import TreadleError
from treadle.orchestration.store.rollout_store import read_call_times
from treadle.view.models import Calls
from treadle.view.recorded_run import RecordedRun


def calls_of_update(run: RecordedRun, update: int) -> Calls:
    """Return when the calls of the attempts that an update trained were made. Raises RunError."""
    rows = run.ledger.query(
        "SELECT trajectory_id, shard, reward FROM trajectories JOIN groups USING (group_id) WHERE trained_version IN "
        "(SELECT value FROM json_each(?))",
        json.dumps(run.versions_of(update)),
    )
    found = Calls()
    rewards = {row["trajectory_id"]: row["reward"] for row in rows}
    calls: list[dict[str, Any]] = []
    for shard in dict.fromkeys(row["shard"] for row in rows):
        try:
            times = read_call_times(run.directory.rollouts, run.shard(shard))
            calls += [call for call in times if call["trajectory_id"] in rewards]
        except TreadleError as error:
            found.problems.append(str(error))
    timed = sorted((call for call in calls if call["started"] is not None), key=lambda call: call["started"])
    found.unknown = len(calls) - len(timed)
    found.attempts = list(dict.fromkeys(call["trajectory_id"] for call in timed))
    found.rewards = [rewards[name] for name in found.attempts]
    place = {name: at for at, name in enumerate(found.attempts)}
    for call in timed:
        began = call["started"] - timed[0]["started"]
        found.calls.append((place[call["trajectory_id"]], call["step"], began, call["waited"], call["seconds"]))
    return found
