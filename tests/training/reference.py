"""What every layout must give: each step computed alone, and the helpers to compute it in layouts."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from tests.models import VOCABULARY, each_step, full, gradients, in_float64, make_group, make_step, step_logprobs
from treadle.algorithms import estimators, losses
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig, NormConfig, PpoClipConfig, ValueConfig
from treadle.algorithms.corrections import corrected
from treadle.algorithms.estimators import Signals, advantages
from treadle.algorithms.kl import ESTIMATORS
from treadle.algorithms.losses import Tokens
from treadle.algorithms.reductions import token_weights
from treadle.core.config import build
from treadle.core.metrics import Measures
from treadle.core.registry import names
from treadle.core.support import Probabilities, Support
from treadle.core.types import Group, Ids, Step, Task
from treadle.models.config import LoraConfig
from treadle.models.lora import add_adapters
from treadle.models.weights import adapter_weights
from treadle.packing.flat import Doubles, FlatBatch, flatten
from treadle.packing.layout import Packing, Sharing, slots
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.frozen import make_reference, make_teacher
from treadle.training.learner import Learner
from treadle.training.objective import Gradient, TokenScores, TracedGroups, concat, lookup
from treadle.training.ranks import Ranks
from treadle.training.teacher_prompts import TeacherPrompt, TeacherPrompts, Truths

if TYPE_CHECKING:
    from treadle.training.teacher_server import TeacherServer

LAYOUTS: dict[str, dict[str, Any]] = {
    "step": {"packing": Packing.STEP},
    "chain": {"packing": Packing.CHAIN},
    **{f"tree within {s}": {"packing": Packing.TREE, "sharing": s} for s in Sharing},
}
ADVANTAGES = names("advantages")
COUPLED = "tests.training.coupled:NORMALISED"
LOSSES = [*names("policy_losses"), COUPLED]
REDUCTIONS: tuple[str, ...] = get_args(AlgorithmConfig.model_fields["reduction"].annotation)
SCOPES: tuple[str, ...] = get_args(AlgorithmConfig.model_fields["scope"].annotation)


def algorithm_with(**fields: Any) -> AlgorithmConfig:
    """With the `length_norm` that one reduction needs and others refuse, as they do a scope."""
    if fields.get("reduction") == "seq_mean_token_sum_norm":
        return AlgorithmConfig(**fields, length_norm=7.0)
    return AlgorithmConfig(**{name: value for name, value in fields.items() if name != "scope"})


LORA = LoraConfig(rank=3, alpha=5)


def adapted(model: PreTrainedModel, config: LoraConfig = LORA, seed: int = 1) -> PreTrainedModel:
    """The model with adapters that have learned something."""
    add_adapters(model, config, seed)
    randomize(model, seed)
    return model


def randomize(model: PreTrainedModel, seed: int = 1) -> None:
    """Have a model's adapters change what it computes."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in adapter_weights(model).items():
            if ".lora_B." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=random, dtype=torch.float64) * 0.3)


