"""Policy losses per token: pure functions on flat arrays [N], summed later under a reduction's weights.

    r = exp(logp_new - logp_old), A the advantage, sg the identity without gradient

Each function takes tensors [N] and returns the loss of each token [N]; the `PolicyLoss` entries below bind them to
their options and are the targets of entry points. Only methods of tensors are used, so that importing this module does
not load torch, and a configuration can be checked first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from treadle.algorithms.config import (
    AlgorithmConfig,
    CispoConfig,
    DppoConfig,
    GspoConfig,
    PpoClipConfig,
    SapoConfig,
    Scope,
)
from treadle.core.config import Config
from treadle.core.errors import ConfigError
from treadle.core.registry import NoOptions, build_options, resolve
from treadle.core.user_functions import Expected, check_function

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of a loss for N completion tokens, in canonical order and without gradient.

    logp_old [N]: log-probabilities by the policy at the update's start. logp_rollout [N]: as reported by the engine.
    advantage [N]. mask bool[N]: trainable. step, trajectory int64[N]: unit of each token.
    logp_ref, logp_teacher [N]: by the reference model and the teacher, if any. logp_top [N, k]: by the teacher, for its
    k most probable tokens, if they are compared. Tokens without a teacher's answer have NaN while an objective is
    built, and the policy's own values in losses.
    """

    logp_old: Tensor
    logp_rollout: Tensor
    advantage: Tensor
    mask: Tensor
    step: Tensor
    trajectory: Tensor
    logp_ref: Tensor | None = None
    logp_teacher: Tensor | None = None
    logp_top: Tensor | None = None

    def unit(self, scope: Scope) -> Tensor:
        """Return the unit of each token under `scope`, int64[N]."""
        return self.trajectory if scope == "trajectory" else self.step

    def at(self, index: Tensor) -> Tokens:
        values = (getattr(self, f.name) for f in fields(self))
        return Tokens(*(None if value is None else value[index] for value in values))  # type: ignore[arg-type]


TokenFunction: TypeAlias = "Callable[[Tensor, Tokens, Any], Tensor]"


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered policy loss (entry points `treadle.policy_losses`).

    per_token: (logp [N], tokens, options) -> loss of each token [N].
    options_type: type of `options`, built from a recipe's `algorithm.policy_loss_options`.
    couples: a token's loss depends on other tokens' log-probabilities, as with one ratio per trajectory; it is then
    computed over the whole update at once.
    anchor: policy in the ratio's denominator; `old` costs a forward pass before the first of several updates.
    ratio, clipped: (logp, tokens, options) -> ratio to the anchor [N], and whether the loss cuts off a gradient that is
    not 0 (cispo: whether the weight is at its bound), bool[N]; for metrics and traces.
    """

    per_token: TokenFunction
    couples: bool = False
    anchor: Literal["old", "rollout", "none"] = "old"
    options_type: type[Config] = NoOptions
    clipped: TokenFunction | None = None
    ratio: TokenFunction | None = None


LOSS_FUNCTION = Expected(
    "    def loss(logp, tokens, options):\n        return -tokens.advantage * logp",
    "the loss of each token, unreduced: a floating-point tensor of the shape of logp, finite, computed from logp",
)


@cache
def by_name(name: str) -> PolicyLoss:
    """Return the policy loss of a registered name or module:attribute. Raises ConfigError."""
    loss, where = resolve("policy_losses", name, "algorithm.policy_loss"), f"algorithm.policy_loss: {name!r}"
    if not isinstance(loss, PolicyLoss):
        raise ConfigError(
            f"{where} is of type {type(loss).__name__}; make it a `PolicyLoss`: MINE = PolicyLoss(loss), with\n"
            f"{LOSS_FUNCTION.example}"
        )
    for function in (loss.per_token, loss.ratio, loss.clipped):
        if function is not None:
            check_function(function, where, LOSS_FUNCTION)
    return loss


def options_of(config: AlgorithmConfig) -> Config:
    options_type = by_name(config.policy_loss).options_type
    return build_options(options_type, config.policy_loss_options, "algorithm.policy_loss_options", config.policy_loss)


# Formulas


def importance_ratio(logp_new: Tensor, logp_other: Tensor) -> Tensor:
    """Return r = exp(logp_new - logp_other) [N]."""
    return (logp_new - logp_other).exp()


def ppo_clip(
    logp_new: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return the clipped surrogate -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A); with A < 0 at most -dual_clip A.

    Source: Schulman et al. 2017, "PPO", eq. 7; asymmetric bounds: Yu et al. 2025, "DAPO"; dual clip: Ye et al. 2020,
    "Mastering complex control in MOBA games", eq. 5.
    """
    ratio = importance_ratio(logp_new, logp_old)
    loss = -(ratio * advantage).minimum(ratio.clamp(1 - eps_low, 1 + eps_high) * advantage)
    if dual_clip is None:
        return loss
    return loss.minimum(-dual_clip * advantage).where(advantage < 0, loss)


