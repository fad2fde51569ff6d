"""Groups that begin in the middle: where, what is trained of them, and that a resumed run begins them as before."""

import json
import math
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.loop.killed_runs import Logged, in_child
from tests.runs import check_finished, query, recorded, resume, start, updates
from tests.view.conftest import asking
from tests.worlds import Quiet, Vowels, make_step, tiny, tool, vowel_tasks
from treadle.cli.main import main
from treadle.core.errors import ConfigError
from treadle.core.types import DropReason, Group, Message, Start, Status, Step, Task, Trajectory
from treadle.envs.base import EnvStep
from treadle.loop.config import LoopPlan
from treadle.loop.starts import PRIOR, Starts, TaskRates, informativeness
from treadle.loop.task_queue import TaskOrder
from treadle.rollout.attempt import Players
from treadle.rollout.config import StartsConfig
from treadle.rollout.drivers.driver import load_driver
from treadle.rollout.other_models import PolicyCopy

REPLIES = 4


class Walk(Vowels):
    """REPLIES replies, each rewarded with a quarter if it has a vowel at all."""

    async def step(self, text: str) -> EnvStep:
        self.replies += 1
        reward = any(c in "aeiou" for c in text.lower()) / REPLIES
        return EnvStep([tool(self.answer(text))], reward, self.replies == REPLIES)

    def answer(self, text: str) -> str:
        return str(len(text))


class Dice(Walk):
    """Answers what no other instance does."""

    made = 0

    def answer(self, text: str) -> str:
        Dice.made += 1
        return str(Dice.made)


class Fixed(Walk):
    replayable = False


STARTS = (
    "environment=tests.loop.test_starts:Walk",
    f"rollout.max_steps={REPLIES}",
    "rollout.max_input_tokens=96",
    "evaluation.success_at=0.7",
    "rollout.starts={share: 0.8, target: 0.95}",
    "orchestration.updates=12",
)


# The table


@pytest.mark.parametrize(("rate", "length"), [(0.9, 12), (0.5, 12), (0.7, 40), (0.2, 3)])
def test_the_step_is_found_from_which_half_of_the_attempts_pass(rate: float, length: int) -> None:
    """In a world where each step passes with the same rate, from no knowledge at all."""
    rates, draws = TaskRates("g000000.0", length), np.random.default_rng(0)
    for _ in range(20):
        step = rates.best_step(0.5)
        rates.add(step, 8, int(draws.binomial(8, rate ** (length - step))))
    best = length - max(1.0, math.log(0.5) / math.log(rate))
    assert abs(rates.best_step(0.5) - max(best, 0)) <= max(2.0, 0.2 * length)
    expected = [rate ** (length - step) for step in range(length)]
    assert np.abs(np.array(rates.rates()) - expected)[rates.best_step(0.5) :].max() < 0.25


def test_a_task_of_which_nothing_is_known_begins_where_half_of_the_attempts_at_others_pass() -> None:
    starts = Starts(a_plan(starts=StartsConfig(share=1.0)), unread)
    for index in range(0, 60, 2):
        begins = Start(f"g{index:06d}.1", 17)
        starts.learn([a_group(index, 0.0, 1.0, task=f"t{index}", steps=20)])
        starts._chosen[index + 1] = begins
        starts.learn([a_group(index + 1, 0.0, 1.0, task=f"t{index}", steps=20, begins=begins)])
    assert TaskRates("g000000.0", 20).best_step(0.5) == 10
    assert TaskRates("g000000.0", 20).best_step(0.5, starts._half()) in (15, 16, 17)
    again = Starts(a_plan(), unread, state=json.loads(json.dumps(starts.state(()))))
    assert again._half() == starts._half()


def test_counts_of_a_step_outweigh_the_rate_common_to_all() -> None:
    rates = TaskRates("g000000.0", 12)
    for _ in range(10):
        rates.add(6, 8, 0)  # step 6 hides a hard place
        rates.add(7, 8, 8)
    estimated = rates.rates()
    assert estimated[6] < 0.3 < 0.7 < estimated[7]
    attempts, _ = rates.counts[6]
    assert estimated[6] <= PRIOR / (PRIOR + attempts)


