"""The value head: trained along with the policy, kept in checkpoints, published to nobody."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import (
    distance,
    exact,
    full,
    gradients,
    make_group,
    make_step,
    norm,
    random_groups,
    same_bits,
    step_logprobs,
    tiny,
    weights_of,
)
from tests.training.reference import (
    LAYOUTS,
    drawn_head,
    forked_groups,
    learner_gradients,
    make_learner,
    step_values,
)
from treadle.algorithms.config import AlgorithmConfig, ValueConfig
from treadle.core.types import Group
from treadle.models.weights import published
from treadle.packing.flat import flatten
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.learner import Learner

FAST = OptimizerConfig(learning_rate=1e-2)
TOKENIZER = Path(__file__).parents[2] / "src" / "treadle" / "recipes" / "tokenizer"
GAE = AlgorithmConfig(advantage="gae", advantage_options={"gamma": 0.9, "gae_lambda": 0.8})


def learner_of(seed: int = 0, algorithm: AlgorithmConfig = GAE, **training: Any) -> Learner:
    return Learner(tiny(seed=seed), TrainingConfig(optimizer=FAST, **training), algorithm, 10)


@pytest.mark.quick(5)
@pytest.mark.parametrize("budget", [1, 7, 8192])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_the_value_of_a_token_is_that_of_the_state_in_which_it_was_sampled(layout: dict[str, Any], budget: int) -> None:
    model, batch = exact(), flatten(forked_groups(groups=1))
    found = make_learner(model, GAE, max_tokens_per_microbatch=budget, **layout).scores(batch).value
    with torch.no_grad():
        wanted = torch.cat([step_values(model, drawn_head(model), step) for step in batch.steps])
    assert found is not None and not found.requires_grad
    np.testing.assert_allclose(full(found), full(wanted), rtol=1e-12, atol=1e-12)
    assert float(wanted.std()) > 0.1


def test_the_gradient_of_one_masked_sequence_by_hand() -> None:
    """One reward of 1, no discount: every return is 1, every advantage 1 - V."""
    step = make_step([1, 2], [3, 4, 5, 6], mask=[True, False, True, True])
    learner = make_learner(exact(), AlgorithmConfig(advantage="gae", value=ValueConfig(coef=0.7)))
    batch = flatten([make_group([([step], 1.0)])])
    values = full(learner.scores(batch).value)
    learner.accumulate(batch, 1 - values, values=values)
    model, trained = exact(), torch.tensor([True, False, True, True])
    head = drawn_head(model)
    value, logp = step_values(model, head, step), step_logprobs(model, step)[0]
    each = -(1 - value.detach()) * logp + 0.7 * (value - 1) ** 2 / 2
    (each[trained].sum() / 3).backward()
    wanted = {**gradients(model), **{f"value_head.{name}": x for name, x in gradients(head).items()}}
    assert distance(learner_gradients(learner), wanted) <= 1e-12 * norm(wanted)


def test_values_are_0_at_first_and_nothing_is_drawn_for_them() -> None:
    model = tiny()
    state = torch.get_rng_state()
    learner = Learner(model, TrainingConfig(), GAE, 1)
    assert torch.equal(state, torch.get_rng_state())
    scores = learner.scores(flatten(random_groups(0)))
    assert scores.value is not None and not scores.value.any()


def foretold() -> list[Group]:
    """Two tasks: one always pays, the other never does, and their openings tell which."""
    return [
        make_group([([make_step([1 + index], [3 + i, 4 + i])], float(index)) for i in range(3)], index)
        for index in range(2)
    ]


def test_it_learns_returns_that_can_be_foretold_and_then_there_is_no_advantage_left() -> None:
    learner = Learner(tiny(), TrainingConfig(optimizer=FAST), AlgorithmConfig(advantage="gae"), 30)
    first, *_, last = [learner.train_batch(foretold())[0] for _ in range(30)]
    assert first.metrics["value_loss"] == pytest.approx(0.25)  # of V = 0: half of the tokens return 1
    assert first.metrics["value_explained_variance"] == 0
    assert last.metrics["value_loss"] < 0.01 and last.metrics["value_explained_variance"] > 0.95
    assert first.advantage["g000001.0"] == 1 and abs(last.advantage["g000001.0"]) < 0.2


def test_old_values_are_of_the_start_of_the_batch() -> None:
    """For all of its updates: the second one learns the returns that were fixed before the first."""
    groups = random_groups(0, groups=4)
    algorithm = AlgorithmConfig(advantage="gae", value=ValueConfig(clip=1e-4))
    learner, by_hand = (learner_of(algorithm=algorithm, updates_per_batch=2) for _ in range(2))
    first, second = flatten(groups[:2]), flatten(groups[2:])
    starts = by_hand.scores(first), by_hand.scores(second)
    results = learner.train_batch(groups)
    assert [by_hand.update(batch, start) for batch, start in zip((first, second), starts, strict=True)] == results
    assert same_bits(weights_of(learner.trained), weights_of(by_hand.trained))
    assert results[0].metrics["value_clip_fraction"] == 0 < results[1].metrics["value_clip_fraction"]


def test_there_is_none_unless_an_advantage_needs_it_and_it_is_never_published() -> None:
    plain = learner_of(algorithm=AlgorithmConfig())
    assert plain.value_head is None and plain.trained is plain.model
    assert dict(published(learner_of().model)).keys() == dict(published(plain.model)).keys()
