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
from treadle.training.forward import Forward
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


def test_gradient_checkpointing_computes_layers_again() -> None:
    """A guard: were it not on, the test above would compare a thing with itself."""
    calls = []
    for checkpointing in (False, True):
        learner = make_learner(tiny(), gradient_checkpointing=checkpointing)
        layer: Any = learner.model.model.layers[0].mlp
        count = [0]
        layer.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        accumulated(learner, forked_groups(groups=1))
        calls.append(count[0])
    assert calls == [1, 2]


@pytest.mark.parametrize("budget", [9, 8192])
def test_scoring_leaves_no_gradient_and_no_graph(budget: int) -> None:
    learner = make_learner(tiny(), max_tokens_per_microbatch=budget)
    batch = flatten(forked_groups())
    temperature = torch.ones(len(batch))
    for tree in learner.trees(batch):
        scores = learner.forward.scores(tree, temperature)
        assert not scores.logp.requires_grad and not scores.entropy.requires_grad
    assert norm(gradients(learner.model)) == 0


def test_a_loss_that_ignores_entropy_needs_no_entropy_gradient() -> None:
    """And one that asks for it without a bonus gets the same."""
    batch = flatten(forked_groups())
    for budget in (9, 8192):
        learner = make_learner(exact(), max_tokens_per_microbatch=budget)
        objective = learner.objective(batch, advantages(batch, learner.algorithm))
        found = []
        for asked in (False, True):
            learner.model.zero_grad()
            for tree in learner.trees(batch):
                learner.forward.backward(
                    tree, torch.ones(len(batch), dtype=torch.float64), objective.gradient, entropy_grad=asked
                )
            found.append(gradients(learner.model))
        assert distance(*found) == 0 < norm(found[0])


def test_a_frozen_model_is_scored_and_gets_no_gradient() -> None:
    model = tiny()
    model.requires_grad_(False)
    forward = Forward(model, 9)
    learner = make_learner(tiny(), max_tokens_per_microbatch=9)
    batch = flatten(forked_groups())
    objective = learner.objective(batch, advantages(batch, learner.algorithm))
    for tree in learner.trees(batch):
        forward.backward(tree, torch.ones(len(batch)), objective.gradient)
    assert norm(gradients(model)) == 0


@pytest.mark.quick(3)
@pytest.mark.parametrize("budget", [15, 8192])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_bfloat16_streams_and_stays_near_float32(layout: dict[str, Any], budget: int) -> None:
    groups = forked_groups(groups=1)
    wanted, _ = separate_gradient(tiny(), groups, AlgorithmConfig(entropy_coef=0.05))
    learner = make_learner(
        tiny(),
        AlgorithmConfig(entropy_coef=0.05),
        max_tokens_per_microbatch=budget,
        precision="bfloat16",
        **layout,
    )
    with computed(learner.model) as sizes:
        found, metrics = accumulated(learner, groups)
    assert max(sizes) <= budget
    assert {g.dtype for g in found.values()} == {torch.float32} and metrics["loss"] != 0
    assert 1e-4 * norm(wanted) < distance(found, wanted) < 0.05 * norm(wanted)
