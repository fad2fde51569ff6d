"""Combinations that mean nothing are refused with the reason; all others are not."""

from typing import Any

import pytest

from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.validation import check, problems
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.registry import names

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
    ({"scope": "step"}, "scope is 'step', but reduction 'token_mean' has no unit"),
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
