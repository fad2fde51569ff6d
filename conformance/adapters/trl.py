"""TRL: turns through AsyncGRPO's reconciler, scoring and tree packing (`trl.experimental.async_grpo`).

Its loss is a mean over all trained tokens. `fork_threshold_tokens` is 1024 by default and 0 under its OpenEnv harness.
An attempt that failed has a reward of None; a retried call is not among the turns.
"""

import asyncio
from collections import defaultdict
from functools import partial
from importlib.metadata import version
from typing import Any

from accelerate import PartialState
from trl.experimental.async_grpo import async_rollout_worker as worker
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TurnRecord
from trl.experimental.async_grpo.packing import TreeRow

from conformance import reference
from conformance.check import Row

TRAINER, VERSION = "TRL", version("trl")
ADVANTAGES, REDUCTIONS, POPULATION_STD = ("grpo",), ("token_mean",), True
LACKS = "advantages without deviation, RLOO, returns of steps, reductions other than the token mean"


def turn(s: dict[str, Any]) -> TurnRecord:
    return TurnRecord(s["prompt"], s["completion"], s["logprobs"], list(map(int, s["mask"])))


def rows(case: dict[str, Any], advantage: str, reduction: str, threshold: int) -> list[Row]:
    loop, packed = object.__new__(worker._AsyncRolloutLoop), TreeRow()
    loop.reward_funcs, loop.reward_func_names = [], ["reward"]
    loop._env_reward_types, loop._provides_rollout_reward = [], True
    everyone = reference.attempts(case)
    for g in range(len(case["groups"])):
        members = [a for a in everyone if a.group == g]
        turns = [[turn(s) for s in a.steps if not s["discarded"]] for a in members]
        sequences = [worker._chain_to_sequences(of_one, "", threshold)[0] for of_one in turns]
        none: list[Any] = [[] for _ in members]
        zero, rewards = [0] * len(members), [a.reward for a in members]
        group = RolloutGroup(none, {}, none, none, sequences, zero, zero, 0, g, [None] * len(members), rewards)
        order = [a.number for a, of_one in zip(members, sequences, strict=True) for _ in of_one]
        for number, sample in zip(order, asyncio.run(loop._score_group(group)), strict=True):
            fields = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id")
            packed.add({name: getattr(sample, name) for name in fields} | {"attempt": number})
    return read(packed)


def read(packed: TreeRow) -> list[Row]:
    """Return a row per trained token: the path through the packed tree that its position attends to."""
    made, tree = [], {name: tensor.tolist() for name, tensor in packed.pack().items()}
    count = len(tree["token_index"])
    paths = defaultdict(list)
    for segment, start in enumerate(tree["tree_cu_seqlens_q"][:-1]):
        keys = tree["tree_kv_index"][slice(*tree["tree_cu_seqlens_k"][segment : segment + 2])]
        for position in range(start, tree["tree_cu_seqlens_q"][segment + 1]):
            paths[position] = keys[: keys.index(position) + 1]
    for i, position in enumerate(tree["token_index"]):
        ids = [*(tree["input_ids"][k] for k in paths[position]), tree["shift_labels"][position]]
        attempt = packed.samples[tree["segment_id"][i]]["attempt"]
        numbers = [tree["old_log_probs"][i]], [tree["advantages"][i]], [1 / count]
        made.append(Row(attempt, ids, [len(ids) - 1], *numbers))
    return made


VARIANTS = {"": partial(rows, threshold=1024), "fork_threshold_tokens=0": partial(rows, threshold=0)}
PartialState(cpu=True)  # which its logger asks for
