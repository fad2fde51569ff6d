"""`ImagePlaces`: images of messages in rendered conversations.

    content "What is \ufffc?", images [url]  --in_parts-->   parts that chat templates read
    text by the template, `<|image_pad|>`     --expanded-->   what the model's processor writes for each image, once
    ids                                       --placed-->     where each image is in them

Only the template's own placeholders are expanded: in a message's text their names are ordinary text (`Structure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.core.errors import DataError
from treadle.core.images import PLACE, ProcessesImages, PromptImage
from treadle.core.types import Ids
from treadle.rendering.structure import Structure
from treadle.rendering.template import Plain

_NO_PROCESSOR = (
    "the conversation has an image, and the model takes none: use a model with a vision tower, whose directory has "
    "its processor's files (preprocessor_config.json), or leave images out"
)


class ImagePlaces:
    """Writes images into conversations of one tokenizer. processor: the model's; None: images are refused."""

    def __init__(self, processor: ProcessesImages | None, structure: Structure) -> None:
        self.processor, self._structure = processor, structure

    def in_parts(self, message: Plain) -> Plain:
        """Return a message as templates read it: with a list of parts as content, if it has images.

        Raises DataError without a processor.
        """
        if not message.get("images"):
            return message
        if self.processor is None:  # a template for text would fail on the parts
            raise DataError(_NO_PROCESSOR)
        parts: list[Any] = []
        for number, text in enumerate(message["content"].split(PLACE)):
            parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
        return {**{key: item for key, item in message.items() if key != "images"}, "content": parts}

    def expanded(self, text: str, urls: Sequence[str]) -> str:
        """Replace the template's placeholders, one an image, by the processor's text. Raises DataError for another
        number of them, or an image that cannot be processed.
        """
        name = self._structure.names.get(self._own.name)
        # Not `split`: a name as a message's text, between two structural tokens, is no private name.
        places = [match for match in self._structure.pattern.finditer(text) if match[0] == name]
        if len(places) != len(urls):
            raise DataError(
                f"the chat template writes {len(places)} placeholders {self._own.name} for {len(urls)} images, so "
                "that the model would not see all of them: it may leave out images of some roles (model.roles: {tool: "
                "user}), or need another template (model.chat_template)"
            )
        made = [self._structure.claim(self._own.prepared(url).text) for url in urls]
        begins, ends = [0, *(place.end() for place in places)], [*(place.start() for place in places), len(text)]
        return "".join(text[a:b] + image for a, b, image in zip(begins, ends, [*made, ""], strict=True))

    def placed(self, ids: Ids, messages: Sequence[Mapping[str, Any]]) -> tuple[PromptImage, ...]:
        """Return where the images of messages are in a prompt's ids int32[P]. Raises DataError if they do not fit."""
        urls = [url for message in messages for url in message.get("images") or ()]
        if not urls:
            return ()
        processor, made = self._own, [self._own.prepared(url) for url in urls]
        where = np.flatnonzero(ids == processor.placeholder)
        if len(where) != sum(each.tokens for each in made):
            raise DataError(
                f"a prompt has {len(where)} ids {processor.placeholder}, the placeholders of "
                f"{sum(each.tokens for each in made)} parts of images: a reply contains some, which no image stands for"
            )
        ends = np.cumsum([each.tokens for each in made])
        own = np.split(where, ends[:-1])
        return tuple(
            PromptImage(
                sha256=each.sha256,
                processed=each.processed,
                settings=processor.settings,
                placeholder=processor.placeholder,
                tokens=each.tokens,
                start=int(places[0]),
                length=int(places[-1]) + 1 - int(places[0]),
                grid=each.grid,
                url=url,
                size=each.size,
            )
            for each, places, url in zip(made, own, urls, strict=True)
        )

    @property
    def _own(self) -> ProcessesImages:
        if self.processor is None:
            raise DataError(_NO_PROCESSOR)
        return self.processor
