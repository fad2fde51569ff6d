"""Corrections, KL, reductions and value losses, against slow references over units that no layout can change."""

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
from tests.models import full, ragged_groups
from treadle.algorithms.config import AlgorithmConfig, CorrectionConfig
from treadle.algorithms.corrections import corrected, product_mask, sequence_tis, token_mask, token_tis
from treadle.algorithms.kl import ESTIMATORS, KlController
from treadle.algorithms.reductions import token_weights
from treadle.algorithms.validation import check
from treadle.algorithms.values import ValueTargets, explained_variance, value_clipped, value_loss
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.types import Group
from treadle.packing.flat import flatten

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


LOGP = st.floats(-8, 0)
FORMULAS = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(-d) - 1 + d, "abs": abs}


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


@given(ragged_groups(vocabulary=5))
def test_weights_count_trained_tokens_and_units_of_the_whole_update(groups: list[Group]) -> None:
    """Every reduction, from the records: what failed, was greedy or masked is in no denominator."""
    rows = [
        ({"task": group.group_id, "trajectory": t.trajectory_id, "step": (t.trajectory_id, number)}, bool(m))
        for group in groups
        for t in group.trajectories
        if t.reward is not None
        for number, step in enumerate(t.steps)
        for m in step.mask
    ]

    def units(kind: str) -> int:
        return len({row[kind] for row, m in rows if m})

    def tokens(kind: str, unit: Any) -> int:
        return sum(m for row, m in rows if row[kind] == unit)

    batch = flatten(groups)
    for config, each in (
        (AlgorithmConfig(), lambda row: sum(m for _, m in rows)),
        (
            AlgorithmConfig(reduction="trajectory_mean"),
            lambda row: units("trajectory") * tokens("trajectory", row["trajectory"]),
        ),
        (AlgorithmConfig(reduction="step_mean"), lambda row: units("step") * tokens("step", row["step"])),
        (AlgorithmConfig(reduction="task_mean"), lambda row: units("task") * tokens("task", row["task"])),
        (AlgorithmConfig(reduction="seq_mean_token_sum_norm", length_norm=7.0), lambda row: 7.0 * units("trajectory")),
        (
            AlgorithmConfig(reduction="seq_mean_token_sum_norm", length_norm=7.0, scope="step"),
            lambda row: 7.0 * units("step"),
        ),
    ):
        wanted = [1 / each(row) if m else 0.0 for row, m in rows]
        np.testing.assert_allclose(token_weights(batch, config), wanted, rtol=1e-14)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reduction": "seq_mean_token_sum_norm"}, "length_norm is None with reduction seq_mean_token_sum_norm"),
        ({"length_norm": 100.0}, "length_norm is 100.0 with reduction token_mean"),
        ({"length_norm": 100.0, "reduction": "step_mean"}, "length_norm is 100.0 with reduction step_mean"),
        ({"reduction": "seq_mean_token_sum_norm", "length_norm": 0.0}, "length_norm"),
        ({"policy_loss_options": {"eps_low": 1.0}}, "policy_loss_options: eps_low"),
        ({"policy_loss_options": {"eps_high": 0.0}}, "policy_loss_options: eps_high"),
        ({"policy_loss_options": {"dual_clip": 1.0}}, "policy_loss_options: dual_clip"),
        ({"policy_loss": "gspo", "policy_loss_options": {"scope": "group"}}, "policy_loss_options: scope"),
        ({"correction": {"token_mask": [1.0, 2.0]}}, r"0 <= low < 1 < high, .*; got \[1.0, 2.0\]"),
        ({"correction": {"outlier_mask": [0.5, 0.9]}}, r"got \[0.5, 0.9\]"),
        ({"correction": {"token_tis": 0.5}}, "correction.token_tis"),
        ({"kl": {}}, "missing key 'kl.coef'"),
        ({"kl": {"coef": 0.1, "estimator": "k4"}}, "kl.estimator"),
        ({"advantage": "gae", "advantage_options": {"gamma": 0.0}}, "advantage_options: gamma"),
        ({"eps_high": 0.1}, "unknown key 'eps_high'"),
        ({"entropy_coef": -0.1}, "entropy_coef"),
        ({"epsilon": 0.2}, "epsilon"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(build(AlgorithmConfig, fields))


NUMBERS = st.floats(-3, 3)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=6), st.sampled_from([None, 0.2, 1.0]))
def test_the_value_loss_element_by_element(rows: list[tuple[float, float, float]], clip: float | None) -> None:
    value, old, target = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    value.requires_grad_()
    targets = ValueTargets(old, target)
    found = value_loss(value, targets, clip)
    found.sum().backward()
    assert value.grad is not None
    for i, (v, o, t) in enumerate(rows):
        plain = (v - t) ** 2 / 2
        held = plain if clip is None else (min(max(v, o - clip), o + clip) - t) ** 2 / 2
        assert float(found[i].detach()) == pytest.approx(max(plain, held))
        if clip is not None and held > plain + 1e-9:  # it has moved far enough: nothing pulls it on, or back
            assert value_clipped(value.detach(), targets, clip)[i] and value.grad[i] == 0
        elif plain > held + 1e-9 or clip is None:
            assert float(value.grad[i]) == pytest.approx(v - t)


def test_explained_variance_is_1_for_the_returns_themselves_and_0_for_any_constant() -> None:
    target = torch.tensor([0.0, 1.0, 3.0])
    assert explained_variance(target + 5, target) == pytest.approx(1.0)  # variance knows no offset
    assert explained_variance(torch.full((3,), 2.0), target) == pytest.approx(0.0)
    assert explained_variance(-target, target) == pytest.approx(-3.0)


@pytest.mark.parametrize("target", [[], [0.7], [0.7] * 8])
def test_explained_variance_of_equal_returns_is_0(target: list[float]) -> None:
    assert explained_variance(torch.arange(len(target)).float(), torch.tensor(target)) == 0
