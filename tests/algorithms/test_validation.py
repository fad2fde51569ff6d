"""Combinations that mean nothing are refused with the reason; all others are not."""

from typing import Any

import pytest

from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import Advantage
from treadle.algorithms.losses import PolicyLoss
from treadle.algorithms.validation import ADVANTAGE_OPTIONS, LOSS_OPTIONS, check, problems
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.registry import names, resolve

KL = {"coef": 0.1}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"gamma": 0.9}, "gamma is set, but advantage 'grpo' does not read it"),
    ({"advantage": "rloo", "norm_by_std": False}, "norm_by_std is set, but advantage 'rloo'"),
    ({"advantage": "step_return", "gigpo_weight": 0.5}, "gigpo_weight is set"),
    ({"advantage": "reinforce++", "gae_lambda": 0.5}, "gae_lambda is set"),
    ({"value": {"coef": 0.1}}, "value is set, but advantage 'grpo' needs no value head"),
    ({"gspo": {"scope": "step"}}, "gspo is set, but policy_loss 'ppo_clip' does not read it"),
    ({"policy_loss": "reinforce", "ppo_clip": {"eps_low": 0.1}}, "ppo_clip is set, but policy_loss 'reinforce'"),
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
    {"advantage": "gigpo", "gamma": 0.9, "gigpo_weight": 0.5, "norm_by_std": False},
    {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.5, "value": {"coef": 1.0, "clip": 0.2}},
    {"policy_loss": "gspo", "gspo": {"scope": "step"}, "correction": {"scope": "step", "sequence_tis": 2.0}},
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


def test_options_are_fields_of_the_section_and_all_of_them_are_read_by_something() -> None:
    """A new option that is in no list would be accepted where nothing reads it."""
    advantages: list[Advantage] = [resolve("advantages", name) for name in names("advantages")]
    losses: list[PolicyLoss] = [resolve("policy_losses", name) for name in names("policy_losses")]
    assert {option for a in advantages for option in a.options} == set(ADVANTAGE_OPTIONS)
    assert {option for loss in losses for option in loss.options} == set(LOSS_OPTIONS)
    general = {"advantage", "value", "policy_loss", "correction", "kl", "reduction", "scope", "length_norm"}
    general |= {"entropy_coef", "entropy_coef_end", "dynamic_sampling", "policy_loss_options", "advantage_options"}
    assert set(AlgorithmConfig.model_fields) == general | set(ADVANTAGE_OPTIONS) | set(LOSS_OPTIONS)
