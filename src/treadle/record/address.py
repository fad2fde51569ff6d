"""Addresses of a run and its checkpoints: `RUN`, `RUN@best`, `RUN@40`, or the directory of a model."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from treadle.models.model_files import is_adapter
from treadle.record.checkpoint_retention import checkpoint_name, find_checkpoint
from treadle.record.run_directory import RunDirectory


class RunAddress(NamedTuple):
    """A run, and one of its checkpoints: `latest`, `best`, or a name."""

    run: Path
    checkpoint: str = "latest"

    def model(self) -> Path:
        """Directory of the checkpoint. Raises RunError, naming the existing ones."""
        return find_checkpoint(self.run, self.checkpoint).directory


def find_address(text: str | Path) -> RunAddress | None:
    """Return the run addressed by a text; None for a model's directory or name, or nothing.

    A directory in a run's `checkpoints` addresses that checkpoint.
    """
    path = Path(text)
    if _is_run(path):
        return RunAddress(path)
    if path.parent.name == "checkpoints" and _is_run(path.parent.parent):
        return RunAddress(path.parent.parent, path.name)
    run, at, which = str(text).rpartition("@")
    if at and not path.exists() and _is_run(Path(run)):
        return RunAddress(Path(run), checkpoint_named(which))
    return None


def checkpoint_named(which: str) -> str:
    """Expand a checkpoint's short name: `40` becomes `step-000040`; others are unchanged."""
    return checkpoint_name(int(which)) if which.isdecimal() else which


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def began_of(*texts: str | Path) -> datetime | None:
    """Return the date of the first addressed run, for its templates. None without a run."""
    addresses = (find_address(text) for text in texts)
    return next(filter(None, (RunDirectory.open(address.run).began() for address in addresses if address)), None)


def run_path(text: str | Path) -> Path:
    """Return the directory of an addressed run, for commands about the whole run; or the path unchanged.

    Raises RunError if it names a missing checkpoint.
    """
    if (address := find_address(text)) is None:
        return Path(text)
    if address.checkpoint != "latest":
        address.model()
    return address.run


def model_path(text: str | Path) -> Path:
    """Return the directory of an addressed checkpoint, or the path unchanged. Raises RunError."""
    path = Path(text)
    address = None if (path / "config.json").is_file() or is_adapter(path) else find_address(text)
    return path if address is None else address.model()
