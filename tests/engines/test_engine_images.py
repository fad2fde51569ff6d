"""The embedded engine with images: it samples and reports what transformers' own model computes of the whole
conversation, an image is part of the prefix that calls share, and text beside it keeps its bits."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.kit import End, moved, sampling, serving
from tests.models import tiny
from tests.seeing import FAMILIES, own_logits, picture, prompt, tokenizer, whole, write
from tests.until import until
from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.images import OWN, PLACE, ImageIds, Picture, PromptImage
from treadle.core.types import Ids
from treadle.models.pretrained import load_pretrained
from treadle.models.towers import frozen_tower
from treadle.models.vision import Features, ImageProcessor, Tower
from treadle.models.weights import unique_weights

# All is computed in float64; what remains is the float32 of logits (of about 30) and of log-probabilities.
TOLERANCE = 1e-5
OPTIONS: dict[str, Any] = {"stop_token_ids": [], "lock_step": False}


@dataclass
class Model:
    """A family's model: whole, as transformers has it, and its language part, as an engine is given it."""

    directory: Path
    family: str

    @cached_property
    def processor(self) -> ImageProcessor:
        return ImageProcessor(self.directory)

    @cached_property
    def whole(self) -> Any:
        return whole(self.directory, torch.float64)

    @cached_property
    def language(self) -> Any:
        return load_pretrained(self.directory, "model.path").double()

    def vision(self, _: Any) -> Tower:
        return Tower(self.whole, self.processor)

    def prompt(self, text: str, *pictures: Picture) -> tuple[Ids, tuple[PromptImage, ...]]:
        return prompt(self.processor, tokenizer(self.family), text, pictures)

    def gap(self, ids: Ids, answer: Completion, images: Sequence[PromptImage], temperature: float = 1.0) -> float:
        """Return the largest difference between reported log-probabilities and transformers' own."""
        assert self.processor.placeholder not in answer.token_ids, "transformers would take it for an image"
        logits = own_logits(self.whole, self.processor, np.concatenate([ids, answer.token_ids]), images) / temperature
        own = logits.log_softmax(-1)[len(ids) - 1 : -1].gather(1, torch.from_numpy(answer.token_ids).long()[:, None])
        return float(np.abs(answer.logprobs - own[:, 0].numpy()).max())


_MADE: dict[str, Model] = {}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family = request.param
    if family not in _MADE:
        _MADE[family] = Model(write(tmp_path_factory.mktemp(family), family), family)
    return _MADE[family]


def after(ids: Ids, answer: Completion, more: Ids, images: Sequence[PromptImage]) -> tuple[Ids, list[PromptImage]]:
    """Return a prompt that goes on with these ids, and where its further images are."""
    start = len(ids) + len(answer.token_ids)
    return np.concatenate([ids, answer.token_ids, more]), [replace(each, start=each.start + start) for each in images]


def own_greedy(model: Model, ids: Ids, images: Sequence[PromptImage], tokens: int) -> list[int]:
    """Return what transformers generates."""
    arrays = [model.processor.checked(image).arrays for image in images]
    join = 1 if "pixel_attention_mask" in arrays[0] else 0
    named: dict[str, Any] = {key: torch.from_numpy(np.concatenate([a[key] for a in arrays], join)) for key in arrays[0]}
    named["pixel_values"] = named["pixel_values"].double()
    given = torch.from_numpy(ids).long()[None]
    if "image_grid_thw" in named:
        named["mm_token_type_ids"] = (given == model.processor.placeholder).int()
    model.whole.generation_config.eos_token_id = None
    mask = torch.ones_like(given)
    made = model.whole.generate(
        input_ids=given, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **named
    )
    return list(made[0, len(ids) :].tolist())


@pytest.mark.quick(4)
async def test_greedy_tokens_are_those_that_transformers_generates(model: Model) -> None:
    ids, images = model.prompt(f"see {PLACE} and {PLACE}, then", picture(1), picture(2, (48, 32)))
    async with serving(model.language, sessions="a", vision=model.vision, **OPTIONS) as engine:
        answer = await engine.generate(ids, sampling(temperature=0.0, max_tokens=12), session="a", images=images)
    assert answer.token_ids.tolist() == own_greedy(model, ids, images, 12)


