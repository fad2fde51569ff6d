"""`Learner`: groups in, one or more optimizer updates out.

    groups -flatten-> FlatBatch -advantages, token_weights-> arrays [N]
                          |-calls-> PrefixTree* -Forward-> logp, entropy [N] -Objective-> gradient -> AdamW

Shapes: N completion tokens of an update, J graded trajectories, P pairs of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from treadle.algorithms.config import AlgorithmConfig, advantages, token_weights
from treadle.algorithms.losses import PolicyLoss, Tokens
from treadle.core.registry import resolve
from treadle.core.types import Group
from treadle.engines.weights import unique_weights
from treadle.packing.checks import set_aside
from treadle.packing.flat import FlatBatch, calls, flatten
from treadle.packing.tree import PrefixTree
from treadle.training.config import TrainingConfig
from treadle.training.forward import Forward
from treadle.training.objective import Gradient, Objective, joined, looked_up
from treadle.training.optimizer import learning_rate, make_optimizer, step


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer update did.

    metrics: over its trainable tokens. advantage: trajectory_id -> value. refused: trajectory_id -> why it could not be
    trained.
    """

    metrics: dict[str, float]
    advantage: dict[str, float]
    refused: dict[str, str] = field(default_factory=dict)


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
        self.policy_loss: PolicyLoss = resolve("policy_losses", algorithm.policy_loss)
        self.forward = Forward(
            model,
            training.max_tokens_per_microbatch,
            training.gradient_checkpointing,
            half=training.precision == "bfloat16",
        )
        self.optimizer = make_optimizer(model, training.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """The current weights, not copied."""
        return unique_weights(self.model)

    def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        """Train on the groups between two publications: `updates_per_batch` updates of equally many groups, in order.

        With several updates, `logp_old` is taken for all of them before the first; a single one is its own anchor.
        Trajectories that this model cannot train (see `packing.checks`) are refused, one by one.
        """
        size = len(groups) // self.training.updates_per_batch
        sound = [self._sound(groups[i : i + size]) for i in range(0, len(groups), size)]
        batches = [flatten(kept) for kept, _ in sound]
        old = [None if len(batches) == 1 else self.logprobs(batch) for batch in batches]
        results = [self.update(batch, logp_old) for batch, logp_old in zip(batches, old, strict=True)]
        return [replace(result, refused=refused) for result, (_, refused) in zip(results, sound, strict=True)]

    def _sound(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
        config = self.model.config.get_text_config()
        return set_aside(groups, config.vocab_size, getattr(config, "max_position_embeddings", None))

    def logprobs(self, batch: FlatBatch) -> NDArray[np.floating]:
        """The current log-probability of every completion token [N], each at its recorded temperature."""
        temperature = self._temperature(batch)
        logp = joined([self.forward.scores(tree, temperature) for tree in self.trees(batch)], temperature).logp
        return logp.cpu().numpy()

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
        self, batch: FlatBatch, per_trajectory: NDArray[np.float64], logp_old: NDArray[np.floating] | None = None
    ) -> dict[str, float]:
        """Add the batch's gradient to the parameters' `.grad`; returns token metrics.

        per_trajectory float64[J]: advantages. logp_old [N], or None to anchor on the policy as it is now.
        """
        trees, temperature = self.trees(batch), self._temperature(batch)
        objective = self.objective(batch, per_trajectory, logp_old)
        gradient: Gradient = objective.gradient
        if self.policy_loss.couples:
            whole = joined([self.forward.scores(tree, temperature) for tree in trees], temperature)
            gradient = looked_up(*objective.gradient(whole))
        scores = [self.forward.backward(tree, temperature, gradient, objective.entropy_coef > 0) for tree in trees]
        return {
            **objective.metrics(joined(scores, temperature)),
            "packed_tokens": sum(len(tree) for tree in trees),
            "packed_sequences": sum(int((tree.depth == 0).sum()) for tree in trees),
        }

    def trees(self, batch: FlatBatch) -> list[PrefixTree]:
        """The batch as it is laid out for the forward pass."""
        return self.forward.trees(calls(batch), self.training.packing, self.training.sharing)

    def objective(
        self, batch: FlatBatch, per_trajectory: NDArray[np.float64], logp_old: NDArray[np.floating] | None = None
    ) -> Objective:
        """The batch's loss as a function of its log-probabilities; arguments as for `accumulate`."""
        start, end = self.algorithm.entropy_coef, self.algorithm.entropy_coef_end
        device = self.model.device
        return Objective(
            self.algorithm,
            self.policy_loss,
            Tokens(
                logp_old=self._tensor(batch.logp_rollout if logp_old is None else logp_old),
                logp_rollout=self._tensor(batch.logp_rollout),
                advantage=self._tensor(per_trajectory[batch.trajectory_id]),
                mask=torch.from_numpy(batch.mask).to(device),
                step=torch.from_numpy(batch.step_id).to(device),
                trajectory=torch.from_numpy(batch.trajectory_id).to(device),
            ),
            weight=self._tensor(token_weights(batch, self.algorithm)),
            entropy_coef=start + (end - start) * self.updates_done / max(self.updates, 1),
            anchored=logp_old is None,
        )

    def _temperature(self, batch: FlatBatch) -> Tensor:
        """[N], in the precision of log-probabilities and losses: the model's, but at least float32."""
        # a greedy token is never trained; any temperature serves for its unused log-probability
        return self._tensor(np.where(batch.temperature > 0, batch.temperature, 1.0))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        dtype = torch.float64 if self.model.dtype is torch.float64 else torch.float32
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device, dtype)
