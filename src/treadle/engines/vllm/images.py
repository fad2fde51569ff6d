"""Images in calls of vLLM's servers: pixels are sent, and ids compared.

    ids [5 9 9 9 9 6] --Pictures.collapsed--> [5 9 6], as the chat template writes it, beside a PNG for each image
    the server's own processor expands these, and the ids that it reports must be the recorded ones (`check_ids`)

A server keeps features by the names given here, which change with the weights of a trained tower: they are never
outdated.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.core.errors import EngineError
from treadle.core.images import CHECKED, PromptImage, picture_of, read_image
from treadle.core.types import Ids
from treadle.models.vision import ImageProcessor, Recent


@dataclass(frozen=True, slots=True)
class Pictures:
    """Writes prompts with images for servers.

    encode, decode: the tokenizer's. vocabulary: an exclusive bound of ids. tolerance: difference in nats between two
    passes of a server over equal tokens. trained: whether published weights include the tower.
    """

    processor: ImageProcessor
    encode: Callable[[str], Ids]
    decode: Callable[[Sequence[int]], str]
    vocabulary: int
    tolerance: float
    trained: bool = False

    def collapsed(self, ids: Ids, images: Sequence[PromptImage]) -> list[int]:
        """Return a prompt's ids with what a chat template writes for an image in place of each.

        White space around what stands for an image (Gemma 3 has some) may be one token with that of the text; the
        latter is encoded anew. Raises EngineError for other ids at an image.
        """
        made: list[int] = []
        rest: list[int] = np.asarray(ids).tolist()
        for image in images:
            text = self.processor.prepared(image.url).text
            inner = self.processor.encoded(text.strip()).tolist()
            begin = image.start - (len(ids) - len(rest)) - inner.index(image.placeholder)
            if begin < 0 or rest[begin : begin + len(inner)] != inner:
                raise EngineError(f"the ids around the image {image.sha256[:12]} are not those of its processor")
            before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
            made += self._without(rest[:begin], before, end=True) + self.encode(self.processor.name).tolist()
            rest = self._without(rest[begin + len(inner) :], after, end=False)
        return made + rest

    def _without(self, ids: list[int], space: str, *, end: bool) -> list[int]:
        """Return ids without white space at their end, or at their beginning. Raises EngineError."""
        if not space:
            return ids
        edge = ids[-1:] if end else ids[:1]
        # Of several tokens if none of them is the whole.
        while edge != ids and len(self.decode(edge)) < len(space):
            edge = ids[-len(edge) - 1 :] if end else ids[: len(edge) + 1]
        text = self.decode(edge)
        rest = text.removesuffix(space) if end else text.removeprefix(space)
        if len(rest) == len(text):
            raise EngineError(f"the text at an image is {text!r}, and its processor writes {space!r} there")
        kept = self.encode(rest).tolist() if rest else []
        return [*ids[: len(ids) - len(edge)], *kept] if end else [*kept, *ids[len(edge) :]]


async def prompt_of(ids: Ids, images: Sequence[PromptImage], label: str, pictures: Pictures | None) -> dict[str, Any]:
    """Return the part of a call's body that is its prompt int32[P]. label: of the weights. pictures: None for servers
    that are shown none. Raises EngineError.
    """
    if not images:
        return {"token_ids": np.asarray(ids).tolist()}
    if pictures is None:
        raise EngineError(
            f"vLLM's servers were started without the model's tower, and are shown {len(images)} images; set "
            "engine.kind=torch or, in a run, engine.options.args={language-model-only: false}"
        )
    return await asyncio.to_thread(_shown, ids, images, label, pictures)


def _shown(ids: Ids, images: Sequence[PromptImage], label: str, pictures: Pictures) -> dict[str, Any]:
    weights = label if pictures.trained else label.partition(".")[0]  # of a frozen tower, this run's
    parts = [{"type": "image_url", "url": _upright(each), "uuid": _name(each, weights)} for each in images]
    return {"token_ids": pictures.collapsed(ids, images), "content_parts": parts, "return_token_ids": True}


def check_ids(server: object, answer: Mapping[str, Any], ids: Ids, images: Sequence[PromptImage]) -> None:
    """Raise EngineError unless a server expanded the prompt of `prompt_of` to these ids int32[P]."""
    own, theirs = np.asarray(ids).tolist(), answer.get("prompt_token_ids") or []
    if not images or theirs == own:
        return
    pairs = enumerate(zip(theirs, own, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(theirs), len(own)))
    raise EngineError(
        f"{server} makes {len(theirs)} ids of a prompt of {len(own)} with {len(images)} images, others from id {at} "
        "on; its image processor has other files or settings (mm-processor-kwargs) than the model's"
    )


def _name(image: PromptImage, label: str) -> str:
    return hashlib.sha256(f"{label}|{image.sha256}".encode()).hexdigest()


_SENT = Recent[str](2**28)


def _upright(image: PromptImage) -> str:
    """Return an image's data URL as the model's processor gets it: upright, RGB. The last ones are kept."""
    return _SENT.get(image.sha256, lambda: read_image(picture_of(image.url).pixels, CHECKED).url, len)