@pytest.mark.quick(8)
@pytest.mark.parametrize("prefill_tokens", [7, 16384])
async def test_turns_are_transformers_own_and_compute_only_what_is_new(model: Model, prefill_tokens: int) -> None:
    """Images of several sizes, one of them twice; text before, between and after."""
    turns = [
        (f"see {PLACE}", [picture(1)]),
        (" more text without any", []),
        (f"{PLACE} and {PLACE} two and then", [picture(2, (48, 32)), picture(1)]),
        (f" now {PLACE}", [picture(3, (32, 64))]),
    ]
    ids, images = np.empty(0, np.int32), list[PromptImage]()
    async with serving(
        model.language, sessions="a", vision=model.vision, prefill_tokens=prefill_tokens, **OPTIONS
    ) as engine:
        answer, known = None, 0
        for seed, (text, pictures) in enumerate(turns):
            more, placed = model.prompt(text, *pictures)
            if answer is None:
                ids, images = more, list(placed)
            else:
                ids, here = after(ids, answer, more, placed)
                images += here
            before = engine.counters.prefilled
            answer = await engine.generate(ids, sampling(seed + 1, temperature=0.8), session="a", images=images)
            assert engine.counters.prefilled - before == len(ids) - known
            known = len(ids) + len(answer.token_ids) - 1  # the last token was sampled, and never fed
            assert model.gap(ids, answer, images, 0.8) < TOLERANCE
            scores = await engine.score(np.concatenate([ids, answer.token_ids]), temperature=0.8, images=images)
            assert np.abs(scores[len(ids) - 1 :] - answer.logprobs).max() < TOLERANCE
        alone = await engine.alone(ids, sampling(9), images=images)
        assert model.gap(ids, alone, images) < TOLERANCE


@pytest.mark.quick(8)
@pytest.mark.parametrize("lock_step", [False, True])
async def test_equal_placeholders_show_each_call_its_own_picture(model: Model, lock_step: bool) -> None:
    """Concurrent sessions with equal ids: two with one picture, which share its prefix, one with another, one of text,
    and a longer one. Then each sees the other picture at the same place."""
    text = f"see {PLACE} it is"
    (ids, one), (_, two) = model.prompt(text, picture(1)), model.prompt(text, picture(2))
    longer, three = model.prompt(f"see {PLACE} it is of {PLACE} and", picture(1), picture(5))
    plain, _ = model.prompt("nothing to see here")
    options = {**OPTIONS, "lock_step": lock_step}
    async with serving(model.language, sessions="abcde", vision=model.vision, **options) as engine:
        await engine._look(one[0])  # as with the first image, which others would not wait for
        calls = {"a": (ids, one), "b": (ids, one), "c": (ids, two), "d": (plain, ()), "e": (longer, three)}
        for turn in range(2):
            before = engine.counters.prefilled, engine.counters.reused
            answers = await asyncio.gather(
                *(engine.generate(i, sampling(turn), session=name, images=m) for name, (i, m) in calls.items())
            )
            for (i, m), answer in zip(calls.values(), answers, strict=True):
                assert model.gap(i, answer, m) < TOLERANCE
            if not turn:
                assert engine.counters.shared >= len(ids)  # b's
            calls = {"a": (ids, two), "b": (ids, one), "c": (ids, one), "d": (plain, ()), "e": (longer, three)}
        if model.family != "qwen3_5":  # whose states are kept after prompts and completions alone
            known = one[0].start
            assert engine.counters.reused - before[1] == 2 * known + len(ids) + len(plain) + len(longer) - 3


