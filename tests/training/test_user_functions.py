"""Losses, advantages, rewards, metrics and callbacks of users: each kind with each mistake, and what is said of it."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import distance, exact, make_step, random_groups, weights_of
from treadle.algorithms import estimators, losses
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import Advantage, has_zero_advantage
from treadle.algorithms.losses import PolicyLoss
from treadle.core.errors import Cause, ConfigError, TrainingStopped, TrajectoryFailure
from treadle.core.metrics import Metric
from treadle.core.types import Message, Status, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tasks import SingleTurn, load_reward
from treadle.report.callback import Callback
from treadle.report.callbacks import CallbackConfig, load_callbacks
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.environment import IsolatedEnvironment
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.rewards import RewardsConfig, RewardShaper, load_group_reward, load_shaping
from treadle.training.config import TrainingConfig
from treadle.training.learner import Learner

HERE = "tests.training.test_user_functions"
MINE: Any = None  # what `HERE:MINE` names
TASK, STEP = Task("t", ({"role": "user", "content": "?"},)), make_step([1, 2], [3, 4])


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    losses.by_name.cache_clear()
    estimators.by_name.cache_clear()


def two(first: Any, second: Any) -> None:
    """Take two arguments of other names."""


def swapped_loss(tokens: Any, logp: Any, options: Any) -> None: ...
def swapped_advantage(signals: Any, batch: Any, options: Any) -> None: ...
def swapped_reward(text: Any, task: Any) -> None: ...
def swapped_shaping(trajectory: Any, task: Any) -> None: ...
def swapped_group(trajectories: Any, task: Any) -> None: ...


LOADED: dict[str, tuple[Callable[[str], Any], Callable[[Any], Any], Any, str]] = {
    "loss": (losses.by_name, PolicyLoss, swapped_loss, "loss(logp, tokens, options)"),
    "advantage": (estimators.by_name, Advantage, swapped_advantage, "advantage(batch, signals, options)"),
    "reward": (load_reward, lambda function: function, swapped_reward, "reward(task, text)"),
    "shaping": (load_shaping, lambda function: function, swapped_shaping, "shaping(task, trajectory)"),
    "group": (load_group_reward, lambda function: function, swapped_group, "group_reward(task, trajectories)"),
}


@pytest.mark.parametrize("kind", LOADED)
@pytest.mark.parametrize("mistake", ["value", "class", "parameters", "order"])
def test_what_cannot_be_called_is_refused_when_it_is_loaded(
    kind: str, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, made, swapped, signature = LOADED[kind]

    def one(only: Any) -> None: ...

    given = {"value": 3, "class": Task, "parameters": one, "order": swapped}[mistake]
    monkeypatch.setattr(f"{HERE}.MINE", made(given))
    with pytest.raises(ConfigError) as refused:
        load(f"{HERE}:MINE")
    said = str(refused.value)
    assert f"{HERE}:MINE" in said and said.count("\n") == 2  # an example of two lines
    called = f"def {signature}:"
    assert called in said
    match mistake:
        case "value" | "class":
            assert (
                f"is {'of type int' if mistake == 'value' else 'a class'}, it must be a function: {signature}" in said
            )
        case "parameters":
            assert f"({HERE}:test_what_cannot" in said and f"is called as {signature}, but: too many posit" in said
        case _:
            assert (
                f"({HERE}:{swapped.__name__}) is called as {signature}, but: " in said and "not in that place" in said
            )


def test_a_loss_or_an_advantage_is_no_bare_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{HERE}.MINE", two)
    for load, kind in ((losses.by_name, "PolicyLoss"), (estimators.by_name, "Advantage")):
        with pytest.raises(ConfigError, match=f"is of type function; make it .*{kind}.*: MINE = {kind}"):
            load(f"{HERE}:MINE")


def at(values: torch.Tensor, index: int, value: float) -> torch.Tensor:
    return torch.where(torch.arange(len(values)) == index, value, values)


LOSSES: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "scalar": (lambda p, tokens, o: (p * tokens.advantage).mean(), ConfigError, "a Tensor of shape [], float64, for "),
    "column": (lambda p, tokens, o: p[:, None], ConfigError, ", 1], float64, for "),
    "whole": (lambda p, tokens, o: torch.ones(len(p), dtype=torch.int64), ConfigError, "], int64, for "),
    "nothing": (lambda p, tokens, o: None, ConfigError, "None, a NoneType, for "),
    "numpy": (lambda p, tokens, o: p.detach().numpy(), ConfigError, "a ndarray of shape ["),
    "detached": (lambda p, tokens, o: p.detach(), ConfigError, ", without a gradient; it must return the loss of each"),
    "nan": (lambda p, tokens, o: at(p, 1, math.nan), TrainingStopped, "], float64, nan at index 1; it must return"),
}


@pytest.mark.parametrize("mistake", LOSSES)
def test_a_loss_that_is_none_is_named_at_the_first_update(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, error, said = LOSSES[mistake]
    monkeypatch.setattr(f"{HERE}.MINE", PolicyLoss(function))
    algorithm = AlgorithmConfig(policy_loss=f"{HERE}:MINE")
    learner = Learner(exact(), TrainingConfig(max_tokens_per_microbatch=1_000), algorithm, 10)
    before = weights_of(learner.model)
    with pytest.raises(error) as refused:
        learner.train_batch(random_groups(0))
    for part in (
        f"algorithm.policy_loss: '{HERE}:MINE'",
        f"{HERE}:<lambda> returned ",
        said,
        "def loss(logp, tokens, ",
    ):
        assert part in str(refused.value)
    assert distance(before, weights_of(learner.model)) == 0


ADVANTAGES: dict[str, tuple[Callable[[int], Any], str]] = {
    "scalar": (lambda n: np.float64(1), "a float64, for "),
    "short": (lambda n: np.zeros(3), "a ndarray of shape [3], float64, for "),
    "whole": (lambda n: np.ones(n, np.int64), "], int64, for "),
    "list": (lambda n: [0.5] * n, ", a list, for "),
    "nothing": (lambda n: None, "None, a NoneType, for "),
    "nan": (lambda n: np.full(n, np.nan), "], float64, nan at index "),
}


@pytest.mark.parametrize("mistake", ADVANTAGES)
def test_an_advantage_that_is_none_is_named_wherever_it_is_needed(
    mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gives, said = ADVANTAGES[mistake]
    monkeypatch.setattr(f"{HERE}.MINE", Advantage(lambda batch, signals, options: gives(len(batch))))
    algorithm = AlgorithmConfig(advantage=f"{HERE}:MINE")
    learner = Learner(exact(), TrainingConfig(), algorithm, 10)
    groups = random_groups(0)
    for need in (lambda: learner.train_batch(groups), lambda: has_zero_advantage(groups[0], algorithm)):
        with pytest.raises(ConfigError) as refused:
            need()
        for part in (f"algorithm.advantage: '{HERE}:MINE': {HERE}:test_an_advantage", said, "def advantage(batch, "):
            assert part in str(refused.value)


def raises(_: Any, second: Any, __: Any) -> Any:
    return second.no_such


@pytest.mark.parametrize("kind", ["policy_loss", "clipped", "advantage"])
def test_an_error_in_a_loss_or_an_advantage_is_named_with_its_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the error's cause."""
    made = {
        "policy_loss": PolicyLoss(raises),
        "clipped": PolicyLoss(lambda logp, tokens, options: -tokens.advantage * logp, clipped=raises),
        "advantage": Advantage(raises),
    }
    monkeypatch.setattr(f"{HERE}.MINE", made[kind])
    section = "advantage" if kind == "advantage" else "policy_loss"
    chosen: dict[str, Any] = {section: f"{HERE}:MINE"}
    learner = Learner(exact(), TrainingConfig(), AlgorithmConfig(**chosen), 10)
    with pytest.raises(ConfigError) as refused:
        learner.train_batch(random_groups(0))
    assert isinstance(refused.value.__cause__, AttributeError)
    said, line = str(refused.value), raises.__code__.co_firstlineno + 1
    assert said.startswith(f"algorithm.{section}: '{HERE}:MINE': {HERE}:raises raised AttributeError: ")
    assert f"no attribute 'no_such', at {__file__}:{line} in raises; it is called as " in said


