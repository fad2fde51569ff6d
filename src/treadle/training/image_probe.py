"""What could be silently wrong with images: a model that is trained without their pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.core.errors import ConfigError
from treadle.core.images import PromptImage
from treadle.models.vision import changed_pixels, probe_prompt

if TYPE_CHECKING:
    from treadle.training.forward import Forward


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
