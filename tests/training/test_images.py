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
from tests.towers import tensors
from treadle.algorithms.config import AlgorithmConfig, KlConfig
from treadle.core.errors import ConfigError, DataError
from treadle.core.files import Manifest
from treadle.core.images import OWN, PLACE, ImageIds, Picture, PromptImage
from treadle.core.types import Group, Step
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.loading import make_model
from treadle.models.towers import tower_of, trained_tower
from treadle.models.vision import ImageProcessor, Tower
from treadle.models.weights import published, weights_digest
from treadle.packing import flat
from treadle.packing.flat import FlatBatch, calls, flatten, replayed
from treadle.packing.layout import Packing, Sharing, chunks, cuts, lay_out
from treadle.training.checkpoint import load_checkpoint, save_checkpoint
from treadle.training.config import TrainingConfig, WarmStartConfig
from treadle.training.forward import Forward
from treadle.training.frozen import make_reference
from treadle.training.learner import Learner
from treadle.training.objective import LossGradients
from treadle.training.sft import Supervised

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


def test_pieces_are_cut_inside_images() -> None:
    """What stands for an image is computed per node, so that a cut inside one is no other computation."""
    of = family("qwen3_vl")
    forward = Forward(of.language, 5, vision=Tower(of.whole, of.processor))
    inside = 0
    for tree in forward.trees(calls(batch_of(of)), Packing.TREE, Sharing.BATCH):
        assert tree.table is not None
        starts = [part.token_ids[0] for part in chunks(tree, 5) if part.token_ids[0] >= OWN]
        inside += sum(tree.table.image(int(ident))[1] > 0 for ident in starts)
    assert inside > 2


@pytest.mark.parametrize("name", FAMILIES)
def test_budgets_count_the_tokens_of_a_trained_tower(name: str) -> None:
    of = family(name)
    factor = Tower(of.whole, of.processor, trained=True).trained_tokens
    shown = of.processor.prepared(picture(3, (64, 32)).url)
    patch = of.whole.config.vision_config.patch_size
    pixels = shown.arrays["pixel_values"].size // 3 // getattr(of.whole.config.vision_config, "temporal_patch_size", 1)
    positions = shown.arrays.get("image_position_ids")  # Gemma 4 pads
    patches = pixels // patch**2 if positions is None else (positions >= 0).all(-1).sum()
    assert factor > 1 and patches == factor * shown.tokens

    for trained, cost in ((False, 1), (True, 1 + factor)):
        forward = Forward(of.whole, 60, vision=Tower(of.whole, of.processor, trained))
        trees = forward.trees(calls(batch_of(of)), Packing.TREE, Sharing.BATCH)
        pieces = [tree.token_ids[start:end] for tree in trees for start, end in cuts(tree, 60, whole_images=trained)]
        assert sum(map(len, pieces)) == sum(map(len, trees))
        largest = max(image.tokens for step in batch_of(of).steps for image in step.images)
        most = max(60, cost * largest) if trained else 60  # a piece may have one image that is larger
        assert max(int(np.where(ids >= OWN, cost, 1).sum()) for ids in pieces) <= most
        assert sum(map(forward.passes, trees)) == len(pieces) or forward.scorer.why_not_shared or "gemma" in name


@pytest.mark.parametrize("name", ["idefics3", "qwen3_vl"])
def test_a_tree_shares_as_far_as_pictures_agree(name: str) -> None:
    of = family(name)
    [tree] = lay_out(calls(batch_of(of)), Packing.TREE, Sharing.BATCH, 8192)
    images = {image.processed: image.tokens for step in batch_of(of).steps for image in step.images}
    counted = np.unique(tree.token_ids[tree.token_ids >= OWN], return_counts=True)
    assert len(counted[0]) == sum(images.values())  # each placeholder of each image has one id
    # `one` and `other` begin a conversation, and are seen again later; `wide` and `again` follow the same text.
    assert sorted(set(counted[1].tolist())) == [1, 2]


