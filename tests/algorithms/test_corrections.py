"""Off-policy corrections against slow references, over units that no layout can change."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms.slow import mean, over_unit
from tests.algorithms.test_losses import Row, rows, tensors
from tests.models import full
from treadle.algorithms.config import CorrectionConfig
from treadle.algorithms.corrections import (
    corrected,
    geometric_mask,
    outlier_mask,
    product_mask,
    sequence_tis,
    token_mask,
    token_tis,
)

BOUNDS = st.sampled_from([(0.5, 2.0), (0.1, 5.0), (0.0, 1.5), (0.99, 1.01)])


def uniform(mask: Tensor) -> Tensor:
    return mask / mask.sum().clamp(min=1).double()


def slow_correction(drawn: list[Row], config: CorrectionConfig) -> tuple[list[float], list[bool]]:
    """Factor and keep of each token."""
    rho = [math.exp(r.old - r.rollout) for r in drawn]
    mask, unit = [r.mask for r in drawn], [getattr(r, config.scope) for r in drawn]
    product = over_unit(rho, mask, unit, math.prod)
    geometric = over_unit(rho, mask, unit, lambda v: math.exp(mean([math.log(x) for x in v])) if v else 1.0)
    factor, keep = [1.0] * len(drawn), [True] * len(drawn)
    for i in range(len(drawn)):
        if config.token_tis is not None:
            factor[i] = min(rho[i], config.token_tis)
        if config.sequence_tis is not None:
            factor[i] = min(product[i], config.sequence_tis)
        for bounds, values in (
            (config.token_mask, [rho[i]]),
            (config.geometric_mask, [geometric[i]]),
            (config.product_mask, [product[i]]),
            (config.outlier_mask, [x for x, m, u in zip(rho, mask, unit, strict=True) if m and u == unit[i]]),
        ):
            if bounds is not None:
                keep[i] = keep[i] and all(bounds[0] <= value <= bounds[1] for value in values)
    return factor, keep


@st.composite
def sections(draw: st.DrawFn) -> CorrectionConfig:
    tis = draw(st.sampled_from([{}, {"token_tis": 2.0}, {"sequence_tis": 3.0}]))
    names = ("token_mask", "geometric_mask", "product_mask", "outlier_mask")
    masks = {name: draw(BOUNDS) for name in names if draw(st.booleans())}
    scope: Any = draw(st.sampled_from(["trajectory", "step"]))
    return CorrectionConfig(scope=scope, renormalize=draw(st.booleans()), **tis, **masks)  # type: ignore[arg-type]


@given(rows(), sections())
def test_corrections_are_their_formulas(drawn: list[Row], config: CorrectionConfig) -> None:
    _, tokens = tensors(drawn)
    found = corrected(tokens, uniform(tokens.mask), config, uniform)
    factor, keep = slow_correction(drawn, config)
    np.testing.assert_allclose(full(found.factor), factor, rtol=1e-9)
    assert found.keep.tolist() == keep
    trained = sum(r.mask for r in drawn)
    kept = sum(r.mask and k for r, k in zip(drawn, keep, strict=True))
    count = kept if config.renormalize else trained
    wanted = [1 / count if r.mask and k else 0.0 for r, k in zip(drawn, keep, strict=True)]
    np.testing.assert_allclose(full(found.weight), wanted, rtol=1e-12)


def test_corrections_by_hand() -> None:
    """Two units with rho 2, 3 and 1/4, 1; an untrained token of rho 1000 is in neither product, mean nor outliers."""
    log_rho = torch.tensor([2.0, 3.0, 1000.0, 0.25, 1.0], dtype=torch.float64).log()
    mask, unit = torch.tensor([True, True, False, True, True]), torch.tensor([0, 0, 0, 1, 1])
    assert token_tis(log_rho, 2.5).tolist() == pytest.approx([2, 2.5, 2.5, 0.25, 1])
    assert sequence_tis(log_rho, mask, unit, 5.0).tolist() == pytest.approx([5, 5, 5, 0.25, 0.25])
    assert token_mask(log_rho, 0.5, 2.5).tolist() == [True, False, False, False, True]
    assert geometric_mask(log_rho, mask, unit, 0.4, 2.4).tolist() == [False] * 3 + [True] * 2  # sqrt 6, 1/2
    assert product_mask(log_rho, mask, unit, 0.5, 7.0).tolist() == [True] * 3 + [False] * 2  # 6, 1/4
    assert outlier_mask(log_rho, mask, unit, 0.3, 4.0).tolist() == [True] * 3 + [False] * 2


def test_the_geometric_mean_does_not_depend_on_length_and_the_product_does() -> None:
    for length in (1, 10, 1000):
        log_rho = torch.full((length,), math.log(1.005), dtype=torch.float64)
        mask, unit = torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.int64)
        assert geometric_mask(log_rho, mask, unit, 0.99, 1.01).all()
        assert product_mask(log_rho, mask, unit, 0.5, 2.0).all() == (1.005**length <= 2.0)


@given(rows())
def test_engines_that_agree_with_the_learner_are_not_corrected(drawn: list[Row]) -> None:
    drawn = [Row(r.new, r.old, r.old, r.a, r.mask, r.step, r.trajectory) for r in drawn]
    _, tokens = tensors(drawn)
    bounds = (0.99, 1.01)
    config = CorrectionConfig(
        token_tis=1.0, token_mask=bounds, geometric_mask=bounds, product_mask=bounds, outlier_mask=bounds
    )
    found = corrected(tokens, uniform(tokens.mask), config, uniform)
    assert found.keep.all() and (found.factor == 1).all()
    torch.testing.assert_close(found.weight, uniform(tokens.mask))


def test_an_infinite_ratio_is_left_out_and_truncated() -> None:
    log_rho, mask = torch.tensor([2000.0, 0.0]), torch.tensor([True, True])
    unit = torch.tensor([0, 1])
    assert token_tis(log_rho, 2.0).tolist() == [2.0, 1.0]
    assert sequence_tis(log_rho, mask, unit, 2.0).tolist() == [2.0, 1.0]
    for found in (token_mask(log_rho, 0.5, 2.0), product_mask(log_rho, mask, unit, 0.5, 2.0)):
        assert found.tolist() == [False, True]
