"""Ray actors, called with Treadle's errors: `await actor.method.remote(...)`, cancelled with its caller."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from treadle.core.engine import ProcessId
from treadle.core.errors import PlacementError, TreadleError, WorkerLost

_CONCURRENCY = 1_000_000  # concurrent calls
_TAIL = 15  # lines of a log or traceback shown in an error


class Placed:
    """Base of actor classes."""

    async def process(self) -> tuple[ProcessId, str]:
        """Return this process, and its log file; "" if the system does not reveal it."""
        try:
            return ProcessId.own(), os.readlink("/proc/self/fd/2")
        except OSError:
            return ProcessId.own(), ""

    async def ping(self) -> Any:
        """Answer, perhaps with a status."""


class Actor:
    """Client of one actor, in any process of the run (a `Worker`). process: its process, once opened."""

    def __init__(self, name: str, kind: type[Placed], options: Mapping[str, Any], *arguments: Any) -> None:
        """Start an actor. name: for errors. options: options of its place."""
        made = ray.remote(kind).options(max_restarts=0, max_task_retries=0, max_concurrency=_CONCURRENCY, **options)
        self.name, self.handle = name, made.remote(*arguments)
        self.process: ProcessId | None = None
        self.log = ""

    async def open(self) -> None:
        self.process, self.log = await self.call("process")

    async def call(self, method: str, *arguments: Any, cancel: bool = True) -> Any:
        """Return the actor's answer, or raise its error, WorkerLost or PlacementError.

        cancel: whether to cancel the call with its caller. Ray cannot end a stopped actor that was asked to cancel a
        call.
        """
        answer = getattr(self.handle, method).remote(*arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            if cancel:
                ray.cancel(answer)
            raise
        except RayError as error:
            raise self.translate(error) from None

    def post(self, method: str, *arguments: Any) -> None:
        getattr(self.handle, method).remote(*arguments)

    def translate(self, error: RayError) -> TreadleError:
        if not isinstance(error, RayTaskError):
            return WorkerLost(f"{self.name} ended: {str(error).splitlines()[0]}{self.tail()}")
        if isinstance(error.cause, TreadleError):
            return error.cause
        traceback = [line for line in str(error).splitlines() if not line.startswith("\x1b")]  # Ray's own line
        failure = f"{self.name} failed with {type(error.cause).__name__}: {error.cause}"
        return PlacementError("\n".join([failure, *traceback[-_TAIL:]]))

    def kill(self) -> None:
        """End the actor immediately. Idempotent."""
        ray.kill(self.handle)

    async def close(self) -> None:
        self.kill()

    def tail(self) -> str:
        """Return the end of its output, or its location, for the end of an error."""
        if self.process is None:
            return ""
        try:
            lines = Path(self.log).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return f"; see {self.log or 'the logs of Ray'} on {self.process.host} (process {self.process.pid})"
        said = [line for line in lines if not line.startswith((":job_id:", ":actor_name:"))][-_TAIL:]
        return "\n".join(["\nIts log ends:", *said]) if said else ""