def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal placeholders are equal, whatever the picture's pixels."""
    own, like = ImageIds.put, dict[int, PromptImage]()

    def put(table: ImageIds, ids: Any, images: Sequence[PromptImage]) -> Any:
        alike = [replace(like.setdefault(i.tokens, i), start=i.start, length=i.length) for i in images]
        return own(table, ids, alike)

    monkeypatch.setattr(ImageIds, "put", put)


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions go on as those of text."""
    monkeypatch.setattr(flat, "axes", lambda length, images: np.tile(np.arange(length), (3, 1)))


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower is skipped."""
    own = Tower.inputs

    def inputs(tower: Tower, embedding: Any, ids: Any, *more: Any) -> dict[str, Any]:
        return own(tower, embedding, np.where(ids >= OWN, tower.processor.placeholder, ids), *more)

    monkeypatch.setattr(Tower, "inputs", inputs)


def from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that begins inside an image begins with the image's first features."""
    own = Tower.inputs

    def inputs(tower: Tower, embedding: Any, ids: Any, table: ImageIds, *more: Any) -> dict[str, Any]:
        number = table.image(int(ids[0, 0]))[1] if ids[0, 0] >= OWN else 0
        run = np.cumprod(ids[0] >= OWN)
        return own(tower, embedding, ids - (number * run).astype(np.int32), table, *more)

    monkeypatch.setattr(Tower, "inputs", inputs)


