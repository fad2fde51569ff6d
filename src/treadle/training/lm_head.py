"""From hidden states to log-probabilities, in row chunks, so that logits are never allocated as a whole [P, V] array.

Shapes: P pairs, d hidden size, V vocabulary, k tokens scored beside the sampled one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

CHUNK_BYTES = 2**27  # size of one chunk's logits; a handful of such arrays exist at a time
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

    def __call__(self, hidden: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(hidden.device.type):
            # Some models keep their residuals in float32.
            hidden = hidden.to(self.embedding.weight.dtype)
        logits: Tensor = self.embedding(hidden) * self.scale if self.scale != 1 else self.embedding(hidden)
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
) -> tuple[Tensor, ...]:
    """Return log-probability and entropy in nats, [P] each, of the distributions at `temperature` [P], in its dtype.

    hidden [P, d]; targets int64[P]. entropy_grad: whether the entropy carries a gradient. top: other tokens int64[P,
    k], or how to choose them: then also returns their log-probabilities [P, k], and ids int64[P, k]. If the logits need
    more than `CHUNK_BYTES`, they are computed chunk by chunk, and again in the backward pass.
    """
    rows = max(1, CHUNK_BYTES // (head.vocabulary * temperature.element_size()))
    if len(hidden) <= rows:
        return _chunk(head, hidden, targets, temperature, entropy_grad, top)
    split = (tensor.split(rows) for tensor in (hidden, targets, temperature))
    tops = top.split(rows) if isinstance(top, Tensor) else repeat(top)
    parts = [
        checkpoint(_chunk, head, h, target, t, entropy_grad, among, use_reentrant=False, preserve_rng_state=False)
        for (h, target, t), among in zip(zip(*split, strict=True), tops, strict=False)
    ]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _chunk(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    entropy_grad: bool,
    top: Tensor | MostProbable | None,
) -> tuple[Tensor, ...]:
    distribution = (head(hidden).to(temperature.dtype) / temperature[:, None]).log_softmax(-1)
    logp = distribution.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(-1)
    if top is None:
        return logp, entropy
    ids = distribution[:, : top.vocabulary].topk(top.count).indices if isinstance(top, MostProbable) else top
    return logp, entropy, distribution.gather(1, ids), ids
