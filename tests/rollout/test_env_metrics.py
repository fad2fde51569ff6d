"""What environments measure."""

from typing import Any

import pytest

from tests.worlds import Told, play, saying, tool
from treadle.core.errors import Cause, ConfigError
from treadle.core.metrics import Metric
from treadle.core.types import Status, Trajectory
from treadle.envs.base import EnvStep
from treadle.envs.lookup import Lookup, tasks
from treadle.orchestration.setup.inputs import make_inputs
from treadle.rollout.drivers.environment import check_metrics

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


def test_what_is_not_given_is_not_counted() -> None:
    assert dict(played({"searches": None}, {}).metrics) == {}
    assert dict(played({"searches": 0}, {}).metrics) == {"searches": 0.0}


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
        ((Metric("x", "step", "mean", view="trained"),), "'x' is of what is trained; leave view out"),
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
        make_inputs(tasks("train", 1), [], {"lookup": Wrong})
    [trajectory] = play(lambda: Wrong(EnvStep(done=True)), saying("hi"))  # its factory does not tell
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.ENVIRONMENT


def test_two_declarations_of_one_name_are_refused_at_start() -> None:
    class Other(Told):
        metrics = (Metric("searches", "trajectory", "max"),)

    with pytest.raises(ConfigError, match="'searches' is declared otherwise by 'lookup'; rename one"):
        check_metrics({"lookup": Lookup, "other": Other})


def test_info_that_is_no_mapping_fails_the_attempt_of_an_environment_that_measures() -> None:
    step: Any = EnvStep(done=True, info=None)  # type: ignore[arg-type]
    [failed] = play(lambda: Measuring(step), saying("hi"))
    [fine] = play(lambda: Told(step), saying("hi"))
    assert failed.failure is not None and "info None; it must be a mapping" in failed.failure.message
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

    with pytest.raises(ConfigError, match="is declared otherwise by 'family'; rename one"):
        check_metrics({"family": Family, "other": Other})
    check_metrics({"family": Family, "again": Family, "lookup": Lookup})
