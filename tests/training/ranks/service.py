"""What each rank of these tests answers: how far it is from one process alone, which it trains beside."""

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.models import distance, exact, norm, random_groups, tiny
from tests.training.reference import (
    FewIds,
    OtherPrompts,
    accumulated,
    adapted,
    earlier_policy,
    make_learner,
    updated_by_hand,
)
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.errors import TrainingStopped
from treadle.core.types import Group
from treadle.models.weights import published, trained, weights_digest, whole
from treadle.packing.flat import flatten
from treadle.training import lm_head
from treadle.training.config import OptimizerConfig, WarmStartConfig
from treadle.training.learner import Learner
from treadle.training.objective import TracedGroups
from treadle.training.ranks import Ranks
from treadle.training.sft import Supervised

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5)


@dataclass(frozen=True)
class Case:
    """A batch and how it is trained. old: another policy's log-probabilities are compared with, not the model's own.
    reference: KL is to another policy than the model's own. teacher: there is one, another model; all is traced.
    context: the teacher is asked otherwise."""

    groups: Sequence[Group]
    family: str = "qwen3"
    double: bool = True
    old: bool = False
    reference: bool = False
    teacher: bool = False
    context: bool = False
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = False


@dataclass(frozen=True)
class Compared:
    """Relative distances from one process alone, and both one's metrics."""

    gradient: float
    metrics: Mapping[str, float]
    alone: Mapping[str, float]


