"""What could be silently wrong with images: a model that is trained without their pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.core.errors import ConfigError
from treadle.core.images import PromptImage, picture_of, read_image
from treadle.core.types import Ids

if TYPE_CHECKING:
    from treadle.models.vision import ImageProcessor
    from treadle.training.forward import Forward


def changed_pixels(image: PromptImage, processor: ImageProcessor) -> PromptImage:
    """Return an image of the same size in the same place, with every pixel moved half the range. Raises DataError."""
    from PIL import Image

    other = read_image(Image.fromarray(picture_of(image.url).pixels + np.uint8(128)))
    prepared = processor.prepared(other.url)
    return replace(image, sha256=prepared.sha256, processed=prepared.processed, url=other.url)


def probe_prompt(image: PromptImage, vocabulary: int) -> tuple[Ids, PromptImage]:
    """Return ids int32[T] with an image between ordinary ones, three before it and three after it."""
    text = ((np.arange(1, 7) + vocabulary // 2) % vocabulary).astype(np.int32)
    ids = np.concatenate([text[:3], np.full(image.tokens, image.placeholder, np.int32), text[3:]])
    return ids, replace(image, start=3, length=image.tokens)


def check_pixels(forward: Forward, image: PromptImage) -> None:
    """Raise ConfigError unless changed pixels change the log-probabilities after an image, and only those."""
    vision, name = forward.scorer.vision, type(forward.model).__name__
    assert vision is not None, "a model without a tower has no images"
    ids, one = probe_prompt(image, forward.model.config.get_text_config().vocab_size)
    other = changed_pixels(one, vision.processor)
    seen, changed = (forward.exact_logprobs(ids, [each]) for each in (one, other))
    if np.array_equal(seen[-3:], changed[-3:]):
        raise ConfigError(
            f"{name} computes the same log-probabilities after an image and after one with other pixels: it would be "
            "trained without seeing; take another model"
        )
    if not np.allclose(seen[:2], changed[:2], rtol=0, atol=forward.tolerance):
        raise ConfigError(
            f"{name} computes other log-probabilities before an image with other pixels: its attention, positions or "
            "image features work in a way unknown to Treadle"
        )
