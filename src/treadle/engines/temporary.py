"""Directories for weights that live as long as the process which made them; a killed one's are removed by others."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from uuid import uuid4

_KIND = "treadle_weights-"
_PREFIX = f"{_KIND}{socket.gethostname()}-"


def temporary_directory(folder: Path, key: str = "", mode: int = 0o700) -> Path:
    """Make a directory that lives as long as this process at most, and remove those of processes that were killed.

    key: unique, by which other processes find it (`with_key`). mode: permissions; default: this user's alone.
    """
    remove_orphans(folder)
    directory = folder / f"{_PREFIX}{os.getpid()}-{key or uuid4().hex}"
    directory.mkdir(mode=mode)
    return directory


def with_key(folder: Path, key: str) -> list[Path]:
    """Return the directories there that were made with the key, by whichever process."""
    return list(folder.glob(f"{_KIND}*-{key}"))


def remove_orphans(folder: Path) -> None:
    """Remove what killed processes of this machine left."""
    for path in folder.glob(f"{_PREFIX}*-*"):
        if not is_running(int(path.name.removeprefix(_PREFIX).split("-")[0])):
            shutil.rmtree(path, ignore_errors=True)


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; one that has, and that nobody has waited for, keeps its number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # it ends just now, or the system does not tell
        return not Path("/proc/self/stat").exists()
    return stat.rpartition(")")[2].split()[0] not in "ZX"
