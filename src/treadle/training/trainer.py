"""The trainer and the weight source of this process (`treadle.core.trainer`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treadle.core.engine import ComponentStatus
from treadle.core.files import Manifest
from treadle.core.images import PromptImage
from treadle.core.trainer import Conversation, ModelInfo, UpdateResult, WeightsDestination
from treadle.core.types import Floats, Group, Ids, Routing
from treadle.engines.compute import Compute
from treadle.models.support import context_of, decoding_gap
from treadle.models.vision import Tower
from treadle.models.weights import described, gathered, published, saved, weights_digest
from treadle.training.checkpoint import checkpoint_bytes, export_model, load_checkpoint, save_checkpoint
from treadle.training.config import WarmStartConfig
from treadle.training.forward import Forward
from treadle.training.learner import Learner
from treadle.training.ranks import OneRank, Ranks
from treadle.training.sft import Supervised

R = TypeVar("R")


class EmbeddedSource:
    """Serves the weights of a model in this process, its `module`: a `WeightSource`.

    tokenizer: directory of the tokenizer's files for exports. compute: where it computes, inline or on a thread.
    forward: the model's own; default: created on demand, so that a model need not be trainable.
    ranks: processes that share the model; each has a source, and all are called together. vision: see `Scorer`.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: Path,
        compute: Compute,
        forward: Forward | None = None,
        ranks: Ranks | None = None,
        vision: Tower | None = None,
    ) -> None:
        self.vision = vision
        self.module, self._tokenizer, self._compute, self._forward = module, tokenizer, compute, forward
        self._ranks = ranks or OneRank()
        text = module.config.get_text_config()
        self.model = ModelInfo(
            vocabulary=int(text.vocab_size),
            context=context_of(text),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            shapes={name: tuple(tensor.shape) for name, tensor in described(module).items()},
            expert_layers=None if forward is None else forward.expert_layers,
            decoding_gap=decoding_gap(module.config),
        )

    async def stage(self, destination: WeightsDestination[R]) -> R:
        """Have the destination write the published weights, on a thread beside the event loop; see `WeightSource`."""
        write = partial(destination.write, described(self.module))
        return await asyncio.to_thread(self._ranks.first, write, published(self.module))

    async def score(self, ids: Ids, images: Sequence[PromptImage] = ()) -> Floats:
        return await self._compute.run(self._score, ids, images)

    async def export(self, directory: Path, more: Mapping[str, bytes] | None = None) -> None:
        await self._compute.run(self._export, directory, more)

    def _export(self, directory: Path, more: Mapping[str, bytes] | None) -> None:
        def write(weights: Iterable[tuple[str, Tensor]]) -> None:
            export_model(directory, self.module, self._tokenizer, more, weights)

        self._ranks.first(write, gathered(saved(self.module)))

    def _score(self, ids: Ids, images: Sequence[PromptImage]) -> Floats:
        self._forward = self._forward or Forward(self.module, len(ids), vision=self.vision)
        return self._forward.exact_logprobs(ids, images)


class EmbeddedTrainer(EmbeddedSource):
    """Trains with a learner in this process: a `Trainer`. warm_start: configures the optimizer of supervised steps."""

    def __init__(
        self, learner: Learner, tokenizer: Path, compute: Compute, warm_start: WarmStartConfig | None = None
    ) -> None:
        super().__init__(learner.model, tokenizer, compute, learner.forward, learner.ranks)
        self._learner, self._warm_start = learner, warm_start
        self._supervised: Supervised | None = None
        self._device = learner.model.device

    @property
    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self._learner)

    async def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        return await self._compute.run(self._learner.train_batch, groups)

    async def supervised_step(self, conversations: Sequence[Conversation], step: int) -> float:
        return await self._compute.run(self._supervised_step, conversations, step)

    async def experts(self, ids: Ids) -> Routing:
        return await self._compute.run(self._learner.forward.experts, ids)

    async def digest(self) -> str:
        return await self._compute.run(weights_digest, published(self.module))

    async def save(self, directory: Path) -> str:
        return await self._compute.run(save_checkpoint, directory, self._learner, self._tokenizer)

    async def load(self, saved: Manifest) -> None:
        await self._compute.run(load_checkpoint, saved, self._learner, self._tokenizer)

    async def offload(self) -> None:
        """Move everything to host memory, to free the device for others. Undone by `reload`."""
        await self._compute.run(self._learner.move, torch.device("cpu"))

    async def reload(self) -> None:
        await self._compute.run(self._learner.move, self._device)

    def status(self) -> list[ComponentStatus]:
        return [ComponentStatus("learner", "0", running=self._compute.running)]

    def close(self) -> None:
        self._compute.close()

    def _supervised_step(self, conversations: Sequence[Conversation], step: int) -> float:
        assert self._warm_start is not None, "supervised steps belong to a warm start"
        if self._supervised is None or step == 0:
            self._supervised = Supervised(self._learner.forward, self._warm_start, self._learner.ranks)
        loss = self._supervised.step(conversations, step)
        self._learner.begin_here()
        if step + 1 == self._warm_start.steps:
            self._supervised = None  # its moments are as large as two models
        return loss