class Counted(Environment):
    """Gives whatever it was made with."""

    metrics = (Metric("pages", "step", "mean"),)

    def __init__(self, given: Any) -> None:
        self.given = given

    def step(self, text: str) -> EnvStep:
        return EnvStep(done=True, **self.given)


def said_of_step(make: Callable[[], Any]) -> str:
    user = UserCode("environment 'mine'", Cause.ENVIRONMENT)
    environment = IsolatedEnvironment("mine", make, user, RolloutConfig())

    async def play() -> str:
        await environment.make()
        await environment.reset(TASK)
        try:
            await environment.step(Message(role="assistant", content="yes"), "yes")
        except TrajectoryFailure as error:
            return str(error)
        return ""

    try:
        return asyncio.run(play())
    finally:
        user.release()


VALUES: dict[str, Any] = {"nothing": None, "nan": math.nan, "text": "1.0", "list": [1.0], "huge": 1e300}
SHOWN = {"nothing": "None, a NoneType", "nan": "nan, a float", "text": "'1.0', a str", "list": "[1.0], a list"}


@pytest.mark.parametrize("mistake", VALUES)
def test_a_reward_or_a_metric_that_is_none_is_named(mistake: str) -> None:
    value, shown = VALUES[mistake], SHOWN.get(mistake, "1e+300, a float")
    said = said_of_step(lambda: SingleTurn(lambda task, text: value))
    assert f"{HERE}:test_a_reward" in said and f"returned {shown}; it must return a finite number" in said
    assert "def reward(task, text): return float(" in said and "\n" not in said
    said = said_of_step(lambda: Counted({"reward": value}))
    assert f"step gave the reward {shown}, in {HERE}:Counted; it must be a finite number" in said
    said = said_of_step(lambda: Counted({"info": {"pages": value}}))
    wanted = mistake not in ("nothing", "huge")  # None is not counted, and a metric may be larger than a reward
    assert (f"step gave info['pages'] = {shown}, in {HERE}:Counted; a declared metric" in said) is wanted


