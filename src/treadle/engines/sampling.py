"""Drawing tokens: an inverse CDF in float64, with the draw addressed by (call seed, token number)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.core.draws import token_uniforms


def sample(logits: Tensor, temperature: Tensor, seeds: NDArray[np.uint64], token: int) -> tuple[Tensor, Tensor]:
    """One token a row.

    logits float32[B, V], temperature float32[B] (0: greedy), seeds uint64[B], token: its number in the completion.
    Returns token ids int64[B] and logprobs float32[B] of the distribution really sampled from: of
    softmax(logits / temperature), and 0 for a greedy token, which is certain.
    """
    greedy = temperature == 0
    logprobs = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    # float64: a float32 CDF moves the boundaries between tokens by up to 7e-5
    cdf = logprobs.double().exp_().cumsum(-1)
    draws = torch.from_numpy(token_uniforms(seeds, token)).to(cdf.device)
    ids = torch.searchsorted(cdf, draws[:, None] * cdf[:, -1:], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    ids = torch.where(greedy, logits.argmax(-1), ids)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    return ids, torch.where(greedy, 0.0, chosen)
