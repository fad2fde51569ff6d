"""The `algorithm` section of a configuration, and what it selects."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from treadle.algorithms.advantages import grpo
from treadle.algorithms.reductions import seq_mean_token_sum_norm, token_mean
from treadle.core.config import Config
from treadle.packing.flat import Doubles, FlatBatch


class AlgorithmConfig(Config):
    """How rewards become a loss: GRPO advantages, PPO-clip, and a reduction."""

    policy_loss: str = Field("ppo_clip", description="loss of each token: a registered name or module:attribute")
    norm_by_std: bool = Field(True, description="divide by the group's standard deviation (false: Dr. GRPO)")
    eps_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 - eps_low")
    eps_high: float = Field(0.28, gt=0, description="the ratio is clipped above 1 + eps_high")
    reduction: Literal["token_mean", "seq_mean_token_sum_norm"] = Field(
        "token_mean", description="how the losses of tokens add up"
    )
    scope: Literal["trajectory", "step"] = Field("trajectory", description="unit of sequence-level reductions")
    length_norm: float | None = Field(None, gt=0, description="constant of seq_mean_token_sum_norm, in tokens")
    entropy_coef: float = Field(0.0, ge=0, description="entropy bonus at the first update")
    entropy_coef_end: float = Field(0.0, ge=0, description="entropy bonus it moves to, linearly, by the end of the run")

    @model_validator(mode="after")
    def _length_norm_where_needed(self) -> AlgorithmConfig:
        if (self.reduction == "seq_mean_token_sum_norm") != (self.length_norm is not None):
            raise ValueError(
                f"length_norm is {self.length_norm} with reduction {self.reduction}: "
                "seq_mean_token_sum_norm needs it (for example the longest expected response), token_mean has none"
            )
        return self


def advantages(batch: FlatBatch, config: AlgorithmConfig) -> Doubles:
    """float64[J], one for each graded trajectory."""
    return grpo(batch.rewards, batch.group_of_trajectory, config.norm_by_std)


def token_weights(batch: FlatBatch, config: AlgorithmConfig) -> Doubles:
    """float64[N], the reduction's weight of each token."""
    if config.length_norm is None:
        return token_mean(batch.mask)
    unit = batch.trajectory_id if config.scope == "trajectory" else batch.step_id
    return seq_mean_token_sum_norm(batch.mask, unit, config.length_norm)