def test_without_a_source_or_after_it_was_lost_there_is_no_start() -> None:
    assert TaskRates().best_step(0.5) == 0
    assert TaskRates("g000000.0", 12, is_lost=True).best_step(0.5) == 0
    assert TaskRates().rates() == pytest.approx([0.25])


def test_what_is_known_is_forgotten_as_the_policy_changes() -> None:
    rates = TaskRates("g000000.0", 8)
    for _ in range(30):
        rates.add(0, 8, 0)
    for _ in range(12):
        rates.add(0, 8, 8)
    assert rates.rates()[0] > 0.8 and rates.best_step(0.5) == 0


# A run's choice


def a_plan(**changes: Any) -> LoopPlan:
    plan = tiny("evaluation.success_at=1", "rollout.starts={share: 0.5}", "data.curriculum=informative").loop
    return replace(plan, **changes)


def a_group(index: int, *rewards: float, task: str = "t", begins: Start | None = None, steps: int = 6) -> Group:
    played = tuple(make_step([1] * (n + 1), [2]) for n in range(steps))
    attempts = tuple(
        Trajectory(f"g{index:06d}.{n}", task, n, played, reward, Status.DONE, start=begins)
        for n, reward in enumerate(rewards)
    )
    return Group(f"g{index:06d}", index, 0, index, Task(task, environment="e"), attempts)


def unread(source: str) -> list[Step]:
    raise AssertionError(source)


def test_a_start_is_drawn_by_seed_epoch_and_position_for_a_share_of_the_groups() -> None:
    starts = Starts(a_plan(), unread)
    starts.learn([a_group(0, 0.0, 1.0)])
    made = [starts.prefix(replace(a_group(n), trajectories=())) for n in range(1, 201)]
    begun = [p is not None for p in made]
    assert 70 < sum(begun) < 130
    again = Starts(a_plan(), lambda source: a_group(0, 1.0).trajectories[0].steps, state=starts.state(()))
    assert [again.prefix(replace(a_group(n), trajectories=())) is not None for n in range(1, 201)] == begun
    prefix = next(p for p in made if p is not None)
    assert prefix.start.source == "g000000.1" and len(prefix.steps) == prefix.start.steps


def test_the_state_goes_through_json_with_the_choices_of_outstanding_groups() -> None:
    plan = a_plan(starts=StartsConfig(share=1.0))
    starts = Starts(plan, unread)
    starts.learn([a_group(0, 0.0, 1.0)])
    chosen = starts.prefix(replace(a_group(7), trajectories=()))
    assert chosen is not None
    starts.learn([a_group(8, *[0.0] * 8), a_group(9, *[0.0] * 8)])  # another step would be chosen now
    state = json.loads(json.dumps(starts.state((7,))))
    later = Starts(plan, lambda source: a_group(0, 0.0, 1.0).trajectories[1].steps, state=state)
    again = later.prefix(replace(a_group(7), trajectories=()))
    assert again is not None and again.start == chosen.start
    assert json.loads(json.dumps(later.state((7,)))) == state
    assert later.state(())["chosen"] == {}
    other = later.prefix(replace(a_group(10), trajectories=()))
    assert other is not None and other.start != chosen.start


def test_the_shortest_attempt_that_passed_is_the_source() -> None:
    starts = Starts(a_plan(starts=StartsConfig(share=1.0)), unread)
    starts.learn([a_group(0, 0.0, 0.0), a_group(1, 0.5, 1.0, steps=9), a_group(2, 1.0, steps=12)])
    [rates] = starts.state(())["tasks"].values()
    assert (rates["source"], rates["length"]) == ("g000001.1", 9)
    starts.learn([a_group(3, 1.0, steps=5)])
    [rates] = starts.state(())["tasks"].values()
    assert (rates["source"], rates["length"], list(rates["counts"])) == ("g000003.0", 5, [0])