def make_learner(
    model: PreTrainedModel,
    algorithm: AlgorithmConfig | None = None,
    ranks: Ranks | None = None,
    updates: int = 10,
    reference: PreTrainedModel | None = None,
    traced: TracedGroups | None = None,
    teacher: PreTrainedModel | None = None,
    prompts: TeacherPrompts | None = None,
    server: TeacherServer | None = None,
    truths: Truths | None = None,
    **training: Any,
) -> Learner:
    """Of a copy of the model, with a value head that has learned something if there is one."""
    config = TrainingConfig(**training)
    algorithm = algorithm or AlgorithmConfig()
    model = copy.deepcopy(model)
    learner = Learner(
        model,
        config,
        algorithm,
        updates,
        reference=make_reference(algorithm.kl, model, reference),
        teacher=make_teacher(algorithm.distillation, model, copy.deepcopy(teacher), server, prompts, truths),
        ranks=ranks,
        traced=traced,
    )
    if learner.value_head is not None:
        with torch.no_grad():
            for own, drawn in zip(learner.value_head.parameters(), drawn_head(model).parameters(), strict=True):
                own.copy_(like(drawn, own))
    return learner


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor, sharded as the other one is."""
    if isinstance(other, DTensor):
        return distribute_tensor(tensor.detach(), other.device_mesh, other.placements)
    return tensor


def drawn_head(model: PreTrainedModel) -> nn.Linear:
    """A value head that has learned something."""
    head = nn.Linear(model.config.hidden_size, 1, dtype=model.dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            drawn = np.random.default_rng(parameter.numel()).normal(0, 0.5, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(drawn))
    return head


def earlier_values(batch: FlatBatch, algorithm: AlgorithmConfig) -> Doubles | None:
    """What some value head said [N] at the start of the batch, if the advantage needs it."""
    needed = estimators.by_name(algorithm.advantage).needs_values
    return np.random.default_rng(2).normal(0, 1, len(batch)) if needed else None


def advantage_of(batch: FlatBatch, algorithm: AlgorithmConfig) -> Doubles:
    """With `earlier_values`, if needed."""
    return advantages(batch, algorithm, Signals(values=earlier_values(batch, algorithm)))


def accumulated(
    learner: Learner,
    groups: Sequence[Group],
    old: NDArray[np.floating] | None = None,
    reference: NDArray[np.floating] | None = None,
) -> tuple[dict[str, Tensor], Measures]:
    """The gradient that a learner adds to nothing, and its metrics."""
    batch = flatten(groups)
    learner.trained.zero_grad()
    metrics = learner.accumulate(
        batch, advantage_of(batch, learner.algorithm), old, reference, earlier_values(batch, learner.algorithm)
    )
    return learner_gradients(learner), metrics


def learner_gradients(learner: Learner) -> dict[str, Tensor]:
    """Of the model, and of the value head if there is one."""
    return {**gradients(learner.model), **_head_gradients(learner.value_head)}


def _head_gradients(head: nn.Module | None) -> dict[str, Tensor]:
    return {} if head is None else {f"value_head.{name}": value for name, value in gradients(head).items()}


def over_ranks(
    learner: Learner,
    groups: Sequence[Group],
    old: NDArray[np.floating] | None,
    ranks: int,
    reference: NDArray[np.floating] | None = None,
) -> tuple[dict[str, Tensor], Measures]:
    """As `accumulated`, with slots of trees dealt to so many replicas, whose gradients add up."""
    batch = flatten(groups)
    temperature = torch.from_numpy(np.where(batch.temperature > 0, batch.temperature, 1)).to(learner.model.dtype)
    objective = learner.objective(
        batch, advantage_of(batch, learner.algorithm), old, reference, earlier_values(batch, learner.algorithm)
    )
    laid_out = slots(learner.trees(batch), ranks, learner.forward.passes)
    gradient: Gradient = objective.gradient
    if objective.couples:
        parts = [learner.forward.scores(tree, temperature, slot.passes) for slot in laid_out for tree in slot.trees]
        gradient = lookup(objective.gradient(concat(parts, temperature)))
    total: dict[str, Tensor] = {}
    scores: list[TokenScores] = []
    for rank in range(ranks):
        learner.trained.zero_grad()
        scores += [
            learner.forward.backward(slot.trees[rank], temperature, gradient, objective.entropy_coef > 0, slot.passes)
            for slot in laid_out
        ]
        for name, value in learner_gradients(learner).items():
            total[name] = total[name] + value if name in total else value
    return total, objective.metrics(concat(scores, temperature))


# Each step alone


@dataclass(frozen=True, slots=True)
class Separate:
    """Loss and metrics of steps computed one by one; `loss` carries the gradient."""

    loss: Tensor
    metrics: dict[str, float]


def separate(
    model: PreTrainedModel,
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    old: NDArray[np.floating] | None = None,
    reference: NDArray[np.floating] | None = None,
    head: nn.Linear | None = None,
    advantage: Doubles | None = None,
) -> Separate:
    """Any policy loss and reduction. One plain call of the model for each step; then the loss over all tokens.

    advantage: default: of the rewards.
    """
    batch = flatten(groups)
    dtype = model.dtype

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(dtype)

    found = [step_logprobs(model, step) for step in batch.steps if len(step.completion_ids)]
    empty = torch.zeros(0, dtype=dtype)
    logp, entropy = (torch.cat([empty, *(pair[at] for pair in found)]) for at in (0, 1))
    anchor = logp.detach() if old is None else tensor(old)
    trained = torch.from_numpy(batch.mask)
    tokens = Tokens(
        logp_old=anchor,
        logp_rollout=tensor(batch.logp_rollout),
        advantage=tensor(advantage_of(batch, algorithm) if advantage is None else advantage),
        mask=trained,
        step=torch.from_numpy(batch.step_id),
        trajectory=torch.from_numpy(batch.trajectory_id),
    )
    policy_loss, correction = losses.by_name(algorithm.policy_loss), algorithm.correction
    loss_options = losses.options_of(algorithm)
    policy = policy_loss.per_token(logp, tokens, loss_options)
    weight = tensor(token_weights(batch, algorithm))
    gap = (anchor - tokens.logp_rollout).abs()[trained]
    count = max(int(trained.sum()), 1)
    metrics = {
        "entropy": float(entropy.detach()[trained].sum()) / count,
        "logprob_gap_mean": float(gap.sum()) / count,
        "logprob_gap_max": max([0.0, *gap.tolist()]),
        "trainable_tokens": int(trained.sum()),
        **ratio_metrics((logp.detach() - anchor)[trained].tolist(), (anchor - tokens.logp_rollout)[trained].tolist()),
        "trainable_fraction": int(trained.sum()) / max(len(trained), 1),
    }
    if policy_loss.clipped is not None:
        cut = policy_loss.clipped(logp.detach(), tokens, loss_options)
        metrics["clip_fraction"] = float(cut[trained].sum()) / count
    if correction.active:
        found_correction = corrected(
            tokens, weight, correction, lambda mask: tensor(token_weights(batch, algorithm, mask.numpy()))
        )
        weight, policy = found_correction.weight, policy * found_correction.factor
        metrics["correction_masked_fraction"] = float((~found_correction.keep)[trained].sum()) / count
        metrics["correction_weight_mean"] = float(found_correction.factor[trained].sum()) / count
    if algorithm.kl is not None and reference is not None:
        kl = ESTIMATORS[algorithm.kl.estimator](logp, tensor(reference))
        policy = policy + algorithm.kl.coef * kl
        metrics["kl"] = float(kl.detach()[trained].sum()) / count
    if head is not None:
        value = torch.cat([empty, *(step_values(model, head, step) for step in batch.steps)])
        start = earlier_values(batch, algorithm)
        assert start is not None
        error, told = _value_error(value, tensor(start), tokens.advantage, trained, algorithm.value)
        policy = policy + algorithm.value.coef * error
        metrics.update(told)
    loss = (weight * (policy - algorithm.entropy_bonus[0] * entropy)).sum()
    return Separate(loss, {**metrics, "loss": float(loss.detach())})


def separate_gradient(
    model: PreTrainedModel,
    groups: Sequence[Group],
    algorithm: AlgorithmConfig,
    old: NDArray[np.floating] | None = None,
    reference: NDArray[np.floating] | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of `separate`, and its metrics."""
    model.zero_grad()
    head = drawn_head(model) if estimators.by_name(algorithm.advantage).needs_values else None
    alone = separate(model, groups, algorithm, old, reference, head)
    if alone.loss.requires_grad:
        alone.loss.backward()
    found = {**gradients(model), **_head_gradients(head)}
    model.zero_grad()
    return found, alone.metrics


