"""The loss of one update as a function of the pairs' log-probabilities, and its traces, independent of the layout.

Shapes: N completion tokens of the update in canonical order, n of the current part, S steps and G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.corrections import Corrected, corrected
from treadle.algorithms.distillation import distilled, top_k_divergence
from treadle.algorithms.kl import ESTIMATORS, k1, k2, k3
from treadle.algorithms.losses import LOSS_FUNCTION, PolicyLoss, TokenFunction, Tokens
from treadle.algorithms.values import ValueTargets, explained_variance, value_clipped, value_loss
from treadle.core.config import Config
from treadle.core.draws import Stream, task_uniforms
from treadle.core.errors import ConfigError
from treadle.core.metrics import Measures, Metric, Tally, measured
from treadle.core.trainer import StepTrace
from treadle.core.types import Group
from treadle.core.user_functions import call, not_finite
from treadle.packing.flat import FlatBatch, Indices
from treadle.training.metrics import (
    CLIP_FRACTION,
    CORRECTION_MASKED,
    CORRECTION_WEIGHT,
    ENTROPY,
    GAP_BY_LAG,
    GAP_KL,
    GAP_MAX,
    GAP_MEAN,
    KL,
    LOSS,
    RATIO_MAX,
    RATIO_MEAN,
    RATIO_MIN,
    TAUGHT,
    TEACHER_KL,
    TRAINABLE_FRACTION,
    TRAINABLE_TOKENS,
    VALUE_CLIPPED,
    VALUE_EXPLAINED,
    VALUE_LOSS,
    tally,
)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """A model's scores of some tokens.

    flat int64[n]: their indices among all N. logp, entropy [n]: in nats. value [n]: value of the state in which each
    was sampled, with a value head. expected [n]: log-probability that the sampler expects, for gradients alone
    (`algorithm.centered_scores`). top [n, k], top_ids int64[n, k]: other tokens there, if requested.
    """

    flat: Indices
    logp: Tensor
    entropy: Tensor
    value: Tensor | None = None
    top: Tensor | None = None
    top_ids: Tensor | None = None
    expected: Tensor | None = None

    def detached(self) -> TokenScores:
        return self.map(Tensor.detach)

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenScores:
        """Apply the function to each tensor that is present."""
        mapped: dict[str, Any] = {n: function(x) for n in SCORES if (x := getattr(self, n)) is not None}
        return replace(self, **mapped)


SCORES = ("logp", "entropy", "value", "top", "top_ids", "expected")


class LossGradients(NamedTuple):
    """A loss's gradient by log-probabilities [n]; by the other fields of `TokenScores` if they matter."""

    logp: Tensor
    entropy: Tensor | None = None
    value: Tensor | None = None
    top: Tensor | None = None
    expected: Tensor | None = None

    def at(self, index: Tensor | slice) -> LossGradients:
        logp, *others = (None if x is None else x[index] for x in self)
        assert logp is not None
        return LossGradients(logp, *others)


class TokenTrace(NamedTuple):
    """Components of a loss, token by token, all [N]; see `core.trainer.StepTrace`."""

    logp: Tensor
    entropy: Tensor
    advantage: Tensor
    ratio: Tensor | None
    clipped: Tensor | None