def clipped(
    logp_new: Tensor,
    logp_old: Tensor,
    advantage: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return bool[N]: tokens with a zero gradient in `ppo_clip`."""
    ratio = importance_ratio(logp_new, logp_old)
    cut = (ratio > 1 + eps_high).where(advantage >= 0, ratio < 1 - eps_low)
    if dual_clip is not None:
        cut = cut | (advantage < 0) & (ratio > dual_clip)
    return cut & (advantage != 0)


def sequence_log_ratio(logp_new: Tensor, logp_old: Tensor, mask: Tensor, unit: Tensor) -> Tensor:
    """Return log s of each token's unit, s = (product of its trainable tokens' r)^(1 / their number), with a gradient
    of one for the token's own logp_new.

    All [N]; mask bool, unit int64. Source: Zheng et al. 2025, "Group sequence policy optimization", eq. 7 and, for the
    gradient by token (equal to that of eq. 5 where a unit's advantages and weights are equal), eq. 14.
    """
    mean = unit_mean(logp_new.detach() - logp_old, mask, unit)
    return mean + (logp_new - logp_new.detach())


def gspo(
    logp_new: Tensor, logp_old: Tensor, advantage: Tensor, mask: Tensor, unit: Tensor, eps_low: float, eps_high: float
) -> Tensor:
    """Return -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A).

    s is the length-normalized ratio of the token's unit (the scope): see `sequence_log_ratio`.
    Source: Zheng et al. 2025, "Group sequence policy optimization", eq. 5 and 13.
    """
    ratio = sequence_log_ratio(logp_new, logp_old, mask, unit)
    return ppo_clip(ratio, ratio.new_zeros(len(ratio)), advantage, eps_low, eps_high)


def cispo(logp_new: Tensor, logp_old: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Return -sg(clip(r, 1 - eps_low, 1 + eps_high)) A logp_new: clips the weight, and keeps every token's gradient.

    Source: MiniMax 2025, "MiniMax-M1", eq. 4-5.
    """
    ratio = importance_ratio(logp_new.detach(), logp_old)
    return -ratio.clamp(1 - eps_low, 1 + eps_high) * advantage * logp_new