def ratio_metrics(log_ratios: list[float], gaps: list[float]) -> dict[str, float]:
    """Of trainable tokens: log-probability now less at the batch's start, and at its start less the engine's."""
    ratios, count = [math.exp(value) for value in log_ratios], max(len(gaps), 1)
    return {
        "ratio_mean": sum(ratios) / count,
        "ratio_max": max(ratios, default=0.0),
        "ratio_min": min(ratios, default=0.0),
        "logprob_gap_kl": sum(math.exp(gap) - 1 - gap for gap in gaps) / count,
    }


def step_distributions(model: PreTrainedModel, step: Step) -> Tensor:
    """Log-probabilities [C, V] of each completion token's alternatives, at its temperature."""
    ids = torch.from_numpy(step.full_ids.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(step.prompt_ids) - 1 : -1]
    found: Tensor = (logits / float(np.float32(step.sampling.temperature or 1.0))).log_softmax(-1)
    return found


def step_values(model: PreTrainedModel, head: nn.Linear, step: Step) -> Tensor:
    """[C]: of the state in which each completion token was sampled, by a plain forward pass of the step alone."""
    ids = torch.from_numpy(step.full_ids.astype(np.int64))[None]
    hidden: Tensor = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    found: Tensor = head(hidden[0, len(step.prompt_ids) - 1 : -1])[:, 0]
    return found


