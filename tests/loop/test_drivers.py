"""A driver of one's own in whole runs, without an edit outside of this file: given, named, and registered."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

import treadle
from tests.runs import MODEL, SETTINGS, check_finished, query, resume
from tests.worlds import Quiet, tiny, user, vowel_tasks
from treadle.api.train import train_run
from treadle.core.config import Config
from treadle.core.errors import ConfigError
from treadle.core.rewards import Reward
from treadle.core.types import Message, Task
from treadle.data.config import SourceConfig
from treadle.data.load import LoadContext, load_tasks
from treadle.plan.config import RunConfig
from treadle.plan.inputs import load_inputs, make_inputs
from treadle.plan.plan import make
from treadle.rollout.attempt import Players
from treadle.rollout.drivers.driver import AttemptDriver, DriverSetup
from treadle.rollout.drivers.outcome import Outcome, outcome_of
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import Session

HERE = "tests.loop.test_drivers"


class TwoTurns(AttemptDriver[Session]):
    """Has the model speak twice, and rewards short speeches. It counts its attempts for as long as it is open.

    A start opens and closes it once before, to see that it can, and plays nothing.
    """

    attempts: ClassVar[list[int]] = []

    def __init__(self, setup: DriverSetup) -> None:
        self.played = 0

    async def __aexit__(self, *error: object) -> None:
        self.attempts.extend([self.played] if self.played else [])

    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        self.played += 1
        conversation: list[Message] = [*task.prompt]
        for _ in range(2):
            reply = await session.chat(conversation)
            session.reward_last(Reward.of(1 / (1 + len(reply.message["content"]))))
            conversation += [reply.message, Message(role="user", content="more")]
        return outcome_of(session.steps, None, user.cause)


@pytest.fixture(autouse=True)
def _none_played() -> None:
    TwoTurns.attempts.clear()


def tasks(split: str, count: int) -> list[Task]:
    """As a recipe finds them: they name nothing that plays them."""
    return vowel_tasks(split, count)


def config(*overrides: str) -> RunConfig:
    return tiny('environment=""', f"data.train.source={HERE}:tasks", "data.held_out=null", *overrides)


def start(path: Path, *overrides: str) -> dict[str, Any]:
    made = config(*overrides)
    summary = train_run(made, load_inputs(made), path, Quiet())
    check_finished(path)
    assert {row["status"] for row in query(path, "SELECT status FROM trajectories")} == {"done"}
    assert {row["steps"] for row in query(path, "SELECT steps FROM trajectories")} == {2}
    return summary


def test_a_driver_given_in_python_trains(tmp_path: Path) -> None:
    rows = [Task(f"t{i}", (user(f"be brief {i}"),)) for i in range(3)]
    options: dict[str, Any] = {"model": MODEL, "settings": SETTINGS, "progress": Quiet()}
    summary = treadle.train(TwoTurns, rows, run=tmp_path / "run", **options)
    check_finished(tmp_path / "run")
    assert (summary["updates"], TwoTurns.attempts) == (2, [12])
    again = treadle.train(TwoTurns, rows, run=tmp_path / "again", **options)
    assert again["weights_sha256"] == summary["weights_sha256"]


def test_a_driver_named_by_module_and_one_registered_by_another_package_train_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = start(tmp_path / "named", f"driver='{HERE}:TwoTurns'")
    package = tmp_path / "site" / "two_turns-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: two-turns\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[treadle.drivers]\ntwo_turns = {HERE}:TwoTurns\n")
    monkeypatch.syspath_prepend(package.parent)
    registered = start(tmp_path / "registered", "driver=two_turns")
    assert registered["weights_sha256"] == named["weights_sha256"]
    assert TwoTurns.attempts == [24, 24]
    resume(tmp_path / "registered", config=config("driver=two_turns", "orchestration.updates=6"))
    check_finished(tmp_path / "registered")
    assert TwoTurns.attempts == [24, 24, 12]


def test_tasks_may_name_what_plays_them_each(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "a"}], "driver": "d"}\n'
        '{"prompt": [{"role": "user", "content": "b"}], "environment": "e"}\n'
        '{"prompt": [{"role": "user", "content": "c"}]}\n'
    )
    found = load_tasks(
        SourceConfig(source=str(tmp_path / "data.jsonl")), "train", LoadContext(player=("driver", "other"))
    )
    assert [task.player for task in found] == [("driver", "d"), ("environment", "e"), ("driver", "other")]
    assert make_inputs([Task("t", (user("?"),))], [], Players(drivers={"d": TwoTurns})).train[0].player == (
        "driver",
        "d",
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("driver=nowhere",), "drivers: 'nowhere' is not registered"),
        ((f"driver='{HERE}:tasks'",), "drivers: .* is of type function, it must be a subclass of AttemptDriver"),
        ((f"driver={HERE}:TwoTurns", "data.train.source=lookup"), "TwoTurns' would play nothing: .* 'lookup'"),
    ],
)
def test_what_cannot_work_is_refused_when_inputs_are_loaded(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_inputs(config(*overrides))


class Pay(Config):
    """What an attempt is worth."""

    worth: float
    bonus: float = 0.0


class Paying(TwoTurns):
    """Pays what its options say; its attempts may wait for one another."""

    may_wait = True
    options_type = Pay

    def __init__(self, setup: DriverSetup, options: Pay) -> None:
        super().__init__(setup)
        self.pay = options.worth + options.bonus

    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        await session.chat(task.prompt)
        session.reward_last(Reward.of(self.pay))
        return outcome_of(session.steps, None, user.cause)


PAYING = (f"driver={HERE}:Paying", "driver_options={worth: 0.5, bonus: 0.25}")


def test_a_driver_is_made_with_the_recipes_options(tmp_path: Path) -> None:
    made = config(*PAYING, "orchestration.updates=1", "orchestration.checkpoint_every=1")
    train_run(made, load_inputs(made), tmp_path / "run", Quiet())
    assert query(tmp_path / "run", "SELECT DISTINCT reward FROM trajectories") == [{"reward": 0.75}]


@pytest.mark.parametrize(
    ("driver", "options", "message"),
    [
        ("Paying", "{worth: 1, bonsu: 2}", "driver_options: unknown key 'bonsu'; did you mean 'bonus'"),
        ("Paying", "{bonus: 1}", "driver_options: missing key 'worth'"),
        ("TwoTurns", "{bonus: 1}", r"driver_options is set, but '.*TwoTurns' has no options; leave it out"),
    ],
)
def test_options_that_a_driver_does_not_take_are_refused_at_the_start(driver: str, options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_inputs(config(f"driver={HERE}:{driver}", f"driver_options={options}"))


def test_the_engine_does_not_wait_for_attempts_that_wait_for_each_other() -> None:
    """Neither in training nor in an evaluation, unless it is told to."""
    waiting, alone = load_inputs(config(*PAYING)), load_inputs(config(f"driver={HERE}:TwoTurns"))
    for overrides, inputs, lock_step in (
        ((), alone, True),
        ((), waiting, False),
        (("engine.lock_step=true",), waiting, True),
        (("engine.lock_step=false",), alone, False),
    ):
        plan = make(config(*PAYING, *overrides), inputs)
        assert plan.engine.lock_step is plan.evaluation_engine.lock_step is plan.repeats is lock_step
    plan = make(config(*PAYING, "orchestration.max_staleness=1"), alone)
    assert plan.engine.lock_step is plan.repeats is False and plan.evaluation_engine.lock_step is True
