"""From hidden states to log-probabilities, in row chunks, so that logits are never allocated as a whole [P, V] array.

Shapes: P pairs, d hidden size, V vocabulary, k tokens scored beside the sampled one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from treadle.core.support import Probabilities, Support

CHUNK_BYTES = 2**27  # size of one chunk's logits; a handful of such arrays exist at a time
FEW = 1 / 32  # share of the vocabulary up to which single logits cost less than all of them
_CAPS = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"  # Gemma, RecurrentGemma, xLSTM


@dataclass(frozen=True, slots=True)
class Head:
    """Maps final hidden states [P, d] to logits [P, V]: the output embedding, scaled and soft-capped."""

    embedding: Any
    scale: float
    cap: float | None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1))
        cap = next((value for name in _CAPS if (value := getattr(config, name, None))), None)
        return cls(model.get_output_embeddings(), scale, cap)

    @property
    def vocabulary(self) -> int:
        return int(self.embedding.weight.shape[0])

    @property
    def has_rows(self) -> bool:
        """Return whether single logits can be computed: the embedding is a plain layer, without an adapter."""
        return isinstance(self.embedding, nn.Linear)

    def rows(self, hidden: Tensor, pair: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return logits [M]: of ids int64[M] in hidden states [P, d], chosen by pair int64[M]."""
        chosen = functional.embedding(ids, self.embedding.weight).to(dtype)
        logits = (hidden.to(self.embedding.weight.dtype).to(dtype).index_select(0, pair) * chosen).sum(-1)
        if self.embedding.bias is not None:
            logits = logits + self.embedding.bias[ids]
        return self._capped(logits)

    def __call__(self, hidden: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(hidden.device.type):
            # Some models keep their residuals in float32.
            hidden = hidden.to(self.embedding.weight.dtype)
        return self._capped(self.embedding(hidden))

    def _capped(self, logits: Tensor) -> Tensor:
        logits = logits * self.scale if self.scale != 1 else logits
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def make_value_head(model: PreTrainedModel) -> nn.Linear:
    """Return a value head, from final hidden states [P, d] to values [P, 1], in at least float32.

    All values are initially 0: nothing is drawn at random.
    """
    dtype = torch.promote_types(model.dtype, torch.float32)
    width = int(model.get_output_embeddings().weight.shape[1])
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    head: nn.Linear = nn.utils.skip_init(nn.Linear, width, 1, device=device, dtype=dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


@dataclass(frozen=True, slots=True)
class MostProbable:
    """Requests the `count` most probable tokens among the first `vocabulary` ids."""

    count: int
    vocabulary: int


def pair_logprobs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    entropy_grad: bool,
    top: Tensor | MostProbable | None = None,
    support: Support | None = None,
    sampler: Probabilities | None = None,
) -> tuple[Tensor, ...]:
    """Return log-probability and entropy in nats, [P] each, of the distributions at `temperature` [P], in its dtype.

    hidden [P, d]; targets int64[P]. entropy_grad: whether the entropy carries a gradient. top: other tokens int64[P,
    k], or how to choose them: then also returns their log-probabilities [P, k], and ids int64[P, k]. support: of the P
    pairs; a distribution is over its ids alone, and other tokens have -inf. sampler: of the P pairs; then
    their expected log-probability under it, [P], follows the entropy. If the logits need more than `CHUNK_BYTES`, they
    are computed chunk by chunk, and again in the backward pass.
    """
    if support is None or not support.counts.any():
        return _over_all(head, hidden, targets, temperature, entropy_grad, top, None, sampler)
    few = (support.listed > 0) & (support.counts <= FEW * head.vocabulary)
    if top is not None or not head.has_rows or not few.any():
        return _over_all(head, hidden, targets, temperature, entropy_grad, top, support, sampler)
    order = [np.flatnonzero(few), np.flatnonzero(~few)]
    computed = []
    for pairs, among_few in zip(order, (True, False), strict=True):
        at, part = torch.from_numpy(pairs).to(hidden.device), support.take(pairs)
        h, target, t = (tensor.index_select(0, at) for tensor in (hidden, targets, temperature))
        own = None if sampler is None else sampler.take(pairs)
        if among_few:
            computed.append(_over_few(head, h, target, t, entropy_grad, part, own))
        else:
            computed.append(_over_all(head, h, target, t, entropy_grad, None, part, own))
    back = torch.from_numpy(np.argsort(np.concatenate(order))).to(hidden.device)
    return tuple(torch.cat(pair).index_select(0, back) for pair in zip(*computed, strict=True))


def _over_all(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    entropy_grad: bool,
    top: Tensor | MostProbable | None,
    support: Support | None,
    sampler: Probabilities | None,
) -> tuple[Tensor, ...]:
    """Compute all logits."""
    rows = max(1, CHUNK_BYTES // (head.vocabulary * temperature.element_size()))
    if len(hidden) <= rows:
        return _chunk(head, hidden, targets, temperature, entropy_grad, top, support, sampler)
    split = (tensor.split(rows) for tensor in (hidden, targets, temperature))
    tops = top.split(rows) if isinstance(top, Tensor) else repeat(top)
    starts = range(0, len(hidden), rows)
    supports = repeat(None) if support is None else [support[start : start + rows] for start in starts]
    samplers = repeat(None) if sampler is None else [sampler[start : start + rows] for start in starts]
    parts = [
        checkpoint(_chunk, head, *tensors, entropy_grad, *more, use_reentrant=False, preserve_rng_state=False)
        for tensors, *more in zip(zip(*split, strict=True), tops, supports, samplers, strict=False)
    ]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _chunk(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    entropy_grad: bool,
    top: Tensor | MostProbable | None,
    support: Support | None,
    sampler: Probabilities | None,
) -> tuple[Tensor, ...]:
    logits = head(hidden).to(temperature.dtype) / temperature[:, None]
    if support is not None:
        possible = torch.from_numpy(support.possible(logits.shape[1])).to(logits.device)
        logits = logits.masked_fill(~possible, -torch.inf)
    distribution = logits.log_softmax(-1)
    logp = distribution.gather(1, targets[:, None])[:, 0]
    found = [logp, _entropy(distribution, entropy_grad, holes=support is not None)]
    if sampler is not None:
        counts = np.zeros(len(logits), np.int32) if support is None else support.counts
        found.append(_expected(distribution, sampler, np.where(counts > 0, counts, logits.shape[1]), sampler.of.ids))
    if top is None:
        return tuple(found)
    ids = distribution[:, : top.vocabulary].topk(top.count).indices if isinstance(top, MostProbable) else top
    return (*found, distribution.gather(1, ids), ids)


def _over_few(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    entropy_grad: bool,
    support: Support,
    sampler: Probabilities | None,
) -> tuple[Tensor, ...]:
    """Compute the logits of each pair's support alone."""
    ends = np.cumsum(support.counts, dtype=np.int64)
    most = max(1, CHUNK_BYTES // (hidden.shape[1] * temperature.element_size()))  # ids at a time
    cuts = np.unique(np.searchsorted(ends, np.arange(0, ends[-1], most), side="right"))[1:].tolist()
    bounds = [*pairwise([0, *cuts, len(ends)])]
    if len(bounds) == 1:
        return _among(head, hidden, targets, temperature, entropy_grad, support, sampler)
    parts = [
        checkpoint(
            _among,
            head,
            hidden[start:end],
            targets[start:end],
            temperature[start:end],
            entropy_grad,
            support[start:end],
            None if sampler is None else sampler[start:end],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start, end in bounds
    ]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _among(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    entropy_grad: bool,
    support: Support,
    sampler: Probabilities | None,
) -> tuple[Tensor, ...]:
    device, counts = hidden.device, torch.from_numpy(support.counts.astype(np.int64))
    ids = torch.from_numpy(support.ids.astype(np.int64)).to(device)
    pair = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)
    column = (torch.arange(len(ids)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)).to(device)
    logits = head.rows(hidden, pair, ids, temperature.dtype) / temperature[pair]
    padded = logits.new_full((len(counts), int(counts.max())), -torch.inf).index_put((pair, column), logits)
    distribution = padded.log_softmax(-1)
    sampled = column[ids == targets[pair]]  # each pair's support has its target once
    found = distribution.gather(1, sampled[:, None])[:, 0], _entropy(distribution, entropy_grad, holes=True)
    if sampler is None:
        return found
    return (*found, _expected(distribution, sampler, support.counts, support.columns(sampler.of)))


def _expected(
    distribution: Tensor, sampler: Probabilities, possible: NDArray[np.integer], columns: NDArray[np.integer]
) -> Tensor:
    """Return the sampler's expectation [P] of log-probabilities [P, K], with all ids that it did not record as one.

    If a truncated ratio weighs each token (`Probabilities.cap`), it weighs here, too, without a gradient:
    q min(p / q, cap) = min(p, cap q). possible [P]: number of ids with a log-probability. columns: of each recorded
    one. Nothing recorded: 0.
    """
    if len(columns) == distribution.numel():  # all ids of all pairs
        q = torch.tensor(sampler.values).to(distribution).view_as(distribution)
        return (_weighed(q, distribution, sampler.cap) * distribution).sum(-1)
    counts, device = sampler.of.counts, distribution.device
    at = np.arange(max(1, counts.max(initial=0))) < counts[:, None]
    weights, ids = np.zeros(at.shape, np.float32), np.zeros(at.shape, np.int64)
    weights[at], ids[at] = sampler.values, columns
    ids = np.where(at, ids, ids[:, :1])
    weight, column = torch.from_numpy(weights).to(distribution), torch.from_numpy(ids).to(device)
    found = torch.where(weight > 0, distribution.gather(1, column), 0.0)
    expected = (_weighed(weight, found, sampler.cap) * found).sum(-1)
    partly = torch.from_numpy(np.flatnonzero((counts > 0) & (counts < possible))).to(device)
    if not len(partly):
        return expected
    rest = distribution[partly].scatter(1, column[partly], -torch.inf).logsumexp(-1)
    missing = (1 - weight[partly].sum(-1)).clamp(min=0)
    return expected.index_add(0, partly, _weighed(missing, rest, sampler.cap) * rest)


def _weighed(q: Tensor, logp: Tensor, cap: float | None) -> Tensor:
    return q if cap is None else torch.minimum(logp.detach().exp(), cap * q)


def _entropy(distribution: Tensor, with_gradient: bool, holes: bool) -> Tensor:
    """Return the entropy [P] of log-probabilities [P, K]. holes: whether some are -inf, which count as nothing."""
    with torch.set_grad_enabled(with_gradient and torch.is_grad_enabled()):
        finite = distribution.clamp(min=torch.finfo(distribution.dtype).min) if holes else distribution
        return -(distribution.exp() * finite).sum(-1)
