"""Images from outside as RGB pixels, or a refusal that says why.

    PIL image | bytes | Path | data URL --read_image(limits)--> Picture: bytes, SHA-256, pixels uint8[H, W, 3]

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
import hashlib
import io
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import ConfigError, DataError
from treadle.core.registry import how_to_install

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]

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


def read_image(source: object, limits: ImageLimits | None = None, where: str = "image") -> Picture:
    """Read a PIL image, the bytes of a file, a `Path`, or a data URL with base64.

    Strings are never paths: they may come from a client, who must not read files here. where: prefix of errors.
    Raises DataError for an image that is damaged, too large, animated, of another format, or elsewhere; ConfigError if
    Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"{where}: images need Pillow: {how_to_install('PIL')}") from error
    limits = limits or ImageLimits()
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
            raise DataError(f"{where}: {url[:80]!r} is no data URL; give a file's name as pathlib.Path(...)")
        if scheme[1].lower() == "data":
            raise DataError(f"{where}: {url[:80]!r} is no data URL; write data:image/png;base64,...")
        raise DataError(
            f"{where}: {url[:80]!r} is a remote image ({scheme[1]}:), which is not fetched; send a data URL"
        )
    declared, _, is_base64 = header.groups()
    if declared is not None and not declared.lower().startswith("image/"):
        raise DataError(f"{where}: a data URL of {declared} is no image")
    if is_base64 is None:
        raise DataError(f"{where}: the data URL {url[:80]!r} is not in base64; write data:image/png;base64,...")
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
