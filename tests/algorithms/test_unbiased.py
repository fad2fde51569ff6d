"""Which estimators are unbiased where the policy decides when to stop: exactly, by enumeration of all updates.

The task: at each of two turns the policy guesses, one way or the other, or looks on, the last time too. Each reply has
a reward, and they differ in length. The policy is a softmax of its own for each turn: five attempts are all that can
happen, and the expected gradient of an update is a sum over their combinations. It is compared with the gradient of the
expected reward.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models import make_group, make_step
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import Signals, advantages
from treadle.algorithms.reductions import token_weights
from treadle.core.types import BreakCause, DropReason, Group, Step
from treadle.packing.flat import FlatBatch, flatten

Vector = NDArray[np.float64]
Attempt = tuple[int, ...]

TURNS, LOOK = 2, 2
POLICY = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])  # of each turn: guess one, guess two, look
REWARDS = np.array([[1.0, 0.0, 0.25], [2.0, 0.5, 1.5]])
LENGTHS = (1, 3, 2)  # tokens of each reply; all is decided by the first
ATTEMPTS = [*((LOOK,) * t + (guess,) for t in range(TURNS) for guess in (0, 1)), (LOOK,) * TURNS]


def probability(attempt: Attempt) -> float:
    return math.prod(float(POLICY[turn, reply]) for turn, reply in enumerate(attempt))


def scores(attempt: Attempt) -> list[Vector]:
    """Of each turn: the gradient of its reply's log-probability by the logits [TURNS * 3]."""
    found = []
    for turn, reply in enumerate(attempt):
        score = np.zeros((TURNS, 3))
        score[turn] = -POLICY[turn]
        score[turn, reply] += 1
        found.append(score.ravel())
    return found


def steps(attempt: Attempt) -> list[Step]:
    prompt, made = [1], list[Step]()
    for turn, reply in enumerate(attempt):
        completion = [3 + reply] + [6] * (LENGTHS[reply] - 1)
        step = make_step(prompt, completion)
        cause = BreakCause.SUMMARY if turn else None  # each turn is a segment
        made.append(replace(step, reward=float(REWARDS[turn, reply]), state_key=str(turn), break_cause=cause))
        prompt = [*prompt, *completion, 7]
    return made


def reward(attempt: Attempt) -> float:
    return float(sum(REWARDS[turn, reply] for turn, reply in enumerate(attempt)))


BY_TURN = np.array(
    [
        np.sum([probability(a) * reward(a) * scores(a)[turn] for a in ATTEMPTS if len(a) > turn], axis=0)
        for turn in range(TURNS)
    ]
)
TRUE: Vector = BY_TURN.sum(0)
"""The gradient of the expected reward, and the part of it that goes through each turn's replies."""


def group_of(attempts: Sequence[Attempt], index: int, stale: int | None) -> Group:
    """stale: a turn of the first attempt whose step is too old to be trained, whatever was said there."""
    group = make_group([(steps(attempt), reward(attempt)) for attempt in attempts], index)
    first, *others = group.trajectories
    marked = tuple(
        replace(step, dropped=DropReason.STALE) if turn == stale else step for turn, step in enumerate(first.steps)
    )
    return replace(group, trajectories=(replace(first, steps=marked), *others))


class Update(NamedTuple):
    """One of all possible ones. values [N]: what a value head may say of each turn. scores [S, TURNS * 3]."""

    probability: float
    batch: FlatBatch
    values: Vector
    scores: Vector


@cache
def updates(size: int, groups: int, stale: int | None) -> list[Update]:
    found = []
    for chosen in itertools.product(ATTEMPTS, repeat=size * groups):
        batch = flatten([group_of(chosen[g * size : (g + 1) * size], g, stale) for g in range(groups)])
        turns = [int(step.state_key) for step in batch.steps]
        of_step = [scores(chosen[j])[t] for j, t in zip(batch.trajectory_of_step, turns, strict=True)]
        values = np.array([0.5 - 0.3 * turn for turn in turns])[batch.step_id]
        made = np.array(of_step).reshape(len(turns), TURNS * 3)
        found.append(Update(math.prod(map(probability, chosen)), batch, values, made))
    return found


def expected(config: AlgorithmConfig, size: int, groups: int = 1, stale: int | None = None) -> Vector:
    """The expectation of an update's gradient, sum_i weight_i advantage_i score_i.

    With a step that is stale every token weighs 1 / size: the reduction counts what is trained.
    """
    total = np.zeros(TURNS * 3)
    for update in updates(size, groups, stale):
        weight = token_weights(update.batch, config) if stale is None else np.full(len(update.batch), 1 / size)
        slopes = weight * advantages(update.batch, config, Signals(values=update.values))
        total += update.probability * slopes[update.batch.step_start[:-1]] @ update.scores
    return total


def angle(one: Vector, other: Vector) -> float:
    """1 - cos of the angle between them."""
    return float(1 - one @ other / np.linalg.norm(one) / np.linalg.norm(other))


SUM: dict[str, Any] = {"reduction": "seq_mean_token_sum_norm", "length_norm": 1}
"""The reduction under which a trajectory's tokens are summed and divided by a constant."""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"advantage": "rloo"}, lambda n: 1),
        ({"advantage": "step_return"}, lambda n: 1),
        ({"advantage": "step_return", "advantage_options": {"scope": "segment"}}, lambda n: 1),
        ({"advantage": "gae"}, lambda n: 1),
        ({"advantage": "grpo", "advantage_options": {"norm_by_std": False}}, lambda n: 1 - 1 / n),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_these_are_unbiased(fields: dict[str, Any], scale: Callable[[int], float], size: int) -> None:
    found = expected(AlgorithmConfig(**SUM, **fields), size)
    np.testing.assert_allclose(found, scale(size) * TRUE, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("stale", range(TURNS))
@pytest.mark.parametrize("advantage", ["rloo", "step_return"])
def test_a_step_that_is_too_old_takes_its_own_part_of_the_gradient_and_no_other(advantage: str, stale: int) -> None:
    """Of one attempt in two."""
    found = expected(AlgorithmConfig(**SUM, advantage=advantage), 2, stale=stale)
    np.testing.assert_allclose(found, TRUE - BY_TURN[stale] / 2, rtol=1e-12, atol=1e-15)


BIASED: list[tuple[dict[str, Any], bool]] = [  # and whether the bias becomes smaller with more groups in an update
    ({"advantage": "grpo"}, False),
    ({"advantage": "maxrl"}, False),
    ({"advantage": "gigpo"}, False),
    (
        {"advantage": "gigpo", "advantage_options": {"norm_by_std": False}},
        False,
    ),  # with all that met a turn as its state: by turn
    ({"advantage": "gae", "advantage_options": {"gae_lambda": 0.5}}, False),
    ({"advantage": "reinforce++"}, True),
    ({"advantage": "reinforce++_baseline"}, True),
    ({"advantage": "rloo", "reduction": "token_mean"}, True),
    ({"advantage": "rloo", "reduction": "trajectory_mean"}, False),
    ({"advantage": "rloo", "reduction": "step_mean"}, False),
    ({"advantage": "rloo", "reduction": "task_mean"}, False),
    ({"advantage": "rloo", **SUM, "scope": "step"}, True),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("fields", "vanishes"), BIASED, ids=str)
def test_these_are_biased(fields: dict[str, Any], vanishes: bool) -> None:
    config = AlgorithmConfig(**{**({} if "reduction" in fields else SUM), **fields})
    one, two = (angle(expected(config, 2, groups), TRUE) for groups in (1, 2))
    assert one > 1e-4
    assert two < 0.5 * one if vanishes else two > 0.99 * one
