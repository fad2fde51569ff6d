"""`Learner`: groups in, one or more optimizer updates out.

    groups -flatten-> FlatBatch -advantages, token_weights-> arrays [N]
                          |-pack, micro_batches-> token_logprobs -> sum_i w_i loss_i -> backward -> AdamW

Shapes: N completion tokens of an update, J graded trajectories, P pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from treadle.algorithms.config import AlgorithmConfig, advantages, token_weights
from treadle.algorithms.losses import clipped, ppo_clip
from treadle.core.types import Group
from treadle.engines.weights import unique_weights
from treadle.packing.flat import FlatBatch, flatten, spans
from treadle.packing.layout import MicroBatch, micro_batches, pack
from treadle.training.config import TrainingConfig
from treadle.training.forward import prepare, token_logprobs
from treadle.training.optimizer import learning_rate, make_optimizer, step


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer update did. metrics are over its trainable tokens; advantage: trajectory_id -> value."""

    metrics: dict[str, float]
    advantage: dict[str, float]


class Learner:
    """Owns the trained model and its optimizer.

    Invariant: loss and gradient are sums over (trajectory, step, token) with weights fixed before the forward pass, so
    packing and micro-batch budget change cost and rounding only.
    """

    def __init__(
        self, model: PreTrainedModel, training: TrainingConfig, algorithm: AlgorithmConfig, updates: int
    ) -> None:
        self.model, self.training, self.algorithm, self.updates = model, training, algorithm, updates
        self.updates_done = 0
        prepare(model, training.gradient_checkpointing)
        self.optimizer = make_optimizer(model, training.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """The current weights, not copied."""
        return unique_weights(self.model)

    def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        """Train on the groups between two publications: `updates_per_batch` updates of equally many groups, in order.

        With several updates, `logp_old` is taken for all of them before the first; a single one is its own anchor.
        """
        size = len(groups) // self.training.updates_per_batch
        batches = [flatten(groups[i : i + size]) for i in range(0, len(groups), size)]
        old = [None if len(batches) == 1 else self.logprobs(batch) for batch in batches]
        return [self.update(batch, logp_old) for batch, logp_old in zip(batches, old, strict=True)]

    def logprobs(self, batch: FlatBatch) -> NDArray[np.floating]:
        """The current log-probability of every completion token [N], each at its recorded temperature."""
        result: NDArray[np.floating] = np.zeros(len(batch), np.float32 if self._dtype is torch.float32 else np.float64)
        with torch.no_grad():
            for part in self._micro_batches(batch):
                result[part.flat] = self._forward(batch, part, entropy_grad=False)[0].cpu().numpy()
        return result

    def update(self, batch: FlatBatch, logp_old: NDArray[np.floating] | None = None) -> UpdateResult:
        """One optimizer update on the batch. An update without a trainable token changes nothing."""
        per_trajectory = advantages(batch, self.algorithm)
        rate = learning_rate(self.training.optimizer, self.updates_done, self.updates)
        totals = self.accumulate(batch, per_trajectory, logp_old)
        norm = step(self.optimizer, self.model, self.training.optimizer, rate) if batch.mask.any() else 0.0
        self.updates_done += 1
        return UpdateResult(
            metrics={"learning_rate": rate, "gradient_norm": norm, **totals},
            advantage={t.trajectory_id: float(a) for t, a in zip(batch.trajectories, per_trajectory, strict=True)},
        )

    def accumulate(
        self,
        batch: FlatBatch,
        per_trajectory: NDArray[np.float64],
        logp_old: NDArray[np.floating] | None = None,
    ) -> dict[str, float]:
        """Add the batch's gradient to the parameters' `.grad`; returns token metrics.

        per_trajectory float64[J]: advantages. logp_old [N], or None to anchor on the policy as it is now.
        """
        advantage, weight = per_trajectory[batch.trajectory_id], token_weights(batch, self.algorithm)
        coefficient = self._entropy_coefficient()
        sums = _Sums()
        tokens = sequences = 0
        for part in self._micro_batches(batch):
            logp, entropy = self._forward(batch, part, entropy_grad=coefficient > 0)
            anchor = logp.detach() if logp_old is None else self._tensor(logp_old[part.flat])
            a, w = self._tensor(advantage[part.flat]), self._tensor(weight[part.flat])
            algorithm = self.algorithm
            policy = ppo_clip(logp, anchor, a, algorithm.eps_low, algorithm.eps_high)
            loss = (w * (policy - coefficient * entropy)).sum()
            loss.backward()
            with torch.no_grad():
                mask = self._tensor(batch.mask[part.flat]).bool()
                gap = (anchor - self._tensor(batch.logp_rollout[part.flat])).abs()[mask]
                cut = clipped(logp, anchor, a, algorithm.eps_low, algorithm.eps_high)[mask]
                sums.add(loss, entropy[mask], gap, cut)
            tokens, sequences = tokens + len(part.token_ids), sequences + len(part.lengths)
        return {**sums.metrics(int(batch.mask.sum())), "packed_tokens": tokens, "packed_sequences": sequences}

    @property
    def _dtype(self) -> torch.dtype:
        """Of log-probabilities and losses: the model's, but at least float32."""
        return torch.float64 if self.model.dtype is torch.float64 else torch.float32

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device, self._dtype)

    def _entropy_coefficient(self) -> float:
        share = self.updates_done / max(self.updates, 1)
        start, end = self.algorithm.entropy_coef, self.algorithm.entropy_coef_end
        return start + (end - start) * share

    def _micro_batches(self, batch: FlatBatch) -> list[MicroBatch]:
        sequences = pack(spans(batch), self.training.packing)
        return micro_batches(sequences, self.training.max_tokens_per_microbatch)

    def _forward(self, batch: FlatBatch, part: MicroBatch, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        half = self.training.precision == "bfloat16"
        # a greedy token is never trained; any temperature serves for its unused log-probability
        temperature = np.where(batch.temperature[part.flat] > 0, batch.temperature[part.flat], 1.0)
        with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=half):
            return token_logprobs(self.model, part, self._tensor(temperature), entropy_grad)


class _Sums:
    """Token metrics added up over micro-batches."""

    def __init__(self) -> None:
        self.loss = self.entropy = self.gap = self.gap_max = self.clipped = 0.0

    def add(self, loss: Tensor, entropy: Tensor, gap: Tensor, cut: Tensor) -> None:
        self.loss += loss.item()
        self.entropy += entropy.sum().item()
        self.gap += gap.sum().item()
        self.gap_max = max(self.gap_max, gap.max().item() if len(gap) else 0.0)
        self.clipped += cut.sum().item()

    def metrics(self, trainable: int) -> dict[str, float]:
        count = max(trainable, 1)
        return {
            "loss": self.loss,
            "entropy": self.entropy / count,
            "clip_fraction": self.clipped / count,
            "logprob_gap_mean": self.gap / count,
            "logprob_gap_max": self.gap_max,
            "trainable_tokens": trainable,
        }
