"""Images from anywhere: the right pixels, or a refusal that names what is wrong; and memory stays bounded."""

import base64
import hashlib
import io
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from tests.hostile_images import (
    BMP,
    COLORS,
    GIF,
    JPEG,
    LIMITS,
    ORIENTATION,
    PALETTE,
    PNG,
    REFUSED,
    SHADES,
    WEBP,
    animated,
    color,
    encoded,
    png,
    translucent,
    turned,
    url,
)
from treadle.core.errors import ConfigError, DataError
from treadle.core.images import ImageLimits, Picture, read_image

EXACT: dict[str, tuple[object, Image.Image]] = {
    "png": (PNG, color()),
    "bytearray": (bytearray(PNG), color()),
    "memoryview": (memoryview(PNG), color()),
    "webp": (WEBP, color()),
    "gif": (GIF, PALETTE),
    "bmp": (BMP, color()),
    "pil": (color(), color()),
    "pil gray": (color("L"), color("L")),
    "1 bit": (encoded(color("1"), "PNG"), color("1")),
    "gray": (encoded(color("L"), "PNG"), color("L")),
    "palette": (encoded(PALETTE, "PNG"), PALETTE),
    "cmyk": (color("CMYK"), color("CMYK")),
    "interlaced": (encoded(color(), "PNG", interlace=1), color()),
    "zip behind a png": (PNG + b"PK\x03\x04" + bytes(60), color()),
    "script inside a gif's comment": (encoded(PALETTE, "GIF", comment=b"<script>alert(1)</script>"), PALETTE),
    "data url": (url(PNG), color()),
    "data url in capitals": (url(PNG, "IMAGE/PNG", ";BASE64").replace("data:", "DATA:"), color()),
    "data url of another type than it says": (url(PNG, "image/jpeg"), color()),
    "data url without a type": (url(PNG, ""), color()),
    "data url with parameters": (url(PNG, "image/png", ";name=a.png;base64"), color()),
    "one frame of webp": (encoded(color(), "WEBP", lossless=True, save_all=True), color()),
}


def rgb(image: Image.Image) -> NDArray[np.uint8]:
    return np.array(image.convert("RGB"))


def read(source: object) -> Picture:
    return read_image(source, LIMITS, "message 3")


@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_image_is_refused_by_name(name: str) -> None:
    source, reason = REFUSED[name]
    with pytest.raises(DataError, match=f"^message 3.*({reason})") as caught:
        read(source)
    assert len(str(caught.value)) < 400  # never the image itself


@pytest.mark.parametrize("name", EXACT)
def test_the_right_pixels(name: str) -> None:
    source, expected = EXACT[name]
    picture = read(source)
    assert np.array_equal(picture.pixels, rgb(expected))
    assert not picture.pixels.flags.writeable
    assert picture.sha256 == hashlib.sha256(picture.data).hexdigest()
    again = read(picture.data)  # what is stored gives the same picture
    assert np.array_equal(again.pixels, picture.pixels)
    assert again.sha256 == picture.sha256


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))  # 0 and 9 mean nothing
def test_orientation_is_as_in_transformers(kind: str, orientation: int, tmp_path: Path) -> None:
    data = turned(orientation, kind)
    (tmp_path / "image").write_bytes(data)
    expected = np.array(load_image(str(tmp_path / "image")))
    plain = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(expected, plain) == (orientation in (0, 1, 9))
    for source in (data, tmp_path / "image", url(data, "image/jpeg"), Image.open(io.BytesIO(data))):
        assert np.array_equal(read(source).pixels, expected)


@pytest.mark.parametrize(
    "data",
    [
        *(JPEG, GIF, encoded(color("CMYK"), "JPEG"), encoded(color("YCbCr"), "JPEG"), encoded(color("L"), "JPEG")),
        *(encoded(color(), "JPEG", progressive=True), encoded(color("1"), "BMP"), png(1, 1, b"\0\1\2\3")),
        encoded(color(), "MPO", save_all=True, append_images=[Image.new("RGB", (3, 3))]),
    ],
)
def test_opaque_images_are_as_in_transformers(data: bytes) -> None:
    assert np.array_equal(read(data).pixels, np.array(load_image(base64.b64encode(data).decode())))


