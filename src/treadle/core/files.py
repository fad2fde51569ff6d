"""Durable files, complete or absent even after a power loss; manifests that detect damage; the cache directory.

Directories written as a whole end with the file SHA256SUMS, which `sha256sum --check` also reads:

    2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae  config.json

Readers check only the files they open. A manifest needs no checksum of its own: after any change to it, some file no
longer matches its entry. A ledger also records the manifest's digest.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from treadle.core.errors import DamageError, RemovedError, RunError

MANIFEST = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def cache_directory() -> Path:
    """Return the cache's directory: `$TREADLE_CACHE`, or `treadle` in an absolute `$XDG_CACHE_HOME` or `~/.cache`."""
    if directory := os.environ.get("TREADLE_CACHE"):
        return Path(directory)
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "treadle"


class WrittenFile(NamedTuple):
    """A durable file, with the SHA-256 (hex) of its content."""

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
    """Make a file written by other code durable; return the SHA-256 of its content. Raises OSError."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_atomically(path: Path, content: bytes) -> str:
    """Write a temporary file, fsync, rename, fsync; return the content's SHA-256. Raises OSError."""
    temporary = _beside(path)
    try:
        write_durably(temporary, content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return sha256_of(content)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def refusal(error: OSError, elsewhere: str = "choose another place, or make it writable") -> str:
    """Describe a refusal by the system and its remedy: "Read-only file system; choose another place, or ...".

    elsewhere: remedy unless the disk is full.
    """
    # safetensors reports the number only in its text.
    in_text = re.search(r"\(os error (\d+)\)", str(error))
    number = int(in_text[1]) if in_text else error.errno
    return f"{error.strerror or error}; {'free disk space' if number in _NO_ROOM else elsewhere}"


def is_refused(error: OSError) -> bool:
    """Return whether the system denies this process access."""
    return error.errno in (*_NO_ROOM, errno.EROFS, errno.EACCES, errno.EPERM)


def make_room_in_cache(target: Path) -> None:
    """Create the parent directory of a cached path. Raises RunError if the cache is not writable."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        check_writable(target)
    except OSError as error:
        elsewhere = "set TREADLE_CACHE to a writable directory"
        raise RunError(f"could not write to the cache {str(target.parent)!r}: {refusal(error, elsewhere)}") from error


def check_writable(path: Path) -> None:
    """Raise OSError if `write_atomically` could not write this file now."""
    temporary = _beside(path)
    temporary.touch()
    temporary.unlink()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


# a file's bytes, or a function that writes them to a path and may raise OSError
Content = bytes | Callable[[Path], None]


def read_proven(path: Path, sha256: str, remedy: str) -> bytes:
    """Return the content of a file with this SHA-256. Raises DamageError, with the remedy at the end."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamageError(f"{path} {_why_unreadable(error)}; {remedy}") from error
    if sha256_of(content) != sha256:
        raise DamageError(f"{path} is damaged: its SHA-256 is not the recorded one; {remedy}")
    return content


def _why_unreadable(error: OSError) -> str:
    return "is gone" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"


class NewDirectory:
    """Collects the files of an unfinished directory; `new_directory` completes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sha256: dict[str, str] = {}

    def write(self, name: str, content: Content) -> None:
        """Write a file durably and list it in the manifest. Raises OSError."""
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            write_durably(path, content)
            self._sha256[name] = sha256_of(content)
        else:
            content(path)
            self._sha256[name] = sync_file(path)

    def note(self, name: str, sha256: str) -> None:
        self._sha256[name] = sha256

    @property
    def manifest(self) -> bytes:
        return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(self._sha256.items())).encode()

    @property
    def manifest_sha256(self) -> str:
        return sha256_of(self.manifest)


@contextmanager
def new_directory(final: Path) -> Iterator[NewDirectory]:
    """Yield a temporary directory beside `final`; renamed to it with a manifest on success, removed on failure.

    An existing directory at `final` is replaced. Raises OSError.
    """
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        new = NewDirectory(temporary)
        yield new
        write_durably(temporary / MANIFEST, new.manifest)
        sync_directory(temporary)
        if final.is_dir():
            remove_at_once(final)
        temporary.replace(final)
        sync_directory(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_at_once(directory: Path) -> None:
    """Delete a directory; for readers, all of it vanishes at the same moment. Raises OSError."""
    hidden = directory.with_name(f".{directory.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)  # left by a process that died here
    shutil.rmtree(directory.rename(hidden))


@dataclass(frozen=True)
class Manifest:
    """Files written by `new_directory`, each with its SHA-256. remedy: end of the message about any damage."""

    directory: Path
    sha256: Mapping[str, str]
    remedy: str

    @classmethod
    def load(cls, directory: Path, sha256: str | None = None, remedy: str = "") -> Manifest:
        """Return a directory's manifest. sha256: expected digest of the manifest itself.

        Raises DamageError if the manifest is missing or changed, RemovedError if the directory is missing.
        """
        remedy = remedy or f"restore it (in an export that was changed on purpose, remove {MANIFEST})"
        try:
            content = (directory / MANIFEST).read_bytes()
        except OSError as error:
            raise _damage(directory, MANIFEST, _why_unreadable(error), remedy) from error
        lines = content.decode(errors="replace").removesuffix("\n").split("\n")
        matches = [_LINE.fullmatch(line) for line in lines]
        listed = {match[2]: match[1] for match in matches if match}
        if (sha256 is not None and sha256_of(content) != sha256) or len(listed) != len(matches):
            raise _damage(directory, MANIFEST, "is not as it was written", remedy)
        return cls(directory, listed, remedy)

    def read(self, name: str) -> bytes:
        """Return a file's checked content. Raises DamageError, or RemovedError if the directory was removed."""
        try:
            content = (self.directory / name).read_bytes()
        except OSError as error:
            raise _damage(self.directory, name, _why_unreadable(error), self.remedy) from error
        self._compare(name, sha256_of(content))
        return content

    def prove(self, names: Iterable[str]) -> None:
        """Check files that other code will read. Raises as `read` does."""
        for name in names:
            try:
                with (self.directory / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise _damage(self.directory, name, _why_unreadable(error), self.remedy) from error
            self._compare(name, digest)

    def _compare(self, name: str, digest: str) -> None:
        if name not in self.sha256:
            raise _damage(self.directory, name, f"is not listed in {MANIFEST}", self.remedy)
        if digest != self.sha256[name]:
            raise _damage(self.directory, name, f"does not have the SHA-256 in {MANIFEST}", self.remedy)


def prove_files(directory: Path, names: Iterable[str], remedy: str = "") -> None:
    """Check files that exist or are listed; no-op without a manifest. Raises DamageError with the remedy."""
    if (directory / MANIFEST).is_file():
        manifest = Manifest.load(directory, remedy=remedy)
        manifest.prove(name for name in names if name in manifest.sha256 or (directory / name).exists())


def _damage(directory: Path, name: str, what: str, remedy: str) -> DamageError | RemovedError:
    if not directory.is_dir():
        return RemovedError(f"{directory} is gone: it was removed, perhaps by its run, which goes on; start again")
    return DamageError(f"{directory} is damaged: {name} {what}; {remedy}")
