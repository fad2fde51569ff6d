"""Policy losses against slow references written from their formulas; combinations of options that mean nothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.algorithms import slow
from tests.models import full
from treadle.algorithms.config import AlgorithmConfig, CispoConfig, GspoConfig
from treadle.algorithms.losses import Tokens, by_name, dppo, gspo, outside_trust_region
from treadle.algorithms.validation import check, problems
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.registry import names

LOGP = st.floats(-6, -0.01)


@dataclass(frozen=True)
class Row:
    """One token; unit ids are in canonical order."""

    new: float
    old: float
    rollout: float
    a: float
    mask: bool
    step: int
    trajectory: int


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Trajectories of 0 to 3 steps of 0 to 4 tokens, ids of empty ones left out; some tokens are not trained."""
    found, step = [], 0
    near = draw(st.booleans())  # ratios near 1, too: gspo's bounds are narrow
    for trajectory in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(0, 3))):
            step += 1
            for _ in range(draw(st.integers(0, 4))):
                old = draw(LOGP)
                new = min(old + draw(st.floats(-1e-3, 1e-3)), -1e-3) if near else draw(LOGP)
                a = draw(st.sampled_from([0.0, 1.0, -1.0, 0.3, -2.0]))
                found.append(Row(new, old, draw(LOGP), a, draw(st.booleans()), step, trajectory))
    return found


