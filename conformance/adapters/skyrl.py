"""SkyRL: step-wise generator output through the trainer's own post-processing, batch, advantages and reduction.

One row per call, as agent harnesses record them (`generator.step_wise_trajectories`), merged or not
(`generator.merge_stepwise_output`). A retried call is not in SkyRL's output.
"""

from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from loguru import logger
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

from conformance import reference
from conformance.check import NotExpressible, Row

TRAINER, VERSION = "SkyRL", version("skyrl")
ADVANTAGES = ("grpo", "grpo_no_std", "rloo")
NAMES = {"trajectory_mean": "sequence_mean", "task_mean": "prompt_mean", "sum_norm": "seq_mean_token_sum_norm"}
REDUCTIONS = ("token_mean", *NAMES)
LACKS = "failed attempts (there is no reward of none), returns of steps"


def output_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the `GeneratorOutput`, a step's reward on its last token, as `SkyRLGymGenerator` makes it."""
    steps = []
    for a in reference.attempts(case):
        used = [s for s in a.steps if not s["discarded"]]
        if a.reward is None:
            raise NotExpressible("an attempt without a reward")
        rest = a.reward - sum(s["reward"] for s in used)
        for s in used:
            last = s is used[-1]
            rewards = [0.0] * len(s["completion"])
            if reward := s["reward"] + rest * last:
                if not rewards:
                    raise NotExpressible("a reward of a reply without tokens")
                rewards[-1] = reward
            steps.append((s, rewards, TrajectoryID(str(a.group), a.number), last))
    columns = [("prompt_token_ids", "prompt"), ("response_ids", "completion"), ("stop_reasons", "stop")]
    output: dict[str, Any] = {name: [s[key] for s, *_ in steps] for name, key in columns}
    output |= {"rollout_logprobs": [s["logprobs"] for s, *_ in steps], "rewards": [r for _, r, *_ in steps]}
    output |= {"loss_masks": [list(map(int, s["mask"])) for s, *_ in steps]}
    return output | {"trajectory_ids": [t for *_, t, _ in steps], "is_last_step": [last for *_, last in steps]}


def rows(case: dict[str, Any], advantage: str, reduction: str, merged: bool) -> list[Row]:
    cfg, groups = SkyRLTrainConfig(), len(case["groups"])
    cfg.generator.step_wise_trajectories, cfg.generator.merge_stepwise_output = True, merged
    cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = groups
    cfg.trainer.critic.model.path, algorithm = None, cfg.trainer.algorithm
    algorithm.advantage_estimator, algorithm.grpo_norm_by_std = advantage.split("_")[0], advantage == "grpo"
    algorithm.loss_reduction, algorithm.max_seq_len = NAMES.get(reduction, reduction), int(case["length_norm"])
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg, trainer.tokenizer, trainer.all_metrics = cfg, SimpleNamespace(pad_token_id=0), {}
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
    output = output_of(case)
    uids = [ident.instance_id for ident in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    data = trainer.convert_to_training_input(output, uids)
    data["values"] = None
    value = trainer.compute_advantages_and_returns(data)["advantages"].clone()
    data["advantages"] = torch.ones_like(value)
    boundaries = data.metadata["policy_mini_batch_boundaries"], data.metadata["policy_prompt_boundaries"]
    weight, made = trainer._normalize_advantages(data, *boundaries)["advantages"], []
    for b, ident in enumerate(output["trajectory_ids"]):
        ids = data["sequences"][b][data["attention_mask"][b].bool()].tolist()
        at = data["loss_mask"][b].nonzero()[:, 0]
        old, width = data["rollout_logprobs"][b][at].tolist(), value.shape[1]
        trained = [len(ids) - width + int(j) for j in at]
        made.append(Row(ident.repetition_id, ids, trained, old, value[b][at].tolist(), weight[b][at].tolist()))
    return made


VARIANTS = {"step-wise": partial(rows, merged=False), "step-wise, merged": partial(rows, merged=True)}
logger.remove()