def _value_error(
    value: Tensor, start: Tensor, advantage: Tensor, trained: Tensor, config: ValueConfig
) -> tuple[Tensor, dict[str, float]]:
    """Half the squared error of each token [N], and the metrics of values."""
    target = start + advantage
    error = (value - target) ** 2 / 2
    metrics = {}
    count = max(int(trained.sum()), 1)
    if config.clip is not None:
        held = torch.minimum(torch.maximum(value, start - config.clip), start + config.clip)
        worse = (held - target) ** 2 / 2 > error
        metrics["value_clip_fraction"] = float(worse[trained].sum()) / count
        error = torch.where(worse, (held - target) ** 2 / 2, error)
    metrics["value_loss"] = float(error.detach()[trained].sum()) / count
    wanted, left = full(target[trained]), full((target - value)[trained])
    size = np.abs([0.0, *wanted, *full(value)[full(trained) > 0]]).max()
    constant = not len(wanted) or wanted.max() - wanted.min() <= 1e-5 * size  # of rounding
    metrics["value_explained_variance"] = 0.0 if constant else 1 - left.var() / wanted.var()
    return error, metrics


def literal_loss(
    model: PreTrainedModel, groups: Sequence[Group], algorithm: AlgorithmConfig, old: NDArray[np.float64] | None
) -> Separate:
    """PPO-clip token by token from the definitions: no flat arrays, no packing, stock attention."""
    trained = [
        (group, trajectory, step)
        for group in groups
        for trajectory in group.trajectories
        if trajectory.reward is not None
        for step in trajectory.steps
    ]
    tokens = sum(int(step.mask.sum()) for *_, step in trained)
    trajectories = len({t.trajectory_id for _, t, step in trained if step.mask.any()})
    steps = sum(bool(step.mask.any()) for *_, step in trained)
    if algorithm.length_norm is None:
        weight = 1 / max(tokens, 1)
    else:
        weight = 1 / (algorithm.length_norm * max(trajectories if algorithm.scope == "trajectory" else steps, 1))
    clip = build(PpoClipConfig, algorithm.policy_loss_options)
    norm_by_std = build(NormConfig, algorithm.advantage_options).norm_by_std
    loss = torch.zeros((), dtype=torch.float64)
    metrics = {"entropy": 0.0, "clip_fraction": 0.0, "logprob_gap_mean": 0.0, "logprob_gap_max": 0.0}
    at, log_ratios, gaps = 0, [], []
    for group, trajectory, step in trained:
        rewards = [t.reward for t in group.trajectories if t.reward is not None]
        assert trajectory.reward is not None
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(len(rewards) - 1, 1))
        advantage = trajectory.reward - mean if max(rewards) > min(rewards) else 0.0
        if norm_by_std:
            advantage /= std + 1e-6
        if not len(step.completion_ids):
            continue
        logp, entropy = step_logprobs(model, step)
        for number in range(len(step.completion_ids)):
            if step.mask[number]:
                ratio = (logp[number] - (logp[number].detach() if old is None else old[at])).exp()
                bounded = ratio.clamp(1 - clip.eps_low, 1 + clip.eps_high)
                policy = -torch.minimum(ratio * advantage, bounded * advantage)
                loss = loss + weight * (policy - algorithm.entropy_bonus[0] * entropy[number])
                anchor = float(logp[number].detach()) if old is None else float(old[at])
                gap = abs(anchor - float(step.logprobs[number]))
                gaps.append(anchor - float(step.logprobs[number]))
                log_ratios.append(float(logp[number].detach()) - anchor)
                cut = (advantage > 0 and ratio > 1 + clip.eps_high) or (advantage < 0 and ratio < 1 - clip.eps_low)
                metrics["entropy"] += float(entropy[number].detach()) / tokens
                metrics["clip_fraction"] += float(cut) / tokens
                metrics["logprob_gap_mean"] += gap / tokens
                metrics["logprob_gap_max"] = max(metrics["logprob_gap_max"], gap)
            at += 1
    metrics["trainable_fraction"] = tokens / max(sum(len(step.completion_ids) for *_, step in trained), 1)
    metrics |= {**ratio_metrics(log_ratios, gaps), "loss": float(loss.detach()), "trainable_tokens": tokens}
    return Separate(loss, metrics)


