"""`Environment.finish`: called once when an attempt has ended, with a last reward and metrics of the whole attempt."""

from typing import Any

import numpy as np
import pytest

from tests.worlds import DONE, MORE, Told, _act, hang, one, play, saying, tool
from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.core.metrics import Metric
from treadle.core.rewards import Reward
from treadle.core.types import Status, Trajectory
from treadle.envs.base import EnvStep, Finish
from treadle.envs.lookup import Lookup, tasks
from treadle.plan.inputs import make_inputs
from treadle.rollout.attempt import Players
from treadle.rollout.drivers.environment import check_metrics
from treadle.testing import VirtualLoop

TESTS = Metric("tests", "trajectory", "mean", "tests")
TIGHT: dict[str, Any] = {"max_input_tokens": 80}
VERIFIER = TrajectoryFailure(Cause.VERIFIER, "no test report")


class Finishing(Told):
    """Answers as told, then finishes as told. ended: what it was called with, each time."""

    metrics = (TESTS,)

    def __init__(self, *answers: Any, last: Any = None, **more: Any) -> None:
        super().__init__(*answers, **more)
        self.last, self.ended = last, list[Status]()

    async def finish(self, ended: Status) -> Finish | None:
        self.calls.append("finish")
        self.ended.append(ended)
        return await _act(self.last)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answers", "settings", "status", "steps"),
    [
        ([MORE, DONE], {}, Status.DONE, [0.25, 1.5]),
        ([MORE] * 9, {"max_steps": 2}, Status.MAX_STEPS, [0.25, 0.75]),
        ([MORE] * 9, TIGHT, Status.CONTEXT, [0.25, 0.25, 0.75]),
    ],
)
def test_it_is_called_once_before_close_however_the_attempt_ended_and_rewards_the_last_step(
    answers: list[EnvStep], settings: dict[str, Any], status: Status, steps: list[float]
) -> None:
    world = Finishing(*answers, last=Finish(0.5, {"tests": 3, "other": object()}))
    found = one(world, **settings)
    assert (found.status, found.reward, [step.reward for step in found.steps]) == (status, sum(steps), steps)
    assert world.ended == [status]
    assert world.calls == ["reset", *["step"] * len(steps), "finish", "close"]
    assert dict(found.metrics) == {"tests": 3.0}


def test_what_it_gives_adds_to_components_and_tokens_of_the_last_step() -> None:
    tokens = np.array([0.5, -1], np.float32)
    world = Finishing(
        EnvStep(reward=Reward({"answer": 1.0}, tokens), done=True),
        last=Finish(Reward({"tests": 2.0, "answer": 0.25}, tokens)),
    )
    found = one(world)
    given_ = found.steps[-1].given
    assert given_.components == {"answer": 1.25, "tests": 2.0}
    assert given_.tokens is not None and given_.tokens.tolist() == [1.0, -2.0]
    assert found.reward == 2.25


@pytest.mark.parametrize("last", [None, Finish(), (0.0,), Finish(info={"tests": None})])
def test_it_may_give_nothing(last: Any) -> None:
    found = one(Finishing(MORE, DONE, last=last))
    assert (found.status, found.reward, dict(found.metrics)) == (Status.DONE, 1.25, {})


@pytest.mark.parametrize(
    ("last", "cause", "message"),
    [
        (KeyError("report"), Cause.ENVIRONMENT, "finish raised KeyError: 'report'"),
        (VERIFIER, Cause.VERIFIER, "no test report"),
        (SystemExit(2), Cause.ENVIRONMENT, "finish tried to exit the process"),
        (hang, Cause.TIMEOUT, "finish took longer than 0.05 s"),
        (1.0, Cause.ENVIRONMENT, "finish must return Finish(reward, info, rewards) or None, got 1.0"),
        (
            EnvStep(reward=1.0),
            Cause.ENVIRONMENT,
            "finish must return Finish(reward, info, rewards) or None, got EnvStep(",
        ),
        (Finish(float("nan")), Cause.ENVIRONMENT, "finish gave the reward nan, a float, in "),
        (Finish(info={"tests": "3"}), Cause.ENVIRONMENT, "finish gave info['tests'] = '3'"),
        (Finish(info=[1]), Cause.ENVIRONMENT, "finish gave info [1]"),  # type: ignore[arg-type]
        (Finish(Reward(tokens=np.ones(9, np.float32))), Cause.ENVIRONMENT, "Step.given rewards 9 tokens"),
        (Finish(1e12), Cause.ENVIRONMENT, "the component 'reward' of a reward must be a finite"),
    ],
)
@pytest.mark.parametrize("answers", [[DONE], [MORE] * 9], ids=["done", "limit"])
def test_a_finish_that_fails_fails_the_attempt_which_is_closed(
    answers: list[EnvStep], last: Any, cause: Cause, message: str
) -> None:
    world = Finishing(*answers, last=last)
    found = one(world, loop=VirtualLoop(), max_steps=1, environment_timeout=0.05)
    assert found.reward is None and found.failure is not None
    assert found.failure.cause is cause
    assert found.failure.message.startswith(message)
    assert dict(found.metrics) == {}
    assert world.calls[-2:] == ["finish", "close"]


