"""Libraries in Pythons of their own: where they are, and a server that plays the model for a library's own loop."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def library_python(variable: str, folder: str) -> str:
    """The interpreter of an environment that `make integrations-env` makes; the test is skipped without it.

    In continuous integration it fails, unless there is no Python to make one with.
    """
    python = Path(os.environ.get(variable) or ROOT / folder) / "bin" / "python"
    if not python.exists():
        found = subprocess.run([ROOT / "scripts" / "environment.sh", "--find"], capture_output=True, check=False)
        missing = f"{python} is not there (make integrations-env)"
        if os.environ.get("CI") and found.returncode == 0:
            pytest.fail(f"{missing}, and continuous integration must have it")
        pytest.skip(missing)
    return str(python)