@pytest.mark.quick(3)
@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
async def test_calls_go_on_across_a_publication(model: Model, in_flight: str) -> None:
    """With the new weights, and if these are recomputed, as if they had been there from the start."""
    ids, images = model.prompt(f"see {PLACE} and", picture(1, (48, 32)))
    other, end = moved(load_pretrained(model.directory, "model.path")).double(), End()
    options = {**OPTIONS, "in_flight": in_flight, "decode": end, "vision": model.vision}
    async with serving(model.language, sessions="a", **options) as engine:
        how = sampling(max_tokens=1500, stop=End.STRING)
        call = asyncio.create_task(engine.generate(ids, how, session="a", images=images))
        await until(lambda: engine.counters.sampled >= 3)
        await engine.update_weights(unique_weights(other), 1)
        sampled = engine.counters.sampled
        await until(lambda: engine.counters.sampled >= sampled + 3)
        end.has_come = True
        answer = await call
        scores = await engine.score(np.concatenate([ids, answer.token_ids]), images=images)
    old, new = answer.policy_versions
    assert (old.version, new.version) == (0, 1)
    gaps = np.abs(scores[len(ids) - 1 :] - answer.logprobs)
    assert gaps[: old.end].max() > 1e-2
    assert (gaps[new.start : new.start + 9].max() < 1e-3) == (in_flight == "recompute")


@pytest.mark.quick(3)
async def test_a_whole_model_is_published_with_its_tower(model: Model) -> None:
    ids, images = model.prompt(f"see {PLACE} and", picture(1, (48, 32)))
    other = Model(model.directory, model.family)
    async with serving(
        model.whole, sessions="a", vision=lambda copy: Tower(copy, model.processor), **OPTIONS
    ) as engine:
        before = await engine.generate(ids, sampling(1), session="a", images=images)
        language = {id(parameter) for parameter in other.whole.get_decoder().parameters()}
        with torch.no_grad():
            for parameter in other.whole.parameters():
                parameter.mul_(1.0 if id(parameter) in language else 1.5)
        await engine.update_weights(unique_weights(other.whole), 1)
        after = await engine.generate(ids, sampling(2), session="a", images=images)
    assert model.gap(ids, before, images) < TOLERANCE
    assert other.gap(ids, after, images) < TOLERANCE < 1e-2 < model.gap(ids, after, images)


@pytest.mark.quick(2)
def test_the_tower_of_a_models_files_is_loaded_once_and_serves_learner_and_engine(model: Model) -> None:
    _, images = model.prompt(f"see {PLACE} it", picture(1))
    tower = frozen_tower(model.directory)
    assert tower is not None and frozen_tower(model.directory) is tower
    with torch.inference_mode():  # as an engine does first
        tower.features(images[0])
    weight = torch.ones_like(tower.features(images[0]).rows, requires_grad=True)
    (weight * tower.features(images[0]).rows).sum().backward()
    assert weight.grad is not None and bool(weight.grad.any())


@pytest.mark.quick(2)
async def test_text_keeps_its_bits_beside_images(model: Model) -> None:
    plain, _ = model.prompt("nothing to see here")
    ids, images = model.prompt(f"see {PLACE} it is", picture(1))
    answers = []
    for vision, shown in ((None, False), (model.vision, False), (model.vision, True)):
        async with serving(model.language, sessions="ab", vision=vision, **OPTIONS) as engine:
            if shown:
                await engine.generate(ids, sampling(), session="b", images=images)
            answers.append(await engine.generate(plain, sampling(3), session="a"))
    assert len({answer.token_ids.tobytes() + answer.logprobs.tobytes() for answer in answers}) == 1


@pytest.mark.quick(2)
async def test_a_placeholder_without_an_image_is_a_token(model: Model) -> None:
    """A sampled one, which stays as it is: not a picture in the next prompt."""
    ids, images = model.prompt(f"see {PLACE} it", picture(1))
    stray = np.append(ids, np.int32(model.processor.placeholder))
    async with serving(model.language, sessions="a", vision=model.vision, **OPTIONS) as engine:
        answer = await engine.generate(stray, sampling(), session="a", images=images)
        scores = await engine.score(np.concatenate([stray, answer.token_ids]), images=images)
        before = await engine.score(ids, images=images)
    assert np.abs(scores[len(stray) - 1 :] - answer.logprobs).max() < TOLERANCE
    assert np.abs(scores[: len(before)] - before).max() < TOLERANCE


