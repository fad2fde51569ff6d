"""The models behind the Tinker protocol: one base, trained models that are adapters over it, versions to sample by.

create -> TrainedModel --forward(backward=True)--> gradients --optim_step--> weights
                                                                               | publish
                                         sample <-- TorchEngine per version <-- Version
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from treadle.core.errors import DataError
from treadle.core.files import Manifest
from treadle.core.types import Ids
from treadle.engines.torch.batch import Decode
from treadle.engines.torch.options import TorchEngineOptions
from treadle.models.chat import end_tokens, load_tokenizer
from treadle.models.lora import add_recorded
from treadle.models.model_files import read_generation_config
from treadle.models.pretrained import load_pretrained
from treadle.models.support import context_of
from treadle.models.weights import saved
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
)
from treadle.tinker.learner import TrainedModel, adapted, shared_copy
from treadle.tinker.sampler import Samplers, Version
from treadle.training.checkpoint import copy_weights, read_part
from treadle.training.ranks import OneRank

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


class Models:
    """The base, created models by id, and versions for samplers.

    base: a causal LM, whose tensors all others share. tokenizer: directory of its tokenizer. decode: ids -> text, for
    stop strings. budget: largest number of tokens of a training pass. kept: how many versions keep an engine while
    unused; options: of each engine, with the memory for keys and values of all of them.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        tokenizer: Path,
        options: TorchEngineOptions,
        decode: Decode | None = None,
        budget: int = 8192,
        kept: int = 3,
    ) -> None:
        self._base = base.requires_grad_(False)
        self._tokenizer, self._budget = tokenizer, budget
        self._models: dict[str, TrainedModel] = {}
        self._samplers = Samplers(options, decode, kept, budget)
        # An adapter of zeros: the base's own numbers, without another copy of its weights.
        self._plain = Version("base", adapted(base, Adapter(1), 0))

    @classmethod
    def open(
        cls, path: Path, *, device: str = "cpu", budget: int = 8192, cache_gib: float = 4.0, kept: int = 3
    ) -> Models:
        """Load a base with its tokenizer from a directory. Raises ConfigError."""
        tokenizer = load_tokenizer(path)
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        ends = dict.fromkeys([*own, *end_tokens(read_generation_config(path))])
        options = TorchEngineOptions(tuple(ends), cache_gib=cache_gib)

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False))

        base = load_pretrained(path, "MODEL").to(device)  # type: ignore[arg-type]
        return cls(base, path, options, decode, budget, kept)

    @property
    def vocabulary(self) -> int:
        """Return the exclusive bound of token ids."""
        return int(self._base.config.get_text_config().vocab_size)

    @property
    def architecture(self) -> str:
        """Return the base's class, such as "Qwen3ForCausalLM"."""
        return type(self._base).__name__

    @property
    def context(self) -> int:
        """Return the maximum number of tokens of a datum with its last target, or of prompt and completion."""
        return context_of(self._base.config)

    def create(self, model_id: str, adapter: Adapter, seed: int) -> TrainedModel:
        """Add a model. seed: of its adapter's initial weights. Raises DataError for a wrong adapter, or a taken id."""
        if model_id in self._models:
            raise DataError(f"there is a model {model_id!r} already")
        model = TrainedModel(self._base, adapter, seed, self._budget, self._tokenizer)
        self._models[model_id] = model
        return model

    def __getitem__(self, model_id: str) -> TrainedModel:
        """Return a created model. Raises KeyError."""
        return self._models[model_id]

    def unload(self, model_id: str) -> None:
        """Forget a created model; its versions remain. Raises KeyError."""
        del self._models[model_id]

    def publish(self, model_id: str, name: str) -> Version:
        """Return a model's current weights as a version to sample by, after its call in progress. Raises KeyError."""
        return Version(name, self._models[model_id].copy())

    def load_version(self, directory: Path, name: str) -> Version:
        """Return the weights that `TrainedModel.save` wrote to a directory as a version, of whatever rank.

        Raises CheckpointError for another base, DamageError for damaged files, RemovedError for none.
        """
        manifest = Manifest.load(directory)
        model = shared_copy(self._base)
        add_recorded(model, manifest)
        copy_weights(saved(model), read_part(manifest, "adapter_model", OneRank()), str(directory))
        return Version(name, model)

    async def sample(
        self,
        version: Version | None,
        prompt: Ids,
        sampling: Sampling,
        num_samples: int = 1,
        scores: PromptScores | None = None,
    ) -> Samples:
        """Sample completions of a prompt by a version; None: by the base. num_samples 0 only scores the prompt.

        A sample depends on the version, the prompt, the parameters and its number alone, up to rounding: prefixes that
        earlier calls of the version computed are not computed again.
        Raises EngineError for a prompt that does not fit the model, DataError for parameters out of range.
        """
        chosen = self._plain if version is None else version
        return await self._samplers.sample(chosen, prompt, sampling, num_samples, scores or PromptScores())

    async def close(self) -> None:
        """Release all engines."""
        await self._samplers.close()
