"""Policy losses per token: pure functions on flat arrays [N], summed later under a reduction's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from treadle.algorithms.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a policy loss may use of N completion tokens, in canonical order and without gradient.

    logp_old [N]: of the policy that the update started from. logp_rollout [N]: as the engine sampled.
    advantage [N]. mask bool[N]: trainable. step, trajectory int64[N]: the unit that each token belongs to.
    """

    logp_old: Tensor
    logp_rollout: Tensor
    advantage: Tensor
    mask: Tensor
    step: Tensor
    trajectory: Tensor

    def at(self, index: Tensor) -> Tokens:
        """These tokens only. index int64[n]."""
        return Tokens(*(getattr(self, f.name)[index] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered policy loss (entry points `treadle.policy_losses`).

    per_token: (logp [N], tokens, config) -> loss of each token [N].
    couples: a token's loss depends on other tokens' log-probabilities, so that it must see the whole batch at once.
    """

    per_token: Callable[[Tensor, Tokens, AlgorithmConfig], Tensor]
    couples: bool = False


def ppo_clip(logp_new: Tensor, logp_old: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Clipped surrogate: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = exp(logp_new - logp_old).

    All tensors [N]; returns [N]. Source: Schulman et al. 2017, "PPO", eq. 7; asymmetric bounds: Yu et al. 2025, "DAPO".
    """
    ratio = (logp_new - logp_old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage)


PPO_CLIP = PolicyLoss(
    lambda logp, tokens, config: ppo_clip(logp, tokens.logp_old, tokens.advantage, config.eps_low, config.eps_high)
)


def clipped(logp_new: Tensor, logp_old: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """bool[N]: tokens whose gradient `ppo_clip` cuts off."""
    ratio = (logp_new - logp_old).exp()
    return torch.where(advantage >= 0, ratio > 1 + eps_high, ratio < 1 - eps_low) & (advantage != 0)