def tensors(drawn: list[Row]) -> tuple[Tensor, Tokens]:
    def column(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([getattr(row, name) for row in drawn], dtype=dtype)

    tokens = Tokens(
        column("old"),
        column("rollout"),
        column("a"),
        column("mask", torch.bool),
        column("step", torch.int64),
        column("trajectory", torch.int64),
    )
    return column("new").requires_grad_(), tokens


def _ratio_of_unit(drawn: list[Row], scope: str) -> list[float]:
    unit = [getattr(row, scope) for row in drawn]
    logs = [row.new - row.old for row in drawn]
    return slow.over_unit(logs, [row.mask for row in drawn], unit, lambda v: math.exp(slow.mean(v)) if v else 1.0)


def _gspo(drawn: list[Row], options: GspoConfig) -> list[float]:
    return [
        slow.ppo_clip(math.log(s), 0.0, row.a, options.eps_low, options.eps_high)
        for s, row in zip(_ratio_of_unit(drawn, options.scope), drawn, strict=True)
    ]


def _each(one: Callable[[Row, Any], float]) -> Callable[[list[Row], Any], list[float]]:
    return lambda drawn, options: [one(row, options) for row in drawn]


REFERENCES: dict[str, Callable[[list[Row], Any], list[float]]] = {
    "ppo_clip": _each(lambda t, o: slow.ppo_clip(t.new, t.old, t.a, *o.bounds)),
    "gspo": _gspo,
    "cispo": _each(lambda t, o: -slow.cispo_weight(t.new, t.old, o.eps_low, o.eps_high) * t.a * t.new),
    "sapo": _each(lambda t, o: slow.sapo(t.new, t.old, t.a, o.tau_positive, o.tau_negative)),
    "dppo": _each(lambda t, o: slow.dppo(t.new, t.rollout, t.a, o.divergence, o.delta)),
    "reinforce": _each(lambda t, o: -t.a * t.new),
    "importance_sampling": _each(lambda t, o: -math.exp(t.new - t.rollout) * t.a),
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ppo_clip": [{}, {"dual_clip": 1.5}, {"eps_low": 0.1, "eps_high": 0.6, "dual_clip": 3.0}],
    "gspo": [{}, {"scope": "step"}, {"eps_low": 0.2, "eps_high": 0.5}],
    "cispo": [{}, {"eps_low": 0.5, "eps_high": 0.5}],
    "sapo": [{}, {"tau_positive": 2.0, "tau_negative": 5.0}],
    "dppo": [{}, {"divergence": "kl", "delta": 0.05}, {"delta": 0.5}],
}

STOP_GRADIENT = ("gspo", "cispo")
UNCLIPPED = ("sapo", "reinforce", "importance_sampling")
CASES = [(name, options) for name in REFERENCES for options in OPTIONS.get(name, [{}])]


def test_every_registered_policy_loss_has_a_reference() -> None:
    assert set(REFERENCES) == set(names("policy_losses")), "`make lint` installs new entry points"


@pytest.mark.parametrize(("name", "options"), CASES)
@settings(max_examples=30)
@given(drawn=rows())
def test_a_policy_loss_is_its_formula(name: str, options: dict[str, Any], drawn: list[Row]) -> None:
    built = by_name(name).options_type(**options)
    logp, tokens = tensors(drawn)
    found = by_name(name).per_token(logp, tokens, built).detach()
    assert found.shape == (len(drawn),) and found.dtype == torch.float64
    np.testing.assert_allclose(full(found), REFERENCES[name](drawn, built), rtol=1e-9, atol=1e-12)


@pytest.mark.quick(4)
@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] not in STOP_GRADIENT])
@settings(max_examples=25)
@given(drawn=rows())
def test_its_gradient_is_that_of_the_formula(name: str, options: dict[str, Any], drawn: list[Row]) -> None:
    """By central differences of the slow reference, away from kinks; a token's loss is its own."""
    built = by_name(name).options_type(**options)
    logp, tokens = tensors(drawn)
    by_name(name).per_token(logp, tokens, built).sum().backward()
    h = 1e-6

    def moved(by: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        shifted = [
            Row(row.new + by, *(getattr(row, f) for f in Row.__dataclass_fields__ if f != "new")) for row in drawn
        ]
        return np.array(REFERENCES[name](shifted, built), np.float64)

    left, here, right = moved(-h), moved(0.0), moved(h)
    smooth = np.abs(left - 2 * here + right) < 1e-9 * (1 + np.abs(here))
    assert logp.grad is not None
    slope = (right - left) / (2 * h)
    np.testing.assert_allclose(full(logp.grad)[smooth], slope[smooth], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS["cispo"])
@given(drawn=rows())
def test_cispo_has_the_gradient_of_its_weighted_logprob(options: dict[str, Any], drawn: list[Row]) -> None:
    logp, tokens = tensors(drawn)
    built = CispoConfig(**options)
    by_name("cispo").per_token(logp, tokens, built).sum().backward()
    wanted = [-slow.cispo_weight(r.new, r.old, built.eps_low, built.eps_high) * r.a for r in drawn]
    assert logp.grad is not None or not drawn
    np.testing.assert_allclose([] if logp.grad is None else full(logp.grad), wanted, rtol=1e-12)


@pytest.mark.parametrize("scope", ["trajectory", "step"])
@given(drawn=rows(), bounds=st.sampled_from([(3e-4, 4e-4), (0.2, 0.5)]))
def test_gspo_has_the_gradient_of_one_ratio_for_each_unit(scope: str, drawn: list[Row], bounds: Any) -> None:
    """Where a unit's advantage is one number, as in the paper: the mean over units of -min(s A, clip(s) A)."""
    drawn = [replace(r, a=1.0 - getattr(r, scope) % 3) for r in drawn]
    low, high = bounds
    logp, tokens = tensors(drawn)
    unit = getattr(tokens, scope)
    counts = {u: sum(r.mask for r in drawn if getattr(r, scope) == u) for u in unit.tolist()}
    weight = torch.tensor([r.mask / max(counts[getattr(r, scope)], 1) for r in drawn], dtype=torch.float64)
    (weight * gspo(logp, tokens.logp_old, tokens.advantage, tokens.mask, unit, low, high)).sum().backward()
    again, _ = tensors(drawn)
    total = torch.zeros((), dtype=torch.float64)
    for u, count in counts.items():
        own = [i for i, r in enumerate(drawn) if r.mask and getattr(r, scope) == u]
        if count:
            s = (sum((again[i] - drawn[i].old for i in own), torch.zeros(())) / count).exp()
            a = float(tokens.advantage[own[0]])
            total = total - torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a)
    if drawn:
        (total + 0 * again.sum()).backward()
        assert logp.grad is not None and again.grad is not None
        torch.testing.assert_close(logp.grad, again.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("name", "options"), CASES)
