"""`Learner`: groups in, one or more optimizer updates out.

    groups -flatten-> FlatBatch -advantage, token_weights-> arrays [N]
                          |-calls-> PrefixTree* -slots-> this rank's -Forward-> logp, entropy
                                                                                     | Ranks.gather
                                                                                     v
                                                                                    [N] -Objective-> gradient -> AdamW

Shapes: N completion tokens of an update, J graded trajectories, P pairs of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.algorithms import estimators, losses
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.corrections import corrected
from treadle.algorithms.distillation import turn_credit
from treadle.algorithms.estimators import Signals
from treadle.algorithms.kl import ESTIMATORS, KlController
from treadle.algorithms.losses import PolicyLoss, Tokens
from treadle.algorithms.reductions import token_weights
from treadle.algorithms.values import ValueTargets
from treadle.core.errors import ConfigError, TrainingStopped
from treadle.core.metrics import Measures, Metric, measured
from treadle.core.outcomes import by_role
from treadle.core.processes import release_freed_memory
from treadle.core.support import Probabilities, Support
from treadle.core.trainer import UpdateResult
from treadle.core.types import Group
from treadle.models.vision import Tower
from treadle.models.weights import adapter_weights
from treadle.packing.checks import split_untrainable
from treadle.packing.flat import FlatBatch, calls, flatten
from treadle.packing.layout import Slot, balance, slots
from treadle.packing.tree import PrefixTree
from treadle.training.config import TrainingConfig, check_algorithm
from treadle.training.forward import Forward
from treadle.training.frozen import Frozen, Teacher
from treadle.training.lm_head import MostProbable, make_value_head
from treadle.training.metrics import (
    FORCED_SHARE,
    GRADIENT_NORM,
    KL_COEF,
    LEARNING_RATE,
    LONGEST_ROW,
    PACKED_SEQUENCES,
    PACKED_TOKENS,
    PADDED_PASSES,
    SEQUENCES,
    SLOT_BALANCE,
    TRUTH_LOGPROB,
    ZERO_ADVANTAGE,
)
from treadle.training.objective import Gradient, Objective, TokenScores, TracedGroups, lookup
from treadle.training.optimizer import learning_rate, make_optimizer, step
from treadle.training.ranks import OneRank, Ranks, ReadWeights
from treadle.training.teacher_prompts import TeacherPrompt, asked_about

if TYPE_CHECKING:
    from treadle.training.teacher_server import TeacherServer


class Learner:
    """The trained model, or this rank's shard of it, with its optimizer.

    Invariant: loss and gradient are sums over (trajectory, step, token) with weights that no layout can change, so
    packing and micro-batch budget affect only cost and rounding.
    reference: of `algorithm.kl`; teacher: of `algorithm.distillation` (`training.frozen`). ranks: processes that share
    the model; default: this one. traced: groups with traces in results; default: none. read: loads the weights of a
    model that is on the meta device on every rank.
    vision: see `Scorer`. value_head: None unless the advantage needs values. trained: the model with its value head.
    Raises ConfigError: see `check_algorithm`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        updates: int,
        *,
        reference: Frozen | None = None,
        teacher: Teacher | None = None,
        ranks: Ranks | None = None,
        traced: TracedGroups | None = None,
        read: ReadWeights | None = None,
        vision: Tower | None = None,
    ) -> None:
        check_algorithm(algorithm, training)
        self.ranks, self.traced = ranks or OneRank(), traced or TracedGroups()
        self.model, self.training, self.algorithm, self.updates = model, training, algorithm, updates
        self.updates_done = 0
        self.policy_loss: PolicyLoss = losses.by_name(algorithm.policy_loss)
        self.loss_options = losses.options_of(algorithm)
        self.value_head = make_value_head(model) if estimators.by_name(algorithm.advantage).needs_values else None
        kl = algorithm.kl
        self.kl = None if kl is None else KlController(kl.coef, kl.target, kl.horizon)
        self.reference, self.teacher = reference, teacher
        if (kl is None, algorithm.distillation is None) != (reference is None, teacher is None):
            raise ValueError("reference and teacher are those of the algorithm: see make_reference and make_teacher")
        budget = training.max_tokens_per_microbatch
        self.forward = Forward(
            model,
            budget,
            training.gradient_checkpointing,
            half=training.precision == "bfloat16",
            routing=training.routing_replay,
            value_head=self.value_head,
            vision=vision,
        )
        # With adapters on one rank, only the base is in bfloat16, and nothing is gathered.
        adapted = bool(adapter_weights(model)) and self.ranks.size == 1
        half = training.precision == "bfloat16_pure" and not adapted
        self.ranks.shard(self.forward, half=half, read=read)
        for scorer in (reference, teacher):
            if scorer is not None:
                scorer.open(self.forward, self.ranks, training, half, read)
        self.trained: nn.Module = model if self.value_head is None else self.forward.scorer
        self.optimizer = make_optimizer(self.trained, training.optimizer)

    @property
    def version(self) -> int:
        """Policy version at the start of the current batch: the number of batches trained before."""
        return self.updates_done // self.training.updates_between_publications

    def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        """Make the updates between two publications: `updates_per_batch` in each of `epochs_per_batch` epochs.

        The groups are split evenly among the updates, in order. With a value head, or if a comparison with the old
        policy spans several updates, scores at the start of the batch are computed first. Trajectories that this model
        cannot train, and groups with too few left (`packing.checks`), are named in `UpdateResult.refused`.
        """
        size = len(groups) // self.training.updates_per_batch
        sound = [self._sound(by_role(groups[i : i + size])) for i in range(0, len(groups), size)]
        batches = [flatten(kept) for kept, _ in sound]
        several = self.training.updates_between_publications > 1
        ahead = self.value_head is not None or (several and self._compares_with_old())
        starts = [self.scores(batch) if ahead else None for batch in batches]
        results = [
            replace(self.update(batch, start), refused=refused)
            for _ in range(self.training.epochs_per_batch)
            for batch, start, (_, refused) in zip(batches, starts, sound, strict=True)
        ]
        release_freed_memory()
        return results

    def _compares_with_old(self) -> bool:
        section = self.algorithm.distillation
        distills = section is not None and section.form == "advantage"
        return self.policy_loss.anchor == "old" or self.algorithm.correction.active or self._penalises() or distills

    def _sampler(self, batch: FlatBatch) -> Probabilities | None:
        if not self._centers or batch.probabilities is None:
            return None
        return replace(batch.probabilities, cap=self.algorithm.correction.token_tis)

    @property
    def _centers(self) -> bool:
        return self.algorithm.centered_scores != "off"

    def _penalises(self) -> bool:
        return self.algorithm.kl is not None and self.algorithm.kl.where == "reward"

    def _sound(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
        config = self.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        least = self.training.least_graded(estimators.needs_group(self.algorithm))
        return split_untrainable(groups, config.vocab_size, context, self.forward.routing, least, self._centers)

    def scores(self, batch: FlatBatch) -> TokenScores:
        """Score every completion token [N] with the current policy, at its recorded temperature."""
        return self._scores(self.forward, batch)

    def _scores(self, forward: Forward, batch: FlatBatch, top: MostProbable | None = None) -> TokenScores:
        laid_out, temperature = self._slots(forward, batch), self._temperature(batch)
        return self._scores_of(forward, laid_out, temperature, top, batch.support)

    def _scores_of(
        self,
        forward: Forward,
        laid_out: Sequence[Slot],
        temperature: Tensor,
        top: Tensor | MostProbable | None,
        support: Support | None,
    ) -> TokenScores:
        own = [(slot.trees[self.ranks.rank], slot.passes) for slot in laid_out]
        parts = [forward.scores(tree, temperature, passes, top, support) for tree, passes in own]
        return self.ranks.gather(parts, temperature)

    def logprobs(self, batch: FlatBatch) -> NDArray[np.floating]:
        """Return the current log-probability of every completion token [N], as in `scores`."""
        return self.scores(batch).logp.cpu().numpy()

    def update(self, batch: FlatBatch, start: TokenScores | None = None) -> UpdateResult:
        """Make one optimizer update: scores -> advantages -> weights of tokens -> forward and backward -> step.

        start: `scores` at the batch's start; None: current ones, computed only if needed. Without a trainable token the
        weights do not change. Raises ConfigError for non-finite advantages, and TrainingStopped for a non-finite loss
        or gradient; the weights are then unchanged.
        """
        if start is None and (self.value_head is not None or self._penalises()):
            start = self.scores(batch)
        logp_old = None if start is None else start.logp.cpu().numpy()
        values = None if start is None or start.value is None else start.value.cpu().numpy()
        reference = self.reference
        logp_ref = None if reference is None else self.frozen_scores(reference, batch).logp.cpu().numpy()
        teacher, known = self.teacher_scores(batch), self.truth_logprobs(batch)

        advantage = self._advantages(batch, logp_old, logp_ref, values, self._credit(batch, known))
        objective = self.objective(batch, advantage, logp_old, logp_ref, values, teacher)
        scores, layout = self._backward(batch, objective)
        if teacher is not None:
            advantage = objective.advantage(scores).cpu().double().numpy()
        totals = objective.metrics(scores) + layout
        self._check_loss(totals["loss"], scores, objective)
        rate = learning_rate(self.training.optimizer, self.updates_done, self.updates)
        norm = step(self.optimizer, self.trained, self.training.optimizer, rate) if batch.mask.any() else 0.0

        self.updates_done += 1
        measures = {LEARNING_RATE: [rate], GRADIENT_NORM: [norm]} | ({KL_COEF: [self.kl.coef]} if self.kl else {})
        truths = measured("step", {} if known is None else {TRUTH_LOGPROB: known.tolist()})
        result = UpdateResult(
            metrics=measured("run", measures) + totals + truths + _batch_metrics(batch, advantage),
            advantage=_by_trajectory(batch, advantage),
            traces=self.traced.traces(batch, partial(objective.trace, scores), self.updates_done),
        )
        if self.kl is not None and (kl := totals["kl"]) is not None:
            self.kl = self.kl.after(kl, len(batch.trajectories))
        for frozen in self._frozen:
            frozen.after_update(self.updates_done)
        return result

    @property
    def _frozen(self) -> list[Frozen]:
        models = self.reference, None if self.teacher is None else self.teacher.frozen
        return [model for model in models if model is not None]

    def frozen_scores(self, model: Frozen, batch: FlatBatch, top: MostProbable | None = None) -> TokenScores:
        """Score every completion token [N] with the reference or the teacher."""
        with model.in_place() as forward:
            return self._scores(forward, batch, top)

    def teacher_scores(self, batch: FlatBatch) -> TokenScores | None:
        """Return the teacher's scores of all N tokens, NaN in steps it is not asked about; None without a teacher.

        Raises ConfigError for a log-probability that is not finite, and as `TeacherPrompts.of` does.
        """
        section, teacher = self.algorithm.distillation, self.teacher
        if section is None or teacher is None or section.form == "turns":
            return None
        prompts: list[TeacherPrompt | None] = [(step.prompt_ids, step.images) for step in batch.steps]
        # From the first rank, in case the function is random.
        if (made := teacher.prompts) is not None:
            prompts = self.ranks.every(lambda: [] if self.ranks.rank else made.of(batch))[0]
        asked = replace(batch, steps=tuple(map(asked_about, batch.steps, prompts)))
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        top = MostProbable(min(section.top_k, vocabulary), vocabulary) if section.by_top_k else None
        unasked = np.array([prompt is None for prompt in prompts], np.bool_)[batch.step_id]
        if teacher.frozen is None:
            scores = self._served_scores(teacher.server, asked, batch.mask & ~unasked, top)
        else:
            scores = self.frozen_scores(teacher.frozen, asked, top)
        trained = scores.logp[torch.from_numpy(batch.mask & ~unasked).to(scores.logp.device)]
        if not bool(trained.isfinite().all()):
            raise ConfigError(
                "algorithm.distillation: the teacher gives a sampled token the log-probability "
                f"{trained[~trained.isfinite()][0].item()}; use another teacher"
            )
        for tensor in (scores.logp, scores.top):
            if tensor is not None:
                tensor[torch.from_numpy(unasked).to(tensor.device)] = torch.nan
        return scores

    def truth_logprobs(self, batch: FlatBatch) -> NDArray[np.float64] | None:
        """Return the teacher's log-probability of the ground truth after each played step's prompt, float64[K].

        None unless `algorithm.distillation.form` is `turns`. Raises ConfigError as `Truths` does, and for a value that
        is not finite.
        """
        if self.teacher is None or (truths := self.teacher.truths) is None:
            return None
        texts = self.ranks.every(lambda: [] if self.ranks.rank else truths.of(batch))[0]
        asked = flatten(truths.asked(batch, texts))
        if self.teacher.frozen is None:
            scores = self._served_scores(self.teacher.server, asked, asked.mask, None)
        else:
            scores = self.frozen_scores(self.teacher.frozen, asked)
        logp = scores.logp.cpu().double().numpy()
        known: NDArray[np.float64] = np.bincount(asked.step_id, logp, len(asked.steps)).astype(np.float64)
        if not np.isfinite(known).all():
            raise ConfigError(
                "algorithm.distillation: the teacher gives a ground truth the log-probability "
                f"{known[~np.isfinite(known)][0]}; use another teacher"
            )
        return known

    def _credit(self, batch: FlatBatch, known: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
        section = self.algorithm.distillation
        if section is None or known is None:
            return None
        return self._scheduled(section.coefs) * turn_credit(known, batch.trajectory_of_played, section.repaid)

    def _served_scores(
        self, server: TeacherServer | None, batch: FlatBatch, wanted: NDArray[np.bool_], top: MostProbable | None
    ) -> TokenScores:
        """Score tokens by the teacher's server, called by the first rank. wanted bool[N]: NaN elsewhere."""
        if (other := batch.temperature[wanted & (batch.temperature != 1)]).size:
            raise ConfigError(
                f"algorithm.distillation.teacher is a server, which scores at temperature 1, and a step was sampled at "
                f"{other[0]:g}; sample at 1, or give the teacher as a path"
            )
        vocabulary = self.model.config.get_text_config().vocab_size
        count = 0 if top is None else top.count
        wanted_of_step = np.bincount(batch.step_id, wanted, len(batch.steps)) > 0
        steps = [step if wants else None for step, wants in zip(batch.steps, wanted_of_step, strict=True)]
        sizes = np.diff(batch.step_start).tolist()
        served = self.ranks.every(lambda: None if server is None else server.scores(steps, sizes, count, vocabulary))[0]
        assert served is not None
        logp = self._tensor(served.logp)
        return TokenScores(
            np.arange(len(batch)),
            logp,
            torch.zeros_like(logp),
            top=None if served.top is None else self._tensor(served.top),
            top_ids=None if served.top_ids is None else torch.from_numpy(served.top_ids).to(logp.device),
        )

    def _advantages(
        self,
        batch: FlatBatch,
        logp_old: NDArray[np.floating] | None,
        logp_ref: NDArray[np.floating] | None,
        values: NDArray[np.floating] | None,
        credit: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Return the advantage of each token [N]. Raises ConfigError unless it is one finite number per token."""
        of_head = None if values is None else values.astype(np.float64)
        signals = Signals(self._penalty(logp_old, logp_ref), of_head, credit)
        return estimators.advantages(batch, self.algorithm, signals)

    def _check_loss(self, loss: float | None, scores: TokenScores, objective: Objective) -> None:
        """Raise TrainingStopped if the loss is not finite though all log-probabilities are."""
        if loss is not None and not math.isfinite(loss) and bool(torch.isfinite(scores.logp).all()):
            raise TrainingStopped(
                f"algorithm.policy_loss: {self.algorithm.policy_loss!r} gave the loss {loss} in update "
                f"{self.updates_done + 1}, though all log-probabilities are finite; no weights were changed"
                f"{objective.refusal(scores)}"
            )

    def _penalty(
        self, logp_old: NDArray[np.floating] | None, logp_ref: NDArray[np.floating] | None
    ) -> NDArray[np.float64] | None:
        """Return the KL penalty float64[N] subtracted from each token's reward; None without one."""
        section = self.algorithm.kl
        if section is None or self.kl is None or section.where == "loss" or logp_old is None or logp_ref is None:
            return None
        old, reference = (torch.from_numpy(np.asarray(logp, np.float64)) for logp in (logp_old, logp_ref))
        penalty: NDArray[np.float64] = (self.kl.coef * ESTIMATORS[section.estimator](old, reference)).numpy()
        return penalty

    def accumulate(
        self,
        batch: FlatBatch,
        advantage: NDArray[np.float64],
        logp_old: NDArray[np.floating] | None = None,
        logp_ref: NDArray[np.floating] | None = None,
        values: NDArray[np.floating] | None = None,
        teacher: TokenScores | None = None,
    ) -> Measures:
        """Add the batch's gradient to the parameters' `.grad`; return metrics of its tokens and of their layout.

        advantage float64[N], from rewards. logp_old [N], or None to compare with the current policy. logp_ref [N], for
        KL. values [N], at the batch's start: a value head learns values + advantage. teacher: `teacher_scores`.
        """
        objective = self.objective(batch, advantage, logp_old, logp_ref, values, teacher)
        scores, layout = self._backward(batch, objective)
        return objective.metrics(scores) + layout

    def _backward(self, batch: FlatBatch, objective: Objective) -> tuple[TokenScores, Measures]:
        """Add the objective's gradient; return the scores of all N that it was computed at, and layout metrics."""
        laid_out, temperature = self._slots(self.forward, batch), self._temperature(batch)
        gradient: Gradient = objective.gradient
        if objective.couples:
            scores = self._scores_of(self.forward, laid_out, temperature, objective.top_ids, batch.support)
            gradient = lookup(objective.gradient(scores))
        parts = [
            self.forward.backward(
                slot.trees[self.ranks.rank],
                temperature,
                gradient,
                objective.entropy_coef > 0,
                slot.passes,
                objective.top_ids,
                batch.support,
                self._sampler(batch),
            )
            for slot in laid_out
        ]
        return self.ranks.gather(parts, temperature), _layout_metrics(laid_out)

    def trees(self, batch: FlatBatch) -> list[PrefixTree]:
        return self._trees(self.forward, batch)

    def _trees(self, forward: Forward, batch: FlatBatch) -> list[PrefixTree]:
        packed = calls(batch, forward.routing is not None)
        return forward.trees(packed, self.training.packing, self.training.sharing)

    def _slots(self, forward: Forward, batch: FlatBatch) -> list[Slot]:
        trees = self._trees(forward, batch)
        return slots(trees, self.ranks.size, forward.passes)

    def objective(
        self,
        batch: FlatBatch,
        advantage: NDArray[np.float64],
        logp_old: NDArray[np.floating] | None = None,
        logp_ref: NDArray[np.floating] | None = None,
        values: NDArray[np.floating] | None = None,
        teacher: TokenScores | None = None,
    ) -> Objective:
        """Return the batch's loss as a function of its log-probabilities; arguments as for `accumulate`."""
        section, tensor = self.algorithm.distillation, self._tensor
        device, correction, kl = self.model.device, self.algorithm.correction, self.algorithm.kl
        tokens = Tokens(
            logp_old=tensor(batch.logp_rollout if logp_old is None else logp_old),
            logp_rollout=tensor(batch.logp_rollout),
            advantage=tensor(advantage),
            mask=torch.from_numpy(batch.mask).to(device),
            step=torch.from_numpy(batch.step_id).to(device),
            trajectory=torch.from_numpy(batch.trajectory_id).to(device),
            logp_ref=None if logp_ref is None else tensor(logp_ref),
            logp_teacher=None if teacher is None else teacher.logp,
            logp_top=None if teacher is None else teacher.top,
        )
        weight = tensor(token_weights(batch, self.algorithm))

        def reduction(mask: Tensor) -> Tensor:
            return tensor(token_weights(batch, self.algorithm, mask.cpu().numpy()))

        correct_now = logp_old is not None and correction.active
        lag = self.version - batch.version
        return Objective(
            self.algorithm,
            self.policy_loss,
            self.loss_options,
            tokens,
            weight,
            entropy_coef=self._scheduled(self.algorithm.entropy_bonus),
            anchored=logp_old is None,
            reduction=reduction,
            corrected=corrected(tokens, weight, correction, reduction) if correct_now else None,
            kl_coef=self.kl.coef if self.kl is not None and kl is not None and kl.where == "loss" else 0.0,
            lag=torch.from_numpy(lag).to(device) if lag.any() else None,
            first=self.updates_done % self.training.updates_between_publications == 0,
            truncated=torch.from_numpy(batch.truncated).to(device) if batch.truncated.any() else None,
            teacher_coef=0.0 if section is None else self._scheduled(section.coefs),
            top_ids=None if teacher is None else teacher.top_ids,
            values=None if values is None else ValueTargets(tensor(values), tensor(values + advantage)),
        )

    def _scheduled(self, ends: tuple[float, float]) -> float:
        """Return a coefficient that changes linearly from the first update to the end of the run."""
        return ends[0] + (ends[1] - ends[0]) * self.updates_done / max(self.updates, 1)

    def move(self, device: torch.device) -> None:
        """Move models, value head and the optimizer's moments, or this rank's shards of them, to another device."""
        for forward in (self.forward, *(model.forward for model in self._frozen)):
            forward.scorer.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                # Step counters stay on their device.
                if isinstance(value, torch.Tensor) and value.ndim:
                    state[name] = value.to(device)

    def begin_here(self) -> None:
        """Call after weights changed outside `update`; refreshes copies of the policy."""
        for frozen in self._frozen:
            frozen.begin_here()

    def _temperature(self, batch: FlatBatch) -> Tensor:
        # Greedy tokens are never trained; any temperature serves for their unused log-probabilities.
        return self._tensor(np.where(batch.temperature > 0, batch.temperature, 1.0))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        dtype = torch.float64 if self.model.dtype is torch.float64 else torch.float32
        # before the transfer: Apple's GPUs have no float64
        values = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        return values.to(self.model.device)


def _layout_metrics(laid_out: Sequence[Slot]) -> Measures:
    """Return metrics of all ranks' trees and, for several ranks, of their load balance."""
    trees = [tree for slot in laid_out for tree in slot.trees if len(tree)]
    values: dict[Metric, list[float]] = {
        PACKED_TOKENS: [len(tree) for tree in trees],
        PACKED_SEQUENCES: [int((tree.depth == 0).sum()) for tree in trees],
    }
    if any(len(slot.trees) > 1 for slot in laid_out):
        values |= {SLOT_BALANCE: [balance(laid_out)], PADDED_PASSES: [slot.padded for slot in laid_out]}
    return measured("run", values)


def _batch_metrics(batch: FlatBatch, advantage: NDArray[np.float64]) -> Measures:
    """Return metrics of the batch's steps and tasks, which do not depend on packing."""
    lengths = [len(step.prompt_ids) + len(step.completion_ids) for step in batch.steps]
    trained, group = batch.mask, batch.group_id
    moved = np.unique(group[trained & (advantage != 0)])
    still = ~np.isin(np.unique(group[trained]), moved)
    steps = measured("step", {SEQUENCES: [1] * len(lengths), LONGEST_ROW: lengths})
    forced = {} if batch.support is None else {FORCED_SHARE: (batch.support.counts == 1)[trained].tolist()}
    return steps + measured("task", {ZERO_ADVANTAGE: still.tolist()}) + measured("token", forced)


def _by_trajectory(batch: FlatBatch, advantage: NDArray[np.float64]) -> dict[str, float]:
    """Return trajectory_id -> mean advantage of its trainable tokens, if any."""
    trajectory, count = batch.trajectory_id[batch.mask], len(batch.trajectories)
    tokens = np.bincount(trajectory, minlength=count)
    sums = np.bincount(trajectory, advantage[batch.mask], count)
    return {t.trajectory_id: float(sums[j] / tokens[j]) for j, t in enumerate(batch.trajectories) if tokens[j]}