def updated_by_hand(
    model: PreTrainedModel,
    groups: Sequence[Group],
    optimizer: OptimizerConfig,
    loss: Callable[[NDArray[np.float64]], Separate] | None = None,
) -> list[Separate]:
    """Make two updates on one batch in place, each step a plain call of the model.

    loss: of log-probabilities at the batch's start; default: PPO-clip.
    """
    loss = loss or (lambda old: literal_loss(model, groups, AlgorithmConfig(), old))
    adam = torch.optim.AdamW(
        model.parameters(), optimizer.learning_rate, optimizer.betas, weight_decay=optimizer.weight_decay
    )
    with torch.no_grad():
        old = np.concatenate(
            [full(step_logprobs(model, s)[0]) for g in groups for t in g.trajectories for s in t.steps]
        )
    made = []
    for _ in range(2):
        adam.zero_grad()
        made.append(loss(old))
        made[-1].loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), optimizer.max_grad_norm)
        adam.step()
    return made


def earlier_policy(model: PreTrainedModel, groups: Sequence[Group], seed: int = 0) -> NDArray[np.float64]:
    """Log-probabilities [N] a little off the model's, so that some ratios are clipped."""
    with torch.no_grad():
        own = [full(step_logprobs(model, s)[0]) for s in flatten(groups).steps if len(s.completion_ids)]
    logp = np.concatenate([np.empty(0), *own])
    return logp + np.random.default_rng(seed).normal(0, 0.3, len(logp))


class OtherPrompts(TeacherPrompts):
    """Each step's prompt backwards, with something before it; nothing for every third step."""

    def __init__(self) -> None: ...

    def of(self, batch: FlatBatch) -> list[TeacherPrompt | None]:
        return [
            None if n % 3 == 2 else (np.append(s.prompt_ids, 7)[::-1].copy(), ()) for n, s in enumerate(batch.steps)
        ]


class FewIds(Truths):
    """Ids that the tests' model has; of two lengths."""

    def __init__(self) -> None:
        self._limit = 100

    def _ids(self, task: Task) -> Ids:
        return np.array([1, 2, 3][: 2 + int(task.task_id[-1]) % 2], np.int32)


def taught_advantages(
    policy: PreTrainedModel,
    teacher: PreTrainedModel,
    groups: Sequence[Group],
    section: DistillationConfig,
    prompts: TeacherPrompts | None = None,
) -> Doubles:
    """[N], by hand: rewards A + coef (log-probability of the teacher less the policy's), by steps and in float64."""
    batch = flatten(groups)
    seen = [(step.prompt_ids, ()) for step in batch.steps] if prompts is None else prompts.of(batch)
    models = [in_float64(copy.deepcopy(model)) for model in (policy, teacher)]
    differences = []
    with torch.no_grad():
        for step, prompt in zip(batch.steps, seen, strict=True):
            mine = full(step_logprobs(models[0], step)[0])
            theirs = mine if prompt is None else full(step_logprobs(models[1], replace(step, prompt_ids=prompt[0]))[0])
            differences.append(theirs - mine)
    difference = np.where(batch.mask, np.concatenate(differences), 0.0)
    return np.asarray(section.rewards * advantages(batch, AlgorithmConfig()) + section.coefs[0] * difference)


