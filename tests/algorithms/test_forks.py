"""Forks in a group: which estimators of their gradient are unbiased, by enumeration of all trees; and by sampling."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.algorithms.enumerable import Chances, Tree, Vector, World, angle, by_group, worlds
from tests.algorithms.test_unbiased import SAMPLED, SUM, TURNS, assert_documented, assert_within_errors
from tests.models import make_step, make_trajectory
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import advantages
from treadle.algorithms.forks import fork_probabilities
from treadle.core.draws import Stream
from treadle.core.types import DropReason, Group, Start, Step
from treadle.loop.forks import fork_of
from treadle.packing.flat import FlatBatch, calls, flatten
from treadle.packing.layout import Packing, arrange
from treadle.rollout.config import ForksConfig
from treadle.rollout.session import Address


def at_random(steps: Sequence[Step]) -> Vector:
    return fork_probabilities(steps, by_entropy=False)


def by_entropy(steps: Sequence[Step]) -> Vector:
    return fork_probabilities(steps, by_entropy=True)


def at_the_first(steps: Sequence[Step]) -> Vector:
    """At step 1, set beforehand."""
    return np.array([float(n == 1) for n in range(len(steps))])


PLACES: dict[str, Chances] = {"random": at_random, "entropy": by_entropy, "step 1": at_the_first}
SCOPES = ("fork", "tree")


def set_beforehand(tree: Tree, place: str) -> Tree:
    return tree._replace(chance=None) if place == "step 1" else tree


def factor(world: World, width: int) -> float:
    """Of the gradient: trees whose first attempt ends at once have others that begin anew."""
    at_once = sum(world.probability(attempt) for attempt in world.attempts if len(attempt) == 1)
    return 1 + at_once * (1 - 1 / width)


def config_of(scope: str) -> AlgorithmConfig:
    return AlgorithmConfig(**SUM, advantage="forks", advantage_options={"baseline": scope})


@cache
def everything(turns: int, width: int, place: str) -> tuple[FlatBatch, Vector]:
    """All groups of two trees, and the probability of each."""
    world = worlds()[turns]
    trees = [(chance, set_beforehand(tree, place)) for chance, tree in world.trees(width, PLACES[place])]
    assert math.fsum(chance for chance, _ in trees) == pytest.approx(1, rel=1e-12)
    pairs = list(itertools.product(trees, repeat=2))
    groups = [world.tree_group([one, other], n) for n, ((_, one), (_, other)) in enumerate(pairs)]
    return flatten(groups), np.array([one * other for (one, _), (other, _) in pairs])


def expected(config: AlgorithmConfig, turns: int, width: int, place: str) -> Vector:
    batch, chances = everything(turns, width, place)
    return chances @ by_group(worlds()[turns], batch, advantages(batch, config), 2 * width)


CASES = [(2, 2), (3, 2), pytest.param(2, 3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("turns", "width"), CASES)
def test_forks_leave_the_gradient_as_it_is(turns: int, width: int, scope: str, place: str) -> None:
    """Up to a constant."""
    world = worlds()[turns]
    found = expected(config_of(scope), turns, width, place)
    np.testing.assert_allclose(found, factor(world, width) * world.gradient().sum(0), rtol=1e-10, atol=1e-14)


def test_a_group_without_forks_has_the_advantages_of_rloo() -> None:
    world = worlds()[3]
    groups = [world.group(attempts, n) for n, (_, attempts) in enumerate(world.groups(2))]
    plain = advantages(flatten(groups), AlgorithmConfig(advantage="rloo"))
    for scope in SCOPES:
        np.testing.assert_allclose(advantages(flatten(groups), config_of(scope)), plain, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("advantage", "degrees"),
    [
        ("rloo", "18.8° / 19.2°"),
        ("grpo", "24.5° / 15.5°"),
        ("step_return", "18.8° / 19.1°"),
        ("gigpo", "23.1° / 13.1°"),
    ],
)
def test_others_take_branches_for_attempts_of_their_own(advantage: str, degrees: str) -> None:
    config = AlgorithmConfig(**SUM, advantage=advantage)
    found = [angle(expected(config, turns, 2, "random"), worlds()[turns].gradient().sum(0)) for turns in TURNS]
    assert_documented(found, degrees)


CONFIGS: dict[str, ForksConfig] = {
    "random": ForksConfig(width=3, at="random"),
    "entropy": ForksConfig(width=3, at="entropy"),
    "step 1": ForksConfig(width=3, at=1),
}


def sampled_group(world: World, config: ForksConfig, place: int) -> Group:
    """Two trees, drawn as a run draws them."""
    trees = []
    for attempt in (0, config.width):
        first = world.sample(place, attempt)
        [trajectory] = world.group([first]).trajectories
        prefix = fork_of(config, trajectory, Address(0, Stream.TRAIN, 0, place, attempt))
        fork, chance = (0, None) if prefix is None else (prefix.start.steps, prefix.start.probability)
        later = range(attempt + 1, attempt + config.width)
        trees.append(Tree(first, fork, chance, tuple(world.sample(place, n, first[:fork]) for n in later)))
    return world.tree_group(trees, place)


@pytest.mark.slow
@pytest.mark.parametrize("place", CONFIGS)
@pytest.mark.parametrize("turns", TURNS)
def test_sampled_updates_agree(turns: int, place: str) -> None:
    world, config = worlds()[turns], CONFIGS[place]
    batch = flatten([sampled_group(world, config, number) for number in range(SAMPLED)])
    for scope in SCOPES:
        each = by_group(world, batch, advantages(batch, config_of(scope)), 2 * config.width)
        assert_within_errors(each, factor(world, config.width) * world.gradient().sum(0))


# By hand


def step(*logprobs: float, dropped: DropReason | None = None) -> Step:
    return replace(make_step([1], [2] * len(logprobs), logprobs=logprobs), dropped=dropped)


def test_a_step_is_forked_more_often_the_less_sure_the_policy_was() -> None:
    steps = [step(-9.0), step(-1.0, -1.0), step(-3.0), step(0.0, 0.0)]
    assert fork_probabilities(steps, by_entropy=False).tolist() == [0, 1 / 3, 1 / 3, 1 / 3]
    np.testing.assert_allclose(fork_probabilities(steps, by_entropy=True), [0, 1 / 6 + 1 / 8, 1 / 6 + 3 / 8, 1 / 6])
    sure = [step(0.0), step(0.0), step()]
    assert fork_probabilities(sure, by_entropy=True).tolist() == [0, 0.5, 0.5]
    for few in ([], [step(-1.0)]):
        assert fork_probabilities(few, by_entropy=True).tolist() == [0.0] * len(few)


def test_where_an_attempt_is_forked_is_keyed_by_its_address() -> None:
    trajectory = make_trajectory([step(-1.0) for _ in range(6)], 1.0, 7, 2)
    found = Counter[int]()
    for position in range(2000):
        address = Address(3, Stream.TRAIN, 1, position, 2)
        prefix = fork_of(ForksConfig(at="random"), trajectory, address)
        assert prefix is not None and prefix.start == Start("g000007.2", len(prefix.steps), 0.2)
        assert fork_of(ForksConfig(at="random"), trajectory, address).start == prefix.start  # type: ignore[union-attr]
        found[prefix.start.steps] += 1
    assert sorted(found) == [1, 2, 3, 4, 5] and min(found.values()) > 330


def test_what_has_no_step_to_fork_has_no_fork() -> None:
    address = Address(0, Stream.TRAIN, 0, 0, 0)
    short, failed = make_trajectory([step(-1.0)], 1.0), make_trajectory([step(-1.0)] * 3, None)
    cut = make_trajectory([step(-1.0), step(dropped=DropReason.CANCELLED), step(-1.0)], 1.0)
    for at in ("random", "entropy", 1):
        config = ForksConfig(at=at)
        assert fork_of(config, short, address) is None
        assert fork_of(config, failed, address) is None
    assert fork_of(ForksConfig(at=2), cut, address) is None  # no replay repeats a cancelled call
    long = make_trajectory([step(-1.0)] * 3, 1.0)
    assert fork_of(ForksConfig(at=3), long, address) is None
    assert fork_of(ForksConfig(at=2), long, address).start == Start("g000000.0", 2)  # type: ignore[union-attr]


def test_steps_before_a_fork_stand_for_all_attempts_and_are_trained_once() -> None:
    """Forks at step 2, set beforehand; a tree of one attempt whose branch began anew; and one without branches."""
    world = worlds()[3]
    trees = [Tree((2, 2, 0), 2, None, ((2, 2, 1), (2, 2, 2))), Tree((0,), 0, None, ((2, 1),)), Tree((1,), 0, None, ())]
    batch = flatten([world.tree_group(trees)])
    assert [t.start for t in batch.trajectories][:3] == [None, Start("g000000.0", 2), Start("g000000.0", 2)]
    assert np.bincount(batch.trajectory_of_step).tolist() == [3, 1, 1, 1, 2, 1]
    rewards = [3.0, 1.0, 1.5, 0.5, 0.25, 0.0]
    assert batch.rewards.tolist() == [2.5, 0.5, 1.0, 0.5, 0.25, 0.0]
    rewards = batch.rewards.tolist()
    outside = [(0.5 + 0.25 + 0.0) / 3, (2.5 + 0.5 + 1.0 + 0.0) / 4, (2.5 + 0.5 + 1.0 + 0.5 + 0.25) / 5]
    mean = sum(rewards[:3]) / 3
    wanted = {
        "tree": [
            *[3 * (mean - outside[0])] * 2,
            *(r - outside[0] for r in rewards[:3]),
            2 * (0.5 - outside[1]),
            *[0.25 - outside[1]] * 2,
            0.0 - outside[2],
        ],
        "fork": [
            *[3 * (mean - outside[0])] * 2,
            rewards[0] - outside[0],
            rewards[1] - (rewards[0] + rewards[2]) / 2,
            rewards[2] - (rewards[0] + rewards[1]) / 2,
            2 * (0.5 - outside[1]),
            *[0.25 - 0.5] * 2,
            0.0 - outside[2],
        ],
    }
    for scope in SCOPES:
        found = advantages(batch, config_of(scope))[batch.step_start[:-1]]
        np.testing.assert_allclose(found, wanted[scope], atol=1e-12)


def test_packing_computes_what_branches_share_once() -> None:
    """Prompts and completions of the deepest path, and of each branch what it alone has."""
    world = worlds()[3]
    tree = Tree((2, 2, 2), 2, None, ((2, 2, 0), (2, 2, 1)))
    batch = flatten([world.tree_group([tree])])
    path, *branches = (list(call.token_ids) for call in calls(batch)[2:])
    assert [branch[:-1] for branch in (branches[0],)] == [path[:-2]]  # of 1 token, and 2
    assert arrange(calls(batch), Packing.TREE).nodes == len(path) + 1 + 3
    assert arrange(calls(batch), Packing.STEP).nodes == sum(len(call.token_ids) for call in calls(batch))
