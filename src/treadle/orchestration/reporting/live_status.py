"""What a run does now: `status.json` in its directory, for `treadle top`.

events of the run ----+
engine.status, ... ---+--> LiveStatus --(a thread, each second)--> status.json --> RunStatus.read
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from treadle.core.status import ComponentStatus, ProcessId
from treadle.orchestration.reporting.callbacks import Callback, RunStart

_PERIOD = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Says what a run does at a moment.

    written: that moment, in seconds since 1970. update: the last one that is made, of `updates`. phase: what is under
    way, `done` of `total` pieces of it, since that time. trained, published: policy versions of the learner and the
    engines; None before the first publication. message: the last line of the run's output, and when. error: what ended
    the run.
    """

    process: ProcessId
    written: float
    update: int = 0
    updates: int = 0
    phase: str = "starting"
    done: int = 0
    total: int = 0
    since: float = 0.0
    trained: int | None = None
    published: int | None = None
    message: str = ""
    message_at: float = 0.0
    error: str = ""
    components: tuple[ComponentStatus, ...] = ()

    @classmethod
    def read(cls, path: Path) -> RunStatus | None:
        """Return what a run wrote last; None if it never did, as runs of earlier versions. Raises OSError."""
        if not path.is_file():
            return None
        data: dict[str, Any] = json.loads(path.read_bytes())
        components = tuple(_component(entry) for entry in data.pop("components"))
        return cls(**{**data, "process": ProcessId(**data["process"]), "components": components})


def _component(entry: Mapping[str, Any]) -> ComponentStatus:
    own = entry["process"]
    return ComponentStatus(**{**entry, "process": None if own is None else ProcessId(**own)})


class LiveStatus(Callback):
    """Follows a run's events, and writes what it does each second, on a thread: also while the event loop computes.

    sources: called for the status of the run's components.
    """

    def __init__(self) -> None:
        now = time.time()
        self.sources: list[Callable[[], Sequence[ComponentStatus]]] = []
        self._status = RunStatus(ProcessId.own(), written=now, since=now)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Within, the file is written again and again; and once more on leaving, with what was raised."""
        ended = threading.Event()

        def work() -> None:
            while not ended.wait(_PERIOD):
                self._write(path)

        thread = threading.Thread(target=work, name="treadle-status", daemon=True)
        self._write(path)
        thread.start()
        try:
            yield
        except BaseException as error:
            self._status = replace(self._status, error=f"{type(error).__name__}: {error}".rstrip(": "))
            raise
        finally:
            ended.set()
            thread.join()
            self.sources.clear()  # nothing is under way any more
            self._write(path)

    def start(self, run: RunStart) -> None:
        self._status = replace(self._status, update=run.update, updates=run.config.orchestration.updates)

    def update(self, row: Mapping[str, Any]) -> None:
        self._status = replace(self._status, update=row["update"])

    def publish(self, version: int) -> None:
        self._status = replace(self._status, trained=version, published=version)

    def phase(self, name: str, done: int, total: int) -> None:
        since = time.time() if done == 0 else self._status.since
        self._status = replace(self._status, phase=name, done=done, total=total, since=since)

    def interval(self, row: Mapping[str, Any]) -> None:
        """Note the end of a phase: the learner is a version ahead of the engines until its weights are published."""
        before = self._status
        if row["phase"] == "update" and before.published is not None:
            self._status = replace(before, trained=before.published + 1, phase="publish", done=0, total=0)
        elif row["phase"] == "publish":
            self._status = replace(before, published=before.trained)

    def message(self, line: str) -> None:
        self._status = replace(self._status, message=line, message_at=time.time())

    def _write(self, path: Path) -> None:
        components = tuple(component for source in tuple(self.sources) for component in source())
        status = replace(self._status, written=time.time(), components=components)
        temporary = path.with_name(f".{path.name}.new")
        with suppress(OSError):  # a full disk ends the run elsewhere; the next write may succeed
            temporary.write_text(json.dumps(asdict(status)), encoding="utf-8")
            os.replace(temporary, path)  # not durable, and need not be
