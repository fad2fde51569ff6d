"""Images that mislead, break or burst what reads them, each with a pattern of its refusal; and plain ones."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from treadle.core.images import ImageLimits

LIMITS = ImageLimits(bytes=400_000, pixels=2**20)
COLORS = np.random.default_rng(0).integers(0, 256, (6, 9, 4), np.uint8)
ORIENTATION = 0x0112


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def color(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(COLORS[..., :3]).convert(mode)


def translucent(mode: str = "RGBA") -> Image.Image:
    return Image.fromarray(COLORS).convert(mode)


def turned(orientation: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(color(), kind, exif=exif)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, data: bytes = b"", depth: int = 8, color_type: int = 2, more: bytes = b"") -> bytes:
    """A PNG that says anything about itself."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + more + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, *[0] * 6)


def gif(width: int, height: int, left: int = 0) -> bytes:
    screen = struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return b"GIF89a" + screen + b"," + struct.pack("<HHHHB", left, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0;"


def webp(width: int, height: int) -> bytes:
    """The header of a lossless one."""
    body = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)
    body = b"VP8L" + struct.pack("<I", len(body)) + body + b"\0"
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def animated(kind: str, count: int = 3) -> bytes:
    frames = [Image.new("RGB", (8, 8), (n * 80, 0, 255 - n * 80)) for n in range(count)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def url(data: bytes, kind: str = "image/png", middle: str = ";base64") -> str:
    return f"data:{kind}{middle},{base64.b64encode(data).decode()}"


PNG, JPEG = encoded(color(), "PNG"), encoded(color(), "JPEG")
PALETTE = color().quantize(16)
WEBP, GIF, BMP = encoded(color(), "WEBP", lossless=True), encoded(PALETTE, "GIF"), encoded(color(), "BMP")
RAW = b"".join(b"\0" + row.tobytes() for row in COLORS[..., :3])
WIDE = np.arange(54, dtype=np.uint16).reshape(6, 9) * 1000
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
SHADES = [n * 13 for n in range(16)]

REFUSED: dict[str, tuple[object, str]] = {
    "no bytes": (b"", "damaged, or none of PNG, JPEG, WEBP, GIF, BMP"),
    "one byte": (b"\x89", "damaged, or none of PNG"),
    "text": (b"hello", r"\(5 bytes\) is damaged, or none of PNG"),
    "svg": (SVG, "none of PNG"),
    "pdf": (b"%PDF-1.7\n%%EOF", "none of PNG"),
    "zip": (b"PK\x03\x04" + bytes(60), "none of PNG"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG"),
    "tiff": (encoded(color(), "TIFF"), "none of PNG"),
    "icon": (encoded(color(), "ICO"), "none of PNG"),
    "ppm": (encoded(color(), "PPM"), "none of PNG"),
    "numpy": (b"\x93NUMPY\x01\0", "none of PNG"),
    "png header alone": (PNG[:8], "damaged"),
    "png truncated in a header": (PNG[:20], "damaged"),
    "png truncated in its pixels": (PNG[: len(PNG) // 2], "damaged"),
    "png with a broken checksum": (PNG[:29] + bytes([PNG[29] ^ 1]) + PNG[30:], "damaged"),
    "png with too few rows": (png(9, 6, RAW[:40]), "damaged"),
    "png without pixels": (png(9, 6), "damaged"),
    "png with broken compression": (PNG[:45] + bytes(20) + PNG[65:], "damaged"),
    "png of no known color type": (png(9, 6, RAW, color_type=5), "damaged"),
    "jpeg truncated": (JPEG[: len(JPEG) // 2], "damaged"),
    "jpeg header alone": (JPEG[:2], "damaged"),
    "jpeg without tables": (b"\xff\xd8\xff\xda" + bytes(50), "damaged"),
    "webp truncated": (WEBP[: len(WEBP) // 2], "damaged"),
    "gif truncated": (GIF[:30], "damaged"),
    "gif header alone": (GIF[:13], "damaged"),
    "bmp truncated": (BMP[:-30], "damaged"),
    "bmp with an unknown compression": (BMP[:30] + b"\x09" + BMP[31:], "damaged"),
    "png of no width": (png(0, 6), "is empty: 0x6|damaged"),
    "png of no height": (png(6, 0), "is empty: 6x0|damaged"),
    "bmp of no size": (bmp(0, 0), "is empty: 0x0|damaged"),
    "pil image of no size": (Image.new("RGB", (0, 5)), "is empty: 0x5"),
    "png bomb": (png(20000, 20000, bytes(60001)), "20000x20000 pixels|exceeds limit of"),
    "png of the largest size": (png(2**31 - 1, 2**31 - 1), "exceeds limit of|more than 1048576"),
    "png that says 100 MB": (png(5792, 5792, bytes(9)), "has 5792x5792 pixels, more than 1048576; scale it down"),
    "png one row over": (png(1024, 1025, bytes(9)), "has 1024x1025 pixels, more than 1048576"),
    "gif bomb": (gif(65535, 65535), "exceeds limit|more than"),
    "gif with a frame beyond its screen": (gif(10, 65000, left=65000), "exceeds limit|more than"),
    "webp bomb": (webp(16383, 16383), "more than|damaged|exceeds limit|none of"),
    "bmp bomb": (bmp(30000, 30000), "exceeds limit of|more than"),
    "bmp of negative width": (bmp(-5, 5), "exceeds limit of|more than|damaged|empty"),
    "pil image with too many pixels": (Image.new("1", (2000, 2000)), "has 2000x2000 pixels, more than 1048576"),
    "text chunk that is a bomb": (
        png(9, 6, RAW, more=chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**24)))),
        "damaged .*too large",
    ),
    "too many bytes": (PNG + bytes(400_000), r"has \d+ bytes, more than 400000; scale it down"),
    "animated gif": (animated("GIF"), r"is animated \(3 frames\); send the frames as separate images"),
    "animated png": (animated("PNG"), "is animated"),
    "animated webp": (animated("WEBP"), "is animated"),
    "16-bit gray": (encoded(Image.fromarray(WIDE), "PNG"), "mode 'I;16'; convert it to RGB with 8 bits"),
    "32-bit pil image": (Image.fromarray(WIDE.astype(np.int32)), "mode 'I'"),
    "float pil image": (Image.fromarray(WIDE.astype(np.float32)), "mode 'F'"),
    "lab pil image": (Image.new("LAB", (4, 4)), "mode 'LAB'"),
    "http": ("https://example.com/cat.png", r"'https://example.com/cat.png' is a remote image \(https:\)"),
    "file url": ("file:///etc/passwd", "is a remote image"),
    "cloud": ("gs://bucket/cat.png", "is a remote image"),
    "a string that is a path": ("/etc/passwd", "is no data URL; give a file's name as pathlib.Path"),
    "windows path": ("C:\\cat.png", "is no data URL; give a file's name"),
    "data url without base64": ("data:image/png,%89PNG", "is not in base64"),
    "data url without comma": ("data:image/png;base64", "write data:image/png;base64"),
    "data url of text": (url(PNG, "text/html"), "a data URL of text/html is no image"),
    "data url of sound": (url(PNG, "audio/wav"), "audio/wav is no image"),
    "data url with an odd letter": (url(PNG)[:-8] + "*" + url(PNG)[-7:], "wrong base64"),
    "data url with a broken end": (url(PNG)[:-3], "wrong base64"),
    "data url beyond ascii": ("data:image/png;base64,\N{SNOWMAN}AAA", "wrong base64"),
    "data url with the other alphabet": ("data:image/png;base64,-_-_", "wrong base64"),
    "data url of nothing": ("data:image/png;base64,", "damaged, or none of"),
    "data url of something else": (url(b"hello"), "damaged, or none of"),
    "data url of svg": (url(SVG, "image/svg+xml"), "none of"),
    "data url with too many bytes": (url(bytes(450_000)), "has 450000 bytes, more than 400000"),
    "nothing": (None, "got NoneType"),
    "number": (7, "got int"),
    "list": ([PNG], "got list"),
}
