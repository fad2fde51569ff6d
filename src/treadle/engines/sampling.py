"""Drawing tokens: temperature, filters, then an inverse CDF in float64 at keyed draws from the caller.

Filters work as in vLLM and in its order: min_p, top_k, top_p, each on the result of the previous one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.core.errors import EngineError
from treadle.core.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Rules:
    """Sampling settings of B rows; None if every row has the neutral value.

    temperature float32[B, 1], 1 for greedy rows; greedy bool[B]; min_p float32[B, 1]; top_k int64[B, 1], 0: all;
    top_p float64[B, 1].
    """

    temperature: Tensor | None
    greedy: Tensor | None
    min_p: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None

    @property
    def filters(self) -> bool:
        return not (self.min_p is None and self.top_k is None and self.top_p is None)


def rules(params: Sequence[SamplingParams], device: torch.device | None = None) -> Rules:

    def column(values: list[float] | list[int], neutral: float, dtype: torch.dtype) -> Tensor | None:
        return torch.tensor(values, dtype=dtype, device=device)[:, None] if set(values) != {neutral} else None

    greedy = [p.temperature == 0 for p in params]
    return Rules(
        temperature=column([p.temperature or 1.0 for p in params], 1.0, torch.float32),
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        min_p=column([p.min_p for p in params], 0.0, torch.float32),
        top_k=column([p.top_k for p in params], 0, torch.int64),
        top_p=column([p.top_p for p in params], 1.0, torch.float64),
    )


def sample(logits: Tensor, how: Rules, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row.

    logits float32[B, V], draws float64[B] in [0, 1).
    Returns token ids int64[B], logprobs float32[B] under the actual sampling distribution, after temperature and
    filters, 0 for a greedy token, which is certain, and that distribution, as by `processed_logprobs`.
    Raises EngineError for logits that are not finite.
    """
    logprobs = processed_logprobs(logits, how)
    # float64, because a float32 CDF moves the boundaries between tokens by up to 7e-5.
    cdf = logprobs.double().exp_().cumsum(-1)
    total = cdf[:, -1:]
    # Greedy rows would continue silently; the index below would kill a GPU's process.
    if not total.isfinite().all():
        raise EngineError(
            "the model's logits are not finite: its weights have diverged (lower training.optimizer.learning_rate), or "
            "its dtype is too narrow (engine.dtype=float32)"
        )
    # Below the total: otherwise a rounded product could choose a final token of probability 0.
    target = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cdf, target, right=True)[:, 0]
    if how.greedy is not None:
        ids = torch.where(how.greedy, logits.argmax(-1), ids)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    return ids, chosen if how.greedy is None else torch.where(how.greedy, 0.0, chosen), logprobs


def processed_logprobs(logits: Tensor, how: Rules) -> Tensor:
    """Return log-probabilities after temperature and filters, float32[B, V]; -inf for filtered tokens."""
    if how.temperature is not None:
        logits = logits / how.temperature
    if how.min_p is not None:
        probabilities = logits.softmax(-1)
        unlikely = probabilities < how.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(unlikely, float("-inf"))
    if how.top_k is not None:
        size = logits.shape[-1]
        rank = torch.where(how.top_k == 0, size, how.top_k.clamp(max=size))
        threshold = logits.topk(int(rank.max())).values.gather(1, rank - 1)
        # Ties with the last one are kept, as in vLLM.
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if how.top_p is not None:
        logits = logits.masked_fill(_outside_nucleus(logits, how.top_p), float("-inf"))
    return logits.log_softmax(-1)


def _outside_nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Return bool[B, V]: tokens outside the smallest set of most probable ones with a total of at least top_p."""
    ascending, index = logits.sort(dim=-1, stable=True)
    outside = (ascending.double().softmax(-1).cumsum(-1) <= 1 - top_p) & (top_p < 1)
    outside[:, -1] = False
    return torch.zeros_like(outside).scatter_(1, index, outside)
