"""Weights in Ray's object store, which carries them to each node once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from treadle.core.errors import EngineError
from treadle.engines.staging import to_host

_BUCKET = 64 * 2**20  # bytes of tensors that make one object


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """References to dictionaries of tensors, which exist as long as anybody holds them (`engines.staging.Staged`)."""

    references: tuple[Any, ...]

    def discard(self) -> None:
        """Do nothing: others may hold the references."""

    async def fetch(self) -> dict[str, Tensor]:
        """Return the weights by name, once they are on this node. Raises EngineError if they are gone."""
        weights: dict[str, Tensor] = {}
        try:
            for reference in self.references:
                weights |= await reference
        except ray.exceptions.RayError as error:
            raise EngineError(f"published weights could not be fetched: {error}") from error
        return weights


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """Writes weights as objects (a `WeightsDestination`). dtype: that floating-point weights are written in."""

    dtype: torch.dtype

    def write(self, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> StoredWeights:
        """Put the weights, some tensors at a time, so that no copy of all of them is made here."""
        references: list[Any] = []
        bucket: dict[str, Tensor] = {}
        for name, tensor in weights:
            bucket[name] = to_host(tensor, self.dtype)
            if sum(each.nbytes for each in bucket.values()) >= _BUCKET:
                references.append(ray.put(bucket))
                bucket = {}
        return StoredWeights((*references, ray.put(bucket)))