def scale(batch: FlatBatch, algorithm: AlgorithmConfig) -> float:
    """How large the gradient's terms are. Where they cancel, their rounding is all that is left."""
    advantage, values = advantage_of(batch, algorithm), earlier_values(batch, algorithm)
    size = np.abs(advantage) + algorithm.entropy_bonus[0]
    if values is not None:
        size = size + algorithm.value.coef * (np.abs(values + advantage) + 1)
    return float((token_weights(batch, algorithm) * size).sum())


# Batches


def forked_groups(seed: int = 0, groups: int = 2, length: int = 4, size: int = 2) -> list[Group]:
    """Some of everything that a tree shares: appended steps, forks inside prompts and completions, duplicates, steps
    that are prefixes of others; trajectories of one group from one opening, groups from one system prompt."""
    random = np.random.default_rng(seed)
    system = random.integers(0, VOCABULARY, 3).astype(np.int32)

    def ids(size: int) -> Ids:
        return random.integers(0, VOCABULARY, size).astype(np.int32)

    made = []
    for index in range(groups):
        opening = np.concatenate([system, ids(length)])
        trajectories: list[tuple[list[Step], float | None]] = []
        for attempt in range(size):
            mask, logprobs = random.random(length) < 0.8, -random.exponential(1, length)
            first = make_step(opening, ids(length), 0.8, mask.tolist(), logprobs)
            steps = [first]
            for _ in range(2):
                last = steps[-1].full_ids
                steps.append(make_step(np.concatenate([last, ids(2)]), ids(length)))
            whole = steps[-1]
            half = length // 2
            steps += [
                make_step(whole.prompt_ids, whole.completion_ids),  # a duplicate
                make_step(whole.prompt_ids, whole.completion_ids[:half]),  # a prefix of another
                make_step(whole.prompt_ids, np.concatenate([whole.completion_ids[:half], ids(2)])),  # leaves it inside
                make_step(np.concatenate([steps[1].full_ids[:-half], ids(1)]), ids(length)),  # forks inside the history
            ]
            trajectories.append((steps, (0.0, 1.0, 0.7)[attempt]))
        shared = trajectories[0][0][1]
        trajectories[1][0].append(make_step(shared.prompt_ids, shared.completion_ids))  # with another advantage
        made.append(make_group(trajectories, index))
    return made


def cut(groups: Sequence[Group], seed: int = 0) -> list[Group]:
    """Each third token could have been any; another one of one to nine, one of most."""
    random = np.random.default_rng(seed)

    def of(step: Step) -> Step:
        sizes = random.choice([0, 1, 2, 9, VOCABULARY - 1], len(step.completion_ids))
        ids = [
            sorted({int(token), *random.choice(VOCABULARY, size - 1, replace=False).tolist()}) if size else None
            for token, size in zip(step.completion_ids, sizes, strict=True)
        ]
        return replace(step, support=Support.of(ids))

    return each_step(of, groups)


def with_experts(groups: Sequence[Group], every: int = 1) -> list[Group]:
    """Each sampled token was computed by two random experts of four. every: of which steps that is told."""
    random, number = np.random.default_rng(0), itertools.count(1)

    def of(step: Step) -> Step:
        drawn = random.random((len(step.completion_ids), 2, 4)).argsort(-1)[..., :2]
        return step if next(number) % every else replace(step, routing=drawn.astype(np.int16))

    return each_step(of, groups)


def with_probabilities(groups: Sequence[Group], count: int, seed: int = 0) -> list[Group]:
    """As another model would have sampled: its probabilities of the `count` most probable ids that could have been."""
    random = np.random.default_rng(seed)

    def of_token(step: Step, token: int) -> tuple[Ids, NDArray[np.float32]]:
        ids = possible(step, token)
        values = random.dirichlet(np.full(len(ids), 0.5)).astype(np.float32)
        most = np.sort(np.argsort(-values)[:count])
        return ids[most], values[most]

    def of(step: Step) -> Step:
        tokens = [of_token(step, token) for token in range(len(step.completion_ids))]
        return replace(step, probabilities=Probabilities.of_tokens(tokens))

    return each_step(of, groups)


def possible(step: Step, token: int) -> Ids:
    """The ids that could have been sampled."""
    ids = step.support[token : token + 1].ids if step.support is not None else ()
    return ids if len(ids) else np.arange(VOCABULARY, dtype=np.int32)  # type: ignore[return-value]