def test_attempts_that_began_elsewhere_than_most_are_left_out_and_the_task_has_no_starts_any_more() -> None:
    starts = Starts(a_plan(starts=StartsConfig(share=1.0)), unread)
    starts.learn([a_group(0, 0.0, 1.0)])
    prefix = starts.prefix(replace(a_group(1), trajectories=()))
    assert prefix is not None
    group = a_group(1, 0.0, 1.0, 1.0, begins=prefix.start)
    first, *others = group.trajectories
    mixed = starts.whole(replace(group, trajectories=(replace(first, start=None), *others)))
    assert [t.dropped for t in mixed.trajectories] == [DropReason.DIVERGED, None, None]
    starts.learn([mixed])
    [rates] = starts.state(())["tasks"].values()
    assert rates["is_lost"] and rates["counts"][prefix.start.steps] == [2, 2]
    assert starts.prefix(replace(a_group(2), trajectories=())) is None
    assert starts.whole(group) is group


def test_off_nothing_is_kept() -> None:
    starts = Starts(tiny().loop, unread)
    starts.learn([a_group(0, 0.0, 1.0)])
    assert starts.prefix(a_group(1)) is None and starts.state((1,)) == {}
    assert starts.draw(0, [Task("t", environment="e")], 0, 1) is None


# The curriculum


def test_informative_tasks_are_drawn_more_often_but_all_are() -> None:
    tasks = [Task(name, environment="e") for name in ("never", "half", "always")]
    plan = a_plan(starts=None)
    starts = Starts(plan, unread)
    results = (("never", (0.0,) * 8), ("half", (0.0, 1.0) * 4), ("always", (1.0,) * 8))
    starts.learn([a_group(n, *rewards, task=name) for n, (name, rewards) in enumerate(results)])
    order = TaskOrder(tasks, 3, True, starts.draw)
    drawn = [order.at(index) for index in range(2000)]
    counts = Counter(task.task_id for _, _, task in drawn)
    assert counts["half"] > 1.5 * counts["never"] > 60 and counts["always"] > 60
    assert [epoch for epoch, _, _ in drawn] == list(range(2000))  # no two groups share a key of their draws
    again = TaskOrder(tasks, 3, True, Starts(plan, unread, state=starts.state(())).draw)
    assert [again.at(index) for index in range(2000)] == drawn


def only_first(tasks: Any, rates: Any) -> Any:
    return [float(number == 0) for number in range(len(tasks))]


def negative(tasks: Any, rates: Any) -> Any:
    return [-1.0 for _ in tasks]


def test_a_function_of_ones_own_weighs_the_tasks() -> None:
    tasks = [Task(str(n), environment="e") for n in range(10)]
    own = Starts(a_plan(curriculum="tests.loop.test_starts:only_first"), unread)
    drawn = [own.draw(index, tasks, 0, 10) for index in range(500)]
    assert drawn.count(0) > 400 and set(drawn) == set(range(10))
    wrong = Starts(a_plan(curriculum="tests.loop.test_starts:negative"), unread)
    with pytest.raises(
        ConfigError, match=r"must return 10 finite weights of at least 0, one per task, got array\(\[-1"
    ):
        wrong.draw(0, tasks, 0, 10)
    with pytest.raises(ConfigError, match=r"data\.curriculum: 'tests\.loop\.test_starts:STARTS' is of type tuple"):
        start(Path("none"), "data.curriculum=tests.loop.test_starts:STARTS")


def test_a_group_of_half_passes_teaches_most() -> None:
    assert [informativeness(r) for r in (0, 0.5, 1)] == [0, 1, 0]


# Runs


def check_starts(path: Path) -> int:
    """What was replayed is what was recorded, and was not trained here; the number of attempts that began so."""
    steps = dict(recorded(path))
    rows = query(path, "SELECT t.*, split FROM trajectories t JOIN groups USING (group_id)")
    for row in rows:
        own, first = steps[row["trajectory_id"]], row["start_steps"]
        replayed = [step.dropped is DropReason.REPLAYED for step in own]
        assert replayed == [n < first for n in range(len(own))]
        if first:
            assert row["split"] == "train"
            source = steps[row["start_source"]]
            for mine, theirs in zip(own[:first], source[:first], strict=True):
                assert mine.prompt_ids.tolist() == theirs.prompt_ids.tolist()
                assert mine.completion_ids.tolist() == theirs.completion_ids.tolist()
                assert mine.logprobs.tolist() == theirs.logprobs.tolist()
            assert own[first].prompt_ids.tolist() == source[first].prompt_ids.tolist()
    states = query(path, "SELECT state, reason FROM steps WHERE reason = 'replayed'")
    assert {row["state"] for row in states} <= {"dropped"}
    assert len(states) == sum(row["start_steps"] for row in rows)
    sql = (
        "SELECT count(DISTINCT coalesce(start_source || start_steps, '')) AS n FROM trajectories JOIN groups "
        "USING (group_id) WHERE trained_version IS NOT NULL GROUP BY group_id"
    )
    assert {row["n"] for row in query(path, sql)} == {1}
    return sum(row["start_steps"] > 0 for row in rows)


