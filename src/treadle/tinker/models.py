"""The models behind the Tinker protocol: one base, trained models that are adapters over it, versions to sample by.

create -> TrainedModel --forward(backward=True)--> gradients --optim_step--> weights
                                                                               | publish
                                         sample <-- TorchEngine per version <-- Version
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from treadle.core.types import Ids
from treadle.tinker.data import (
    AdamParams,
    Adapter,
    Datum,
    Outputs,
    PromptScores,
    Sampled,
    Samples,
    Sampling,
    Sparse,
    TopTokens,
    Version,
)

__all__ = [
    "AdamParams",
    "Adapter",
    "Datum",
    "Models",
    "Outputs",
    "PromptScores",
    "Sampled",
    "Samples",
    "Sampling",
    "Sparse",
    "TopTokens",
    "TrainedModel",
    "Version",
]


class TrainedModel:
    """One created model: an adapter over the shared base, with its optimizer. One call at a time, from any thread."""

    adapter: Adapter

    def forward(self, data: Sequence[Datum], loss: str, options: Mapping[str, float], *, backward: bool) -> Outputs:
        """Compute a loss, a sum over all tokens; with `backward`, add its gradient to those of earlier calls.

        Raises DataError, without changing gradients, for an unknown loss, data that do not fit it or the model, and a
        loss that is not finite.
        """
        raise NotImplementedError

    def optim_step(self, params: AdamParams) -> Mapping[str, float]:
        """Make an optimizer step with the accumulated gradient and clear it; return metrics.

        Raises DataError, with the gradient cleared and the weights unchanged, if it is not finite.
        """
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        """Write weights and optimizer to a new directory, complete or not at all; pending gradients are not saved."""
        raise NotImplementedError

    def load(self, directory: Path, optimizer: bool) -> None:
        """Continue from a directory, with its optimizer or a new one. Raises CheckpointError if it does not fit."""
        raise NotImplementedError


class Models:
    """The base, created models by id, and versions for samplers."""

    @classmethod
    def open(cls, path: Path, *, budget: int = 8192, cache_gib: float = 4.0, engines: int = 4) -> Models:
        """Load a base with its tokenizer from a directory.

        budget: largest number of tokens of a training pass. engines: how many versions keep an engine while unused;
        cache_gib: memory for keys and values of all of them. Raises ConfigError.
        """
        raise NotImplementedError

    @property
    def vocabulary(self) -> int:
        """Return the exclusive bound of token ids."""
        raise NotImplementedError

    @property
    def context(self) -> int:
        """Return the maximum number of tokens of a datum, or of prompt and completion together."""
        raise NotImplementedError

    def create(self, model_id: str, adapter: Adapter, seed: int) -> TrainedModel:
        """Add a model. seed: of its adapter's initial weights. Raises DataError for an id that is taken."""
        raise NotImplementedError

    def __getitem__(self, model_id: str) -> TrainedModel:
        """Return a created model. Raises KeyError."""
        raise NotImplementedError

    def unload(self, model_id: str) -> None:
        """Forget a created model. Its versions remain. Raises KeyError."""
        raise NotImplementedError

    def publish(self, model_id: str, name: str) -> Version:
        """Return a model's current weights as a version to sample by."""
        raise NotImplementedError

    def load_version(self, directory: Path, name: str) -> Version:
        """Return the weights in a directory that `TrainedModel.save` wrote as a version. Raises CheckpointError."""
        raise NotImplementedError

    async def sample(
        self,
        version: Version | None,
        prompt: Ids,
        sampling: Sampling,
        num_samples: int = 1,
        scores: PromptScores | None = None,
    ) -> Samples:
        """Sample completions of a prompt by a version; None: by the base. num_samples 0 only scores the prompt.

        Raises EngineError for a prompt that does not fit the model, DataError for parameters out of range.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Release all engines."""
        raise NotImplementedError
