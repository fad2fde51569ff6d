"""Advantages, losses and reductions against slow references written from their formulas."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tests.models import ragged_groups
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.reductions import token_weights
from treadle.algorithms.validation import check
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.types import Group
from treadle.packing.flat import flatten


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
