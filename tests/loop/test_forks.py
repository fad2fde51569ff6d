"""Attempts that branch from a sibling: what they share, what is trained, and that a resumed run branches as before."""

import json
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.loop.killed_runs import in_child
from tests.loop.test_starts import REPLIES, Dice, Fixed, Killing, Walk
from tests.runs import check_finished, query, recorded, resume, start, updates
from tests.worlds import Quiet
from treadle.api.public import load_run
from treadle.cli.main import main
from treadle.core.errors import ConfigError
from treadle.core.types import DropReason, Task, Trajectory
from treadle.envs.base import EnvStep
from treadle.record.recorded import RecordedTrajectory


class Stroll(Walk):
    """Ends early, by what was said; one reply in eight is the last."""

    async def step(self, text: str) -> EnvStep:
        made = await super().step(text)
        return made._replace(done=made.done or len(text) % 8 == 1)


SIZE, WIDTH = 6, 3
FORKS = (
    "environment=tests.loop.test_forks:Stroll",
    f"rollout.max_steps={REPLIES}",
    "rollout.max_input_tokens=96",
    f"training.group_size={SIZE}",
    f"rollout.forks={{width: {WIDTH}}}",
    "algorithm.advantage=forks",
    "orchestration.updates=4",
)


def check_forks(path: Path, at: int | None = None) -> Counter[str]:
    """Branches repeat their sibling up to the fork, and nothing of that is trained twice. Count what there was."""
    steps, found = dict(recorded(path)), Counter[str]()
    sql = "SELECT t.*, split, group_id FROM trajectories t JOIN groups USING (group_id) WHERE split = 'train'"
    for row in query(path, sql):
        name, first = row["trajectory_id"], row["start_steps"]
        place = row["attempt"] % SIZE
        own, source = steps[name], row["start_source"]
        assert [step.dropped is DropReason.REPLAYED for step in own] == [n < first for n in range(len(own))]
        if place % WIDTH == 0:
            assert source is None and first == 0
            found["first"] += 1
            continue
        sibling = f"{row['group_id']}.{place - place % WIDTH}"
        assert source == sibling
        found["branch" if first else "anew"] += 1
        if first:
            assert first < len(steps[sibling])
            assert row["start_probability"] == (None if at else pytest.approx(1 / (len(steps[sibling]) - 1)))
            for mine, theirs in zip(own[:first], steps[sibling][:first], strict=True):
                assert mine.full_ids.tolist() == theirs.full_ids.tolist()
            assert own[first].prompt_ids.tolist() == steps[sibling][first].prompt_ids.tolist()
            found["differs"] += own[first].completion_ids.tolist() != steps[sibling][first].completion_ids.tolist()
        else:
            assert len(steps[sibling]) <= (at or 1)
    shared = query(path, "SELECT group_id, count(DISTINCT start_steps) AS n FROM trajectories WHERE start_steps > 0 "
                         "GROUP BY start_source")  # fmt: skip
    assert {row["n"] for row in shared} == {1}
    return found


