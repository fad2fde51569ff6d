"""Off-policy corrections: tokens on which the learner's policy and the engine's disagree are down-weighted or left out.

    rho = exp(logp_old - logp_rollout) of a token; of a unit (trajectory or step), over its trainable tokens, either the
    product of its tokens' rho or their geometric mean

All are functions of log rho [N] without gradient, on flat arrays; a unit is the same whatever the packing. Sources:
token and sequence TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
token mask: Ling team 2025, "IcePop"; sequence masks: Liu et al. 2025, "When speed kills stability"; outlier mask: the
veto of verl's rollout correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.algorithms.config import CorrectionConfig
from treadle.algorithms.losses import Tokens, unit_mean, unit_sum


def token_tis(log_rho: Tensor, cap: float) -> Tensor:
    """Return min(rho, cap) [N]: truncated importance sampling."""
    return log_rho.exp().clamp(max=cap)


def sequence_tis(log_rho: Tensor, mask: Tensor, unit: Tensor, cap: float) -> Tensor:
    """Return min(product of the unit's rho, cap) for each of its tokens [N]. mask bool[N], unit int64[N]."""
    return unit_sum(log_rho, mask, unit).exp().clamp(max=cap)


def token_mask(log_rho: Tensor, low: float, high: float) -> Tensor:
    """Return bool[N], whether low <= rho <= high (IcePop)."""
    return _between(log_rho.exp(), low, high)


def geometric_mask(log_rho: Tensor, mask: Tensor, unit: Tensor, low: float, high: float) -> Tensor:
    """Return bool[N], whether the length-normalized (geometric) mean of the unit's rho lies in [low, high]."""
    return _between(unit_mean(log_rho, mask, unit).exp(), low, high)


def product_mask(log_rho: Tensor, mask: Tensor, unit: Tensor, low: float, high: float) -> Tensor:
    """Return bool[N], whether the product of the unit's rho, its true importance ratio, lies in [low, high]."""
    return _between(unit_sum(log_rho, mask, unit).exp(), low, high)


def outlier_mask(log_rho: Tensor, mask: Tensor, unit: Tensor, low: float, high: float) -> Tensor:
    """Return bool[N], false for all tokens of a unit with any trainable token's rho outside [low, high]."""
    outside = (~_between(log_rho.exp(), low, high)).to(log_rho.dtype)
    return unit_sum(outside, mask, unit) == 0


def _between(value: Tensor, low: float, high: float) -> Tensor:
    return (value >= low) & (value <= high)


@dataclass(frozen=True, slots=True)
class Corrected:
    """Corrected weights of a loss.

    weight [N]: weight of each token's loss, 0 if left out. factor [N]: further factor of its policy loss alone. keep
    bool[N]: tokens kept by every mask.
    """

    weight: Tensor
    factor: Tensor
    keep: Tensor

    def at(self, index: Tensor) -> Corrected:
        return Corrected(self.weight[index], self.factor[index], self.keep[index])


def corrected(
    tokens: Tokens, weight: Tensor, config: CorrectionConfig, reduction: Callable[[Tensor], Tensor]
) -> Corrected:
    """Apply the configured corrections.

    weight [N]: weights of the reduction. reduction: mask bool[N] -> weights [N] of the tokens in it.
    Masked tokens also weigh 0 for KL and entropy; truncated ratios weigh only the policy loss. `renormalize` takes the
    reduction's denominators over the kept tokens.
    """
    log_rho = tokens.logp_old - tokens.logp_rollout
    unit, mask = tokens.unit(config.scope), tokens.mask
    factor, keep = torch.ones_like(log_rho), torch.ones_like(mask)
    if config.token_tis is not None:
        factor = token_tis(log_rho, config.token_tis)
    if config.sequence_tis is not None:
        factor = sequence_tis(log_rho, mask, unit, config.sequence_tis)
    if config.token_mask is not None:
        keep = keep & token_mask(log_rho, *config.token_mask)
    if config.geometric_mask is not None:
        keep = keep & geometric_mask(log_rho, mask, unit, *config.geometric_mask)
    if config.product_mask is not None:
        keep = keep & product_mask(log_rho, mask, unit, *config.product_mask)
    if config.outlier_mask is not None:
        keep = keep & outlier_mask(log_rho, mask, unit, *config.outlier_mask)
    return Corrected(reduction(mask & keep) if config.renormalize else weight * keep, factor, keep)