class Parity:
    """Answers the tests on one rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def gradient(self, case: Case) -> Compared:
        """Of one batch, added to nothing."""
        alone, shared = self._learners(case)
        model = alone.model
        old = earlier_policy(model, case.groups) if case.old else None
        reference = earlier_policy(model, case.groups, seed=1) if case.reference else None
        (wanted, expected), (found, metrics) = (
            accumulated(each, case.groups, old, reference) for each in (alone, shared)
        )
        return Compared(_relative(found, wanted), dict(metrics), dict(expected))

    def near(self, case: Case) -> float:
        """Relative distance of the gradient from that of one process in float32."""
        _, shared = self._learners(case)
        alone, _ = self._learners(replace(case, training={**case.training, "precision": "float32"}))
        return _relative(*(accumulated(each, case.groups)[0] for each in (shared, alone)))

    def trained(self, case: Case, batches: int = 2) -> dict[str, float]:
        """Relative distances after some batches, of weights, moments and the results' metrics."""
        alone, shared = self._learners(case)
        gap = 0.0
        for number in range(batches):
            groups = case.groups if number == 0 else random_groups(number)
            results, others = alone.train_batch(groups), shared.train_batch(groups)
            for mine, theirs in zip(results, others, strict=True):
                assert mine.refused == theirs.refused and mine.advantage.keys() == theirs.advantage.keys()
                for trajectory in mine.advantage:
                    gap = max(gap, _gap(mine.advantage[trajectory], theirs.advantage[trajectory]))
                for name in mine.metrics:
                    gap = max(gap, _gap(mine.metrics[name], theirs.metrics[name]))
        found = {"metrics": gap, "weights": _relative(_weights(shared), _weights(alone))}
        for moment in ("exp_avg", "exp_avg_sq"):
            found[moment] = _relative(_moments(shared, moment), _moments(alone, moment))
        return found

    def by_hand(self, case: Case) -> float:
        """Relative distance of the weights from those of two updates on a batch that are computed step by step."""
        alone, shared = self._learners(replace(case, training={**case.training, "epochs_per_batch": 2}))
        shared.train_batch(case.groups)
        updated_by_hand(alone.model, case.groups, OPTIMIZER)
        return _relative(_weights(shared), _weights(alone))

    def advantages(self, case: Case) -> list[float]:
        """Of each token, in the first update of a batch."""
        (result,) = self._learners(case)[1].train_batch(case.groups)
        return [value for trace in result.traces for value in trace.advantage.tolist()]

    def supervised(self, budget: int) -> dict[str, float]:
        """Relative distance of weights after three steps of a warm start, and of the losses."""
        conversations = [
            [(step.prompt_ids, step.completion_ids) for step in trajectory.steps]
            for group in random_groups(3, groups=2)
            for trajectory in group.trajectories
        ]
        config = WarmStartConfig(demonstrations="x", steps=3, learning_rate=1e-3)
        losses, weights = [], []
        for learner in self._learners(
            Case([], training={"max_tokens_per_microbatch": budget}, algorithm={"advantage": "gae"})
        ):
            supervised = Supervised(learner.forward, config, learner.ranks)
            losses.append([supervised.step(conversations, number) for number in range(3)])
            weights.append(_weights(learner))
        return {"weights": _relative(weights[1], weights[0]), "loss": max(map(_gap, *losses))}

    def digests(self) -> tuple[str, str]:
        """Of the published weights, alone and shared."""
        alone, shared = self._learners(Case([], double=False))
        return weights_digest(published(alone.model)), weights_digest(published(shared.model))

    def head_in_chunks(self, case: Case) -> Compared:
        """As `gradient`, with logits made a few rows at a time, and once more in the backward pass."""
        before, lm_head.CHUNK_BYTES = lm_head.CHUNK_BYTES, 2000
        try:
            return self.gradient(case)
        finally:
            lm_head.CHUNK_BYTES = before

    def same_seed_twice(self, case: Case) -> bool:
        """Whether training twice gives the same bits."""
        digests = []
        for _ in range(2):
            _, shared = self._learners(case)
            shared.train_batch(case.groups)
            digests.append(weights_digest(published(shared.model)))
        return len(set(digests)) == 1

    def same_when_moved(self, case: Case) -> bool:
        """Whether training goes on with the same bits after everything was moved to the host and back."""
        digests = []
        for moved in (False, True):
            _, shared = self._learners(case)
            shared.train_batch(case.groups)
            if moved:
                device = shared.model.device
                for where in (torch.device("cpu"), device):
                    shared.move(where)
            shared.train_batch(case.groups)
            digests.append(weights_digest(published(shared.model)))
        return len(set(digests)) == 1

    def passes(self, case: Case) -> list[tuple[int, int]]:
        """(trees, passes) of each slot of this batch."""
        _, shared = self._learners(case)
        return [
            (sum(len(tree) > 0 for tree in slot.trees), slot.passes)
            for slot in shared._slots(shared.forward, flatten(case.groups))
        ]

    def _learners(self, case: Case) -> tuple[Learner, Learner]:
        model = (exact if case.double else tiny)(case.family, **case.model)
        if case.lora:
            adapted(model)
        algorithm = AlgorithmConfig(**case.algorithm)
        training = {"optimizer": OPTIMIZER, **case.training}
        of_one = {**training, "precision": "bfloat16"} if training.get("precision") == "bfloat16_pure" else training
        teacher = (exact if case.double else tiny)(seed=5) if case.teacher else None
        traced = TracedGroups(share=float(case.teacher))
        prompts = OtherPrompts() if case.context else None
        section = algorithm.distillation
        truths = FewIds() if section is not None and section.form == "turns" else None
        alone = make_learner(model, algorithm, teacher=teacher, prompts=prompts, truths=truths, **of_one)
        for module in (model, teacher) if self.ranks.rank else ():
            if module is not None:
                module.to("meta")  # type: ignore[arg-type]  # the first rank's weights are everybody's
                module.tie_weights()  # which that has undone
        beside: dict[str, Any] = {"traced": traced, "teacher": teacher, "prompts": prompts, "truths": truths}
        return alone, make_learner(model, algorithm, self.ranks, **beside, **training)

    # what goes wrong

    def fail(self, where: int, how: str) -> float:
        """Every rank but one waits for the others in a collective."""
        if self.ranks.rank != where:
            return self.ranks.add(1.0)
        match how:
            case "raise":
                raise ZeroDivisionError("made up")
            case "refuse":
                raise TrainingStopped("made up")
            case "die":
                print("last words", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(1000)
            case "outlive":
                while not select.select([0], [], [], 0.1)[0]:  # its caller holds the other end
                    pass
                return self.ranks.add(1.0)
            case "unpicklable":
                self.ranks.add(1.0)
                return lambda: None  # type: ignore[return-value]
        raise AssertionError(how)

    def refuse(self) -> None:
        """All ranks raise."""
        raise TrainingStopped(f"rank {self.ranks.rank}")

    def pid(self) -> int:
        return os.getpid()

    def echo(self, *what: Any) -> Any:
        return what

    def settings(self) -> tuple[int, bool, int]:
        return torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), dist.get_world_size()


def _relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return distance(found, wanted) / max(norm(wanted), 1e-300)


def _gap(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b) / (1 + abs(a))


def _weights(learner: Learner) -> dict[str, Tensor]:
    return {name: whole(parameter).detach().clone() for name, parameter in trained(learner.trained)}


def _moments(learner: Learner, moment: str) -> dict[str, Tensor]:
    state = learner.optimizer.state
    return {name: whole(state[parameter][moment]) for name, parameter in trained(learner.trained) if parameter in state}
