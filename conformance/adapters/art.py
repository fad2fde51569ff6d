"""ART: choices with the engine's ids through `tokenize_trajectory_groups` and `prefix_tree_pack`.

A step whose tokens are all masked is a choice without log-probabilities, which ART reads and does not train. An attempt
that failed is an exception of its group; a retried call is not in a history. Attempts without an advantage are kept
(`drop_zero_advantage_trajectories=False`). The packer then divides all advantages by their mean size, which is not
judged here.
"""

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
from art import Trajectory, TrajectoryGroup
from art.preprocessing.pack import prefix_tree_pack
from art.preprocessing.tokenize import tokenize_trajectory_groups
from openai.types.chat.chat_completion import Choice

from conformance import reference
from conformance.check import NotExpressible, Row

TRAINER, VERSION = "ART", version("openpipe-art")
ADVANTAGES, REDUCTIONS, POPULATION_STD = ("grpo", "grpo_no_std"), ("trajectory_mean",), True
LACKS = "RLOO, returns of steps, other reductions, masks of single tokens"


def choice(s: dict[str, Any]) -> Choice:
    if any(s["mask"]) != all(s["mask"]):
        raise NotExpressible("a mask of single tokens")
    pairs = zip(s["completion"], s["logprobs"], strict=True)
    content = [{"token": str(i), "logprob": logprob, "top_logprobs": []} for i, logprob in pairs]
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "length" if s["stop"] == "length" else "stop",
            "message": {"role": "assistant", "content": ""},
            "logprobs": {"content": content} if all(s["mask"]) else None,
            "prompt_token_ids": s["prompt"],
            "token_ids": s["completion"],
        }
    )


def rows(case: dict[str, Any], advantage: str, reduction: str) -> list[Row]:
    groups = []
    for members in filter(None, reference.by_group(case)):
        made = []
        for a in members:
            choices: list[Any] = [choice(s) for s in a.steps if not s["discarded"]]
            made.append(Trajectory(messages_and_choices=choices, reward=a.reward, metadata={"attempt": a.number}))
        groups.append(TrajectoryGroup(made))
    tokenizer: Any = SimpleNamespace(name_or_path="")
    scaled = {"scale_rewards": advantage == "grpo", "drop_zero_advantage_trajectories": False}
    results = list(tokenize_trajectory_groups(tokenizer, groups, False, **scaled))
    length = max(len(result.token_ids) for result in results)
    packed = prefix_tree_pack(tokenized_results=results, seq_len=length, pack_results=False, verbosity=0)
    found, count = [], int(packed["assistant_mask"].sum())  # the mean that `art.loss.loss_fn` takes
    for result in results:
        size = len(result.token_ids)
        padded = torch.tensor(result.token_ids + [-100] * (length - size))
        here = (packed["tokens"] == padded).all(1).nonzero()
        trained = [at for at, mask in enumerate(result.assistant_mask) if mask]
        weights = [float(packed["weights"][int(here[0]), at]) / count for at in trained]
        old = [result.logprobs[at] for at in trained]
        number = int(result.trajectory.metadata["attempt"])
        found.append(Row(number, result.token_ids, trained, old, [result.advantage] * len(trained), weights))
    return found


VARIANTS = {"": rows}
