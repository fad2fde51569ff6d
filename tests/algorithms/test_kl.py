"""KL estimators and the controller of their coefficient."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import full
from treadle.algorithms.kl import ESTIMATORS, KlController

LOGP = st.floats(-8, 0)
FORMULAS = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
}


@pytest.mark.parametrize("name", FORMULAS)
@given(st.lists(st.tuples(LOGP, LOGP), min_size=1))
def test_an_estimator_is_its_formula(name: str, rows: list[tuple[float, float]]) -> None:
    logp, reference = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    found = full(ESTIMATORS[name](logp, reference))
    np.testing.assert_allclose(found, [FORMULAS[name](a - b) for a, b in rows], rtol=1e-12, atol=1e-12)


def test_their_expectations_and_the_gradients_of_their_losses() -> None:
    """Over a whole vocabulary: k1 and k3 are unbiased; as losses k2 has the gradient of KL, k1 none at all."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=random, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    reference = torch.randn(7, generator=random, dtype=torch.float64).log_softmax(0)
    p = logp.exp().detach()
    kl = (logp.exp() * (logp - reference)).sum()
    for name in ("k1", "k3"):
        assert (p * ESTIMATORS[name](logp, reference)).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    gradients = {
        name: torch.autograd.grad((p * estimator(logp, reference)).sum(), logits, retain_graph=True)[0]
        for name, estimator in ESTIMATORS.items()
    }
    (wanted,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(gradients["k2"], wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients["k1"], torch.zeros(7, dtype=torch.float64), rtol=0.0, atol=1e-12)
    assert (gradients["k3"] - wanted).norm() > 0.1 * wanted.norm()


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.05, 1.0), (0.055, 1.001), (1.0, 1.002), (0.0, 0.998), (-3.0, 0.998), (0.045, 0.999)]
)
def test_an_adaptive_coefficient_goes_by_the_clipped_relative_error(kl: float, factor: float) -> None:
    assert KlController(0.1, 0.05, 10000.0).after(kl, 100).coef == pytest.approx(0.1 * factor)