@given(drawn=rows())
def test_what_is_called_clipped_has_a_bounded_ratio(name: str, options: dict[str, Any], drawn: list[Row]) -> None:
    """ppo_clip, gspo, dppo: the gradient is cut off exactly there. cispo: the weight is at its bound."""
    loss = by_name(name)
    built: Any = loss.options_type(**options)
    if loss.clipped is None:
        assert name in UNCLIPPED
        return
    logp, tokens = tensors(drawn)
    cut = loss.clipped(logp.detach(), tokens, built)
    assert cut.dtype == torch.bool
    if name == "cispo":
        weights = [math.exp(r.new - r.old) for r in drawn]
        low, high = 1 - built.eps_low, 1 + built.eps_high
        assert cut.tolist() == [not low <= w <= high for w in weights]
        return
    loss.per_token(logp, tokens, built).sum().backward()
    if drawn:
        assert logp.grad is not None
        assert (cut == ((logp.grad == 0) & (tokens.advantage != 0))).all()


# By hand


def one(*values: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.parametrize(
    ("new", "old", "advantage", "outside"),
    [
        (0.9, 0.5, 1.0, True),  # already 0.4 more probable, and pushed further
        (0.9, 0.5, -1.0, False),  # pushed back
        (0.1, 0.5, -1.0, True),
        (0.1, 0.5, 1.0, False),
        (0.6, 0.5, 1.0, False),  # within 0.15
        (0.01, 0.0001, 1.0, False),  # a ratio of 100, which ppo_clip would cut: hardly any probability moved
        (0.9, 0.5, 0.0, False),
    ],
)
def test_the_trust_region_is_about_probability_not_ratio(
    new: float, old: float, advantage: float, outside: bool
) -> None:
    pi, mu, a = one(math.log(new), math.log(old), advantage)
    assert outside_trust_region(pi, mu, a, "tv", 0.15).tolist() == [outside]
    assert (dppo(pi, mu, a, "tv", 0.15).item() == 0) == (outside or advantage == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pair", [(0.0, 0.0), (-1e-7, 0.0), (0.0, -3.0), (-80.0, -1e-6), (1e-6, -1.0)])
def test_kl_of_the_trust_region_is_finite_for_certain_tokens(pair: tuple[float, float], dtype: torch.dtype) -> None:
    new, old, a = (torch.tensor([x], dtype=dtype) for x in (*pair, 1.0))
    assert math.isfinite(dppo(new, old, a, "kl", 0.05).item())


def test_on_the_sampling_policy_every_loss_has_the_policy_gradient() -> None:
    """new = old = rollout: d loss / d logp = -A for each of them."""
    new = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    same, a = new.detach(), torch.tensor([1.0, -0.5], dtype=torch.float64)
    tokens = Tokens(same, same, a, torch.ones(2, dtype=torch.bool), torch.zeros(2).long(), torch.zeros(2).long())
    for name in names("policy_losses"):
        (gradient,) = torch.autograd.grad(by_name(name).per_token(new, tokens, by_name(name).options_type()).sum(), new)
        torch.testing.assert_close(gradient, -a, rtol=1e-12, atol=0.0, msg=name)


KL = {"coef": 0.1}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"advantage_options": {"gamma": 0.9}}, "advantage_options: unknown key 'gamma'"),
    ({"advantage": "rloo", "advantage_options": {"norm_by_std": False}}, "is set, but 'rloo' has no options"),
    ({"advantage": "step_return", "advantage_options": {"weight": 0.5}}, "advantage_options: unknown key 'weight'"),
    ({"advantage": "gae", "advantage_options": {"gamma": 2.0}}, "advantage_options: gamma: got 2.0"),
    ({"value": {"coef": 0.1}}, "value is set, but advantage 'grpo' needs no value head"),
    ({"policy_loss_options": {"scope": "step"}}, "policy_loss_options: unknown key 'scope'"),
    ({"policy_loss": "reinforce", "policy_loss_options": {"eps_low": 0.1}}, "set, but 'reinforce' has no options"),
    ({"correction": {"token_tis": 2.0, "sequence_tis": 2.0}}, "token_tis and sequence_tis both weigh"),
    ({"policy_loss": "importance_sampling", "correction": {"token_tis": 2.0}}, "would count rho twice"),
    ({"policy_loss": "dppo", "correction": {"sequence_tis": 2.0}}, "would count rho twice"),
    ({"correction": {"renormalize": True, "token_tis": 2.0}}, "no mask leaves anything out"),
    ({"correction": {"scope": "step", "token_mask": [0.5, 2.0]}}, "nothing is corrected over a sequence"),
    ({"kl": {**KL, "estimator": "k1"}}, "gradient of k1 as a loss is 0"),
    ({"kl": {**KL, "where": "reward"}, "advantage": "maxrl"}, "maxrl, which needs rewards >= 0"),
    ({"kl": {**KL, "horizon": 5.0}}, "without kl.target the coefficient is fixed"),
    ({"scope": "step"}, "scope is 'step', but reduction 'token_mean' uses no unit"),
]
FILTERED: list[tuple[dict[str, Any], str]] = [
    ({"policy_loss": "dppo"}, "policy_loss 'dppo' compares with them"),
    ({"policy_loss": "importance_sampling"}, "policy_loss 'importance_sampling' compares with them"),
    ({"correction": {"token_tis": 2.0}}, "correction compares with them"),
]
GOOD: list[dict[str, Any]] = [
    {},
    *({"advantage": name} for name in names("advantages")),
    *({"policy_loss": name} for name in names("policy_losses")),
    {"advantage": "gigpo", "advantage_options": {"gamma": 0.9, "weight": 0.5, "norm_by_std": False}},
    {"advantage": "gae", "advantage_options": {"gamma": 0.9, "gae_lambda": 0.5}, "value": {"coef": 1.0, "clip": 0.2}},
    {
        "policy_loss": "gspo",
        "policy_loss_options": {"scope": "step"},
        "correction": {"scope": "step", "sequence_tis": 2.0},
    },
    {"policy_loss": "importance_sampling", "correction": {"geometric_mask": [0.9, 1.1], "renormalize": True}},
    {"kl": KL},
    {"kl": {**KL, "estimator": "k1", "where": "reward", "target": 0.05, "horizon": 5.0}},
    {"reduction": "seq_mean_token_sum_norm", "length_norm": 5.0, "scope": "step"},
]


