"""`Learner`: groups in, one or more optimizer updates out.

    groups -flatten-> FlatBatch -advantage, token_weights-> arrays [N]
                          |-calls-> PrefixTree* -Forward-> logp, entropy [N] -Objective-> gradient -> AdamW

Shapes: N completion tokens of an update, J graded trajectories, P pairs of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from treadle.algorithms import estimators, losses
from treadle.algorithms.config import AlgorithmConfig, token_weights
from treadle.algorithms.corrections import corrected
from treadle.algorithms.estimators import Advantage, Signals
from treadle.algorithms.kl import ESTIMATORS, KlController
from treadle.algorithms.losses import PolicyLoss, Tokens
from treadle.algorithms.validation import check
from treadle.core.errors import ConfigError
from treadle.core.metrics import Measures, measured
from treadle.core.types import Group
from treadle.engines.weights import unique_weights
from treadle.packing.checks import set_aside
from treadle.packing.flat import FlatBatch, calls, flatten
from treadle.packing.tree import PrefixTree
from treadle.training.config import TrainingConfig
from treadle.training.forward import Forward
from treadle.training.metrics import (
    GRADIENT_NORM,
    KL_COEF,
    LEARNING_RATE,
    LONGEST_ROW,
    PACKED_SEQUENCES,
    PACKED_TOKENS,
    SEQUENCES,
    ZERO_ADVANTAGE,
)
from treadle.training.objective import Gradient, Objective, joined, looked_up
from treadle.training.optimizer import learning_rate, make_optimizer, step


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer update did.

    metrics: of what it trained (`training.metrics`). advantage: trajectory_id -> mean over its trainable tokens, if it
    has any. refused: trajectory_id -> why it could not be trained.
    """

    metrics: Measures
    advantage: dict[str, float]
    refused: dict[str, str] = field(default_factory=dict)


Reference = Callable[[FlatBatch], NDArray[np.floating]]
"""The reference model's log-probability of every completion token [N], each at its recorded temperature."""


def check_algorithm(algorithm: AlgorithmConfig, training: TrainingConfig, reference: Reference | None = None) -> None:
    """Raise ConfigError for an algorithm that means nothing, or that needs what is not there. Needs no model."""
    check(algorithm)
    name, advantage = algorithm.advantage, estimators.by_name(algorithm.advantage)
    if advantage.needs_values:
        raise ConfigError(f"algorithm.advantage {name!r} needs a value head, which there is none of; choose another")
    if algorithm.kl is not None and reference is None:
        raise ConfigError("algorithm.kl needs a reference model, which there is none of; remove algorithm.kl")
    if training.group_size == 1 and advantage.by_group:
        raise ConfigError(
            f"training.group_size is 1, but algorithm.advantage {name!r} compares the trajectories of a group; "
            "raise it to 2 or more, or choose reinforce++"
        )


