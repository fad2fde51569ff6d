"""Off-policy corrections against slow references, over units that no layout can change."""

import math
from typing import Any

import numpy as np
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


def test_an_infinite_ratio_is_left_out_and_truncated() -> None:
    log_rho, mask = torch.tensor([2000.0, 0.0]), torch.tensor([True, True])
    unit = torch.tensor([0, 1])
    assert token_tis(log_rho, 2.0).tolist() == [2.0, 1.0]
    assert sequence_tis(log_rho, mask, unit, 2.0).tolist() == [2.0, 1.0]
    for found in (token_mask(log_rho, 0.5, 2.0), product_mask(log_rho, mask, unit, 0.5, 2.0)):
        assert found.tolist() == [False, True]
