"""`python -m tests.loop.killed_runs FOLDER KILLS OPTION...`: a run that is killed over and over, as it writes.

One process imports everything; each process of the run is a fork of it that kills itself with SIGKILL, just before a
write or just after a publication. Nothing on the disk changes between two writes, so that these are all the states that
a kill at any time can leave; of a transaction of the ledger only its COMMIT is a write.

KILLS, as in "write=:20,record=2", says when, one kill after the other: at the 1st to 20th write of a file, and at the
2nd COMMIT of records, that come after the first checkpoint of that process. So what the process before left has become
part of the result by then. "end=:4" are the events of any kind once the last checkpoint is there, "resume=:4" those
before the first; of a run that has none yet, each process begins it anew.

FOLDER/run is the run, FOLDER/said what it logged. Fails unless every kill came and the run ended well after the last.
"""

import os
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pandas  # noqa: F401  # a run imports it late: each fork would anew

from tests.forks import ForkedProcess, start_server
from tests.runs import check_finished, resume, start
from tests.worlds import Quiet, tiny
from treadle.core import processes
from treadle.engines.staging import WeightsFile
from treadle.engines.torch.model import CachedModel
from treadle.record.ledger import Ledger

Moment = tuple[str, int]


class Logged(Quiet):
    """Writes the lines to a file, for those who outlive this process."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def log(self, line: str) -> None:
        print(line, file=self._file)


class Victim:
    """Kills this process at a moment: the n-th event of a kind. last: the run's last checkpoint."""

    def __init__(self, moment: Moment, last: Path) -> None:
        self._moment, self._last, self._counts = moment, last, Counter[str]()
        self._committing, self._has_saved = False, False

    def event(self, kind: str) -> None:
        kind = "end" if self._last.exists() else kind if self._has_saved else "resume"
        self._counts[kind] += 1
        if (kind, self._counts[kind]) == self._moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Count events of this process from now on."""
        connect, commit = sqlite3.connect, Ledger.commit_checkpoint

        def before(call: Callable[..., object]) -> Callable[..., object]:
            def counted(*arguments: object) -> object:
                self.event("write")
                return call(*arguments)

            return counted

        def after(call: Callable[..., object]) -> Callable[..., object]:
            def counted(*arguments: object) -> object:
                result = call(*arguments)
                self.event("publish")
                return result

            return counted

        def statement(text: str) -> None:
            if text.strip() == "COMMIT":
                self.event("checkpoint" if self._committing else "record")

        def watched(*arguments: Any, **settings: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **settings)
            connection.set_trace_callback(statement)
            return connection

        def committing(*arguments: Any) -> None:
            self._committing = True
            commit(*arguments)
            self._committing, self._has_saved = False, True

        for owner, name, replacement in (
            (os, "fsync", before(os.fsync)),
            (Path, "replace", before(Path.replace)),
            (CachedModel, "load", after(CachedModel.load)),  # it has new weights, and the version of the old ones
            (WeightsFile, "write", after(WeightsFile.write)),  # the engine's process does not know of them
            (sqlite3, "connect", watched),
            (Ledger, "commit_checkpoint", committing),
        ):
            setattr(owner, name, replacement)


def moments(kills: str) -> Iterator[Moment]:
    """Yield the moments that KILLS names."""
    for kind, _, number in (part.partition("=") for part in kills.split(",")):
        first, last = (1, int(number[1:])) if number.startswith(":") else (int(number), int(number))
        yield from ((kind, n) for n in range(first, last + 1))


def in_child(work: Callable[[], object]) -> int:
    """Run it in a fork of this process; returns how that ended."""
    if not (child := os.fork()):
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, kills: str, *options: str) -> None:
    """Kill the run at each of these moments; let it finish, and check what it left."""
    run = folder / "run"
    last = run / "checkpoints" / f"step-{tiny(*options).orchestration.updates:06d}"

    def go_on(moment: Moment | None = None) -> None:
        if moment:
            Victim(moment, last).watch()
        with (folder / "said").open("a", buffering=1) as file:
            if (run / "config.yaml").exists():
                resume(run, progress=Logged(file))
            else:
                start(run, *options)

    for moment in moments(kills):
        ended = in_child(partial(go_on, moment))
        assert ended == -signal.SIGKILL, (moment, ended)
    assert in_child(go_on) == 0
    check_finished(run)


if __name__ == "__main__":
    processes.Popen = ForkedProcess  # type: ignore[attr-defined]
    start_server()
    main(Path(sys.argv[1]), *sys.argv[2:])
