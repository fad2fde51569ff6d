"""Every family of models trains packed as it trains alone."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.models import (
    FAMILIES,
    INEXACT,
    MORE_FAMILIES,
    SLIDING,
    distance,
    exact,
    full,
    norm,
    step_logprobs,
    tiny,
    weights_of,
)
from tests.training.reference import LAYOUTS, accumulated, forked_groups, make_learner, separate_gradient
from treadle.algorithms.config import AlgorithmConfig
from treadle.models.support import slides
from treadle.packing.flat import flatten

EVERY = [*FAMILIES, *MORE_FAMILIES]
ALGORITHM = AlgorithmConfig(reduction="seq_mean_token_sum_norm", length_norm=10.0, entropy_coef=0.01)


@pytest.mark.quick(4)
@pytest.mark.parametrize("family", EVERY)
def test_a_tree_with_forks_trains_as_each_step_alone(family: str) -> None:
    """Whole and in chunks, sequences much longer than the sliding windows."""
    groups = forked_groups(3)
    model = exact(family)
    wanted, _ = separate_gradient(model, groups, ALGORITHM)
    assert norm(wanted) > 1e-2
    with torch.no_grad():
        logprobs = np.concatenate([full(step_logprobs(model, step)[0]) for step in flatten(groups).steps])
    limit = INEXACT.get(family, 1e-12)
    for name, budget in (("tree within batch", 8192), ("tree within batch", 9), ("tree within group", 60)):
        learner = make_learner(model, ALGORITHM, max_tokens_per_microbatch=budget, **LAYOUTS[name])
        np.testing.assert_allclose(learner.logprobs(flatten(groups)), logprobs, rtol=limit, atol=limit)
        found, _ = accumulated(learner, groups)
        assert distance(found, wanted) <= limit * norm(wanted), (name, budget)


@pytest.mark.parametrize("family", EVERY)
def test_a_layer_that_slides_is_known_from_the_configuration(family: str) -> None:
    config = tiny(family).config
    found = [slides(config, layer) for layer in range(2)]
    assert any(found) == ("sliding" in family)
    assert all(found) == (family == "mistral-sliding")


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        *((family, "sliding_window", 200) for family in [*SLIDING, "olmo3-half-sliding"]),
        *(("granite", "logits_scaling", 0.9), ("cohere", "logit_scale", 0.9)),
        ("gemma3-capped", "final_logit_softcapping", 0.9),
    ],
)
def test_windows_and_scaling_of_the_head_matter_in_these_tests(family: str, field: str, value: float) -> None:
    """A guard for the test above: with the same weights and another window or scale the numbers differ."""
    fields: dict[str, Any] = {field: value}
    model, other = exact(family), exact(family, **fields)
    assert distance(weights_of(model), weights_of(other)) == 0
    one, two = (full(make_learner(m).logprobs(flatten(forked_groups()))) for m in (model, other))
    assert np.abs(one - two).max() > 1e-3