Gradient = Callable[[TokenScores], LossGradients]
"""Maps the detached scores of some tokens to the loss's gradient by them."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Computes sum_i weight_i (factor_i policy_loss_i + kl_coef kl_i + coef value_loss_i - entropy_coef entropy_i).

    The teacher's term (`algorithm.distillation`) is in the advantage, or a further term of the sum.
    tokens, weight [N]; `tokens.advantage` comes from rewards. anchored: the update starts from the current policy, and
    `logp_old` is `logp` itself.
    first: whether nothing was trained since the batch's start, so that metrics may treat this policy as the batch's.
    reduction: mask [N] -> weights [N] of the tokens in it. corrected: weights and factors after corrections, if
    `logp_old` is known before the forward pass; factor is 1 without any. kl_coef: coefficient of KL in the loss; it
    needs `tokens.logp_ref`.
    values: targets of a value head, [N]. lag int32[N]: versions between sampling and this update, if any.
    truncated bool[N]: tokens with an incomparable `logp_rollout`, if any.
    top_ids int64[N, k]: the teacher's most probable tokens, which all scores then have; `tokens.logp_top` is theirs.
    teacher_coef: weight of the teacher's term.
    """

    config: AlgorithmConfig
    policy_loss: PolicyLoss
    loss_options: Config
    tokens: Tokens
    weight: Tensor
    entropy_coef: float
    anchored: bool
    reduction: Callable[[Tensor], Tensor]
    corrected: Corrected | None = None
    kl_coef: float = 0.0
    lag: Tensor | None = None
    values: ValueTargets | None = None
    first: bool = True
    truncated: Tensor | None = None
    top_ids: Tensor | None = None
    teacher_coef: float = 0.0

    @property
    def couples(self) -> bool:
        """Return whether the gradient requires all tokens' log-probabilities."""
        return self.policy_loss.couples or (self.anchored and self.config.correction.couples)

    def loss(self, scores: TokenScores) -> Tensor:
        """Return the loss of these tokens, a scalar. scores: of all N if the objective couples tokens."""
        index, tokens = self._tokens(scores)
        each = self._policy_losses(scores.logp, tokens)
        weight = self.weight[index]
        if self.config.correction.active:
            correction = self._corrected(index, tokens)
            weight, each = correction.weight, correction.factor * each
        if scores.expected is not None:
            # Its gradient alone, and not by the factor, which the expectation has inside.
            drift = self._policy_losses(scores.logp.detach() - scores.expected, tokens)
            each = each + (drift - drift.detach())
        if self.kl_coef:
            each = each + self.kl_coef * self._kl(scores.logp, tokens)
        distillation = self.config.distillation
        if distillation is not None and distillation.form == "loss" and tokens.logp_teacher is not None:
            each = each + self.teacher_coef * k2(scores.logp, tokens.logp_teacher)
        if distillation is not None and tokens.logp_top is not None and scores.top is not None:
            reverse = distillation.form == "reverse_top_k"
            each = each + self.teacher_coef * top_k_divergence(scores.top, tokens.logp_top, reverse)
        if scores.logp.requires_grad and not each.requires_grad:
            raise ConfigError(self._refused(each, "without a gradient"))
        if self.values is not None and scores.value is not None:
            section = self.config.value
            each = each + section.coef * value_loss(scores.value, self.values.at(index), section.clip)
        return (weight * (each - self.entropy_coef * scores.entropy)).sum()

    def _policy_losses(self, logp: Tensor, tokens: Tokens) -> Tensor:
        """Return the policy loss of each token [n]. Raises ConfigError for an invalid result."""
        each = self._call(self.policy_loss.per_token, logp, tokens)
        if not isinstance(each, Tensor) or each.shape != logp.shape or not each.is_floating_point():
            raise ConfigError(self._refused(each, f"for {len(logp)} tokens"))
        return each

    def _call(self, function: TokenFunction, logp: Tensor, tokens: Tokens) -> Tensor:
        return call(function, self._where, LOSS_FUNCTION, logp, tokens, self.loss_options)

    @property
    def _where(self) -> str:
        return f"algorithm.policy_loss: {self.config.policy_loss!r}"

    def _refused(self, value: object, wrong: str) -> str:
        return f"{self._where}: {LOSS_FUNCTION.refusal(self.policy_loss.per_token, value, wrong)}"

    def refusal(self, scores: TokenScores) -> str:
        """Return `: FUNCTION returned ..., nan at index 4 ...`, or "" if the policy loss of every token is finite."""
        each = self._policy_losses(scores.logp, self._tokens(scores)[1])
        wrong = not_finite(each.detach().double().cpu().numpy())
        return wrong and f": {LOSS_FUNCTION.refusal(self.policy_loss.per_token, each, wrong)}"

    def gradient(self, scores: TokenScores) -> LossGradients:
        """Return the loss's gradient by these scores; they must be of all N if the objective couples tokens."""
        leaves = {"logp": scores.logp, "entropy": scores.entropy}
        if self.values is not None and scores.value is not None:
            leaves["value"] = scores.value
        if scores.top is not None:
            leaves["top"] = scores.top
        if self.config.centered_scores != "off":
            leaves["expected"] = torch.zeros_like(scores.logp)  # changes gradients, but no value
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
        found = torch.autograd.grad(self.loss(TokenScores(scores.flat, **leaves)), list(leaves.values()))
        slopes = LossGradients(**dict(zip(leaves, found, strict=True)))
        return slopes if self.entropy_coef else slopes._replace(entropy=None)

    def advantage(self, scores: TokenScores) -> Tensor:
        """Return the advantage of each token, including the teacher's term. scores: of all N, in order."""
        return self._tokens(scores)[1].advantage

    def trace(self, scores: TokenScores) -> TokenTrace:
        """Return the components of each token's loss. scores: of all N, in order."""
        _, tokens = self._tokens(scores)
        made = [
            None if function is None else self._call(function, scores.logp, tokens)
            for function in (self.policy_loss.ratio, self.policy_loss.clipped)
        ]
        return TokenTrace(scores.logp, scores.entropy, tokens.advantage, *made)

    def metrics(self, scores: TokenScores) -> Measures:
        """Return metrics over the trainable tokens, as far as computable. scores: of all N, in order."""
        index, tokens = self._tokens(scores)
        mask = tokens.mask
        values = {ENTROPY: scores.entropy[mask], TRAINABLE_TOKENS: mask[mask], TRAINABLE_FRACTION: mask}
        if self.first or not self.anchored:
            ratio = (scores.logp - tokens.logp_old)[mask]
            # In float64, where no ratio overflows.
            ratio = _wide(ratio).exp()
            values |= {RATIO_MEAN: ratio, RATIO_MAX: ratio, RATIO_MIN: ratio} | self._gaps(index, tokens)
        if self.policy_loss.clipped is not None:
            values[CLIP_FRACTION] = self._call(self.policy_loss.clipped, scores.logp, tokens)[mask]
        if self.config.correction.active:
            correction = self._corrected(index, tokens)
            values[CORRECTION_MASKED] = ~correction.keep[mask]
            values[CORRECTION_WEIGHT] = correction.factor[mask]
        if tokens.logp_ref is not None:
            values[KL] = self._kl(scores.logp, tokens)[mask]
        if tokens.logp_teacher is not None and self.tokens.logp_teacher is not None:
            taught = ~self.tokens.logp_teacher[index].isnan()
            values[TEACHER_KL] = k1(scores.logp, tokens.logp_teacher)[mask & taught]
            if self.config.distillation is not None and self.config.distillation.context is not None:
                values[TAUGHT] = taught[mask]
        of_values = Measures()
        if self.values is not None and scores.value is not None:
            clip, value, targets = self.config.value.clip, scores.value[mask], self.values.at(index[mask])
            values[VALUE_LOSS] = value_loss(value, targets, clip)
            of_values = measured("run", {VALUE_EXPLAINED: [explained_variance(value, targets.target)]})
            if clip is not None:
                values[VALUE_CLIPPED] = value_clipped(value, targets, clip)
        loss = Tally(LOSS, float(self.loss(scores)), len(mask))
        return Measures([loss, *(tally(metric, each) for metric, each in values.items())]) + of_values

    def _gaps(self, index: Tensor, tokens: Tokens) -> dict[Metric, Tensor]:
        """Return gaps between the engine's log-probabilities and the learner's at the batch's start."""
        mask = tokens.mask if self.truncated is None else tokens.mask & ~self.truncated[index]
        if self.truncated is not None and not mask.any():
            return {}
        gap = (tokens.logp_old - tokens.logp_rollout)[mask]
        gaps = {GAP_MEAN: gap.abs(), GAP_MAX: gap.abs(), GAP_KL: k3(torch.zeros_like(_wide(gap)), _wide(gap))}
        if self.lag is None:
            return gaps
        lag = self.lag[index][mask]
        return gaps | {GAP_BY_LAG.of(int(versions)): gap.abs()[lag == versions] for versions in lag.unique()}

    def _corrected(self, index: Tensor, tokens: Tokens) -> Corrected:
        """Return the corrections of these tokens, all N if a correction couples them and is not known yet."""
        if self.corrected is not None:
            return self.corrected.at(index)
        return corrected(tokens, self.weight[index], self.config.correction, self.reduction)

    def _kl(self, logp: Tensor, tokens: Tokens) -> Tensor:
        assert self.config.kl is not None and tokens.logp_ref is not None  # guaranteed by the learner
        return ESTIMATORS[self.config.kl.estimator](logp, tokens.logp_ref)

    def _tokens(self, scores: TokenScores) -> tuple[Tensor, Tokens]:
        index = torch.from_numpy(scores.flat).to(scores.logp.device)
        tokens, now = self.tokens.at(index), scores.logp.detach()

        def known(logp: Tensor) -> Tensor:
            """Replace untrainable tokens' entries, which could give infinite ratios, by `now`; they have no weight."""
            return torch.where(tokens.mask, logp, now)

        old = now if self.anchored else known(tokens.logp_old)
        advantage, section, teacher = tokens.advantage, self.config.distillation, tokens.logp_teacher
        if section is not None:
            in_advantage = section.form == "advantage"
            # Unasked tokens must have no gradient.
            if teacher is not None:
                teacher = torch.where(tokens.mask & ~teacher.isnan(), teacher, old if in_advantage else now)
            advantage = distilled(advantage, old, teacher if in_advantage else None, self.teacher_coef, section.rewards)
        top = tokens.logp_top
        if top is not None and scores.top is not None:
            top = torch.where(tokens.mask[:, None] & ~top.isnan(), top, scores.top.detach())
        return index, replace(
            tokens,
            logp_top=top,
            logp_old=old,
            logp_rollout=known(tokens.logp_rollout),
            advantage=advantage,
            logp_ref=None if tokens.logp_ref is None else known(tokens.logp_ref),
            logp_teacher=teacher,
        )


