"""Directories for weights that live as long as the process which made them; a killed one's are removed by others."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from uuid import uuid4

_PREFIX = f"treadle_weights-{socket.gethostname()}-"


def new_name() -> str:
    """Return a unique name for a directory that lives as long as this process at most."""
    return f"{_PREFIX}{os.getpid()}-{uuid4().hex}"


def new_directory(folder: Path) -> Path:
    """Make a directory that only this user can read, and remove those of processes that were killed."""
    remove_orphans(folder)
    directory = folder / new_name()
    directory.mkdir(mode=0o700)
    return directory


def remove_orphans(folder: Path) -> None:
    """Remove what killed processes of this machine left."""
    for path in folder.glob(f"{_PREFIX}*-*"):
        try:
            os.kill(int(path.name.removeprefix(_PREFIX).split("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except PermissionError:  # another user's, and alive
            continue