def test_a_run_begins_groups_in_the_middle_and_trains_each_sampled_token_once(tmp_path: Path) -> None:
    start(tmp_path / "run", *STARTS, progress=(said := Quiet()))
    check_finished(tmp_path / "run")
    assert check_starts(tmp_path / "run") > 6
    begun = [row for row in updates(tmp_path / "run") if "starts" in row]
    assert begun and all(row["start_steps_mean"] >= 1 for row in begun)
    assert all(row["dropped_replayed"] == row["start_steps_mean"] * row["starts"] * 6 for row in begun)
    assert not [line for line in said.lines if "not deterministic" in line]


def test_off_a_run_is_what_it_was(tmp_path: Path) -> None:
    """Not even the state of a checkpoint differs."""
    start(tmp_path / "run", "orchestration.updates=2")
    [row] = query(tmp_path / "run", "SELECT state FROM checkpoints ORDER BY number DESC LIMIT 1")
    assert json.loads(row["state"])["starts"] == {}
    assert not query(tmp_path / "run", "SELECT 1 FROM trajectories WHERE start_source IS NOT NULL")


def test_an_environment_that_is_not_deterministic_is_named_and_its_attempts_begin_at_0(tmp_path: Path) -> None:
    start(tmp_path / "run", *STARTS, "environment=tests.loop.test_starts:Dice", progress=(said := Quiet()))
    check_finished(tmp_path / "run")
    assert check_starts(tmp_path / "run") == 0
    [line] = [line for line in said.lines if "not deterministic" in line]
    assert "environment 'tests.loop.test_starts:Dice' did not repeat its observations" in line
    warned = query(tmp_path / "run", "SELECT count(*) AS n FROM trajectories WHERE warning LIKE '%not deterministic%'")
    assert 0 < warned[0]["n"] <= 6 * 3  # each task tried once


def test_a_player_that_cannot_be_replayed_is_refused_by_name(tmp_path: Path) -> None:
    message = r"rollout.starts is set, but environment 'tests.loop.test_starts:Fixed' cannot be replayed"
    with pytest.raises(ConfigError, match=message):
        start(tmp_path / "run", *STARTS, "environment=tests.loop.test_starts:Fixed")


def test_harbors_tasks_and_self_play_have_no_starts() -> None:
    harbor = Players(drivers={"harbor": load_driver("harbor")})
    assert not harbor.may_start(Task("t", driver="harbor"))
    alone, duel = (Players({"e": Walk}, models=models) for models in ({}, {"rival": PolicyCopy}))
    task = Task("t", environment="e")
    assert alone.may_start(task) and not duel.may_start(task)


def solved(task: Task) -> list[Message]:
    said = "a" if task.task_id.endswith("0") else "anna"
    messages = [*task.prompt]
    for _ in range(REPLIES):
        messages += [Message(role="assistant", content=said), tool(str(len(said)))]
    return messages[:-1]


@pytest.mark.parametrize("kind", ["function", "conversations", "trajectories"])
def test_starts_from_demonstrations(kind: str, tmp_path: Path) -> None:
    source = "tests.loop.test_starts:solved"
    if kind == "conversations":
        rows = [json.dumps({"task_id": t.task_id, "messages": solved(t)}) for t in vowel_tasks("train", 6)]
        (tmp_path / "shown.jsonl").write_text("\n".join(rows))
        source = str(tmp_path / "shown.jsonl")
    if kind == "trajectories":
        start(tmp_path / "teacher", *STARTS, "rollout.starts=null", "orchestration.updates=6")
        assert main(["export-traces", str(tmp_path / "teacher"), str(tmp_path / "shown.jsonl")]) == 0
        source = str(tmp_path / "shown.jsonl")
    start(tmp_path / "run", *STARTS, f"rollout.starts.source={source}")
    check_finished(tmp_path / "run")
    sql = "SELECT count(*) AS n, max(start_source) AS one FROM trajectories WHERE start_steps > 0"
    [row] = query(tmp_path / "run", sql)
    assert row["n"] > 6
    assert row["one"].startswith(source)
    for name, steps in recorded(tmp_path / "run"):
        for step in steps:
            if step.dropped is DropReason.REPLAYED and kind != "trajectories":
                assert not step.mask.any(), name