def test_media_types_follow_the_content() -> None:
    mpo = encoded(color(), "MPO", save_all=True, append_images=[color()])
    found = [read(data).media_type for data in (PNG, JPEG, WEBP, GIF, BMP, mpo, color())]
    assert found == [f"image/{kind}" for kind in ("png", "jpeg", "webp", "gif", "bmp", "jpeg", "png")]


TRANSPARENT = {
    "rgba": encoded(translucent(), "PNG"),
    "gray": encoded(translucent("LA"), "PNG"),
    "palette": encoded(PALETTE, "PNG", transparency=3),
    "palette with levels": encoded(PALETTE, "PNG", transparency=bytes(SHADES)),
    "one color": encoded(color(), "PNG", transparency=tuple(COLORS[0, 0, :3].tolist())),
    "one gray": encoded(color("L"), "PNG", transparency=int(np.array(color("L"))[0, 0])),
    "1 bit": encoded(color("1"), "PNG", transparency=0),
    "gif": encoded(PALETTE, "GIF", transparency=3),
    "webp": encoded(translucent(), "WEBP", lossless=True),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparency_is_as_in_the_processors(name: str) -> None:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(TRANSPARENT[name])))
    expected = np.asarray(convert_to_rgb(image, return_numpy=True))
    assert np.array_equal(read(TRANSPARENT[name]).pixels, expected)
    assert np.array_equal(read(image).pixels, expected)


def test_a_transparent_pixel_is_white() -> None:
    picture = read(Image.new("RGBA", (2, 1), (200, 0, 0, 0)))
    assert picture.pixels.tolist() == [[[255, 255, 255]] * 2]


def test_a_path_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    assert np.array_equal(read(tmp_path / "cat.png").pixels, rgb(color()))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(DataError, match="is not a file"):
            read(path)
    (tmp_path / "large").write_bytes(b"")
    os.truncate(tmp_path / "large", 10**11)
    with pytest.raises(DataError, match="has 100000000000 bytes, more than 400000"):
        read(tmp_path / "large")


def test_an_image_from_memory_is_not_changed() -> None:
    image = Image.open(io.BytesIO(turned(6)))
    picture = read(image)
    assert image.getexif()[ORIENTATION] == 6
    assert (image.size, picture.pixels.shape) == ((9, 6), (9, 6, 3))
    with pytest.raises(DataError, match=r"message 3 has \d+ bytes, more than 100"):
        read_image(Image.effect_noise((64, 64), 50), ImageLimits(bytes=100), "message 3")


def test_any_damage_is_refused_or_gives_pixels() -> None:
    """Cut, changed and repeated bytes at places of a seed."""
    draw = random.Random(0)
    outcomes = set()
    for data in (PNG, JPEG, WEBP, GIF, BMP, turned(6), TRANSPARENT["palette"], animated("GIF"), animated("WEBP")):
        for _ in range(120):
            broken = bytearray(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data)
            for _ in range(draw.choice((1, 1, 3, 20))):
                if broken:
                    broken[draw.randrange(len(broken))] = draw.randrange(256)
            try:
                outcomes.add(read(bytes(broken)).pixels.dtype.name)
            except DataError as error:
                assert str(error).startswith("message 3")
                outcomes.add("refused")
    assert outcomes == {"uint8", "refused"}


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match=r"images need Pillow: pip install 'treadle\[images\]'"):
        read_image(PNG)


def test_memory_is_bounded() -> None:
    """All of them, at the limits a run would have, in a process whose peak is then compared with its start."""
    code = """
import resource, warnings
from PIL import Image
from tests.hostile_images import PNG, REFUSED
from treadle.core.errors import DataError
from treadle.core.images import ImageLimits, read_image
warnings.simplefilter("ignore")
read_image(PNG)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
for name, (source, _) in REFUSED.items():
    try:
        read_image(source, ImageLimits(pixels=2**20))
    except DataError:
        pass
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert int(result.stdout) < 64  # MiB; 20000 x 20000 pixels would be 1,200


def test_pixels_of_an_array_are_kept() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(read_image(read_image(pixels).url).pixels, pixels)
    for wrong in (pixels.astype(np.float32), pixels[..., 0], pixels[..., :2], pixels[:0]):
        with pytest.raises(DataError, match=r"must be uint8\[H, W, 3\] as an array"):
            read_image(wrong)
