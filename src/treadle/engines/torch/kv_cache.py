"""The KV cache of `TorchEngine` and the attention that reads it.

Shapes: B rows of a call, R rows of the cache, C new tokens a row, T positions, H heads, K key/value heads, D head size.

Any Hugging Face decoder writes and reads this cache through transformers' attention interface: the model is
called with `attention="treadle_kv"` and the keyword `kv=KVCall(...)`, which reaches every attention layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from treadle.core.errors import EngineError

ATTENTION = "treadle_kv"


@dataclass(slots=True)
class KVCache:
    """Keys and values of every layer: layer -> (K, V), each [R, K, T, D]. Layers are allocated at their first write.

    Memory starts as zeros: masked positions are still multiplied by 0, and must be finite.
    """

    rows: int
    capacity: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's (K, V); allocate them like the new key and value [B, K, C, D] if needed."""
        if index not in self.layers:
            keys, values = (t.new_zeros((self.rows, t.shape[1], self.capacity, t.shape[3])) for t in (key, value))
            self.layers[index] = (keys, values)
        return self.layers[index]

    def position_bytes(self) -> int:
        """Bytes of one position of one row in all layers."""
        return sum(t.shape[1] * t.shape[3] * t.element_size() for pair in self.layers.values() for t in pair)

    def resize(self, rows: int, capacity: int) -> None:
        """Change to `rows` rows of `capacity` >= the current number of positions, and keep what still fits."""
        kept_rows, old_capacity = min(rows, self.rows), self.capacity
        self.rows, self.capacity = rows, capacity
        for number, pair in self.layers.items():
            larger = [t.new_zeros((rows, t.shape[1], capacity, t.shape[3])) for t in pair]
            for new, old in zip(larger, pair, strict=True):
                new[:kept_rows, :, :old_capacity] = old[:kept_rows]
            self.layers[number] = (larger[0], larger[1])

    def move(self, sources: Mapping[int, int], length: int) -> None:
        """Copy simultaneously to each row the first `length` positions of the row that `sources` names for it."""
        if not sources or not length:
            return
        for pair in self.layers.values():
            for t in pair:
                rows, origins = (torch.tensor(list(r), device=t.device) for r in (sources.keys(), sources.values()))
                t[:, :, :length].index_copy_(0, rows, t[:, :, :length].index_select(0, origins))

    def copy_rows(self, other: KVCache, sources: Tensor, rows: Tensor, length: int) -> None:
        """Copy to row rows[i] the first `length` positions of `other`'s row sources[i]."""
        for number, pair in other.layers.items():
            for target, origin in zip(self.layer(number, *pair), pair, strict=True):
                target[:, :, :length].index_copy_(0, rows, origin[:, :, :length].index_select(0, sources))


@dataclass(slots=True)
class KVCall:
    """One forward pass over some rows of a cache.

    rows: a slice, or int64[B]. positions: int64[B, C], where each new token is written.
    length: number of positions that queries may attend to.
    """

    cache: KVCache
    rows: slice | Tensor
    positions: Tensor
    length: int
    _mask: dict[int | None, Tensor] = field(default_factory=dict)
    _index: dict[int, Tensor] = field(default_factory=dict)  # by number of heads

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [B, K, C, D]; return all [B, K, length, D]."""
        pair = self.cache.layer(layer, key, value)
        for held, new in zip(pair, (key, value), strict=True):
            # [B, C, K, D] is how projections leave them in memory
            vectors = new.transpose(1, 2).reshape(-1, new.shape[3])
            held.view(-1, new.shape[3]).index_copy_(0, self._places(new.shape[1]), vectors)
        if isinstance(self.rows, slice):
            keys, values = (t[self.rows, :, : self.length] for t in pair)
        else:
            keys, values = (t[:, :, : self.length].index_select(0, self.rows) for t in pair)
        return keys, values

    def _places(self, heads: int) -> Tensor:
        """int64[B * C * K]: index of each new vector in a layer flattened over [R, K, T]."""
        if heads not in self._index:
            device = self.positions.device
            rows = self.rows
            if isinstance(rows, slice):
                rows = torch.arange(rows.start, rows.stop, device=device)
            head = rows[:, None, None] * heads + torch.arange(heads, device=device)
            self._index[heads] = (head * self.cache.capacity + self.positions[:, :, None]).reshape(-1)
        return self._index[heads]

    def mask(self, window: int | None) -> Tensor:
        """Return bool[B, 1, C, length]: key position <= query position, and within the sliding window, if any."""
        if window not in self._mask:
            key = torch.arange(self.length, device=self.positions.device)
            query = self.positions[:, None, :, None]
            allowed = key <= query
            self._mask[window] = allowed if window is None else allowed & (key > query - window)
        return self._mask[window]


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    kv: KVCall | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of the new queries [B, H, C, D] over the cache; returns ([B, C, H, D], None)."""
    if kv is None:
        raise EngineError(
            "an attention layer was called without the engine's KV cache: its model drops keyword arguments"
        )
    if softcap is not None or s_aux is not None:
        raise EngineError(
            f"{type(module).__name__} uses soft-capped or sink attention, which TorchEngine does not implement"
        )
    keys, values = kv.append(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    mask = kv.mask(sliding_window)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if query.shape[2] > 1:
        gqa = query.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2), None
    # One token a row: two batched products beat the fused kernel on CPU.
    batch, heads, _one, size = query.shape
    grouped = query.reshape(batch, keys.shape[1], heads // keys.shape[1], size)
    scores = torch.matmul(grouped, keys.transpose(-1, -2)).mul_(scale).masked_fill_(~mask, float("-inf"))
    probabilities = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(probabilities, values).reshape(batch, 1, heads, size), None


AttentionInterface.register(ATTENTION, cached_attention)
