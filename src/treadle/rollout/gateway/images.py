"""Images in requests, as each dialect has them, and how they are read.

data URL --Image (validation)--> read within `rollout.images`, as a data URL of its true type
http(s) URL --Image--> itself, if these may be fetched --RequestImages.finish--> a data URL
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from treadle.core.errors import ConfigError, DataError
from treadle.core.images import PLACE, data_url
from treadle.core.types import Message
from treadle.rollout.config import ImagesConfig
from treadle.rollout.gateway import request as api
from treadle.rollout.gateway.fetch import fetch, is_remote

T = TypeVar("T")

_DEFAULT = ImagesConfig()
_DECODED = 2  # images decoded at a time, which bounds memory
_FETCHED = 64 * 2**20  # bytes of remote images of one request


def _read(url: str, info: ValidationInfo) -> str:
    config = info.context or _DEFAULT
    if is_remote(url):
        if config.fetch == "never":
            raise api.problem(
                "is a remote image, which is not fetched; send a data URL (data:image/png;base64,...), or set "
                "rollout.images.fetch"
            )
        return url
    try:
        return data_url(url, config.limits)
    except (DataError, ConfigError) as error:
        raise api.problem(str(error)) from error


Image = Annotated[api.Text, AfterValidator(_read)]


class ImageUrl(api.RequestModel):
    url: Image


class ImagePart(api.RequestModel):
    """An image in OpenAI's dialects: chat completions have an object with its URL, Responses the URL."""

    type: Literal["image_url", "input_image"]
    image_url: Annotated[ImageUrl, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)]

    @property
    def image(self) -> str:
        return self.image_url.url


class _Base64(api.RequestModel):
    type: Literal["base64"]
    media_type: api.Text = "image/png"
    data: api.Text


class _Remote(api.RequestModel):
    type: Literal["url"]
    url: api.Text


def _source(source: _Base64 | _Remote, info: ValidationInfo) -> str:
    return _read(source.url if isinstance(source, _Remote) else f"data:{source.media_type};base64,{source.data}", info)


class ImageBlock(api.RequestModel):
    """An image in Anthropic's dialect."""

    type: Literal["image"]
    source: Annotated[_Base64 | _Remote, Field(discriminator="type"), AfterValidator(_source)]

    @property
    def image(self) -> str:
        return cast(str, self.source)  # since validation


class TextPart(Protocol):
    """A part of a message's content that has text."""

    @property
    def said(self) -> str: ...


def filled(message: Message, parts: Sequence[TextPart | ImagePart | ImageBlock]) -> Message:
    """Return the message with the content of these parts: texts on lines of their own, and images.

    Raises ApiError if a text beside images has the character that stands for an image.
    """
    content, images, was_text = "", list[str](), False
    for part in parts:
        if isinstance(part, ImagePart | ImageBlock):
            images.append(part.image)
            content, was_text = content + PLACE, False
        else:
            content, was_text = f"{content}\n{part.said}" if was_text else content + part.said, True
    filled: Message = {**message, "content": content}
    if not images:
        return filled
    if content.count(PLACE) != len(images):
        raise api.ApiError(400, "messages: a text beside images has the character U+FFFC; leave it out", "messages")
    return {**filled, "images": images}


class RequestImages:
    """Reads requests with images, off the event loop."""

    def __init__(self, config: ImagesConfig = _DEFAULT) -> None:
        self.config, self._places = config, asyncio.Semaphore(_DECODED)

    async def read(self, raw: bytes, read: Callable[[ImagesConfig], T]) -> T:
        """Return `read(config)`, called in a thread if the request's body may have images."""
        if b"image" not in raw:
            return read(self.config)
        return await self._decoding(read, self.config)

    async def finish(self, messages: Sequence[Message], kept: dict[str, str]) -> None:
        """Fetch the remote images of messages just read. Raises ApiError.

        kept: images of earlier requests; equal ones share their text.
        """
        left = _FETCHED
        for message in messages:
            for number, url in enumerate(images := message.get("images", [])):
                if is_remote(url):
                    data = await fetch(url, min(left, self.config.max_bytes), self.config.fetch == "any")
                    left -= len(data)
                    try:
                        url = await self._decoding(data_url, data, self.config.limits, f"the image {url[:80]!r}")
                    except DataError as error:
                        raise api.ApiError(400, str(error), "messages") from error
                images[number] = kept.setdefault(url, url)

    async def _decoding(self, read: Callable[..., T], *arguments: Any) -> T:
        async with self._places:
            return await asyncio.to_thread(read, *arguments)