@pytest.mark.quick(1)
async def test_images_are_forgotten_with_their_sessions(model: Model) -> None:
    async with serving(model.language, sessions="ab", vision=model.vision, **OPTIONS) as engine:
        shown = {}
        for number, session in enumerate("aab"):
            ids, images = model.prompt(f"see {PLACE} it", picture(number))
            await engine.generate(ids, sampling(max_tokens=1), session=session, images=images)
            shown[session] = images[0].processed
        table = engine._batch._images.table
        assert len(table._images) == 3
        engine.close_session("a")
        ids, images = model.prompt(f"{PLACE} and", picture(7))
        await engine.generate(ids, sampling(max_tokens=1), session="b", images=images)
        assert [image.processed for image in table._images] == [shown["b"], images[0].processed]


async def test_images_are_refused_by_models_that_do_not_see_and_where_they_have_no_place(model: Model) -> None:
    ids, images = model.prompt(f"see {PLACE} it", picture(1))
    async with serving(tiny(), sessions="a", **OPTIONS) as engine:
        with pytest.raises(EngineError, match="loaded without a part that sees images; take a model that sees"):
            await engine.generate(np.zeros_like(ids), sampling(), session="a", images=images)
    async with serving(model.language, sessions="a", vision=model.vision, **OPTIONS) as engine:
        for wrong in (np.ones_like(ids), ids[:-2]):
            with pytest.raises(EngineError, match=r"the image .* has \d+ placeholders, and \d+ of its ids"):
                await engine.generate(wrong[: images[0].start + 1], sampling(), session="a", images=images)
            with pytest.raises(EngineError, match="has"):
                await engine.score(wrong[: images[0].start + 1], images=images)


class Blind(Tower):
    """Shows nothing, whatever the pixels."""

    def features(self, image: PromptImage) -> Features:
        rows = torch.zeros_like(super().features(image).rows)
        return Features(rows, tuple(map(torch.zeros_like, super().features(image).deep)))


async def test_a_model_that_pixels_do_not_move_is_refused_with_the_first_image(model: Model) -> None:
    ids, images = model.prompt(f"see {PLACE} it", picture(1))
    plain, _ = model.prompt("nothing to see")
    blind = Blind(model.whole, model.processor)
    async with serving(model.language, sessions="a", vision=lambda _: blind, **OPTIONS) as engine:
        for _ in range(2):
            with pytest.raises(
                EngineError, match="same log-probabilities after an image and after one with other pixels"
            ):
                await engine.generate(ids, sampling(), session="a", images=images)
        assert len((await engine.generate(plain, sampling(), session="a")).token_ids)


@pytest.mark.quick(1)
def test_ids_of_forgotten_images_are_given_again() -> None:
    table, ids = ImageIds(), np.full(2**4, 5, np.int32)

    def image(name: str, tokens: int) -> PromptImage:
        return PromptImage(name, name, "", 5, tokens, 0, tokens, (), "")

    table._next = 2**31 - 20
    first = table.put(ids, [image("a", 16)])
    assert first.tolist() == list(range(2**31 - 20, 2**31 - 4))
    assert table.put(ids, [image("b", 16)])[0] == OWN
    assert table.put(ids, [image("c", 16)])[0] == OWN + 16
    table.forget(["b"])
    table._next = 2**31 - 2
    assert table.put(ids, [image("d", 16)])[0] == OWN
    table._next = OWN
    assert table.put(ids, [image("e", 16)])[0] == OWN + 32
    assert [table.image(OWN + n)[0].processed for n in (0, 15, 16, 31, 32)] == ["d", "d", "c", "c", "e"]
    assert [each.processed for each, _ in table.among(table.put(ids, [image("a", 16)]))] == ["a"]
