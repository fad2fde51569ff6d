"""Images of a run or an export: files named by their content, `images/<sha256>.png`, each written once.

    data URLs in messages and steps  --referred(put)-->   names of files: in shards, the ledger and exports
    names                            --resolved(url)-->   data URLs: in memory

A name proves its file. Names are plain data, and stay readable where files are missing.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from treadle.core.errors import DamageError, DataError, RunError
from treadle.core.files import read_proven, refusal, write_atomically
from treadle.core.images import PromptImage

FOLDER = "images"
Put = Callable[[str], str]
"""Data URL -> name of its file."""
Url = Callable[[str], str]
"""Name of a file -> data URL."""
_NAME = re.compile(r"([0-9a-f]{64})\.(png|jpeg|webp|gif|bmp)")
_CACHED = 256


def named(url: str) -> tuple[str, bytes]:
    """Return name and content of a data URL's file."""
    head, _, data = url.partition(",")
    content = base64.b64decode(data)
    return f"{sha256(content).hexdigest()}.{head.removeprefix('data:image/').removesuffix(';base64')}", content


@functools.lru_cache(maxsize=1024)
def name_of(url: str) -> str:
    return named(url)[0]


class ImageFiles:
    """The files in one directory, made when the first one is written. Raises RunError if the disk refuses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, url: str) -> str:
        """Write the file of a data URL, unless it is there; return its name."""
        name = name_of(url)
        path = self._directory / name
        if not path.is_file():
            try:
                self._directory.mkdir(exist_ok=True)
                write_atomically(path, named(url)[1])
            except OSError as error:
                raise RunError(
                    f"could not write {path}: {refusal(error, 'make it writable')}, then --resume"
                ) from error
        return name

    def url(self, name: str) -> str:
        """Read a file. Raises DamageError if it is missing, or not what its name says."""
        return _read(self._directory, name)


@functools.lru_cache(maxsize=_CACHED)
def _read(directory: Path, name: str) -> str:
    if (match := _NAME.fullmatch(name)) is None:
        raise DamageError(f"{name!r:.100} is no name of an image in {directory}")
    content = read_proven(directory / name, match[1], "restore it from a copy")
    return f"data:image/{match[2]};base64,{base64.b64encode(content).decode()}"


def referred(value: Any, put: Put) -> Any:
    """Return JSON data with the data URLs of messages' `images` replaced by names of files."""
    return _replaced(value, lambda item: put(item) if item.startswith("data:image/") else item)


def resolved(value: Any, url: Url) -> Any:
    """Undo `referred`."""
    return _replaced(value, lambda item: url(item) if _NAME.fullmatch(item) else item)


def _replaced(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: [change(each) if isinstance(each, str) else each for each in item]
            if key == "images" and isinstance(item, list)
            else _replaced(item, change)
            for key, item in value.items()
        }
    return [_replaced(item, change) for item in value] if isinstance(value, list | tuple) else value


def image_column(images: Iterable[PromptImage], put: Put) -> str | None:
    """Return a step's images as JSON for a row; None without any."""
    rows = [{**asdict(image), "url": put(image.url)} for image in images]
    return json.dumps([{"file": row.pop("url"), **row} for row in rows]) if rows else None


def images_of(column: str | None, url: Url | None) -> tuple[PromptImage, ...]:
    """Undo `image_column`. url: reads their files; raises DataError without it."""
    if not column:
        return ()
    if url is None:
        raise DataError("the step has images, and their files are not here")
    return tuple(
        PromptImage(url=url(row.pop("file")), **{**row, "grid": tuple(row["grid"]), "size": tuple(row["size"])})
        for row in json.loads(column)
    )
