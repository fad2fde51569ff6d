"""The losses of the Tinker protocol: per token, and summed, never averaged.

    p = exp(logp), q = exp(logprobs), r = p / q, A = advantages, sg the identity without gradient

Shapes: M targets of some datums in one flat array. Definitions: https://tinker-docs.thinkingmachines.ai/tinker/losses
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treadle.algorithms.losses import importance_ratio, sequence_log_ratio
from treadle.core.errors import DataError

Inputs = Mapping[str, Tensor]
"""A loss's inputs by name, [M] each; `datum` int64[M] is the datum of each target."""

TARGETS = "target_tokens"
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
_CLIPS = {_LOW: 0.8, _HIGH: 1.2}


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of the protocol.

    per_token: (logp [M], inputs) -> loss of each target [M]; options are among the inputs. required, optional: names
    of inputs beside the targets. options: their default values; an input of an option's name overrides it, target by
    target. couples: a target's loss depends on others' log-probabilities.
    """

    per_token: Callable[[Tensor, Inputs], Tensor]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict)
    couples: bool = False

    def sums(self, logp: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the loss, summed, and its gradient by log-probabilities [M]."""
        with torch.enable_grad():
            leaf = logp.detach().requires_grad_()
            total = self.per_token(leaf, inputs).sum()
            [slope] = torch.autograd.grad(total, leaf)
        return total.detach(), slope

    def settled(self, name: str, options: Mapping[str, float | str]) -> dict[str, float]:
        """Return all options, with their defaults. name: of the loss, for errors. Raises DataError."""
        for option, value in options.items():
            if option not in self.options:
                known = f"it has {sorted(self.options)}" if self.options else "it has none"
                raise DataError(f"loss {name!r} has no option {option!r}; {known}")
            if isinstance(value, str) or not math.isfinite(value):
                raise DataError(f"option {option!r} of loss {name!r} must be a finite number, got {value!r}")
        return {**self.options, **{option: float(value) for option, value in options.items()}}


def cross_entropy(logp: Tensor, inputs: Inputs) -> Tensor:
    """Return -w logp."""
    return -inputs["weights"] * logp


def importance_sampling(logp: Tensor, inputs: Inputs) -> Tensor:
    """Return -r A."""
    return -importance_ratio(logp, inputs["logprobs"]) * inputs["advantages"]


def ppo(logp: Tensor, inputs: Inputs) -> Tensor:
    """Return -min(r A, clip(r, low, high) A)."""
    return _clipped(importance_ratio(logp, inputs["logprobs"]), inputs)


def cispo(logp: Tensor, inputs: Inputs) -> Tensor:
    """Return -sg(clip(r, low, high)) A logp."""
    ratio = importance_ratio(logp.detach(), inputs["logprobs"])
    return -ratio.clamp(inputs[_LOW], inputs[_HIGH]) * logp * inputs["advantages"]


def stable_reinforce(logp: Tensor, inputs: Inputs) -> Tensor:
    """Return -sg(clip(r, 0.8, 1.2)) A logp, as `cispo` does by default; what Tinker's own servers compute is not
    published. On data sampled by the weights that are trained, r = 1, and all variants of REINFORCE agree.
    """
    return cispo(logp, {**inputs, **{name: logp.new_tensor(bound) for name, bound in _CLIPS.items()}})


def dro(logp: Tensor, inputs: Inputs) -> Tensor:
    """Return -(A logp - beta / 2 (log r)^2)."""
    quadratic = (logp - inputs["logprobs"]).square()
    return -(logp * inputs["advantages"] - 0.5 * inputs["beta"] * quadratic)


def gspo(logp: Tensor, inputs: Inputs) -> Tensor:
    """Return -min(s A, clip(s, low, high) A), s the geometric mean of r over a datum's targets in
    `sequence_ratio_mask`, with a gradient of s for each target's own logp.
    """
    mask = inputs["sequence_ratio_mask"] != 0
    return _clipped(sequence_log_ratio(logp, inputs["logprobs"], mask, inputs["datum"]).exp(), inputs)


def _clipped(ratio: Tensor, inputs: Inputs) -> Tensor:
    advantage = inputs["advantages"]
    return -(ratio * advantage).minimum(ratio.clamp(inputs[_LOW], inputs[_HIGH]) * advantage)


_POLICY = ("logprobs", "advantages")
# The documentation's examples send weights with every loss of a policy; their definitions do not use them.
_UNUSED = ("weights",)
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, (), ("weights",)),
    "importance_sampling": Loss(importance_sampling, _POLICY, _UNUSED),
    "ppo": Loss(ppo, _POLICY, _UNUSED, _CLIPS),
    "cispo": Loss(cispo, _POLICY, _UNUSED, _CLIPS),
    "stable_reinforce": Loss(stable_reinforce, _POLICY, _UNUSED),
    "dro": Loss(dro, _POLICY, _UNUSED, {"beta": 0.05}),
    "gspo": Loss(gspo, (*_POLICY, "sequence_ratio_mask"), _UNUSED, _CLIPS, couples=True),
}
_UNSUPPORTED = {
    "custom": "losses are not run on the server; pass the function itself to forward_backward_custom",
}


def by_name(name: str) -> Loss:
    """Return a loss. Raises DataError for one that is unknown or not supported."""
    if name in _UNSUPPORTED:
        raise DataError(f"loss {name!r} is not supported: {_UNSUPPORTED[name]}")
    if name not in LOSSES:
        raise DataError(f"unknown loss {name!r}; there are {', '.join(LOSSES)}")
    return LOSSES[name]
