"""A policy loss of one's own: a function of log-probabilities, advantages and options, named in the settings.

    python examples/own_loss.py

The loss is REINFORCE with a ratio that is cut at a bound, and no gradient through it. Half a minute on a CPU.
"""

from small import MODEL, SETTINGS, arguments, comparisons
from torch import Tensor

import treadle
from treadle.algorithms.losses import PolicyLoss, Tokens
from treadle.core.config import Config


class Bound(Config):
    """Options of the loss. A wrong or unknown one is refused before anything runs."""

    ratio: float = 2.0


def truncated(logp: Tensor, tokens: Tokens, options: Bound) -> Tensor:
    """Return the loss of each sampled token, [N]. Gradients flow through `logp`; `tokens` has what else is known."""
    ratio = (logp.detach() - tokens.logp_old).exp().clamp(max=options.ratio)
    return -ratio * tokens.advantage * logp


TRUNCATED = PolicyLoss(truncated, options_type=Bound)


def reward(task: treadle.Task, text: str) -> float:
    """Return 1 for the larger digit."""
    return float(text == f"<answer> {task.ground_truth}</answer>")


if __name__ == "__main__":
    options = arguments(updates=20, run="own-loss")
    tasks = comparisons()
    summary = treadle.train(
        reward,
        [task for number, task in enumerate(tasks) if number % 4],
        held_out=tasks[::4],
        model=MODEL,
        run=options.run,
        settings={
            **SETTINGS,
            "orchestration.updates": options.updates,
            "algorithm.policy_loss": "own_loss:TRUNCATED",
            "algorithm.policy_loss_options": {"ratio": 1.5},
        },
    )
    print(f"held out: {summary['held_out_success_before']:.2f} -> {summary['held_out_success_after']:.2f}")
