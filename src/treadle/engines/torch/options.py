"""Options of `TorchEngine`. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.engines.config import InFlight


@dataclass(frozen=True, slots=True)
class TorchEngineOptions:
    """Decoding options of a `TorchEngine`: `TorchEngineOptions(stop_token_ids=[2], max_batch=64)`.

    stop_token_ids: tokens that end a completion (they are part of it).
    max_batch: maximum number of rows decoded together. prefill_tokens: maximum number of (padded) tokens per prefill
    pass.
    cache_gib: memory limit for keys and values; calls wait for room, and the least recently used sequences are evicted.
    dtype: dtype of weights and cache, by torch's name; None: the model's. Logits are float32.
    device: device to compute on, by torch's name; None: the model's.
    lock_step: admit in waves, for synchronous training. A publication waits for the end of the wave.
    in_flight: whether calls in flight keep their cache when weights change, or recompute it with the new ones.
    routing: whether completions report the chosen experts.
    probabilities: report the sampler's probabilities of so many most probable ids at each token, and of those as
    probable as the last of them.
    pinned: sessions keep the version of their first call, at most so many behind the newest (`PinnedEngine`).
    """

    stop_token_ids: Sequence[int]
    max_batch: int = 256
    prefill_tokens: int = 16384
    cache_gib: float = 4.0
    dtype: str | None = None
    device: str | None = None
    lock_step: bool = False
    in_flight: InFlight = "keep"
    routing: bool = False
    probabilities: int | None = None
    pinned: int | None = None