def sapo(logp_new: Tensor, logp_old: Tensor, advantage: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate in place of clipping.

    Source: Gao et al. 2025, "Soft adaptive policy optimization", eq. 5-6.
    """
    ratio = importance_ratio(logp_new, logp_old)
    tau = ratio.new_tensor(tau_positive).where(advantage > 0, ratio.new_tensor(tau_negative))
    return -(4 / tau) * (tau * (ratio - 1)).sigmoid() * advantage


def outside_trust_region(
    logp_new: Tensor, logp_rollout: Tensor, advantage: Tensor, divergence: Literal["tv", "kl"], delta: float
) -> Tensor:
    """Return bool[N]: tokens more than delta from the sampling policy that A pushes further away.

    The divergence is binary, between the token and all others: with mu, pi the probabilities of the token,
    tv = |mu - pi|, kl = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)).
    """
    new, old = logp_new.detach().exp(), logp_rollout.exp()
    if divergence == "tv":
        distance = (old - new).abs()
    else:
        tiny = float(np.finfo(str(new.dtype).removeprefix("torch.")).tiny)
        rest_new, rest_old = -logp_new.detach().expm1(), -logp_rollout.expm1()
        rest = rest_old.clamp(min=0) * (rest_old.clamp(min=tiny).log() - rest_new.clamp(min=tiny).log())
        distance = old * (logp_rollout - logp_new.detach()) + rest
    away = (new > old).where(advantage > 0, new < old) & (advantage != 0)
    return away & (distance > delta)


def dppo(
    logp_new: Tensor, logp_rollout: Tensor, advantage: Tensor, divergence: Literal["tv", "kl"], delta: float
) -> Tensor:
    """Return -M r A with r = exp(logp_new - logp_rollout), M = 0 for tokens outside the trust region, else 1.

    Source: Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning" (binary TV and KL).
    """
    outside = outside_trust_region(logp_new, logp_rollout, advantage, divergence, delta)
    return (-importance_ratio(logp_new, logp_rollout) * advantage).where(~outside, 0.0)


def reinforce(logp_new: Tensor, advantage: Tensor) -> Tensor:
    """Return -A logp_new. Source: Williams 1992, "Simple statistical gradient-following algorithms"."""
    return -advantage * logp_new


def importance_sampling(logp_new: Tensor, logp_rollout: Tensor, advantage: Tensor) -> Tensor:
    """Return -r A with r = exp(logp_new - logp_rollout), unbounded: unbiased per token whatever policy sampled it.

    Source: importance sampling of the policy gradient, as `importance_sampling` of Thinking Machines' Tinker.
    """
    return -importance_ratio(logp_new, logp_rollout) * advantage


# Registered losses


def _ratio_to_old(logp: Tensor, tokens: Tokens, options: Config) -> Tensor:
    return importance_ratio(logp, tokens.logp_old)


def _ratio_to_rollout(logp: Tensor, tokens: Tokens, options: Config) -> Tensor:
    return importance_ratio(logp, tokens.logp_rollout)


def _ppo_clip(logp: Tensor, tokens: Tokens, options: PpoClipConfig) -> Tensor:
    return ppo_clip(logp, tokens.logp_old, tokens.advantage, *options.bounds)


def _ppo_clipped(logp: Tensor, tokens: Tokens, options: PpoClipConfig) -> Tensor:
    return clipped(logp, tokens.logp_old, tokens.advantage, *options.bounds)


PPO_CLIP = PolicyLoss(_ppo_clip, options_type=PpoClipConfig, clipped=_ppo_clipped, ratio=_ratio_to_old)


def _gspo(logp: Tensor, tokens: Tokens, options: GspoConfig) -> Tensor:
    unit = tokens.unit(options.scope)
    return gspo(logp, tokens.logp_old, tokens.advantage, tokens.mask, unit, options.eps_low, options.eps_high)


def _gspo_log_ratio(logp: Tensor, tokens: Tokens, options: GspoConfig) -> Tensor:
    return sequence_log_ratio(logp, tokens.logp_old, tokens.mask, tokens.unit(options.scope))


def _gspo_clipped(logp: Tensor, tokens: Tokens, options: GspoConfig) -> Tensor:
    ratio = _gspo_log_ratio(logp, tokens, options)
    return clipped(ratio, ratio.new_zeros(len(ratio)), tokens.advantage, options.eps_low, options.eps_high)


GSPO = PolicyLoss(
    _gspo,
    couples=True,
    options_type=GspoConfig,
    clipped=_gspo_clipped,
    ratio=lambda logp, tokens, options: _gspo_log_ratio(logp, tokens, options).exp(),
)


def _cispo(logp: Tensor, tokens: Tokens, options: CispoConfig) -> Tensor:
    return cispo(logp, tokens.logp_old, tokens.advantage, options.eps_low, options.eps_high)


def _cispo_clipped(logp: Tensor, tokens: Tokens, options: CispoConfig) -> Tensor:
    ratio = _ratio_to_old(logp, tokens, options)
    return (ratio < 1 - options.eps_low) | (ratio > 1 + options.eps_high)


CISPO = PolicyLoss(_cispo, options_type=CispoConfig, clipped=_cispo_clipped, ratio=_ratio_to_old)


def _sapo(logp: Tensor, tokens: Tokens, options: SapoConfig) -> Tensor:
    return sapo(logp, tokens.logp_old, tokens.advantage, options.tau_positive, options.tau_negative)


SAPO = PolicyLoss(_sapo, options_type=SapoConfig, ratio=_ratio_to_old)


def _dppo(logp: Tensor, tokens: Tokens, options: DppoConfig) -> Tensor:
    return dppo(logp, tokens.logp_rollout, tokens.advantage, options.divergence, options.delta)


def _dppo_clipped(logp: Tensor, tokens: Tokens, options: DppoConfig) -> Tensor:
    return outside_trust_region(logp, tokens.logp_rollout, tokens.advantage, options.divergence, options.delta)


DPPO = PolicyLoss(_dppo, anchor="rollout", options_type=DppoConfig, clipped=_dppo_clipped, ratio=_ratio_to_rollout)
REINFORCE = PolicyLoss(lambda logp, tokens, options: reinforce(logp, tokens.advantage), anchor="none")
IMPORTANCE_SAMPLING = PolicyLoss(
    lambda logp, tokens, options: importance_sampling(logp, tokens.logp_rollout, tokens.advantage),
    anchor="rollout",
    ratio=_ratio_to_rollout,
)


def unit_sum(values: Tensor, mask: Tensor, unit: Tensor) -> Tensor:
    """Return the sum over the trainable tokens of each token's unit. values, mask, unit [N] -> [N]."""
    units = int(unit.max()) + 1 if len(unit) else 0
    return values.new_zeros(units).index_add(0, unit, values.where(mask, 0.0))[unit]


def unit_mean(values: Tensor, mask: Tensor, unit: Tensor) -> Tensor:
    """Return `unit_sum` divided by the unit's number of trainable tokens, [N]; 0 for a unit without any."""
    return unit_sum(values, mask, unit) / unit_sum(values.new_ones(len(values)), mask, unit).clamp(min=1)
