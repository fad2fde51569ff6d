"""A tree larger than the budget is computed in pieces: the same gradient, and never more than the budget at once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import distance, exact, gradients, make_group, make_step, norm, same_bits, tiny
from tests.training.reference import (
    COUPLED,
    LAYOUTS,
    LOSSES,
    accumulated,
    earlier_policy,
    forked_groups,
    make_learner,
    separate_gradient,
)
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import advantages
from treadle.core.types import Group
from treadle.packing.flat import flatten
from treadle.training.learner import Learner
from treadle.training.objective import Gradient, concat, lookup


@contextmanager
def computed(model: Any) -> Iterator[list[int]]:
    """How many tokens each call of the model's decoder computes, padding included."""
    sizes: list[int] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not args
        sizes.append(kwargs["input_ids"].numel())

    handle = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    yield sizes
    handle.remove()


def long_step() -> list[Group]:
    """One step of 60 tokens: nothing to share, nothing to cut between."""
    prompt, completion = [i % 31 for i in range(40)], [i * 7 % 32 for i in range(20)]
    return [make_group([([make_step(prompt, completion)], 1.0), ([make_step(prompt[:3], [5])], 0.0)])]


def nodes(learner: Learner, groups: Sequence[Group]) -> list[int]:
    return [len(tree) for tree in learner.trees(flatten(groups))]


@pytest.mark.quick(4)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 16, 59])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_longer_than_the_budget_trains_as_it_does_alone(loss: str, budget: int, checkpointing: bool) -> None:
    groups = long_step()
    model = exact()
    algorithm = AlgorithmConfig(policy_loss=loss, entropy_coef=0.05)
    old = earlier_policy(model, groups)
    wanted, _ = separate_gradient(model, groups, algorithm, old)
    learner = make_learner(
        model, algorithm, max_tokens_per_microbatch=budget, gradient_checkpointing=checkpointing, **LAYOUTS["step"]
    )
    assert max(nodes(learner, groups)) >= 60 > budget
    with computed(learner.model) as sizes:
        found, _ = accumulated(learner, groups, old)
    assert max(sizes) == budget
    assert distance(found, wanted) <= 1e-12 * norm(wanted)


@pytest.mark.quick(2)
@pytest.mark.parametrize("budget", [7, 13])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_no_forward_pass_computes_more_nodes_than_the_budget(layout: dict[str, Any], budget: int) -> None:
    """A hard bound, in training and in scoring, with a coupled loss too."""
    groups = forked_groups(groups=1, length=6)
    learner = make_learner(
        exact("gemma3-half-sliding"), AlgorithmConfig(policy_loss=COUPLED), max_tokens_per_microbatch=budget, **layout
    )
    assert max(nodes(learner, groups)) > budget
    with computed(learner.model) as sizes:
        learner.logprobs(flatten(groups))
        accumulated(learner, groups)
    assert max(sizes) == budget


@pytest.mark.quick(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_streamed_tree_that_forks_across_pieces_trains_as_each_step_alone(loss: str) -> None:
    """One tree, cut at every place in turn: pieces begin in trunks, at forks and in leaves."""
    groups = forked_groups(1, groups=1, length=2)
    model = exact()
    algorithm = AlgorithmConfig(policy_loss=loss, entropy_coef=0.05)
    wanted, _ = separate_gradient(model, groups, algorithm)
    batch = flatten(groups)
    whole = make_learner(model, algorithm, **LAYOUTS["tree within batch"])
    (tree,) = whole.trees(batch)
    for budget in (*range(1, 6), len(tree) // 2, len(tree) - 1, len(tree)):
        whole.forward.budget = budget  # the layout stays one tree
        whole.model.zero_grad()
        objective = whole.objective(batch, advantages(batch, algorithm))
        gradient: Gradient = objective.gradient
        temperature = torch.from_numpy(batch.temperature).double()
        if whole.policy_loss.couples:
            gradient = lookup(objective.gradient(concat([whole.forward.scores(tree, temperature)], temperature)))
        with computed(whole.model) as sizes:
            whole.forward.backward(tree, temperature, gradient, entropy_grad=True)
        assert max(sizes) <= budget
        assert distance(gradients(whole.model), wanted) <= 1e-12 * norm(wanted), budget


@pytest.mark.quick(2)
@pytest.mark.parametrize("budget", [9, 8192])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_gradient_checkpointing_changes_nothing(layout: dict[str, Any], budget: int) -> None:
    """Whole and streamed, the same bits."""
    groups = forked_groups(groups=1)
    found = []
    for checkpointing in (False, True):
        learner = make_learner(
            tiny(),
            AlgorithmConfig(entropy_coef=0.05),
            max_tokens_per_microbatch=budget,
            gradient_checkpointing=checkpointing,
            **layout,
        )
        with computed(learner.model) as sizes:
            found.append(accumulated(learner, groups)[0])
        assert max(sizes) <= budget
    assert same_bits(*found)