class Learner:
    """Owns the trained model and its optimizer.

    Invariant: loss and gradient are sums over (trajectory, step, token) with weights that no layout can change, so
    packing and micro-batch budget change cost and rounding only.
    reference: called once an update if `algorithm.kl` is set.
    Raises ConfigError: see `check_algorithm`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        updates: int,
        reference: Reference | None = None,
    ) -> None:
        check_algorithm(algorithm, training, reference)
        self.model, self.training, self.algorithm, self.updates = model, training, algorithm, updates
        self.updates_done = 0
        self.advantage: Advantage = estimators.by_name(algorithm.advantage)
        self.policy_loss: PolicyLoss = losses.by_name(algorithm.policy_loss)
        self.reference = reference
        kl = algorithm.kl
        self.kl = None if kl is None else KlController(kl.coef, kl.target, kl.horizon)
        self.forward = Forward(
            model,
            training.max_tokens_per_microbatch,
            training.gradient_checkpointing,
            half=training.precision == "bfloat16",
            routing=training.routing_replay,
        )
        self.optimizer = make_optimizer(model, training.optimizer)

    def weights(self) -> dict[str, Tensor]:
        """The current weights, not copied."""
        return unique_weights(self.model)

    def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        """Train on the groups between two publications: `updates_per_batch` updates of equally many groups, in order.

        With several updates, `logp_old` is taken for all of them before the first, if anything compares with it; a
        single one is its own anchor. Trajectories that this model cannot train (see `packing.checks`) are refused, one
        by one.
        """
        size = len(groups) // self.training.updates_per_batch
        sound = [self._sound(groups[i : i + size]) for i in range(0, len(groups), size)]
        batches = [flatten(kept) for kept, _ in sound]
        ahead = len(batches) > 1 and self._compares_with_old()
        old = [self.logprobs(batch) if ahead else None for batch in batches]
        results = [self.update(batch, logp_old) for batch, logp_old in zip(batches, old, strict=True)]
        return [replace(result, refused=refused) for result, (_, refused) in zip(results, sound, strict=True)]

    def _compares_with_old(self) -> bool:
        return self.policy_loss.anchor == "old" or self.algorithm.correction.active or self._penalises()

    def _penalises(self) -> bool:
        """Whether KL is taken off the rewards."""
        return self.algorithm.kl is not None and self.algorithm.kl.where == "reward"

    def _sound(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
        config = self.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        return set_aside(groups, config.vocab_size, context, self.forward.routing)

    def logprobs(self, batch: FlatBatch) -> NDArray[np.floating]:
        """The current log-probability of every completion token [N], each at its recorded temperature."""
        temperature = self._temperature(batch)
        logp = joined([self.forward.scores(tree, temperature) for tree in self.trees(batch)], temperature).logp
        return logp.cpu().numpy()

    def update(self, batch: FlatBatch, logp_old: NDArray[np.floating] | None = None) -> UpdateResult:
        """One optimizer update on the batch. An update without a trainable token changes nothing."""
        if logp_old is None and self._penalises():
            logp_old = self.logprobs(batch)
        logp_ref = None if self.reference is None or self.kl is None else self.reference(batch)
        advantage = self.advantage.per_token(batch, self._signals(logp_old, logp_ref), self.algorithm)
        rate = learning_rate(self.training.optimizer, self.updates_done, self.updates)
        totals = self.accumulate(batch, advantage, logp_old, logp_ref)
        norm = step(self.optimizer, self.model, self.training.optimizer, rate) if batch.mask.any() else 0.0
        self.updates_done += 1
        of_update = {LEARNING_RATE: [rate], GRADIENT_NORM: [norm]}
        if self.kl is not None:
            of_update[KL_COEF] = [self.kl.coef]
            if (kl := totals["kl"]) is not None:
                self.kl = self.kl.after(kl, len(batch.trajectories))
        return UpdateResult(
            metrics=measured("run", of_update) + totals + _batch_metrics(batch, advantage),
            advantage=_by_trajectory(batch, advantage),
        )

    def _signals(self, logp_old: NDArray[np.floating] | None, logp_ref: NDArray[np.floating] | None) -> Signals:
        """What the advantage may use beside the batch."""
        section = self.algorithm.kl
        if section is None or self.kl is None or section.where == "loss" or logp_old is None or logp_ref is None:
            return Signals()
        old, reference = (torch.from_numpy(np.asarray(logp, np.float64)) for logp in (logp_old, logp_ref))
        return Signals(penalty=(self.kl.coef * ESTIMATORS[section.estimator](old, reference)).numpy())

    def accumulate(
        self,
        batch: FlatBatch,
        advantage: NDArray[np.float64],
        logp_old: NDArray[np.floating] | None = None,
        logp_ref: NDArray[np.floating] | None = None,
    ) -> Measures:
        """Add the batch's gradient to the parameters' `.grad`; returns metrics of its tokens and of their layout.

        advantage float64[N]. logp_old [N], or None to anchor on the policy as it is now. logp_ref [N], for KL.
        """
        trees, temperature = self.trees(batch), self._temperature(batch)
        objective = self.objective(batch, advantage, logp_old, logp_ref)
        gradient: Gradient = objective.gradient
        if objective.couples:
            whole = joined([self.forward.scores(tree, temperature) for tree in trees], temperature)
            gradient = looked_up(*objective.gradient(whole))
        scores = [self.forward.backward(tree, temperature, gradient, objective.entropy_coef > 0) for tree in trees]
        packed = {
            PACKED_TOKENS: [len(tree) for tree in trees],
            PACKED_SEQUENCES: [int((tree.depth == 0).sum()) for tree in trees],
        }
        return objective.metrics(joined(scores, temperature)) + measured("run", packed)

    def trees(self, batch: FlatBatch) -> list[PrefixTree]:
        """The batch as it is laid out for the forward pass."""
        return self.forward.trees(
            calls(batch, self.training.routing_replay), self.training.packing, self.training.sharing
        )

    def objective(
        self,
        batch: FlatBatch,
        advantage: NDArray[np.float64],
        logp_old: NDArray[np.floating] | None = None,
        logp_ref: NDArray[np.floating] | None = None,
    ) -> Objective:
        """The batch's loss as a function of its log-probabilities; arguments as for `accumulate`."""
        start, end = self.algorithm.entropy_coef, self.algorithm.entropy_coef_end
        device, correction, kl = self.model.device, self.algorithm.correction, self.algorithm.kl
        tokens = Tokens(
            logp_old=self._tensor(batch.logp_rollout if logp_old is None else logp_old),
            logp_rollout=self._tensor(batch.logp_rollout),
            advantage=self._tensor(advantage),
            mask=torch.from_numpy(batch.mask).to(device),
            step=torch.from_numpy(batch.step_id).to(device),
            trajectory=torch.from_numpy(batch.trajectory_id).to(device),
            logp_ref=None if logp_ref is None else self._tensor(logp_ref),
        )
        weight = self._tensor(token_weights(batch, self.algorithm))

        def reduction(mask: Tensor) -> Tensor:
            return self._tensor(token_weights(batch, self.algorithm, mask.cpu().numpy()))

        known = logp_old is not None and correction.active
        return Objective(
            self.algorithm,
            self.policy_loss,
            tokens,
            weight,
            entropy_coef=start + (end - start) * self.updates_done / max(self.updates, 1),
            anchored=logp_old is None,
            reduction=reduction,
            corrected=corrected(tokens, weight, correction, reduction) if known else None,
            kl_coef=self.kl.coef if self.kl is not None and kl is not None and kl.where == "loss" else 0.0,
        )

    def _temperature(self, batch: FlatBatch) -> Tensor:
        """[N], in the precision of log-probabilities and losses: the model's, but at least float32."""
        # a greedy token is never trained; any temperature serves for its unused log-probability
        return self._tensor(np.where(batch.temperature > 0, batch.temperature, 1.0))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        dtype = torch.float64 if self.model.dtype is torch.float64 else torch.float32
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.model.device, dtype)


def _batch_metrics(batch: FlatBatch, advantage: NDArray[np.float64]) -> Measures:
    """Of its steps and tasks, whatever the packing."""
    lengths = [len(step.prompt_ids) + len(step.completion_ids) for step in batch.steps]
    trained, group = batch.mask, batch.group_id
    moved = np.unique(group[trained & (advantage != 0)])
    still = ~np.isin(np.unique(group[trained]), moved)
    steps = measured("step", {SEQUENCES: [1] * len(lengths), LONGEST_ROW: lengths})
    return steps + measured("task", {ZERO_ADVANTAGE: still.tolist()})


def _by_trajectory(batch: FlatBatch, advantage: NDArray[np.float64]) -> dict[str, float]:
    """trajectory_id -> mean advantage of its trainable tokens, if it has any."""
    own, count = batch.trajectory_id[batch.mask], len(batch.trajectories)
    tokens = np.bincount(own, minlength=count)
    sums = np.bincount(own, advantage[batch.mask], count)
    return {t.trajectory_id: float(sums[j] / tokens[j]) for j, t in enumerate(batch.trajectories) if tokens[j]}
