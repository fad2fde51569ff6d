"""What a `TorchEngine` is told about how to sample. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.engines.config import InFlight


@dataclass(frozen=True, slots=True)
class TorchEngineOptions:
    """Says how a `TorchEngine` decodes: `TorchEngineOptions(stop_token_ids=[2], max_batch=64)`.

    stop_token_ids: tokens that end a completion (they are part of it).
    max_batch: most rows decoded together. prefill_tokens: most (padded) tokens of one prefill pass.
    cache_gib: most memory for keys and values; calls wait, and sequences that were not used for long go, to keep it.
    dtype: of weights and cache, by torch's name (None: the model's); logits are float32.
    lock_step: admit in waves: right for synchronous training. A publication waits for the end of the wave.
    in_flight: whether calls in flight keep their cache when weights change, or have it recomputed with the new ones.
    routing: completions tell which experts were chosen.
    """

    stop_token_ids: Sequence[int]
    max_batch: int = 256
    prefill_tokens: int = 16384
    cache_gib: float = 4.0
    dtype: str | None = None
    lock_step: bool = False
    in_flight: InFlight = "keep"
    routing: bool = False
