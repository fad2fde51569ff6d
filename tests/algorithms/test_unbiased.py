"""Which estimators are unbiased where the policy decides when to stop: exactly, by enumeration of all updates.

The expected gradient of an update is a sum over all that can happen in it (`enumerable.World`). It is compared with the
gradient of the expected reward; and so is the mean over updates that are sampled.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.algorithms.enumerable import Vector, World, angle, by_group, worlds
from treadle.algorithms.advantages import grpo, returns
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.distillation import turn_credit
from treadle.algorithms.estimators import Advantage, Signals, advantages
from treadle.algorithms.reductions import token_weights
from treadle.core.types import DropReason, Group, Start, Trajectory
from treadle.packing.flat import FlatBatch, flatten

TURNS = sorted(worlds())
SAMPLED = 10_000  # groups
PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


def marked(group: Group, stale: int) -> Group:
    """stale: a turn of the first attempt whose step is too old to be trained, whatever was said there."""
    first, *others = group.trajectories
    steps = tuple(
        replace(step, dropped=DropReason.STALE) if turn == stale else step for turn, step in enumerate(first.steps)
    )
    return replace(group, trajectories=(replace(first, steps=steps), *others))


def said_by_a_value_head(world: World, batch: FlatBatch) -> Vector:
    """[N]"""
    return np.array([0.5 - 0.3 * len(world.state(step)) for step in batch.steps])[batch.step_id]


class Everything(NamedTuple):
    """All groups of some attempts, as one batch: an estimator that compares within groups sees each alone."""

    world: World
    batch: FlatBatch
    probability: Vector
    size: int

    def expected(self, config: AlgorithmConfig, credit: Vector | None = None) -> Vector:
        """The expectation [D] of a group's gradient, see `by_group`."""
        return self.probability @ self.each(config, credit)

    def each(self, config: AlgorithmConfig, credit: Vector | None = None) -> Vector:
        """The gradient [G, D] of each group. credit [K]: of turns."""
        signals = Signals(values=said_by_a_value_head(self.world, self.batch), credit=credit)
        return by_group(self.world, self.batch, advantages(self.batch, config, signals), self.size)


@cache
def everything(turns: int, size: int, stale: int | None = None) -> Everything:
    world, groups = worlds()[turns], worlds()[turns].groups(size)
    made = [world.group(attempts, index) for index, (_, attempts) in enumerate(groups)]
    if stale is not None:
        made = [marked(group, stale) for group in made]
    return Everything(world, flatten(made), np.array([probability for probability, _ in groups]), size)


SUM: dict[str, Any] = {"reduction": "seq_mean_token_sum_norm", "length_norm": 1}
"""The reduction under which a trajectory's tokens are summed and divided by a constant."""

UNBIASED: list[tuple[dict[str, Any], Callable[[int], float]]] = [  # and the factor for groups of n
    ({"advantage": "rloo"}, lambda n: 1),
    ({"advantage": "step_return"}, lambda n: 1),
    ({"advantage": "step_return", "advantage_options": {"scope": "segment"}}, lambda n: 1),
    ({"advantage": "gae"}, lambda n: 1),
    ({"advantage": "grpo", "advantage_options": {"norm_by_std": False}}, lambda n: 1 - 1 / n),
]


def assert_documented(found: list[float], degrees: str) -> None:
    """Assert that these are the degrees, in worlds of two and three turns, and that the documentation has them."""
    assert " / ".join(f"{each:.1f}°" for each in found) == degrees
    assert degrees in PAGE.read_text(encoding="utf-8")


def name_of(value: object) -> str:
    return str(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("fields", "scale"), UNBIASED, ids=name_of)
