"""A `WeightSource` of given weights, and publication of such to any engine."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from treadle.core.images import PromptImage
from treadle.core.trainer import ModelInfo, WeightsDestination
from treadle.core.types import Floats, Ids
from treadle.engines.remote import RemoteEngine
from treadle.engines.torch.batch import Decode
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.model import MakeTower
from treadle.engines.torch.options import TorchEngineOptions
from treadle.engines.vllm.engine import VLLMEngine
from treadle.engines.weight_sync import SharedMemorySync
from treadle.rendering.grammars import Grammars

R = TypeVar("R")


def no_scores(ids: Ids) -> Floats:
    return np.zeros(len(ids) - 1, np.float32)


@dataclass
class FixedWeights:
    """shapes: that engines are told of; default: those of the weights. scores: what the weights make of ids."""

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] | None = None
    scores: Callable[[Ids], Floats] = no_scores
    expert_layers: tuple[int, ...] | None = None

    @property
    def model(self) -> ModelInfo:
        own = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        return ModelInfo(1024, 1024, 0, own if self.shapes is None else self.shapes, self.expert_layers)

    async def stage(self, destination: WeightsDestination[R]) -> R:
        weights = dict(sorted(self.weights.items()))
        return await asyncio.to_thread(destination.write, weights, iter(weights.items()))

    async def score(self, ids: Ids, images: Sequence[PromptImage] = ()) -> Floats:
        return self.scores(ids)

    async def export(self, directory: Path, more: Mapping[str, bytes] | None = None) -> None:
        raise NotImplementedError


async def publish(engine: Any, weights: Mapping[str, Tensor], version: int) -> None:
    match engine:
        case TorchEngine():
            await engine.update_weights(weights, version)
        case RemoteEngine():
            await SharedMemorySync(FixedWeights(weights), engine).publish(version)
        case VLLMEngine():
            source = engine._publication._source
            assert isinstance(source, FixedWeights)
            source.weights = weights
            await engine._publication.publish(version)
        case _:
            raise TypeError(f"{engine!r} has no weights")


def make_engine(
    model: PreTrainedModel,
    *,
    decode: Decode | None = None,
    grammars: Grammars | None = None,
    own_thread: bool = True,
    vision: MakeTower | None = None,
    **options: Any,
) -> TorchEngine:
    made = TorchEngineOptions(**options)
    return TorchEngine(model, made, decode=decode, grammars=grammars, own_thread=own_thread, vision=vision)