@pytest.mark.parametrize(("fields", "reason"), BAD)
def test_what_means_nothing_is_refused_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    config = build(AlgorithmConfig, fields)
    found = problems(config)
    assert len(found) == 1 and reason in found[0]
    with pytest.raises(ConfigError, match=r"^algorithm\."):
        check(config)


@pytest.mark.parametrize(("fields", "reason"), FILTERED)
def test_filtered_sampling_refuses_what_compares_with_the_engine(fields: dict[str, Any], reason: str) -> None:
    config = build(AlgorithmConfig, fields)
    assert problems(config) == []
    found = problems(config, filtered_sampling=True)
    assert len(found) == 1 and reason in found[0] and "truncated distribution" in found[0]
    assert problems(AlgorithmConfig(), filtered_sampling=True) == []


@pytest.mark.parametrize("fields", GOOD, ids=str)
def test_everything_else_is_not(fields: dict[str, Any]) -> None:
    check(build(AlgorithmConfig, fields))


def test_all_problems_are_told_at_once() -> None:
    config = build(
        AlgorithmConfig, {"advantage_options": {"gamma": 0.5}, "scope": "step", "kl": {**KL, "estimator": "k1"}}
    )
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("fields", [{"advantage": "grpoo"}, {"policy_loss": "ppo"}])
def test_unknown_names_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not registered"):
        check(build(AlgorithmConfig, fields))