def test_these_are_unbiased(fields: dict[str, Any], scale: Callable[[int], float], size: int, turns: int) -> None:
    found = everything(turns, size).expected(AlgorithmConfig(**SUM, **fields))
    np.testing.assert_allclose(found, scale(size) * worlds()[turns].gradient().sum(0), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("stale", range(2))
@pytest.mark.parametrize("advantage", ["rloo", "step_return"])
def test_a_step_that_is_too_old_takes_its_own_part_of_the_gradient_and_no_other(advantage: str, stale: int) -> None:
    """Of one attempt in two."""
    found = everything(2, 2, stale=stale).expected(AlgorithmConfig(**SUM, advantage=advantage))
    parts = worlds()[2].gradient()
    np.testing.assert_allclose(found, parts.sum(0) - parts[stale] / 2, rtol=1e-12, atol=1e-15)


# Groups that begin in the middle of a recorded attempt

START = (2,)


@cache
def started(turns: int, size: int) -> Everything:
    """All groups whose attempts go on from a recorded attempt's first step."""
    world, groups = worlds()[turns], worlds()[turns].groups(size, START)
    made = [begun(world.group(attempts, index)) for index, (_, attempts) in enumerate(groups)]
    return Everything(world, flatten(made), np.array([probability for probability, _ in groups]), size)


def begun(group: Group) -> Group:
    def replayed(t: Trajectory) -> Trajectory:
        first, *own = t.steps
        return replace(t, steps=(replace(first, dropped=DropReason.REPLAYED), *own), start=Start("g000099.0", 1))

    return replace(group, trajectories=tuple(map(replayed, group.trajectories)))


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize(("fields", "scale"), UNBIASED, ids=name_of)
def test_a_start_leaves_them_unbiased_for_what_follows_it(
    fields: dict[str, Any], scale: Callable[[int], float], turns: int
) -> None:
    found = started(turns, 2).expected(AlgorithmConfig(**SUM, **fields))
    parts = worlds()[turns].gradient(START)
    assert not parts[0].any()  # the replayed step is not trained
    np.testing.assert_allclose(found, scale(2) * parts.sum(0), rtol=1e-12, atol=1e-15)


def test_a_start_has_another_gradient_than_the_beginning() -> None:
    found = [angle(world.gradient(START).sum(0), world.gradient().sum(0)) for world in worlds().values()]
    assert_documented(found, "76.5° / 49.4°")


# Turns that are credited with what a frozen model gets to know by them


def credit_of(part: Everything, repaid: bool) -> Vector:
    """By a log-probability of the ground truth that differs from state to state; [K]."""
    known = [-3.0 + 1.7 * sum(part.world.state(step)) - len(step.prompt_ids) / 4 for step in part.batch.played]
    return 0.3 * turn_credit(np.array(known), part.batch.trajectory_of_played, repaid)


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("advantage", ["step_return", "gae"])
def test_a_credit_that_is_paid_back_biases_nothing(advantage: str, turns: int) -> None:
    config, part = AlgorithmConfig(**SUM, advantage=advantage), everything(turns, 2)
    credit = credit_of(part, repaid=True)
    assert np.abs(part.each(config, credit) - part.each(config)).max() > 0.1 or turns == 3  # where states differ
    found = part.expected(config, credit)
    np.testing.assert_allclose(found, worlds()[turns].gradient().sum(0), rtol=1e-12, atol=1e-15)


def test_a_credit_that_is_kept_is_another_objective() -> None:
    config = AlgorithmConfig(**SUM, advantage="step_return")
    parts = [everything(turns, 2) for turns in TURNS]
    found = [angle(p.expected(config, credit_of(p, repaid=False)), p.world.gradient().sum(0)) for p in parts]
    assert_documented(found, "31.3° / 16.8°")


@cache
def sampled(turns: int, size: int) -> Everything:
    world = worlds()[turns]
    groups = [world.group([world.sample(place, n) for n in range(size)], place) for place in range(SAMPLED)]
    return Everything(world, flatten(groups), np.full(SAMPLED, 1 / SAMPLED), size)


def assert_within_errors(each: Vector, true: Vector) -> None:
    """Assert that the mean of the gradients [G, D] is the true one within 4 standard errors, in each direction."""
    error = each.std(0, ddof=1) / math.sqrt(len(each))
    off = np.abs(each.mean(0) - true)
    assert (error > 0).all() and (off <= 4 * error).all(), (off / error).max()


@pytest.mark.slow
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize(("fields", "scale"), UNBIASED, ids=name_of)
def test_sampled_updates_agree(fields: dict[str, Any], scale: Callable[[int], float], turns: int) -> None:
    each = sampled(turns, 2).each(AlgorithmConfig(**SUM, **fields))
    assert_within_errors(each, scale(2) * worlds()[turns].gradient().sum(0))


@pytest.mark.slow
@pytest.mark.parametrize("turns", TURNS)
def test_sampled_updates_with_credit_and_with_starts_agree(turns: int) -> None:
    world, config = worlds()[turns], AlgorithmConfig(**SUM, advantage="step_return")
    part = sampled(turns, 2)
    assert_within_errors(part.each(config, credit_of(part, repaid=True)), world.gradient().sum(0))
    attempts = [[world.sample(place, n, START) for n in range(2)] for place in range(SAMPLED)]
    batch = flatten([begun(world.group(each, place)) for place, each in enumerate(attempts)])
    after = Everything(world, batch, np.full(SAMPLED, 1 / SAMPLED), 2)
    wanted = world.gradient(START).sum(0)
    reached = wanted != 0  # other parameters are not moved at all
    each = after.each(config)
    assert not each[:, ~reached].any()
    assert_within_errors(each[:, reached], wanted[reached])


# Biased ones, which the documentation says by how much


@cache
def updates(turns: int, size: int, groups: int) -> list[tuple[float, FlatBatch]]:
    """All updates of some groups, for what depends on the whole update."""
    world, found = worlds()[turns], []
    for chosen in itertools.product(world.groups(size), repeat=groups):
        batch = flatten([world.group(attempts, index) for index, (_, attempts) in enumerate(chosen)])
        found.append((math.prod(probability for probability, _ in chosen), batch))
    return found


def expected(config: AlgorithmConfig, turns: int, groups: int = 1) -> Vector:
    """The expectation of an update's gradient, sum_i weight_i advantage_i score_i, with groups of two."""
    world, total = worlds()[turns], np.zeros(1)
    for probability, batch in updates(turns, 2, groups):
        signals = Signals(values=said_by_a_value_head(world, batch))
        slopes = token_weights(batch, config) * advantages(batch, config, signals)
        total = total + probability * slopes[batch.step_start[:-1]] @ world.scores(batch)
    return total


def _by_turn(batch: FlatBatch, signals: Signals, options: Any) -> Vector:
    """The return to go less its mean over all attempts of the group that reached the turn, itself included."""
    togo = returns(batch.played_rewards, batch.trajectory_of_played, 1.0)
    group = batch.group_of_trajectory[batch.trajectory_of_played]
    turn = np.array([np.sum(step.prompt_ids == 7) for step in batch.played])
    return grpo(togo, group * (turn.max(initial=0) + 1) + turn, norm_by_std=False)[batch.played_id]


BY_TURN = Advantage(_by_turn, by_step=True)

# The degrees that docs/algorithms.md has, for two turns and for three; and whether the bias becomes smaller with more
# groups in an update.
BIASED: list[tuple[dict[str, Any], str, bool]] = [
    ({"advantage": "grpo"}, "22.0° / 21.6°", False),
    ({"advantage": "maxrl"}, "14.4° / 28.6°", False),
    ({"advantage": "gigpo"}, "22.5° / 24.9°", False),
    # with all that met a turn as its state: by turn
    ({"advantage": "gigpo", "advantage_options": {"norm_by_std": False}}, "8.5° / 9.6°", False),
    ({"advantage": f"{__name__}:BY_TURN"}, "9.4° / 21.5°", False),
    ({"advantage": "gae", "advantage_options": {"gae_lambda": 0.5}}, "41.5° / 58.4°", False),
    ({"advantage": "reinforce++"}, "41.7° / 15.4°", True),
    ({"advantage": "reinforce++_baseline"}, "27.4° / 25.7°", True),
    ({"advantage": "rloo", "reduction": "token_mean"}, "6.2° / 6.8°", True),
    ({"advantage": "rloo", "reduction": "trajectory_mean"}, "26.2° / 18.2°", False),
    ({"advantage": "rloo", "reduction": "step_mean"}, "23.0° / 20.8°", False),
    ({"advantage": "rloo", "reduction": "task_mean"}, "6.2° / 6.8°", False),
    ({"advantage": "rloo", **SUM, "scope": "step"}, "5.0° / 9.2°", True),
]


def with_reduction(fields: dict[str, Any]) -> AlgorithmConfig:
    return AlgorithmConfig(**{**({} if "reduction" in fields else SUM), **fields})


@pytest.mark.quick(2)
@pytest.mark.parametrize(("fields", "vanishes"), [(fields, vanishes) for fields, _, vanishes in BIASED], ids=str)
def test_these_are_biased(fields: dict[str, Any], vanishes: bool) -> None:
    config, true = with_reduction(fields), worlds()[2].gradient().sum(0)
    one, two = (1 - math.cos(math.radians(angle(expected(config, 2, groups), true))) for groups in (1, 2))
    assert one > 1e-4
    assert two < 0.5 * one if vanishes else two > 0.9 * one


@pytest.mark.parametrize(("fields", "degrees"), [(fields, degrees) for fields, degrees, _ in BIASED], ids=str)
def test_the_documentation_says_by_how_much(fields: dict[str, Any], degrees: str) -> None:
    config = with_reduction(fields)
    found = [angle(expected(config, turns), worlds()[turns].gradient().sum(0)) for turns in TURNS]
    assert_documented(found, degrees)
