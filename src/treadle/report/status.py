"""`LiveStatus`: a run's current activity, in a file of its directory, to be read as `RunStatus`."""

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

from pydantic import TypeAdapter

from treadle.core.engine import ComponentStatus, ProcessId
from treadle.record.run_directory import RunDirectory
from treadle.report.callback import Callback, RunStart

_PERIOD = 1.0  # seconds
_STALE = 10.0  # seconds without a status before `doing` reports it


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run's activity at one moment.

    written: that moment, in seconds since 1970. update: the last one made, of `updates`. phase: current phase since
    `since`, with `done` of `total` pieces. trained, published: policy versions of the learner and the engines; None
    before the first publication. message: the last line of the run's output, and its time. error: error that ended the
    run.
    interrupted: whether it was asked to stop (Ctrl-C, SIGTERM), and saved a checkpoint.
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
    interrupted: bool = False
    components: tuple[ComponentStatus, ...] = ()

    @classmethod
    def read(cls, path: Path) -> RunStatus | None:
        """Return the latest status of a run; None if there is no readable one."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None

    @property
    def failure(self) -> str:
        """The error that ended the run; "" if none or an interrupt did."""
        return "" if self.error == KeyboardInterrupt.__name__ else self.error

    def doing(self, run: RunDirectory) -> str:
        """Return in words the run's activity, or how it ended and is resumed: `rollout 12/64 for 8 s`."""
        when, state = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.written)), run.state()
        if state == "finished" or self.failure:
            return f"ended {when}: {self.failure}".removesuffix(": ")
        if state != "in progress":
            resume = f"resume with: {run.resume_command}" if run.has_checkpoint else "there is no checkpoint to resume"
            if self.interrupted:
                return f"interrupted {when} after update {self.update} of {self.updates}; {resume}"
            what = "interrupted" if self.error else "last status"
            return f"{what} {when}, during {self.phase}; {resume}"
        if (silent := time.time() - self.written) > _STALE:
            return f"no status for {duration(silent)}, since {self.phase}: the process may be stopped, or its disk full"
        pieces = f" {self.done}/{self.total}" if self.total > 1 else ""
        return f"{self.phase}{pieces} for {duration(time.time() - self.since)}"


def duration(seconds: float) -> str:
    """Return `8 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class LiveStatus(Callback):
    """Writes the run's activity each second, on a thread, so that it works while the event loop computes.

    sources: called for the status of the run's components.
    """

    def __init__(self) -> None:
        now = time.time()
        self.sources: list[Callable[[], Sequence[ComponentStatus]]] = []
        self._status = RunStatus(ProcessId.own(), written=now, since=now)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Write the file each second inside the context, and once more on leaving, with any error."""
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
            self._change(error=f"{type(error).__name__}: {error}".rstrip(": "))
            raise
        finally:
            ended.set()
            thread.join()
            self.sources.clear()  # the components have ended
            self._write(path)

    def start(self, run: RunStart) -> None:
        self._change(update=run.update, updates=run.config.orchestration.updates)

    def update(self, row: Mapping[str, Any]) -> None:
        self._change(update=row["update"])

    def publish(self, version: int) -> None:
        self._change(trained=version, published=version)

    def end(self, summary: Mapping[str, Any] | None, error: BaseException | None) -> None:
        self._change(interrupted=summary is not None and summary["stopped_early"])

    def phase(self, name: str, done: int, total: int) -> None:
        self._change(phase=name, done=done, total=total, since=time.time() if done == 0 else self._status.since)

    def interval(self, row: Mapping[str, Any]) -> None:
        """End of a phase: the learner is one version ahead of the engines until its weights are published."""
        if row["phase"] == "update" and self._status.published is not None:
            self._change(trained=self._status.published + 1)
            self.phase("publish", 0, 0)
        elif row["phase"] == "publish":
            self._change(published=self._status.trained)

    def message(self, line: str) -> None:
        self._change(message=line, message_at=time.time())

    def _change(self, **fields: Any) -> None:
        self._status = replace(self._status, **fields)

    def _write(self, path: Path) -> None:
        components = tuple(component for source in tuple(self.sources) for component in source())
        status = replace(self._status, written=time.time(), components=components)
        temporary = path.with_name(f".{path.name}.new")
        # A full disk ends the run elsewhere; the next write may succeed.
        with suppress(OSError):
            temporary.write_text(json.dumps(asdict(status)), encoding="utf-8")
            os.replace(temporary, path)  # need not be durable