# Resumed


class Killing(Logged):
    """Kills this process while a certain batch is played."""

    def __init__(self, file: Any, which: int) -> None:
        super().__init__(file)
        self.left = which

    def began(self, name: str) -> None:
        self.left -= name == "rollout"
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("data.curriculum=informative",)])
def test_a_run_killed_over_and_over_has_the_same_bits(more: tuple[str, ...], tmp_path: Path) -> None:
    options = (*STARTS, "orchestration.checkpoint_every=3", *more)
    expected = start(tmp_path / "straight", *options)["weights_sha256"]
    assert check_starts(tmp_path / "straight") >= 3

    def go(which: int) -> None:
        with (tmp_path / "said").open("a", buffering=1) as file:
            progress = Killing(file, which)
            if (tmp_path / "run" / "config.yaml").exists():
                resume(tmp_path / "run", progress=progress)
            else:
                start(tmp_path / "run", *options, progress=progress)

    ends: list[int] = []
    while not ends or ends[-1]:
        ends.append(in_child(lambda: go(2 + 2 * (len(ends) % 2))))
        assert len(ends) < 40
    assert ends.count(-signal.SIGKILL) >= 3
    check_finished(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["weights_sha256"] == expected


def test_an_asynchronous_run_with_starts_ends_with_nothing_undecided(tmp_path: Path) -> None:
    start(tmp_path / "run", *STARTS, "orchestration.max_staleness=2", "data.curriculum=informative")
    check_finished(tmp_path / "run")
    check_starts(tmp_path / "run")


async def wandering(task: Task, client: Any) -> float:
    """REPLIES calls over HTTP; the reward is the share of answers with a vowel."""
    talk: list[Any] = [*task.prompt]
    vowels = 0
    for _ in range(REPLIES):
        answer = await client.chat.completions.create(model="any", messages=talk)
        said = answer.choices[0].message.content
        vowels += any(c in "aeiou" for c in said.lower())
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": str(len(said))}]
    return vowels / REPLIES


def test_agents_over_the_gateway_begin_by_the_same_requests(tmp_path: Path) -> None:
    agent = ("environment=", "agent=tests.loop.test_starts:wandering")
    start(tmp_path / "run", *STARTS, *agent, progress=(said := Quiet()))
    check_finished(tmp_path / "run")
    assert check_starts(tmp_path / "run") > 6
    assert not [line for line in said.lines if "did not repeat" in line]


def test_what_is_shown_names_the_attempt_that_was_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "run", *STARTS)
    sql = "SELECT trajectory_id, start_source, start_steps, completion_tokens FROM trajectories WHERE start_steps > 0"
    rows = query(tmp_path / "run", sql)
    capsys.readouterr()
    run = str(tmp_path / "run")
    assert main(["show", run, rows[0]["trajectory_id"]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"began after {rows[0]['start_steps']} steps of {rows[0]['start_source']}, which are context" in shown
    assert f"{rows[0]['completion_tokens']} sampled tokens in {REPLIES} steps" in shown
    assert main(["show", run]) == 0 and "began at" in capsys.readouterr().out
    assert main(["report", run]) == 0
    report = capsys.readouterr().out
    assert f"{len(rows)} attempts of {len(rows) // 3} groups began in the middle of recorded ones" in report
    [listed] = asking(tmp_path / "run")("runs")["runs"]
    attempt = asking(tmp_path / "run")(f"runs/{listed['key']}/trajectories/{rows[0]['trajectory_id']}")["attempt"]
    assert (attempt["start_source"], attempt["start_steps"]) == (rows[0]["start_source"], rows[0]["start_steps"])
