"""Miles: a sample per call, merged or not, through the rollout manager's rewards and the training loss's reduction.

`merge_samples` is its default, and refuses what it cannot merge; `--generate-multi-samples` keeps every call a sample.
Its servers (sglang, Megatron) need a GPU to import; nothing here calls them, and empty modules take their place.
"""

from argparse import Namespace
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from conformance import reference
from conformance.check import NotExpressible, Row
from conformance.standins import stand_in

stand_in("sglang", "sglang_router", "megatron")
from miles.backends.training_utils import loss, parallel
from miles.ray.rollout import RolloutManager
from miles.rollout.generate_utils.sample_utils import merge_samples
from miles.utils.types import Sample

TRAINER, VERSION = "Miles", version("miles-rl")
ADVANTAGES, REDUCTIONS = ("grpo", "grpo_no_std"), ("token_mean", "trajectory_mean")
LACKS = "failed attempts (a reward of none), RLOO, returns of steps, other reductions"
parallel.set_parallel_state(parallel.ParallelState(*[parallel.GroupInfo(0, 1, None)] * 7))
STATUS = {"stop": Sample.Status.COMPLETED, "length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED}


def samples(a: reference.Attempt, merged: bool) -> list[Sample]:
    if a.reward is None:
        raise NotExpressible("an attempt without a reward")
    made = []
    for s in (s for s in a.steps if not s["discarded"]):
        masks, mine = list(map(int, s["mask"])), {"group_index": a.group, "index": a.number, "reward": a.reward}
        mine |= {"tokens": [*s["prompt"], *s["completion"]], "response_length": len(masks), "loss_mask": masks}
        made.append(Sample(**mine, rollout_log_probs=list(s["logprobs"]), status=STATUS[s["stop"]]))
    try:
        return [merge_samples(made, SimpleNamespace(decode=str))] if merged else made
    except AssertionError as error:
        raise NotExpressible(str(error)) from error


def rows(case: dict[str, Any], advantage: str, reduction: str, merged: bool) -> list[Row]:
    every = [sample for a in reference.attempts(case) for sample in samples(a, merged)]
    args = MagicMock(
        **{"advantage_estimator": "grpo", "grpo_std_normalization": advantage == "grpo", "rewards_normalization": True},
        **{"rollout_batch_size": len(case["groups"]), "n_samples_per_prompt": len(case["groups"][0])},
        **{"calculate_per_token_loss": reduction == "token_mean", "use_dynamic_global_batch_size": True},
        **{"kl_coef": 0, "use_rollout_logprobs": True, "normalize_advantages": False, "reward_key": None},
        **{"recompute_loss_function": False, "qkv_format": "thd", "loss_type": "custom_loss"},
        **{"custom_loss_function_path": f"{__name__}.total"},  # its gradient: the weights,
    )
    hooks = {f"custom_{name}_func": None for name in ("reward_post_process", "convert_samples_to_train_data")}
    manager = SimpleNamespace(args=args, _dynamic_global_batch_size=len(every), **hooks)
    methods = RolloutManager.__ray_metadata__.modified_class
    manager._post_process_rewards = partial(methods._post_process_rewards, manager)
    data = methods._convert_samples_to_train_data(manager, every)
    data |= {name: [torch.tensor(x) for x in data[name]] for name in ("rollout_log_probs", "loss_masks")}
    data["total_lengths"] = [len(x) for x in data["tokens"]]
    loss.compute_advantages_and_returns(args, data)
    values, made = torch.zeros(sum(data["response_lengths"]), requires_grad=True), []
    reduced, normalizer, _ = loss.loss_function(args, data, 1, values)
    (weight,) = torch.autograd.grad(reduced / normalizer, values)
    for i, (sample, weights) in enumerate(zip(every, weight.split(data["response_lengths"]), strict=True)):
        at = data["loss_masks"][i].nonzero()[:, 0]
        trained = (len(sample.tokens) - sample.response_length + at).tolist()
        numbers = (x[at].tolist() for x in (data["rollout_log_probs"][i], data["advantages"][i], weights))
        made.append(Row(sample.index, sample.tokens, trained, *numbers))
    return made


def total(args: Namespace, batch: Any, values: torch.Tensor, sum_of_sample_mean: Any) -> tuple[torch.Tensor, dict]:
    return sum_of_sample_mean(values), {}


VARIANTS = {"": partial(rows, merged=True), "--generate-multi-samples": partial(rows, merged=False)}
