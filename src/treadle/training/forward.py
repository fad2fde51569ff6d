"""The packed forward pass: sequences laid end to end in one row, log-probabilities of the wanted pairs only.

Shapes: T tokens of a micro-batch, S sequences in it, L the longest of them, P pairs, H heads, K key/value heads,
D head size, V vocabulary.

Linear layers see the T tokens and no padding; only attention lays them out as [S, L], inside. It is installed through
transformers' attention interface, so any Hugging Face decoder works, with its own head and scalings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from treadle.core.errors import ConfigError
from treadle.packing.layout import MicroBatch

ATTENTION = "treadle_packed"


@dataclass(slots=True)
class Layout:
    """Where each of the T tokens stands in the padded [S, L] of attention."""

    sequences: int
    longest: int
    place: Tensor  # int64[T], s * L + position
    layers: set[int] = field(default_factory=set)  # that have attended through this layout

    def pad(self, flat: Tensor) -> Tensor:
        """[1, heads, T, D] -> [S, heads, L, D], zeros behind each sequence."""
        _, heads, _, size = flat.shape
        padded = flat.new_zeros(self.sequences * self.longest, heads, size)
        padded[self.place] = flat[0].transpose(0, 1)
        return padded.view(self.sequences, self.longest, heads, size).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """[S, heads, L, D] -> [1, T, heads, D]."""
        _, heads, _, size = padded.shape
        rows = padded.transpose(1, 2).reshape(self.sequences * self.longest, heads, size)
        return rows.index_select(0, self.place)[None]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: Layout | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    if packed is None:
        raise ConfigError(
            f"{type(module).__name__} drops keyword arguments on the way to attention; it cannot be packed"
        )
    if softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} uses soft-capped or sink attention, which packing does not implement"
        )
    packed.layers.add(int(module.layer_idx))  # type: ignore[arg-type]
    mask = None
    if sliding_window is not None and sliding_window < packed.longest:
        at = torch.arange(packed.longest, device=query.device)
        distance = at[:, None] - at
        mask = (distance >= 0) & (distance < sliding_window)
    # Causal and padded behind: no real token sees padding, so no mask is needed.
    out = F.scaled_dot_product_attention(
        packed.pad(query),
        packed.pad(key),
        packed.pad(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return packed.unpad(out), None


AttentionInterface.register(ATTENTION, packed_attention)


def prepare(model: PreTrainedModel, gradient_checkpointing: bool) -> None:
    """Install packed attention; the model then takes micro-batches only."""
    model.set_attn_implementation(ATTENTION)
    model.train()
    if gradient_checkpointing:
        # renamed in the course of transformers 5; where both exist, the old name warns
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})


def token_logprobs(
    model: PreTrainedModel, batch: MicroBatch, temperature: Tensor, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """One forward pass over a micro-batch.

    temperature [P], at which each pair was sampled; its dtype is the result's (at least float32).
    Returns (log-probability [P], entropy in nats [P]) of each pair's distribution at that temperature; the entropy
    carries a gradient only if asked. Raises ConfigError if a layer did not attend through the packed layout.
    """
    device = model.device
    lengths = torch.from_numpy(batch.lengths)
    longest = int(lengths.max())
    row_start = torch.repeat_interleave(torch.arange(len(lengths)) * longest, lengths)
    positions = torch.from_numpy(batch.position_ids)
    layout = Layout(len(lengths), longest, (row_start + positions).to(device))
    logits = model(
        input_ids=torch.from_numpy(batch.token_ids).long()[None].to(device),
        position_ids=positions[None].to(device),
        logits_to_keep=torch.from_numpy(batch.source).to(device),
        use_cache=False,
        packed=layout,
    ).logits[0]
    layers = model.config.get_text_config().num_hidden_layers
    if len(layout.layers) != layers:
        raise ConfigError(
            f"{len(layout.layers)} of {layers} layers of {type(model).__name__} attended "
            "through the packed layout; the others would mix sequences"
        )
    distribution = (logits.to(temperature.dtype) / temperature.to(device)[:, None]).log_softmax(-1)
    targets = torch.from_numpy(batch.target_ids).long().to(device)
    logp = distribution.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(-1)
    return logp, entropy
