"""tinker-cookbook: trajectories of transitions through `compute_advantages` and `assemble_training_data`.

Tinker's server sums token losses, so there are no reductions here. An attempt that failed is in no group
(`RetryOnFailure` and `rollout_errors`); a retried call is not in a trajectory.
"""

from importlib.metadata import version
from typing import Any

import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, Trajectory, TrajectoryGroup, Transition

from conformance import reference
from conformance.check import NotExpressible, Row

TRAINER, VERSION = "tinker-cookbook", version("tinker-cookbook")
ADVANTAGES, REDUCTIONS = ("grpo_no_std",), ()
LACKS = "reductions (Tinker's server sums), deviation, RLOO, returns of steps, masks of single tokens"


def transition(s: dict[str, Any], last: bool) -> Transition:
    if any(s["mask"]) != all(s["mask"]):
        raise NotExpressible("a mask of single tokens")
    metrics = {} if all(s["mask"]) else {PARSE_ERROR_MASKED_METRIC_KEY: 1.0}
    action = TokensWithLogprobs(s["completion"], s["logprobs"], "length" if s["stop"] == "length" else "stop")
    return Transition(tinker.ModelInput.from_ints(s["prompt"]), action, s["reward"], last, metrics)


def rows(case: dict[str, Any], advantage: str, reduction: str) -> list[Row]:
    groups, numbers = [], []
    for members in filter(None, reference.by_group(case)):
        trajectories, final = [], []
        for a in members:
            used = [s for s in a.steps if not s["discarded"]]
            transitions = [transition(s, s is used[-1]) for s in used]
            trajectories.append(Trajectory(transitions, tinker.ModelInput.empty()))
            final.append(a.reward - sum(s["reward"] for s in used))
        groups.append(TrajectoryGroup(trajectories, final, [{} for _ in members]))
        numbers.append([a.number for a in members])
    made = []
    for datum, meta in zip(*assemble_training_data(groups, compute_advantages(groups)), strict=True):
        inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
        ids = [*datum.model_input.to_ints(), inputs["target_tokens"][-1]]
        trained = [at + 1 for at, mask in enumerate(inputs["mask"]) if mask]
        old, value = ([inputs[name][at - 1] for at in trained] for name in ("logprobs", "advantages"))
        made.append(Row(numbers[meta["group_idx"]][meta["traj_idx"]], ids, trained, old, value))
    return made


VARIANTS = {"": rows}