GROUPS: dict[str, tuple[Any, str]] = {
    "nothing": (None, "None, a NoneType, no rewards; it must return a list with one "),
    "number": (1.0, "1.0, a float, no rewards; it must"),
    "one": ([1.0], "[1.0], a list, there are 1 rewards for 2 "),
    "text": (["good", "bad"], "['good', 'bad'], a list, a reward must be a finite number"),
    "nan": (np.array([1.0, math.nan]), "a ndarray of shape [2], float64, a reward must be a finite number"),
}


@pytest.mark.parametrize("mistake", GROUPS)
def test_rewards_of_shaping_and_of_groups_that_are_none_are_named(mistake: str) -> None:
    value, said = GROUPS[mistake]
    shaper = RewardShaper(RewardsConfig(shaping=f"{HERE}:two"), 5.0)
    played = Trajectory("g.0", "t", 0, (STEP, STEP), 0.0, Status.DONE)
    shaper._hook = lambda task, trajectory: value
    shaper.group = lambda task, trajectories: value

    async def both() -> list[Trajectory]:
        shaped = await shaper.shape(TASK, played, UserCode("code", Cause.ENVIRONMENT))
        return [shaped, *await shaper.reward_group(TASK, "g", [played, played])]

    for trajectory, setting in zip(asyncio.run(both()), ("shaping", "group", "group"), strict=True):
        assert trajectory.failure is not None and trajectory.failure.cause is Cause.VERIFIER
        message = trajectory.failure.message
        assert message.startswith(f"rewards.{setting}: {HERE}:test_rewards") and f"returned {said}" in message
        assert f"def {'shaping' if setting == 'shaping' else 'group_reward'}(task, " in message and "\n" not in message


class Nothing(Callback):
    def on_update(self, row: Any) -> None: ...


class Few(Callback):
    def update(self) -> None: ...  # type: ignore[override]


class Moved(Callback):
    def batch(self, version: Any, groups: Any) -> None: ...  # type: ignore[override]


class Later(Callback):
    async def update(self, row: Any) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        ("Nothing", "has none of the methods start, rollout, batch, update, "),
        ("Few", f"update ({HERE}:Few.update) is called as update(self, row), but: too many positional"),
        ("Moved", f"batch ({HERE}:Moved.batch) is called as batch(self, groups, version), but: 'version' is not in"),
        ("Later", "has async methods (update); write plain ones"),
        ("TASK", "is of type Task; name a treadle.Callback's class"),
    ],
)
def test_a_callback_that_cannot_be_called_is_refused_at_the_start(callback: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_callbacks([CallbackConfig(name=f"{HERE}:{callback}")])
    assert said in str(refused.value)
