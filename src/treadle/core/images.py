"""Images from outside as RGB pixels, or a refusal that says why; and images in prompts.

    PIL image | bytes | Path | data URL --read_image(limits)--> Picture: bytes, SHA-256, pixels uint8[H, W, 3]
    Picture --rendering--> PromptImage: where its placeholders are in a prompt
    prompt ids --ImageIds.put--> the same ids, but every placeholder with one of its own

Everything that sees a picture is given these pixels, so that loaders that differ cannot disagree. Orientation and
transparency as of transformers 5.24 and vLLM's ImageMediaIO:

- `transformers.image_utils.load_image` (paths, URLs, base64) applies EXIF orientation, then `convert("RGB")`, which
  drops alpha and shows what was hidden. Image processors, fast and slow, do not turn a PIL image; those that convert to
  RGB compose it onto white. vLLM turns and composes onto white.
- Here: turned, whatever the image comes from, and composed onto white. Opaque images thus equal `load_image`, and
  transparent ones what processors and vLLM make of them.

Pillow decodes, with only the formats below; its guard against decompression bombs stays in force. It is imported by the
function that needs it.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import re
import struct
import threading
import zlib
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import ConfigError, DataError
from treadle.core.registry import how_to_install

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]

PLACE = "\ufffc"
"""Object replacement character: the place of an image in the content of a message (`Message.images`)."""
BothWays = Literal["", "all", "sliding"]
"""Layers in which tokens of an image attend in both directions: none, all (Gemma 3), or those with a sliding window."""
OWN, _END = 2**30, 2**31
"""First id that stands for a placeholder of a certain image (`ImageIds`), above any vocabulary."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Others lose precision silently in `convert`: 16-bit gray is clipped at 255.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
_MPO = "MPO"  # a JPEG with previews, as cameras write it; its first frame is the picture
# What decoders raise for a damaged file; a warning, where warnings are errors.
_DAMAGE = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError, KeyError, TypeError),
    *(OverflowError, AttributeError, MemoryError, RuntimeError, ZeroDivisionError, Warning),
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Sizes beyond which an image is refused unread.

    bytes: size of the file. pixels: width times height; decoding needs about 12 bytes of memory for each.
    """

    bytes: int = 20 * 2**20
    pixels: int = 2**25


CHECKED = ImageLimits(2**40, 2**40)
"""Limits of images that were checked before, or are of the program's own."""


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image that was read.

    data: its file's bytes; of a PIL image, a PNG of the pixels. sha256: of `data`, hexadecimal. media_type: of `data`,
    by content: image/png, image/jpeg, ... pixels uint8[H, W, 3]: RGB, upright, read-only.
    """

    data: bytes
    sha256: str
    media_type: str
    pixels: Pixels

    @property
    def url(self) -> str:
        """The file as a data URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt.

    sha256: of the image's file. processed: SHA-256 of what the model's image processor makes of it. settings: SHA-256
    of that processor's settings. placeholder: id of the tokens whose hidden states its features replace, tokens of them
    among the prompt's ids [start, start + length). grid: (frames, rows, columns) of these, if the model's positions
    have three axes; () otherwise. url: its file as a data URL. size: width and height in pixels.
    """

    sha256: str
    processed: str
    settings: str
    placeholder: int
    tokens: int
    start: int
    length: int
    grid: tuple[int, ...]
    url: str = field(repr=False)
    size: tuple[int, int] = (0, 0)

    def places(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the positions of its placeholders in the prompt's ids, int64[tokens]. Raises DataError."""
        inside = self.start + np.flatnonzero(ids[self.start : self.start + self.length] == self.placeholder)
        if len(inside) != self.tokens:
            raise DataError(
                f"the image {self.sha256[:12]} has {self.tokens} placeholders, and {len(inside)} of its ids "
                f"[{self.start}, {self.start + self.length}) are {self.placeholder}"
            )
        return inside


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What an image processor makes of one image.

    sha256: of the image's file. size: its width and height. processed: SHA-256 of `arrays`. text: stands for it in a
    prompt. tokens: placeholders in the text. grid: see `PromptImage`. arrays: arguments of the tower.
    """

    sha256: str
    size: tuple[int, int]
    processed: str
    text: str
    tokens: int
    grid: tuple[int, ...]
    arrays: Mapping[str, NDArray[Any]]


class ProcessesImages(Protocol):
    """A model's image processor, as rendering uses it (`models.vision.ImageProcessor`).

    name: what a chat template writes for an image. placeholder, settings: see `PromptImage`.
    """

    @property
    def name(self) -> str: ...

    @property
    def placeholder(self) -> int: ...

    @property
    def settings(self) -> str: ...

    def prepared(self, url: str) -> Prepared:
        """Process an image, given as a data URL. Raises DataError."""


class ImageIds:
    """Gives each placeholder of each image an id of its own, from `OWN` on: equal ids then show equal pictures.

    Prefix trees and caches, which compare ids, thereby never share a token over different pictures. The ids are only
    used inside one object that computes; what is recorded has the placeholder's.

    tower: what each placeholder costs beside itself, in tokens of a trained tower; set by who computes.
    """

    def __init__(self) -> None:
        self.tower = 0
        self._first: dict[str, int] = {}  # hash of a processed image -> id of its first placeholder
        self._starts: list[int] = []
        self._images: list[PromptImage] = []
        self._next = OWN

    def put(self, ids: NDArray[np.int32], images: Sequence[PromptImage]) -> NDArray[np.int32]:
        """Return a copy of ids int32[T] with placeholders replaced; without images, `ids` itself."""
        if not images:
            return ids
        made = ids.copy()
        for image in images:
            first = self._first.get(image.processed)
            if first is None:
                first = self._first[image.processed] = self._free(image.tokens)
                number = bisect_right(self._starts, first)
                self._starts.insert(number, first)
                self._images.insert(number, image)
                self._next = first + image.tokens
            made[image.places(ids)] = np.arange(first, first + image.tokens)
        return made

    def costs(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return what tokens int32[T] cost of a budget, int64[T]."""
        return 1 + self.tower * (ids >= OWN).astype(np.int64)

    def plain(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return a copy of ids int32[T] with the placeholders of `put` as they were."""
        made, own = ids.copy(), ids >= OWN
        placeholders = np.array([image.placeholder for image in self._images], np.int32)
        made[own] = placeholders[np.searchsorted(self._starts, ids[own], "right") - 1]
        return made

    def _free(self, tokens: int) -> int:
        """Return the first of so many unused ids, if possible those after the newest image's. Raises DataError."""
        ends = (start + image.tokens for start, image in zip(self._starts, self._images, strict=True))
        for first in chain((self._next, OWN), ends):
            number = bisect_right(self._starts, first)
            before = number and self._starts[number - 1] + self._images[number - 1].tokens
            if before <= first and first + tokens <= (self._starts[number] if number < len(self._starts) else _END):
                return first
        raise DataError(f"more than {_END - OWN} placeholders of different images")

    def forget(self, images: Collection[str]) -> None:
        """Forget images that no ids in use show, by the hashes of what their processor made; their ids become free."""
        for processed in images:
            number = bisect_right(self._starts, self._first.pop(processed)) - 1
            del self._starts[number], self._images[number]

    def image(self, ident: int) -> tuple[PromptImage, int]:
        """Return the image of an id >= `OWN`, and the number of its placeholder."""
        number = bisect_right(self._starts, ident) - 1
        return self._images[number], ident - self._starts[number]

    def among(self, ids: NDArray[np.int32]) -> list[tuple[PromptImage, int]]:
        """Return the images that have placeholders in ids int32[T], each once in order of its number, with its first
        id.
        """
        numbers = np.unique(np.searchsorted(self._starts, ids[ids >= OWN], "right")) - 1
        return [(self._images[number], self._starts[number]) for number in numbers.tolist()]


def axes(length: int, images: Sequence[PromptImage]) -> NDArray[np.int64] | None:
    """Return the positions of a sequence's tokens on three axes (time, row, column), int64[3, T]; None if the model's
    positions have one.

    Multimodal rotary positions of Qwen2-VL (Wang et al., 2024, section 2.1): a text token has its position on all axes;
    the placeholders of an image of r rows and c columns have (p, p + row, p + column), with p the position that follows
    the text before; the text after goes on at p + max(r, c). Placeholders of such an image are adjacent.
    """
    if not any(image.grid for image in images):
        return None
    parts, at, position = [], 0, 0
    for image in images:
        text = image.start - at
        parts.append(np.broadcast_to(position + np.arange(text), (3, text)))
        position += text
        parts.append(position + np.indices(image.grid).reshape(3, -1))
        at, position = image.start + image.length, position + max(image.grid)
    parts.append(np.broadcast_to(position + np.arange(length - at), (3, length - at)))
    return np.concatenate(parts, 1)


def image_ends(ids: NDArray[Any], depth: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64[T]: for each placeholder of an image (ids int[T] of `ImageIds`), the place after the stretch of them
    that it is in; for other tokens the next one. depth int64[T]: of a sequence or tree.
    """
    same = (ids[1:] >= OWN) & (ids[1:] == ids[:-1] + 1) & (depth[1:] == depth[:-1] + 1)
    ends = np.append(np.flatnonzero(~same) + 1, len(ids))
    return ends[np.searchsorted(ends, np.arange(len(ids)), "right")]


@functools.lru_cache(maxsize=2)
def picture_of(url: str) -> Picture:
    """Read a data URL that was checked before (`as_messages`), whatever its size."""
    return read_image(url, CHECKED)


_CHECKED_URLS = 4096  # data URLs known to be good, by their digests
_known: dict[bytes, tuple[ImageLimits, str]] = {}  # SHA-256 -> the limits it was checked by, its header
_lock = threading.Lock()


def data_url(source: object, limits: ImageLimits | None = None, where: str = "image") -> str:
    """Return an image as the data URL that `Picture.url` gives. Raises as `read_image` does.

    A data URL that was read before is not decoded again: a conversation is checked at each of its turns.
    """
    if not isinstance(source, str):
        return read_image(source, limits, where).url
    limits, body = limits or ImageLimits(), source.partition(",")[2]
    digest = hashlib.sha256(source.encode(errors="surrogatepass")).digest()
    with _lock:
        checked, header = _known.get(digest, (None, ""))
    if checked is not None and checked.bytes <= limits.bytes and checked.pixels <= limits.pixels:
        return header + body
    url = read_image(source, limits, where).url
    if url.endswith(f",{body}"):  # not of another base64 for the same bytes
        with _lock:
            _known[digest] = limits, url.removesuffix(body)
            if len(_known) > _CHECKED_URLS:
                del _known[next(iter(_known))]
    return url


def read_image(source: object, limits: ImageLimits | None = None, where: str = "image") -> Picture:
    """Read a PIL image, pixels uint8[H, W, 3], the bytes of a file, a `Path`, or a data URL with base64.

    Strings are never paths: they may come from a client, who must not read files here. where: prefix of errors.
    Raises DataError for an image that is damaged, too large, animated, of another format, or elsewhere; ConfigError if
    Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"{where}: images need Pillow: {how_to_install('PIL')}") from error
    limits = limits or ImageLimits()
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
            raise DataError(f"{where} must be uint8[H, W, 3] as an array, got {source.dtype}{list(source.shape)}")
        source = Image.fromarray(source)
    if isinstance(source, Image.Image):
        _, pixels = _decoded(source, limits, where)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        data, media_type = buffer.getvalue(), "image/png"
        _check_size(len(data), limits, where)
    else:
        data = _bytes(source, limits, where)
        _check_size(len(data), limits, where)
        kind, pixels = _decoded(data, limits, where)
        media_type = f"image/{'jpeg' if kind == _MPO else kind.lower()}"
    pixels.flags.writeable = False
    return Picture(data, hashlib.sha256(data).hexdigest(), media_type, pixels)


def _bytes(source: object, limits: ImageLimits, where: str) -> bytes:
    match source:
        case bytes() | bytearray() | memoryview():
            return bytes(source)
        case Path():
            if not source.is_file():  # a pipe would block, a device never end
                raise DataError(f"{where}: {str(source)!r} is not a file")
            _check_size(source.stat().st_size, limits, where)
            try:
                with source.open("rb") as file:
                    return file.read(limits.bytes + 1)
            except OSError as error:
                raise DataError(f"{where}: cannot read {str(source)!r}: {error.strerror}") from error
        case str():
            return _from_data_url(source, limits, where)
    raise DataError(f"{where} must be a PIL image, bytes, a Path or a data URL, got {type(source).__name__}")


def _from_data_url(url: str, limits: ImageLimits, where: str) -> bytes:
    header = _DATA_URL.match(url)
    if header is None:
        scheme = _SCHEME.match(url)
        if scheme is None:
            shown = url[:80] if len(url) <= 256 else f"{url[:8]}..."  # may be base64
            raise DataError(f"{where}: {shown!r} is no data URL; give a file's name as pathlib.Path(...)")
        if scheme[1].lower() == "data":
            shown = url.partition(",")[0][:40]
            raise DataError(f"{where}: {shown!r} is no data URL; write data:image/png;base64,...")
        raise DataError(
            f"{where}: {url[:80]!r} is a remote image ({scheme[1]}:), which is not fetched; send a data URL"
        )
    declared, _, is_base64 = header.groups()
    if declared is not None and not declared.lower().startswith("image/"):
        raise DataError(f"{where}: a data URL of {declared[:40]} is no image")
    if is_base64 is None:
        shown = url.partition(",")[0][:40]
        raise DataError(f"{where}: the data URL {shown!r} is not in base64; write data:image/png;base64,...")
    _check_size((len(url) - header.end()) // 4 * 3 - url[-2:].count("="), limits, where)
    try:
        return base64.b64decode(url[header.end() :], validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: beyond ASCII
        raise DataError(f"{where}: the data URL has wrong base64: {error}") from error


def _check_size(size: int, limits: ImageLimits, where: str) -> None:
    if size > limits.bytes:
        raise DataError(f"{where} has {size} bytes, more than {limits.bytes}; scale it down, or compress it more")


def _decoded(source: bytes | Image, limits: ImageLimits, where: str) -> tuple[str, Pixels]:
    """Return Pillow's name of the format, "" for an image from memory, and upright RGB pixels. Raises DataError."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    what = f"{where} ({len(source)} bytes)" if isinstance(source, bytes) else where
    try:
        image = Image.open(io.BytesIO(source), formats=_FORMATS) if isinstance(source, bytes) else source
        kind = image.format or ""
        _check_kind(image, limits, where)
        image.load()
        image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        pixels = np.array(image.convert("RGB"))
    except DataError:
        raise
    except UnidentifiedImageError as error:
        formats = ", ".join(_FORMATS)
        raise DataError(f"{what} is damaged, or none of {formats}; save it again as PNG") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{what}: {error} (PIL.Image.MAX_IMAGE_PIXELS); scale it down") from error
    except _DAMAGE as error:
        raise DataError(f"{what} is damaged ({type(error).__name__}: {str(error)[:200]}); save it again") from error
    return kind, pixels


def _check_kind(image: Any, limits: ImageLimits, where: str) -> None:
    """Raise DataError for an image that is not decoded, by its header."""
    width, height = image.size
    if not width * height:
        raise DataError(f"{where} is empty: {width}x{height} pixels")
    if width * height > limits.pixels:
        raise DataError(f"{where} has {width}x{height} pixels, more than {limits.pixels}; scale it down")
    if image.mode not in _MODES:
        raise DataError(f"{where} has pixels of mode {image.mode!r}; convert it to RGB with 8 bits per channel")
    if getattr(image, "is_animated", False) and image.format != _MPO:
        raise DataError(f"{where} is animated ({image.n_frames} frames); send the frames as separate images")
