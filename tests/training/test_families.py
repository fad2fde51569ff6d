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
from treadle.models.support import slides, why_not_packable
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
    for name, budget in (("tree within batch", 8192), ("tree within batch", 9), ("tree within group", 60)):
        found, _ = accumulated(
            make_learner(model, ALGORITHM, max_tokens_per_microbatch=budget, **LAYOUTS[name]), groups
        )
        assert distance(found, wanted) <= INEXACT.get(family, 1e-12) * norm(wanted), (name, budget)


@pytest.mark.quick(8)
@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("layout", ["step", "chain", "tree within batch"])
def test_logprobs_are_those_of_a_plain_forward_pass_of_each_step(family: str, layout: str) -> None:
    model = exact(family)
    batch = flatten(forked_groups(1))
    found = make_learner(model, max_tokens_per_microbatch=25, **LAYOUTS[layout]).logprobs(batch)
    assert found.dtype == np.float64
    with torch.no_grad():
        wanted = np.concatenate([full(step_logprobs(model, step)[0]) for step in batch.steps])
    np.testing.assert_allclose(found, wanted, rtol=INEXACT.get(family, 1e-12), atol=INEXACT.get(family, 1e-12))


@pytest.mark.parametrize("family", EVERY)
def test_ordinary_families_share_prefixes(family: str) -> None:
    assert why_not_packable(tiny(family).config) is None


@pytest.mark.parametrize("family", EVERY)
def test_a_layer_that_slides_is_known_from_the_configuration(family: str) -> None:
    config = tiny(family).config
    found = [slides(config, layer) for layer in range(2)]
    assert any(found) == ("sliding" in family)
    assert all(found) == (family == "mistral-sliding")


@pytest.mark.parametrize("family", [*SLIDING, "olmo3-half-sliding"])
def test_the_sliding_window_matters_in_these_tests(family: str) -> None:
    """A guard for the tests above: on the same weights without windows the numbers are others."""
    model = exact(family)
    wide = exact(family, sliding_window=200)
    assert distance(weights_of(model), weights_of(wide)) == 0
    near, far = (full(make_learner(m).logprobs(flatten(forked_groups()))) for m in (model, wide))
    assert np.abs(near - far).max() > 1e-3


@pytest.mark.parametrize(
    ("family", "field"),
    [("granite", "logits_scaling"), ("cohere", "logit_scale"), ("gemma3-capped", "final_logit_softcapping")],
)
def test_the_heads_scaling_matters_in_these_tests(family: str, field: str) -> None:
    groups = forked_groups()
    fields: dict[str, Any] = {field: 0.9}
    own, other = (full(make_learner(m).logprobs(flatten(groups))) for m in (exact(family), exact(family, **fields)))
    assert np.abs(own - other).max() > 1e-3
