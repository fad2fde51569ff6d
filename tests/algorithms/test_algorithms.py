"""Advantages, losses and reductions against slow references written from their formulas."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models import full, make_group, make_step, ragged_groups
from treadle.algorithms.advantages import grpo
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import advantages
from treadle.algorithms.losses import clipped, ppo_clip
from treadle.algorithms.reductions import seq_mean_token_sum_norm, token_mean, token_weights, unit_mean
from treadle.algorithms.validation import check
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.types import Group
from treadle.packing.flat import flatten

REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.7]), st.floats(-100, 100))
LOGP = st.floats(-8, 0)


def slow_grpo(rewards: list[float], group: list[int], norm_by_std: bool) -> list[float]:
    result = []
    for reward, own in zip(rewards, group, strict=True):
        members = [r for r, g in zip(rewards, group, strict=True) if g == own]
        if max(members) == min(members):
            result.append(0.0)
            continue
        mean = math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / (len(members) - 1))
        result.append((reward - mean) / (std + 1e-6 if norm_by_std else 1.0))
    return result


@given(st.lists(st.tuples(REWARD, st.integers(0, 3)), max_size=20), st.booleans())
def test_grpo_is_its_formula(rows: list[tuple[float, int]], norm_by_std: bool) -> None:
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    found = grpo(np.array(rewards, np.float64), np.array(group, np.int64), norm_by_std)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, slow_grpo(rewards, group, norm_by_std), rtol=1e-9, atol=1e-7)


def test_grpo_by_hand() -> None:
    found = grpo(np.array([1.0, 0.0, 0.0, 1.0, 5.0]), np.array([0, 0, 0, 0, 1]))
    std = math.sqrt(4 * 0.25 / 3)
    np.testing.assert_allclose(
        found, [0.5 / (std + 1e-6), *[-0.5 / (std + 1e-6)] * 2, 0.5 / (std + 1e-6), 0], rtol=1e-14
    )
    assert grpo(np.array([3.0, 1.0]), np.array([0, 0]), norm_by_std=False).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 13, 17])
@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3])
def test_equal_rewards_give_exactly_nothing(size: int, reward: float, norm_by_std: bool) -> None:
    """0.7 has no exact mean: a rounded one, divided by a standard deviation of nothing, would be an advantage."""
    assert grpo(np.full(size, reward), np.zeros(size, np.int64), norm_by_std).tolist() == [0.0] * size


def test_a_failed_trajectory_enters_no_baseline() -> None:
    steps = [make_step([1], [2])]
    healthy: list[tuple[list[Any], float | None]] = [(steps, 1.0), (steps, 0.0)]
    alone = advantages(flatten([make_group(healthy)]), AlgorithmConfig())
    beside = advantages(flatten([make_group([(steps, None), *healthy, (steps, None)])]), AlgorithmConfig())
    posing = advantages(flatten([make_group([(steps, 0.0), *healthy])]), AlgorithmConfig())
    assert alone.tolist() == beside.tolist() != posing[1:].tolist()


def test_a_trajectory_without_steps_enters_the_baseline() -> None:
    group = make_group([([], 0.0), ([make_step([1], [2])], 1.0)])
    found = advantages(flatten([group]), AlgorithmConfig(advantage_options={"norm_by_std": False}))
    assert found.tolist() == [0.5]


def slow_ppo(new: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(new - old)
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


@given(st.lists(st.tuples(LOGP, LOGP, st.floats(-3, 3)), min_size=1, max_size=20), st.floats(0.01, 0.9))
def test_ppo_clip_is_its_formula(rows: list[tuple[float, float, float]], eps: float) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    found = ppo_clip(new, old, advantage, eps, 2 * eps)
    np.testing.assert_allclose(full(found), [slow_ppo(*row, eps, 2 * eps) for row in rows], rtol=1e-12, atol=1e-15)


@given(st.lists(st.tuples(LOGP, LOGP, st.floats(-3, 3, allow_subnormal=False)), min_size=1, max_size=20))
def test_clipped_names_exactly_the_tokens_whose_gradient_is_cut_off(rows: list[tuple[float, float, float]]) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    new.requires_grad_()
    ppo_clip(new, old, advantage, 0.2, 0.28).sum().backward()
    assert new.grad is not None
    ratio = (new.detach() - old).exp()
    cut = clipped(new.detach(), old, advantage, 0.2, 0.28)
    away = ((ratio - 0.8).abs() > 1e-9) & ((ratio - 1.28).abs() > 1e-9)  # at a bound, torch halves the gradient
    reference = torch.where(cut, 0.0, -ratio * advantage)
    torch.testing.assert_close(new.grad[away], reference[away], rtol=1e-12, atol=0.0)
    assert not cut[advantage == 0].any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [
        (1.3, 1.0, True),
        (1.27, 1.0, False),
        (0.5, 1.0, False),
        (0.75, -1.0, True),
        (0.85, -1.0, False),
        (3.0, -1.0, False),
    ],
)
def test_the_two_bounds(ratio: float, advantage: float, cut: bool) -> None:
    new, old, a = torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage])
    assert clipped(new, old, a, 0.2, 0.28).tolist() == [cut]
    limit = {1.3: 1.28, 0.75: 0.8}.get(ratio, ratio)
    assert ppo_clip(new, old, a, 0.2, 0.28).item() == pytest.approx(-limit * advantage)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=30), st.floats(0.5, 1000))
def test_reductions_are_their_formulas(rows: list[tuple[bool, int]], length_norm: float) -> None:
    mask, unit = np.array([m for m, _ in rows], np.bool_), np.array([u for _, u in rows], np.int64)
    count = sum(m for m, _ in rows)
    units = len({u for m, u in rows if m})
    found = token_mean(mask)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [1 / count if m else 0.0 for m, _ in rows], rtol=1e-15)
    own = {u: sum(m for m, v in rows if v == u) for _, u in rows}
    found = unit_mean(mask, unit)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [1 / (units * own[u]) if m else 0.0 for m, u in rows], rtol=1e-14)
    found = seq_mean_token_sum_norm(mask, unit, length_norm)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [1 / (units * length_norm) if m else 0.0 for m, _ in rows], rtol=1e-14)


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
        (
            AlgorithmConfig(reduction="seq_mean_token_sum_norm", length_norm=7.0),
            lambda row: 7.0 * units("trajectory"),
        ),
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
        (
            {"correction": {"token_mask": [1.0, 2.0]}},
            r"0 <= low < 1 < high, .*; got \[1.0, 2.0\]",
        ),
        ({"correction": {"outlier_mask": [0.5, 0.9]}}, r"got \[0.5, 0.9\]"),
        ({"correction": {"token_tis": 0.5}}, "correction.token_tis"),
        ({"kl": {}}, "missing key 'kl.coef'"),
        ({"kl": {"coef": 0.1, "estimator": "k4"}}, "kl.estimator"),
        ({"advantage": "gae", "advantage_options": {"gamma": 0.0}}, "advantage_options: gamma"),
        ({"eps_high": 0.1}, "did you mean 'policy_loss_options'"),
        ({"entropy_coef": -0.1}, "entropy_coef"),
        ({"epsilon": 0.2}, "epsilon"),
    ],
)
def test_impossible_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(build(AlgorithmConfig, fields))
