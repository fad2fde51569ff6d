"""KL divergence from a reference model: estimators per token, and controllers of its coefficient.

    d = logp - logp_ref of a token that the policy sampled

Shapes: tensors [N] in, [N] out. In the loss, the estimator itself is differentiated; in the reward, its value at
`logp_old` is a penalty on each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


def k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Return d: unbiased, may be negative. As a loss its expected gradient is 0.

    Source: Schulman 2020, "Approximating KL".
    """
    return logp - logp_ref


def k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Return d^2 / 2: biased, low variance. As a loss its gradient is that of KL(policy || reference).

    Source: as `k1`.
    """
    return (logp - logp_ref).square() / 2


def k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d: unbiased, >= 0.

    Source: as `k1`; in GRPO's loss: Shao et al. 2024, "DeepSeekMath", eq. 4.
    """
    return (logp_ref - logp).exp() - 1 + (logp - logp_ref)


def absolute(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Return |d|. Source: the `abs` penalty of verl and OpenRLHF."""
    return (logp - logp_ref).abs()


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}


@dataclass(frozen=True, slots=True)
class KlController:
    """The coefficient of KL, with its update rule.

    target: mean KL per token to steer towards, None for a fixed coefficient. horizon: approximate number of
    trajectories for steering. For example, at twice the target or more, an update of 100 trajectories with a horizon of
    10000 raises the coefficient by 0.2 * 100 / 10000 = 0.2%.
    """

    coef: float
    target: float | None = None
    horizon: float = 10000.0

    def after(self, kl: float, trajectories: int) -> KlController:
        """Return the controller after an update: coef (1 + clip(kl / target - 1, -0.2, 0.2) trajectories / horizon).

        kl: mean per token of the update, in nats. trajectories: number it trained.
        Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", sec. 2.2.
        """
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * trajectories / self.horizon))
