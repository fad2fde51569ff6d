"""Treadle: records as `treadle.Group`, rows read from the packed trees, loss and gradient by the learner."""

from functools import cache, partial
from typing import Any

import numpy as np

from conformance.check import Row
from conformance.reference import ADVANTAGES, REDUCTIONS  # noqa: F401
from conformance.tiny import TinyModel
from treadle import Group, SamplingParams, Step, Task, Trajectory, __version__
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import advantages
from treadle.algorithms.reductions import token_weights
from treadle.core.errors import Cause
from treadle.core.types import DropReason, Failure, Status, StopReason
from treadle.packing.flat import FlatBatch, flatten
from treadle.training.config import TrainingConfig
from treadle.training.learner import Learner

TRAINER, VERSION, RTOL = "Treadle", __version__, 1e-9
ARRAYS = {"prompt_ids": ("prompt", "i4"), "completion_ids": ("completion", "i4"), "mask": ("mask", "?")}
ARRAYS |= {"policy_versions": ("versions", "i4"), "logprobs": ("logprobs", "f4")}


def step(s: dict[str, Any]) -> Step:
    arrays: dict[str, Any] = {name: np.array(s[key], dtype) for name, (key, dtype) in ARRAYS.items()}
    outcome = {"reward": s["reward"], "dropped": DropReason.REJECTED if s["discarded"] else None}
    return Step(**arrays, sampling=SamplingParams(), stop_reason=StopReason(s["stop"]), **outcome)


def batch_of(case: dict[str, Any]) -> FlatBatch:
    groups = []
    for g, group in enumerate(case["groups"]):
        made = []
        for n, (reward, steps) in enumerate((a["reward"], tuple(map(step, a["steps"]))) for a in group):
            failed: Any = Status.FAILED, Failure(Cause.ENVIRONMENT, "failed")
            outcome = failed if reward is None else (Status.DONE, None)
            made.append(Trajectory(f"g{g:06d}.{n}", f"task-{g}", n, steps, reward, *outcome))
        groups.append(Group(f"g{g:06d}", g, 0, g, Task(f"task-{g}"), tuple(made)))
    return flatten(groups)


def config(case: dict[str, Any], advantage: str, reduction: str) -> AlgorithmConfig:
    options = {"rloo": {}, "step_return": {"gamma": case["gamma"]}}.get(advantage, {"norm_by_std": advantage == "grpo"})
    norm = {"reduction": "seq_mean_token_sum_norm", "length_norm": case["length_norm"]}
    fields = {"policy_loss": "importance_sampling", "reduction": reduction} | (norm if reduction == "sum_norm" else {})
    return AlgorithmConfig(advantage=advantage.removesuffix("_no_std"), advantage_options=options, **fields)


@cache
def learner(packing: Any, algorithm: str) -> Learner:
    config = AlgorithmConfig.model_validate_json(algorithm)
    return Learner(TinyModel(), TrainingConfig(packing=packing), config, updates=1)


def rows(case: dict[str, Any], advantage: str, reduction: str, packing: str) -> list[Row]:
    batch, algorithm = batch_of(case), config(case, advantage, reduction)
    values = batch.logp_rollout, advantages(batch, algorithm), token_weights(batch, algorithm)
    number = [n for n, a in enumerate(a for group in case["groups"] for a in group) if a["reward"] is not None]
    made = []
    for tree in learner(packing, algorithm.model_dump_json()).trees(batch):
        for source, target, i in zip(tree.source, tree.target_ids, tree.flat, strict=True):
            path = [int(tree.token_ids[j]) for j in range(source + 1) if source < tree.subtree_end[j]]
            numbers = ([float(value[i])] for value in values)
            if batch.mask[i]:
                made.append(Row(number[batch.trajectory_id[i]], [*path, int(target)], [len(path)], *numbers))
    return made


def loss(case: dict[str, Any], advantage: str, reduction: str, packing: str) -> tuple[float, Any]:
    batch, algorithm = batch_of(case), config(case, advantage, reduction)
    trained = learner(packing, algorithm.model_dump_json())
    trained.optimizer.zero_grad(set_to_none=False)
    measures = trained.accumulate(batch, advantages(batch, algorithm))
    return float(measures["loss"] or 0.0), trained.model.lm_head.weight.grad.clone().numpy()


VARIANTS = {packing: partial(rows, packing=packing) for packing in ("step", "chain", "tree")}
LOSSES = {packing: partial(loss, packing=packing) for packing in VARIANTS}
