"""Durable files, complete or absent even after a power loss, and the cache directory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple


def cache_directory() -> Path:
    """Return the directory of warm starts and converted models: `$TREADLE_CACHE`, or `treadle` in the user's cache.

    The user's cache is `$XDG_CACHE_HOME`, which must be absolute to count, or `~/.cache`.
    """
    if directory := os.environ.get("TREADLE_CACHE"):
        return Path(directory)
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "treadle"


class WrittenFile(NamedTuple):
    """A durable file, with the SHA-256 (hex) of what was written into it."""

    name: str
    sha256: str


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and fsync it. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make renames inside `directory` durable. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> str:
    """Make a file that somebody else has written durable; returns the SHA-256 of its content. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(content: bytes) -> str:
    """Return the hex digest of these bytes."""
    return hashlib.sha256(content).hexdigest()


def write_atomically(path: Path, content: bytes) -> str:
    """Write a temporary file, fsync, rename, fsync; returns the content's SHA-256.

    Raises OSError; the temporary file is then removed.
    """
    temporary = _beside(path)
    try:
        write_durably(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return sha256_of(content)


def check_writable(path: Path) -> None:
    """Raise OSError if `write_atomically` could not write this file now."""
    temporary = _beside(path)
    temporary.touch()
    temporary.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")
