"""Steps with images: every layout, and pieces of any size, compute what transformers does with whole conversations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import in_float64, make_group, make_step
from tests.models import quiet as quiet
from tests.seeing import FAMILIES, own_logits, picture, prompt, tokenizer, whole, write
from treadle.core.images import PLACE, Picture
from treadle.core.types import Group, Step
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.models.vision import ImageProcessor, Tower
from treadle.packing.flat import FlatBatch, calls, flatten
from treadle.packing.layout import Packing, Sharing
from treadle.training.forward import Forward
from treadle.training.objective import LossGradients

EXACT = 1e-10
LAYOUTS = [(Packing.STEP, 8192), (Packing.CHAIN, 8192), (Packing.TREE, 8192), (Packing.CHAIN, 37), (Packing.TREE, 5)]


@dataclass(frozen=True)
class Family:
    """A tiny model of a family, in float64 throughout, and what makes prompts for it."""

    name: str
    directory: Path
    processor: ImageProcessor

    @property
    def whole(self) -> Any:
        return in_float64(whole(self.directory, torch.float64))

    @property
    def language(self) -> Any:
        return in_float64(make_model(ModelConfig(path=str(self.directory)), 726, 0))

    def step(self, before: Step | None, text: str, pictures: Sequence[Picture], reply: Sequence[int]) -> Step:
        """A step whose prompt goes on after an earlier one's completion."""
        ids, images = prompt(self.processor, tokenizer(self.name), text, pictures)
        earlier = np.empty(0, np.int32) if before is None else before.full_ids
        moved = [replace(image, start=image.start + len(earlier)) for image in images]
        made = make_step(np.concatenate([earlier, ids]), reply, temperature=0.8)
        return replace(made, images=(*(() if before is None else before.images), *moved))


@cache
def family(name: str) -> Family:
    directory = write(Path(mkdtemp()), name)
    return Family(name, directory, ImageProcessor(directory))


def conversations(of: Family) -> list[Group]:
    """Two tasks: attempts that share images, that see others of the same size at the same place, one image twice, and
    a history without its image.
    """
    one, other, wide, again = picture(1), picture(2), picture(3, (64, 32)), picture(4, (64, 32))
    first = of.step(None, f"look at {PLACE} now", [one], [40, 41, 42])
    second = of.step(first, f" and {PLACE}", [wide], [50, 51])
    third = of.step(second, f" and {PLACE}, {PLACE}", [one, other], [60, 61, 62])
    sibling = of.step(first, f" and {PLACE}", [again], [50, 51])
    fork = of.step(second, " then?", [], [70])
    elsewhere = of.step(None, f"look at {PLACE} now", [other], [40, 41, 42])
    forgotten = of.step(None, "look at nothing now", [], [43, 44])
    attempts = [[first, second, third, fork], [first, sibling], [elsewhere, forgotten]]
    return [
        make_group([(steps, float(n)) for n, steps in enumerate(attempts)]),
        make_group([([first], 0.0), ([forgotten], 1.0)], 1),
    ]


def batch_of(of: Family) -> FlatBatch:
    return flatten(conversations(of))


def wanted(model: Any, of: Family, batch: FlatBatch, weights: Tensor | None = None) -> Tensor:
    """Log-probabilities [N] by transformers' forward of each whole conversation; with weights [N], their weighted sum
    is propagated back.
    """
    found = []
    for step, first in zip(batch.steps, batch.step_start.tolist(), strict=False):
        logits = own_logits(model, of.processor, step.full_ids, step.images, grad=weights is not None)
        replies = torch.from_numpy(step.completion_ids.astype(np.int64))
        logp = (logits[len(step.prompt_ids) - 1 : -1].double() / np.float64(np.float32(0.8))).log_softmax(-1)
        logp = logp.gather(1, replies[:, None])[:, 0]
        if weights is not None:
            (logp * weights[first : first + len(replies)]).sum().backward()
        found.append(logp.detach())
    return torch.cat(found)


def computed(forward: Forward, batch: FlatBatch, packing: Packing, weights: Tensor | None = None) -> Tensor:
    """The same by a layout."""
    found = torch.full((len(batch),), torch.nan, dtype=torch.float64)
    temperature = torch.from_numpy(batch.temperature).double()
    for tree in forward.trees(calls(batch), packing, Sharing.BATCH):
        if weights is None:
            scores = forward.scores(tree, temperature)
        else:
            scores = forward.backward(tree, temperature, lambda s: LossGradients(weights[torch.from_numpy(s.flat)]))
        found[torch.from_numpy(scores.flat)] = scores.logp
    return found


def gradients(model: Any) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in found.items():
        gap = float((gradient - expected.get(name, torch.zeros(()))).abs().max())
        assert gap <= EXACT * scale, f"{name}: {gap:.1e} of {scale:.1e}"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_computes_what_transformers_does(name: str) -> None:
    of = family(name)
    batch, model = batch_of(of), of.whole
    weights = torch.randn(len(batch), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = wanted(model, of, batch, weights)
    wanted_gradients = gradients(model)
    assert any("vision" in n or "visual" in n for n in wanted_gradients)
    for packing, budget in LAYOUTS:
        frozen, tower = of.language, Tower(of.whole, of.processor)
        trained = of.whole
        for policy, vision in ((frozen, tower), (trained, Tower(trained, of.processor, trained=True))):
            forward = Forward(policy, budget, vision=vision)
            torch.testing.assert_close(computed(forward, batch, packing), expected, rtol=0, atol=EXACT)
            torch.testing.assert_close(computed(forward, batch, packing, weights), expected, rtol=0, atol=EXACT)
            found = gradients(policy)
            assert found.keys() <= wanted_gradients.keys()
            assert (policy is frozen) == (found.keys() < wanted_gradients.keys())
            assert_close(found, wanted_gradients)