def without_deep_features(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Tower.inputs
    monkeypatch.setattr(Tower, "inputs", lambda *a: {"inputs_embeds": own(*a)["inputs_embeds"]})


@pytest.mark.parametrize("mutant", [None, shared, plain, blind, from_the_start, without_deep_features])
def test_what_others_get_wrong_is_found(monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    of = family("qwen3_vl")
    batch = batch_of(of)
    expected = wanted(of.whole, of, batch)
    forward = Forward(of.language, 5, vision=Tower(of.whole, of.processor))
    forward.scorer.looked = True  # its own check would raise
    if mutant is not None:
        mutant(monkeypatch)
    gap = float((computed(forward, batch, Packing.TREE) - expected).abs().max())
    assert gap < EXACT if mutant is None else gap > 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_and_recomputed_layers_give_the_same(name: str) -> None:
    """A model that cannot share prefixes sees each step in a padded row."""
    of = family(name)
    batch, model = batch_of(of), of.whole
    weights = torch.randn(len(batch), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = wanted(model, of, batch, weights)
    for shares in (False, True):
        trained = of.whole
        forward = Forward(trained, 400, gradient_checkpointing=True, vision=Tower(trained, of.processor, trained=True))
        if not shares:
            forward.scorer.why_not_shared = "as it is told"
            if name.startswith("gemma"):  # rows are causal
                with pytest.raises(ConfigError, match="in both directions inside images"):
                    computed(forward, batch, Packing.STEP)
                continue
        torch.testing.assert_close(computed(forward, batch, Packing.TREE, weights), expected, rtol=0, atol=EXACT)
        assert_close(gradients(trained), gradients(model))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_sequence_is_scored(name: str) -> None:
    of = family(name)
    step = batch_of(of).steps[2]
    forward = Forward(of.language, 4096, vision=Tower(of.whole, of.processor))
    logits = own_logits(of.whole, of.processor, step.full_ids, step.images)[:-1].log_softmax(-1)
    expected = logits.gather(1, torch.from_numpy(step.full_ids[1:].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(forward.exact_logprobs(step.full_ids, step.images), expected, atol=1e-5)


def test_images_without_a_tower_are_refused_by_name() -> None:
    of = family("idefics3")
    forward = Forward(of.language, 4096)
    [tree, *_] = forward.trees(calls(batch_of(of)), Packing.TREE, Sharing.BATCH)
    with pytest.raises(DataError, match="take a model with a vision tower"):
        forward.scores(tree, torch.ones(100))


def test_a_tower_that_does_not_see_is_refused_at_the_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    of = family("idefics3")
    forward = Forward(of.language, 4096, vision=Tower(of.whole, of.processor))
    blind(monkeypatch)
    with pytest.raises(ConfigError, match="same log-probabilities after an image and after one with other pixels"):
        forward.trees(calls(batch_of(of)), Packing.TREE, Sharing.BATCH)
    forward.trees(calls(flatten([make_group([([make_step([5, 6], [7])], 1.0)])])), Packing.TREE, Sharing.BATCH)


# --- learning ---


def learner(of: Family, vision: str = "frozen", **settings: Any) -> Learner:
    lora = settings.pop("lora", None)
    algorithm = settings.pop("algorithm", AlgorithmConfig())
    whole = vision == "train"
    config = ModelConfig(path=str(of.directory))
    model = make_model(config, 726, 0, lora=lora, whole=whole)
    tower = trained_tower(config, model) if whole else tower_of(config, "cpu")
    training = TrainingConfig.model_validate(
        {"optimizer": {"learning_rate": 1e-2}, "vision": vision, "tasks_per_update": 2, "group_size": 2, **settings}
    )
    reference = make_reference(algorithm.kl, model)
    return Learner(model, training, algorithm, 4, reference=reference, vision=tower)


def is_of_tower(name: str) -> bool:
    return "vision" in name or "visual" in name or "connector" in name


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tower_moves_only_if_it_is_trained(name: str, tmp_path: Path) -> None:
    """And is then published, saved, and resumed."""
    of = family(name)
    came = tensors(of.directory)
    for vision in ("frozen", "train"):
        here = learner(of, vision)
        names = {n for n, _ in published(here.model)}
        assert any(map(is_of_tower, names)) == (vision == "train")
        assert here.train_batch(conversations(of))[0].metrics["gradient_norm"]
        save_checkpoint(tmp_path / vision, here, of.directory)
        goes = tensors(tmp_path / vision)
        assert goes.keys() == came.keys()
        moved = {n for n in came if is_of_tower(n) and not torch.equal(came[n], goes[n])}
        assert bool(moved) == (vision == "train")
        assert (tmp_path / vision / "preprocessor_config.json").is_file()

        resumed = learner(of, vision)
        load_checkpoint(Manifest.load(tmp_path / vision), resumed, of.directory)
        assert weights_digest(published(resumed.model)) == weights_digest(published(here.model))
        for each in (here, resumed):
            each.train_batch(conversations(of))
        assert weights_digest(published(resumed.model)) == weights_digest(published(here.model))


@pytest.mark.parametrize("vision", ["frozen", "train"])
def test_a_reference_sees_with_its_own_weights(vision: str) -> None:
    """Its features are those of the start, or of the policy that it was reset to."""
    of = family("idefics3")
    here = learner(of, vision, algorithm=AlgorithmConfig(kl=KlConfig(coef=0.1, reset_every=2)))
    batch, reference = batch_of(of), here.reference
    assert reference is not None
    start = here.logprobs(batch)
    for update in (1, 2):
        here.train_batch(conversations(of))
        told = here.frozen_scores(reference, batch).logp.numpy()
        now = here.logprobs(batch)
        # A trained tower computes images together, which rounds in another way than each alone.
        assert np.abs(told - (start if update == 1 else now)).max() < 1e-5 < 1e-4 < np.abs(now - start).max()


@pytest.mark.parametrize("name", ["idefics3", "qwen3_5"])
def test_adapters_precision_and_values_with_images(name: str) -> None:
    of = family(name)
    plain = learner(of)
    expected = plain.logprobs(batch_of(of))
    for settings in (
        {"lora": LoraConfig(rank=2)},
        {"precision": "bfloat16"},
        {"algorithm": AlgorithmConfig(advantage="gae")},
    ):
        here = learner(of, **settings)
        gap = np.abs(here.logprobs(batch_of(of)) - expected).max()
        assert gap < (0.5 if "precision" in settings else 1e-4)
        assert here.train_batch(conversations(of))[0].metrics["gradient_norm"]


def test_demonstrations_with_images_are_learned() -> None:
    of = family("idefics3")
    here, step = learner(of, "train"), batch_of(of).steps[1]
    supervised = Supervised(here.forward, WarmStartConfig(demonstrations="x", steps=30, learning_rate=1e-2))
    losses = [supervised.step([[(step.prompt_ids, step.completion_ids, *step.images)]], n) for n in range(30)]
    assert losses[-1] < losses[0] / 2


def test_routing_is_inherited_as_far_as_pictures_agree() -> None:
    """A sibling's prompt has equal placeholders, which the engine's cache did not have."""
    of = family("idefics3")
    first = of.step(None, f"at {PLACE} is", [picture(1)], [40, 41])
    other = of.step(None, f"at {PLACE} is", [picture(2)], [40])
    choices = [np.array([0, 1], np.int32), np.array([2], np.int32)]
    keys = replayed([first, other], choices)
    assert (keys[1][: len(other.prompt_ids) - 1] == -1).all()
    same = replayed([first, of.step(first, " and", [], [50])], choices)
    assert (same[1][len(first.prompt_ids) - 1 : len(first.full_ids) - 1] == [0, 1]).all()