@pytest.mark.parametrize("staleness", [0, 2])
def test_attempts_branch_and_each_sampled_token_is_trained_once(staleness: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    start(path, *FORKS, f"orchestration.max_staleness={staleness}", progress=(said := Quiet()))
    check_finished(path)
    found = check_forks(path)
    assert found["branch"] > 10 and found["anew"] > 1 and found["differs"] > 0.5 * found["branch"]
    missing = 2 * found["first"] - found["branch"] - found["anew"]
    assert missing == 0 if staleness == 0 else missing <= 2 * 18  # of groups in progress at the end
    assert not [line for line in said.lines if "not deterministic" in line]
    if staleness == 0:
        rows = [row for row in updates(path) if "starts" in row]
        assert rows and all(row["start_steps_mean"] >= 1 for row in rows)


@pytest.mark.parametrize("at", ["entropy", "2"])
def test_where_they_branch(at: str, tmp_path: Path) -> None:
    start(tmp_path / "run", *FORKS, f"rollout.forks.at={at}")
    check_finished(tmp_path / "run")
    rows = query(tmp_path / "run", "SELECT start_steps, start_probability FROM trajectories WHERE start_steps > 0")
    if at == "2":
        assert check_forks(tmp_path / "run", at=2)["branch"] > 4
        assert {(row["start_steps"], row["start_probability"]) for row in rows} == {(2, None)}
    else:
        assert len({row["start_probability"] for row in rows}) > 8
        assert {row["start_steps"] for row in rows} == set(range(1, REPLIES))


def test_branches_are_read_back_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    start(path, *FORKS)
    [row, *_] = query(path, "SELECT * FROM trajectories WHERE start_steps > 0")
    everything = [t.trajectory for t in load_run(path) if isinstance(t, RecordedTrajectory)]
    [found] = [t for t in everything if t.trajectory_id == row["trajectory_id"]]
    assert found.start is not None
    assert found.start.probability == row["start_probability"] > 0
    assert main(["show", str(path), row["trajectory_id"]]) == 0
    assert f"steps of {row['start_source']} (drawn with probability" in capsys.readouterr().out
    exported = tmp_path / "run.jsonl"
    assert main(["export-traces", str(path), str(exported)]) == 0
    rows = [json.loads(line) for line in exported.read_text().splitlines()]
    assert row["start_probability"] in [each["start_probability"] for each in rows]


def test_the_same_seed_branches_alike_and_another_one_does_not(tmp_path: Path) -> None:
    made = []
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        summary = start(tmp_path / name, *FORKS, f"seed={seed}", "orchestration.updates=2")
        sql = "SELECT trajectory_id, start_steps FROM trajectories ORDER BY trajectory_id"
        made.append((summary["weights_sha256"], query(tmp_path / name, sql)))
    assert made[0] == made[1] != made[2]


def test_a_failed_attempt_is_replaced_before_others_branch_from_it(tmp_path: Path) -> None:
    """And a failed branch begins at the same step once more."""
    start(tmp_path / "run", *FORKS, "environment=tests.loop.test_forks:Breaking", "failures.causes={environment: "
          "{retries: 3, backoff: 0.001}}", "failures.max_failed_fraction=1")  # fmt: skip
    check_finished(tmp_path / "run")
    rows = query(tmp_path / "run", "SELECT * FROM trajectories JOIN groups USING (group_id) WHERE split = 'train'")
    by_place = defaultdict[tuple[str, int], list[dict[str, Any]]](list)
    for row in sorted(rows, key=lambda row: row["attempt"]):
        by_place[row["group_id"], row["attempt"] % SIZE].append(row)
    retried = Counter[bool]()
    for (group, place), tries in by_place.items():
        if len(tries) > 1:
            retried[place % WIDTH == 0] += 1
            assert {(row["start_source"], row["start_steps"]) for row in tries} == {
                (tries[0]["start_source"], tries[0]["start_steps"])
            }
        if place % WIDTH:
            last = by_place[group, place - place % WIDTH][-1]
            assert tries[0]["start_source"] == last["trajectory_id"]
    assert retried[True] > 1 and retried[False] > 1


class Going(Stroll):
    """Goes back by its snapshots, and answers what no replay repeats."""

    replayable, restorable, made = False, True, 0

    def answer(self, text: str) -> str:
        Going.made += 1
        return str(Going.made)

    async def snapshot(self) -> str:
        return str(self.replies)

    async def restore(self, task: Task, snapshot: str) -> None:
        await self.reset(task)
        self.replies = int(snapshot)


@pytest.mark.parametrize(
    "player", [("environment=", "agent=tests.loop.test_starts:wandering"), (f"environment={__name__}:Going",)]
)
def test_agents_and_environments_with_snapshots_branch_too(player: tuple[str, ...], tmp_path: Path) -> None:
    start(tmp_path / "run", *FORKS, *player, "orchestration.updates=2", progress=(said := Quiet()))
    check_finished(tmp_path / "run")
    assert check_forks(tmp_path / "run")["branch"] > 4
    assert not [line for line in said.lines if "did not repeat" in line]


def by_length(task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
    assert len(trajectories) in (1, SIZE)  # 1 in evaluations
    return [len(t.steps) / REPLIES for t in trajectories]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_group_is_rewarded_once_all_branches_are_in(staleness: int, tmp_path: Path) -> None:
    options = (f"rewards.group={__name__}:by_length", f"orchestration.max_staleness={staleness}")
    start(tmp_path / "run", *FORKS, *options)
    check_finished(tmp_path / "run")
    assert check_forks(tmp_path / "run")["branch"] > 10


class Breaking(Stroll):
    """Raises in every fifth of its instances, at its second reply."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Breaking.made += 1
        self.breaks = Breaking.made % 5 == 0

    async def step(self, text: str) -> EnvStep:
        if self.breaks:
            raise RuntimeError("broken")
        return await super().step(text)


def test_an_environment_that_is_not_deterministic_is_named_and_its_branches_begin_at_0(tmp_path: Path) -> None:
    start(tmp_path / "run", *FORKS, "environment=tests.loop.test_starts:Dice", "orchestration.updates=1")
    check_finished(tmp_path / "run")
    assert Dice.made
    rows = query(tmp_path / "run", "SELECT * FROM trajectories WHERE start_source IS NOT NULL")
    # Forks at step 1 have no answer before them.
    deep = [row for row in rows if "not deterministic" in row["warning"]]
    assert deep and not any(row["start_steps"] for row in deep)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["training.group_size=4"], "set training.group_size to 6"),
        (["training.group_size=3"], "a group needs two first attempts or more"),
        (["algorithm.advantage=grpo"], "algorithm.advantage is 'grpo', which takes all attempts of a group for"),
        (["rollout.forks.at=4"], r"rollout.forks.at is 4, and the last step has number 3"),
        (["rollout.starts={}"], "rollout.starts and rollout.forks cannot be combined"),
        ([f"environment={Fixed.__module__}:Fixed"], "rollout.forks is set, but environment .* cannot be replayed"),
    ],
)
def test_what_could_not_branch_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tmp_path / "run", *FORKS, *options)


@pytest.mark.slow
def test_a_run_killed_over_and_over_has_the_same_bits(tmp_path: Path) -> None:
    options = (*FORKS, "orchestration.checkpoint_every=2", "orchestration.updates=8")
    expected = start(tmp_path / "straight", *options)["weights_sha256"]
    assert check_forks(tmp_path / "straight")["branch"] > 20

    def go(which: int) -> None:
        with (tmp_path / "said").open("a", buffering=1) as file:
            progress = Killing(file, which)
            if (tmp_path / "run" / "config.yaml").exists():
                resume(tmp_path / "run", progress=progress)
            else:
                start(tmp_path / "run", *options, progress=progress)

    ends: list[int] = []
    while not ends or ends[-1]:
        ends.append(in_child(lambda: go(2 + len(ends) % 2)))
        assert len(ends) < 60
    assert ends.count(-signal.SIGKILL) >= 3
    check_finished(tmp_path / "run")
    check_forks(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["weights_sha256"] == expected
    assert np.all(np.array(ends[:-1]) == -signal.SIGKILL)