@pytest.mark.parametrize(
    "world",
    [
        Finishing(ValueError("x"), last=Finish(1.0)),
        Finishing(EnvStep(reward=float("inf"), done=True), last=Finish(1.0)),
        Finishing(hang, last=Finish(1.0)),
    ],
    ids=["raises", "no reward", "hangs"],
)
def test_an_attempt_that_failed_is_not_finished_but_closed(world: Finishing) -> None:
    found = one(world, loop=VirtualLoop(), environment_timeout=0.05)
    assert (found.status, found.reward) == (Status.FAILED, None)
    assert world.calls[-1] == "close" and "finish" not in world.calls


def test_the_engine_does_not_wait_for_it() -> None:
    engine = saying("a")
    left_open = []

    async def look() -> Finish:
        left_open.extend(engine.open)
        return Finish()

    play(lambda: Finishing(DONE, last=look), engine)
    assert left_open == []


# What environments measure


SEARCHES = Metric("searches", "trajectory", "mean", "searches")
SLOW = Metric("slow", "step", "mean", "share")


class Measuring(Told):
    metrics = (SEARCHES, SLOW)


def played(*infos: Any) -> Trajectory:
    answers = [EnvStep([tool("on")], info=info) for info in infos[:-1]]
    [trajectory] = play(lambda: Measuring(*answers, EnvStep(done=True, info=infos[-1])), saying("hi"))
    return trajectory


def test_values_of_a_trajectory_add_up_and_values_of_steps_count_each() -> None:
    found = played({"searches": 1, "slow": True}, {"searches": 2, "slow": False}, {"slow": False, "other": "x"}).metrics
    assert dict(found) == {"searches": 3.0, "slow": pytest.approx(1 / 3)}
    assert [tally.count for tally in found.tallies] == [1, 3]


@pytest.mark.parametrize("value", ["3", float("nan"), float("inf"), [1], 10**400])
def test_a_value_that_is_no_number_fails_the_attempt(value: object) -> None:
    trajectory = played({"searches": value}, {})
    assert trajectory.status is Status.FAILED and trajectory.failure is not None
    assert trajectory.failure.cause is Cause.ENVIRONMENT
    assert trajectory.failure.message.startswith("step gave info['searches'] = ")
    assert dict(trajectory.metrics) == {}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ((Metric("x", "token", "mean"),), "environment 'world': metrics: 'x' is of level token; make it step or traj"),
        ((Metric("a b", "step", "mean"),), "'a b' must be a name of letters, digits and underscores"),
        ((Metric("*_x", "step", "mean"),), "must be a name of letters"),
        ((Metric("*", "step", "mean"),), "must be a name of letters"),
        ((Metric("x", "step", "mean", view="trained"),), "'x' has the view trained; leave view out"),
        (("searches",), "metrics must be a tuple of treadle.Metric, got"),
        (SEARCHES, "metrics must be a tuple of treadle.Metric, got"),
        ({"searches": 0}, "metrics must be a tuple of treadle.Metric, got"),
    ],
)
def test_a_declaration_that_cannot_be_counted_is_refused_at_start(metrics: Any, message: str) -> None:
    class Wrong(Told):
        pass

    Wrong.metrics = metrics
    with pytest.raises(ConfigError, match=message):
        check_metrics({"world": Wrong})
    with pytest.raises(ConfigError, match="environment 'lookup': metrics"):
        make_inputs(tasks("train", 1), [], Players({"lookup": Wrong}))
    [trajectory] = play(lambda: Wrong(EnvStep(done=True)), saying("hi"))  # its factory does not tell
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.ENVIRONMENT


def test_two_declarations_of_one_name_are_refused_at_start() -> None:
    class Other(Told):
        metrics = (Metric("searches", "trajectory", "max"),)

    with pytest.raises(ConfigError, match="'searches' is declared differently by 'lookup'; rename one"):
        check_metrics({"lookup": Lookup, "other": Other})


def test_info_that_is_no_mapping_fails_the_attempt_of_an_environment_that_measures() -> None:
    step: Any = EnvStep(done=True, info=None)  # type: ignore[arg-type]
    [failed] = play(lambda: Measuring(step), saying("hi"))
    [fine] = play(lambda: Told(step), saying("hi"))
    assert failed.failure is not None and "info None, a NoneType, in " in failed.failure.message
    assert fine.reward == 0.0


class Family(Told):
    metrics = (Metric("lib_*", "trajectory", "mean", help="a number of the library"), SLOW)


def test_a_family_declares_all_names_that_begin_like_it() -> None:
    infos: list[Any] = [{"lib_steps": 1, "other": 5, "slow": True}, {"lib_steps": 2, "lib_won": True, 3: 4}]
    answers = [EnvStep([tool("on")], info=infos[0]), EnvStep(done=True, info=infos[1])]
    [trajectory] = play(lambda: Family(*answers), saying("hi"))
    assert dict(trajectory.metrics) == {"slow": 1.0, "lib_steps": 3.0, "lib_won": 1.0}
    [failed] = play(lambda: Family(EnvStep(done=True, info={"lib_x": "3"})), saying("hi"))
    assert failed.failure is not None and "info['lib_x'] = '3'" in failed.failure.message


@pytest.mark.parametrize("name", ["lib_steps", "lib_*", "lib_more_*", "li*"])
def test_a_family_takes_no_name_of_others(name: str) -> None:
    class Other(Told):
        metrics = (Metric(name, "step", "max"),)

    with pytest.raises(ConfigError, match="is declared differently by 'family'; rename one"):
        check_metrics({"family": Family, "other": Other})
    check_metrics({"family": Family, "again": Family, "lookup": Lookup})
