"""How a run and its checkpoints are addressed: `RUN`, `RUN@best`, `RUN@40`, or the directory of a model."""

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
        """Directory of the checkpoint. Raises RunError, naming those there are."""
        return find_checkpoint(self.run, self.checkpoint).directory


def find_address(text: str | Path) -> RunAddress | None:
    """Return the run that a text addresses; None if it is none: a model's directory or name, or nothing.

    A directory in a run's `checkpoints` is that checkpoint.
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
    """Return the name of a checkpoint as people write it: `step-000040` for `40`, others as they are."""
    return checkpoint_name(int(which)) if which.isdecimal() else which


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def began_of(*texts: str | Path) -> datetime | None:
    """Return when the first run that is addressed began: the date that its templates write. None without a run."""
    addresses = (find_address(text) for text in texts)
    return next(filter(None, (RunDirectory.open(address.run).began() for address in addresses if address)), None)


def run_path(text: str | Path) -> Path:
    """Return the directory of the run that is addressed, for what looks at all of it; or the path as it is.

    Raises RunError if a checkpoint is named that is not there.
    """
    if (address := find_address(text)) is None:
        return Path(text)
    if address.checkpoint != "latest":
        address.model()
    return address.run


def model_path(text: str | Path) -> Path:
    """Return the directory of the checkpoint that is addressed, or the path as it is. Raises RunError."""
    path = Path(text)
    address = None if (path / "config.json").is_file() or is_adapter(path) else find_address(text)
    return path if address is None else address.model()
