"""Models with layers that cannot use the engine's cache: computed call by call, with the model's own cache.

    row of a batch -> Past: its ids, and the cache returned by the model's last forward pass

That is slower: no two calls share a forward pass, and no call starts from an earlier one's prefix. The batch is the
same (`Batch`), and with it draws, stop rules, versions and the order of calls. Layers of this kind restart if given
several tokens (Mamba 1), attend to chosen or compressed tokens, make their own masks, or keep state hidden from any
interface.

A model's own cache must give the same logits as without one, which is checked on a short sequence at the start;
otherwise every token is computed with all before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treadle.core.errors import ConfigError, EngineError
from treadle.core.types import Ids
from treadle.engines.torch.kv_cache import KVCache, KVCall
from treadle.engines.torch.model import Axes, CachedModel, MakeTower, Pictures, Predicted, Reach, Span
from treadle.models.support import why_not_packable

_CACHES = "cache", "past_key_values", "cache_params", "state"  # names of transformers' caches, of several versions
_PROMPT, _PROBE = 5, 24  # tokens of the sequence that shows whether a cache is right


def engine_model(
    model: PreTrainedModel,
    dtype: torch.dtype,
    prefill_tokens: int,
    routing: bool,
    device: str | None,
    vision: MakeTower | None = None,
) -> CachedModel:
    """Return the model for an engine: a `RowModel` if its layers cannot use the engine's cache. See `CachedModel`."""
    why = why_not_packable(model.config)
    if why is None:
        cached = CachedModel(model, dtype, prefill_tokens, routing, device, vision)
        try:
            cached.cache_bytes()
            return cached
        except (ConfigError, EngineError, RuntimeError) as error:
            # RuntimeError comes from the model's own code.
            why = str(error)
        del cached  # a copy of all weights
    return RowModel(model, dtype, prefill_tokens, routing, device, why=why)


@dataclass(slots=True)
class Past:
    """A sequence so far. ids: int64[T]. cache: the model's, by its parameter's name; empty: it keeps none."""

    ids: Tensor
    cache: dict[str, Any] = field(default_factory=dict)


class RowModel(CachedModel):
    """A model with its own attention and cache, one sequence per forward pass. why: reason against the engine's.

    keeps: whether sequences continue from the model's cache; otherwise each token is computed with all before it.
    """

    reuses = False

    def __init__(self, *arguments: Any, why: str) -> None:
        super().__init__(*arguments)
        self.keeps = True
        self.keeps = self._own_cache_is_right()
        how = "with its own cache" if self.keeps else "each token with all before it"
        self.slow = f"{type(self.model).__name__} is sampled call by call, {how}, which is slower: {why}"
        self._bytes = self._measure()

    def _prepare(self) -> bool:
        self._takes = inspect.signature(self.model.forward).parameters.keys()
        # Ended rows must not be computed further either.
        return True

    @property
    def blind(self) -> str | None:
        return f"{type(self.model).__name__} is sampled call by call, without images"

    def cache_bytes(self) -> tuple[int, int]:
        return self._bytes

    def parts(self, spans: Sequence[Span]) -> list[list[Span]]:
        # A prompt is never split: some layers cannot continue with several tokens.
        return [[span] for span in spans]

    def extend(
        self,
        cache: KVCache,
        rows: slice | Tensor,
        chunks: Sequence[Ids],
        starts: Sequence[int],
        pictures: Pictures | None = None,
    ) -> Predicted:
        """Begin the rows with these chunks, of text; return the predictions after each."""
        assert not any(starts), "no call starts from another's prefix"
        begun = [self._advance(None, torch.from_numpy(chunk).long()) for chunk in chunks]
        return self._kept(cache, rows, begun)

    def forward(self, call: KVCall, ids: Tensor) -> Predicted:
        """Return the predictions after one more token of each row. ids: int64[B, 1]."""
        pasts = call.cache.pasts
        return self._kept(
            call.cache,
            call.rows,
            [self._advance(pasts[row], more) for row, more in zip(_numbers(call.rows), ids, strict=True)],
        )

    def _kept(self, cache: KVCache, rows: slice | Tensor, advanced: Sequence[tuple[Past, Predicted]]) -> Predicted:
        predicted = self.empty(len(advanced))
        for place, (row, (past, one)) in enumerate(zip(_numbers(rows), advanced, strict=True)):
            cache.pasts[row] = past
            predicted.put(torch.tensor([place]), one)
        return predicted

    def _advance(self, past: Past | None, more: Tensor) -> tuple[Past, Predicted]:
        """Append int64[C] ids to a sequence; return it, and the prediction after them."""
        past = past or Past(more[:0])
        ids = torch.cat([past.ids, more])
        fed = more if past.cache else ids
        places = torch.arange(len(ids) - len(fed), len(ids), device=self.device)[None]
        named = {"position_ids": places, "use_cache": self.keeps, "logits_to_keep": 1, **past.cache}
        predicted, answer = self._predict(fed[None], **{name: named[name] for name in named if name in self._takes})
        name = next((name for name in _CACHES if answer.get(name) is not None), None) if self.keeps else None
        return Past(ids, {} if name is None else {name: answer[name]}), predicted

    def _predict(self, ids: Tensor, **named: Any) -> tuple[Predicted, Any]:
        with self._half():
            return super()._predict(ids, **named)

    def _logits(self, ids: Tensor, places: Axes = None, reach: Reach = None) -> Tensor:
        with self._half():
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    def _half(self) -> torch.autocast:
        """Let layers multiply half-precision weights by their float32 buffers inside the block."""
        dtype = self.model.dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype.itemsize < 4, cache_enabled=False)

    @torch.inference_mode()
    def _own_cache_is_right(self) -> bool:
        """Return whether a short sequence has the same logits with and without the model's cache."""
        ids = (torch.arange(_PROBE) * 7 + self.vocabulary // 2) % self.vocabulary  # not special ones, first or last
        past, found = None, []
        try:
            for part in (ids[:_PROMPT], *ids[_PROMPT:].split(1)):
                past, predicted = self._advance(past, part)
                found.append(predicted.logits)
        except (RuntimeError, ValueError):
            # For example, xLSTM's cache has other widths than its layers.
            return False
        wanted = self._logits(ids[None].to(self.device))[_PROMPT - 1 :].float()
        gap = float((torch.cat(found) - wanted).norm() / wanted.norm())
        return bool(past and past.cache) and gap < (1e-3 if self.model.dtype.itemsize >= 4 else 0.1)

    @torch.inference_mode()
    def _measure(self) -> tuple[int, int]:
        """Return the approximate bytes of a position, and of a sequence's other state."""
        short, long = (_tensor_bytes(self._advance(None, torch.zeros(n).long())[0]) for n in (1, 1 + _PROBE))
        position = max(0, long - short) // _PROBE
        return position, short - position


def _numbers(rows: slice | Tensor) -> list[int]:
    return list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()


def _tensor_bytes(past: Past) -> int:
    """Return the bytes of all its tensors, in any container."""
    copies: dict[int, Any] = {}
    deepcopy(past, copies)
    return sum(copy.nbytes for copy in copies.values() if isinstance(copy, Tensor))
