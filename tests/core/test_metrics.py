"""Declared metrics and how they add up."""

import math
import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.errors import ConfigError
from treadle.core.metrics import Aggregation, Measures, Metric, Tally, measured, shares

VALUES = st.floats(-1e6, 1e6) | st.integers(-1000, 1000) | st.booleans()
ALL: dict[Aggregation, Metric] = {
    "mean": Metric("a_max", "token", "mean"),  # names that lie: they decide nothing
    "sum": Metric("a_mean", "token", "sum"),
    "max": Metric("a_sum", "token", "max"),
    "min": Metric("a_share", "token", "min"),
}


def at_once(how: Aggregation, values: Sequence[float]) -> float | None:
    """The definition."""
    if how == "sum":
        return math.fsum(values)
    if not values:
        return None
    return {"mean": math.fsum(values) / len(values), "max": max(values), "min": min(values)}[how]


@pytest.mark.parametrize("how", ALL)
@given(parts=st.lists(st.lists(VALUES, max_size=5), max_size=6))
def test_any_split_adds_up_to_the_whole(how: Aggregation, parts: list[list[float]]) -> None:
    metric = ALL[how]
    values = [value for part in parts for value in part]
    whole = Tally.over(metric, values)
    assert whole.value == at_once(how, values)
    together = sum((measured("token", {metric: part}) for part in parts), measured("token", {metric: []}))
    assert together[metric.name] == (None if whole.value is None else pytest.approx(whole.value, rel=1e-12, abs=1e-9))
    assert together.tallies[0].count == len(values)


@given(st.lists(st.integers(-(2**60), 2**60)))
def test_counts_stay_whole_numbers(values: list[int]) -> None:
    found = Tally.over(ALL["sum"], values).value
    assert found == sum(values) and type(found) is int


def test_values_of_another_level_are_refused() -> None:
    metric = Metric("tokens_mean", "step", "mean")
    with pytest.raises(ConfigError, match="'tokens_mean' is of level step, its values are of level trajectory"):
        measured("trajectory", {metric: [1.0]})


def test_one_name_has_one_declaration() -> None:
    one, other = (measured("token", {Metric("x", "token", how): [1.0]}) for how in ("mean", "max"))
    with pytest.raises(ConfigError, match="'x' is declared twice"):
        one + other


def test_what_is_measured_reads_as_a_mapping_and_survives_pickling() -> None:
    found = measured("token", {ALL["mean"]: [1, 2], ALL["max"]: [], ALL["sum"]: []})
    assert dict(found) == {"a_max": 1.5, "a_sum": None, "a_mean": 0}
    assert pickle.loads(pickle.dumps(found)) == found
    assert list(found.under("env/")) == ["env/a_max", "env/a_sum", "env/a_mean"]
    assert dict(Measures()) == {} and Measures() + found == found
    assert repr(found).startswith("Measures({'a_max': 1.5")


def test_shares_tell_also_what_never_occurs() -> None:
    ended = Metric("ended_*", "trajectory", "mean", "share")
    row = measured("trajectory", shares(ended, ["done", "failed"], ["done", "done"]))
    assert dict(row + measured("trajectory", shares(ended, ["done", "failed"], ["failed"]))) == {
        "ended_done": 2 / 3,
        "ended_failed": 1 / 3,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "token", "mean"), "a metric needs a name, got ''"),
        (("x", "turn", "mean"), "metric 'x': level 'turn' must be one of token, step, trajectory, task, run"),
        (("x", "token", "median"), "metric 'x': aggregation 'median' must be one of mean, sum, max, min"),
        (("x", "token", "mean", "", "", "live"), "view 'live' must be one of played, trained, dropped, run"),
    ],
)
def test_a_wrong_declaration_is_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Metric(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_huge_values_end_nothing(aggregation: Aggregation) -> None:
    metric = Metric("own", "trajectory", aggregation)
    huge = Tally.over(metric, [1e308] * 4) + Tally.over(metric, [1e308, -1.0])
    assert isinstance(huge.value, float) and 0 < huge.value < math.inf
    assert Tally.over(metric, [-1e308] * 4).total < 0
