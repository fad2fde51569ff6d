"""Where the Python of a library that needs one of its own is."""

from __future__ import annotations

import os
from pathlib import Path


def interpreter(configured: str | None, variable: str, folder: str) -> str:
    """Return the configured interpreter, else that of the environment in $variable, else of the one in `folder`."""
    if configured:
        return str(Path(configured).expanduser()) if os.sep in configured else configured
    return str(Path(os.environ.get(variable) or folder).absolute() / "bin" / "python")
