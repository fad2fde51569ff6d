"""Datums of multi-turn clients, and losses computed one datum at a time from their written definitions."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models import VOCABULARY, exact
from tests.training.reference import randomize
from treadle.tinker.data import Adapter, Datum
from treadle.tinker.learner import TrainedModel

TOKENIZER = Path(__file__).parents[2] / "src/treadle/recipes/tokenizer"
Formula = Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def trained_model(base: PreTrainedModel | None = None, budget: int = 8192, **adapter: Any) -> TrainedModel:
    """Of a tiny base in float64, with an adapter that has learned something."""
    model = TrainedModel(base or exact(), Adapter(**{"rank": 3, **adapter}), 1, budget, TOKENIZER)
    randomize(model.model)
    return model


def conversations(inputs: Sequence[str], samples: int = 3, turns: int = 3, seed: int = 0) -> list[Datum]:
    """One datum per turn, with all turns before it, as multi-turn clients send them; twice the first one."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, VOCABULARY, 4)
    data = []
    for _ in range(samples):
        ids = prompt
        for _ in range(turns):
            ids = np.concatenate([ids, random.integers(0, VOCABULARY, random.integers(2, 5))])
            data.append(datum_of(ids, inputs, random))
    return [*data, datum_of(np.append(data[0].ids, data[0].inputs["target_tokens"][-1]), inputs, random)]  # type: ignore[index]


def datum_of(whole: np.ndarray, inputs: Sequence[str], random: np.random.Generator) -> Datum:
    """Of a whole sequence, with random inputs of these names."""
    targets = whole[1:].astype(np.int64)
    return Datum(whole[:-1].astype(np.int32), {"target_tokens": targets, **drawn(inputs, targets.shape, random)})


def drawn(inputs: Sequence[str], shape: tuple[int, ...], random: np.random.Generator) -> dict[str, Any]:
    draws: dict[str, Callable[[], Any]] = {
        "weights": lambda: random.normal(0, 1, shape),
        "advantages": lambda: random.normal(0, 1, shape),
        "logprobs": lambda: -np.abs(random.normal(3.5, 0.4, shape)),
        "sequence_ratio_mask": lambda: random.random(shape) < 0.7,
        "clip_low_threshold": lambda: random.uniform(0.5, 1.0, shape),
        "clip_high_threshold": lambda: random.uniform(1.0, 1.5, shape),
    }
    return {name: draws[name]().astype(np.float32) for name in inputs}


def own_logp(model: PreTrainedModel, datum: Datum) -> Tensor:
    """Log-probabilities of a datum's targets by the unpacked model, in their shape."""
    ids: Any = torch.from_numpy(datum.ids.astype(np.int64))
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    targets = torch.from_numpy(np.asarray(datum.inputs["target_tokens"]))
    every = logits.double().log_softmax(-1)
    return every.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)


def one_by_one(model: PreTrainedModel, data: Sequence[Datum], formula: Formula) -> tuple[float, dict[str, Tensor]]:
    """The loss by a formula, and its gradient, each datum computed alone."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for datum in data:
        inputs = {name: torch.from_numpy(np.asarray(array)).double() for name, array in datum.inputs.items()}
        loss = formula(own_logp(model, datum), inputs)
        loss.backward()
        total += loss.item()
    gradients = gradients_of(model)
    model.zero_grad(set_to_none=True)
    return total, gradients


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
