"""Policy losses per token: pure functions on flat arrays [N], summed later under a reduction's weights."""

from __future__ import annotations

import torch
from torch import Tensor


def ppo_clip(logp_new: Tensor, logp_old: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Clipped surrogate: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) with r = exp(logp_new - logp_old).

    All tensors [N]; returns [N]. Source: Schulman et al. 2017, "PPO", eq. 7; asymmetric bounds: Yu et al. 2025, "DAPO".
    """
    ratio = (logp_new - logp_old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage)


def clipped(logp_new: Tensor, logp_old: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """bool[N]: tokens whose gradient `ppo_clip` cuts off."""
    ratio = (logp_new - logp_old).exp()
    return torch.where(advantage >= 0, ratio > 1 + eps_high, ratio < 1 - eps_low) & (advantage != 0)
