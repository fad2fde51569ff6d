"""A policy loss whose tokens are not independent, for tests: registered by nobody, named `module:attribute`."""

import torch
from torch import Tensor

from treadle.algorithms.losses import PolicyLoss, Tokens
from treadle.core.config import Config


def _per_token(logp: Tensor, tokens: Tokens, options: Config) -> Tensor:
    """-(s / mean s) A, with s the geometric mean of a step's trained ratios, one for all of its tokens (as in GSPO).

    Divided by the mean over the batch's steps on purpose: no sum over parts of the batch gives it.
    """
    steps = int(tokens.step.max()) + 1 if len(tokens.step) else 0
    mask = tokens.mask.to(logp.dtype)
    total = torch.zeros(steps, dtype=logp.dtype).index_add(0, tokens.step, (logp - tokens.logp_old) * mask)
    count = torch.zeros(steps, dtype=logp.dtype).index_add(0, tokens.step, mask)
    ratio = (total / count.clamp(min=1)).exp()
    trained = count > 0
    mean = ratio[trained].mean() if bool(trained.any()) else torch.ones((), dtype=logp.dtype)
    return -(ratio / mean)[tokens.step] * tokens.advantage


NORMALISED = PolicyLoss(_per_token, couples=True)