def concat(parts: Sequence[TokenScores], like: Tensor) -> TokenScores:
    """Return the scores of all N tokens, in order, from parts that contain each once.

    like: a tensor with the dtype and device of the result, in case there are no parts.
    """
    if not parts:
        return TokenScores(np.empty(0, np.int64), like[:0], like[:0], like[:0])
    scores = joined(parts)
    order = torch.from_numpy(np.argsort(scores.flat)).to(like.device)
    return replace(scores.map(lambda tensor: tensor[order]), flat=np.arange(len(order)))


def joined(parts: Sequence[TokenScores]) -> TokenScores:
    """Return the concatenated scores of all parts."""

    def each(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if any(x is None for x in tensors) else torch.cat(tensors)

    flat = np.concatenate([part.flat for part in parts])
    logp, entropy, *others = map(each, SCORES)
    assert logp is not None and entropy is not None
    return TokenScores(flat, logp, entropy, *others)


def _wide(values: Tensor) -> Tensor:
    """Return the values in float64, on the CPU if their device lacks it (Apple's GPUs)."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def lookup(slopes: LossGradients) -> Gradient:
    """Return a `Gradient` that looks up tokens in the precomputed gradient [N] of the whole batch."""

    def gradient(scores: TokenScores) -> LossGradients:
        return slopes.at(torch.from_numpy(scores.flat).to(slopes.logp.device))

    return gradient


@dataclass(frozen=True, slots=True)
class TracedGroups:
    """Draws a share of all groups, keyed by the run's seed, epoch and task: a resampled group is drawn again."""

    seed: int = 0
    share: float = 0.0

    def among(self, groups: Sequence[Group]) -> NDArray[np.bool_]:
        """Return bool[G]: whether each group is traced."""
        if not self.share:
            return np.zeros(len(groups), np.bool_)
        draws = task_uniforms(self.seed, Stream.TRACE, [g.epoch for g in groups], [g.position for g in groups])
        return draws < self.share

    def traces(self, batch: FlatBatch, trace: Callable[[], TokenTrace], update: int) -> tuple[StepTrace, ...]:
        """Return the traces of the trained steps of traced groups, in order.

        trace: returns the values that update computed for all N; called only if there is such a step.
        """
        group_of_step = batch.group_of_trajectory[batch.trajectory_of_step]
        chosen = np.flatnonzero(self.among(batch.groups)[group_of_step])
        if not len(chosen):
            return ()
        values, number = trace(), batch.step_number
        logp, entropy, advantage, ratio = (None if x is None else x.float().cpu().numpy() for x in values[:4])
        clipped = None if values.clipped is None else values.clipped.cpu().numpy()
        assert logp is not None and entropy is not None and advantage is not None

        def made(step: int) -> StepTrace:
            tokens = slice(batch.step_start[step], batch.step_start[step + 1])
            return StepTrace(
                update=update,
                group_id=batch.groups[group_of_step[step]].group_id,
                trajectory_id=batch.trajectories[batch.trajectory_of_step[step]].trajectory_id,
                step=number[step],
                logprobs=logp[tokens].copy(),
                entropy=entropy[tokens].copy(),
                advantage=advantage[tokens].copy(),
                ratio=None if ratio is None else ratio[tokens].copy(),
                clipped=None if clipped is None else clipped[tokens].copy(),
            )

        return tuple(made(int(step)) for step in chosen)
