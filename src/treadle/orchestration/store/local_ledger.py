"""A ledger on a disk of this machine's own, for run directories on a shared filesystem, where SQLite is not safe.

    <ledger_directory>/<run>-<digest>.sqlite --(Ledger.copy_out)--> <run>/ledger.sqlite, which everybody else reads

The copy is made after each checkpoint, whenever other files of the run follow what the ledger says, and when the
process ends. It is replaced as a whole. If the process is killed, a resumed run goes on with what it left here; if the
machine is lost with its disk, with the copy: what came after the last checkpoint is sampled again.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from treadle.core.errors import RunError
from treadle.core.files import sync_file
from treadle.orchestration.store.ledger import Ledger
from treadle.orchestration.store.run_directory import RunDirectory


def local_file(run: RunDirectory, directory: str) -> Path:
    """Place of a run's ledger in this directory, by the run's name and whole path."""
    path = run.path.resolve()
    return Path(directory).expanduser() / f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}.sqlite"


@contextmanager
def open_ledger(run: RunDirectory, directory: str | None) -> Iterator[Ledger]:
    """Open the run's ledger for writing: in the run directory, or in one of this machine's own, from the run's copy.

    directory: `orchestration.ledger_directory`; `recover_ledger` was called for that of the process before.
    Raises RunError.
    """
    if directory is None:
        with closing(Ledger(run.ledger_file)) as ledger:
            yield ledger
        return
    local = local_file(run, directory)
    try:
        local.parent.mkdir(parents=True, exist_ok=True)
        _remove(local)
        if run.ledger_file.is_file():
            unfinished = local.with_name(f"{local.name}.new")
            shutil.copyfile(run.ledger_file, unfinished)
            unfinished.replace(local)
    except OSError as error:
        raise RunError(f"orchestration.ledger_directory={directory}: {error}; give a directory to write to") from error
    with closing(Ledger(local, copy=run.ledger_file)) as ledger:
        ledger.copy_out()  # from now on this ledger knows the copy as its own
        try:
            yield ledger
        finally:
            ledger.copy_out()
    _remove(local)


def recover_ledger(run: RunDirectory, directory: str | None) -> None:
    """Bring the run directory's copy up to date with what a killed process left in `directory`, if it did.

    A local ledger whose copy is not the last one that it made is out of date: the run went on elsewhere. It is removed.
    Raises DamageError for one that is damaged.
    """
    if directory is None or not (local := local_file(run, directory)).is_file():
        return
    with closing(Ledger(local, copy=run.ledger_file)) as ledger:
        ledger.prove()
        if not run.ledger_file.is_file() or ledger.has_copied(sync_file(run.ledger_file)):
            ledger.copy_out()
    _remove(local)


def _remove(local: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        local.with_name(f"{local.name}{suffix}").unlink(missing_ok=True)
