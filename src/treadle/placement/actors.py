"""Ray actors: calling one with Treadle's errors, and keeping one alive at its place.

Supervised: start -> Actor -> (ended, or silent) -> start again
Actor.call: await actor.method.remote(...); cancelled with its caller; Ray's errors become Treadle's
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from treadle.core.errors import PlacementError, TreadleError
from treadle.core.status import ProcessId

_PERIOD = 5.0  # seconds between pings
_SILENCE = 60.0  # seconds without an answer to a ping after which an actor is replaced
_STARTING = 600.0  # seconds for an actor to be placed and opened
_FRUITLESS = 3  # actors in a row that end before they have answered a call, after which no other is started
_CONCURRENCY = 1_000_000  # calls at a time
_TAIL = 15  # lines of a log or traceback that an error shows


class ActorLost(PlacementError):
    """Raised when an actor ended before it answered. The call may be made again on the next one."""


class Placed:
    """Base of actor classes."""

    async def process(self) -> tuple[ProcessId, str]:
        """Return which process this is, and the file that its output goes to; "" if the system does not tell."""
        try:
            return ProcessId.own(), os.readlink("/proc/self/fd/2")
        except OSError:
            return ProcessId.own(), ""

    async def ping(self) -> Any:
        """Answer, perhaps with a status."""


class Actor:
    """Reaches one actor, from any process of the run.

    process: where it runs, once `open` has returned.
    """

    def __init__(self, name: str, kind: type[Placed], options: Mapping[str, Any], *arguments: Any) -> None:
        """Start an actor. name: in errors. options: of its place."""
        made = ray.remote(kind).options(max_restarts=0, max_task_retries=0, max_concurrency=_CONCURRENCY, **options)
        self.name, self.handle = name, made.remote(*arguments)
        self.process: ProcessId | None = None
        self.log = ""

    async def open(self) -> None:
        """Wait until the actor runs. Raises ActorLost."""
        self.process, self.log = await self.call("process")

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the actor's answer; cancelling this cancels the call.

        Raises Treadle's errors as they were raised there, ActorLost, and PlacementError for any other exception.
        """
        answer = getattr(self.handle, method).remote(*arguments)
        try:
            return await answer
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except RayError as error:
            raise self.translate(error) from None

    def translate(self, error: RayError) -> TreadleError:
        """Return the error as one of Treadle's."""
        if not isinstance(error, RayTaskError):
            return ActorLost(f"{self.name} ended: {str(error).splitlines()[0]}{self.tail()}")
        if isinstance(error.cause, TreadleError):
            return error.cause
        traceback = [line for line in str(error).splitlines() if not line.startswith("\x1b")]  # Ray's own line
        failure = f"{self.name} failed with {type(error.cause).__name__}: {error.cause}"
        return PlacementError("\n".join([failure, *traceback[-_TAIL:]]))

    def kill(self) -> None:
        """End the actor at once. Idempotent."""
        ray.kill(self.handle)

    def tail(self) -> str:
        """Return the end of its output, or where that is, to end an error with."""
        if self.process is None:
            return ""
        try:
            lines = Path(self.log).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return f"; see {self.log or 'the logs of Ray'} on {self.process.host} (process {self.process.pid})"
        said = [line for line in lines if not line.startswith((":job_id:", ":actor_name:"))][-_TAIL:]
        return "\n".join(["; its log ends:", *said]) if said else ""


class Supervised:
    """Keeps an actor at a place: when it ends, or does not answer for a minute, another one is started.

    make: starts an actor, which `open` then prepares. notify: gets a line when one is replaced. An actor that cannot be
    opened is the last one, and so is the third in a row that ends before it has answered a call.

    said: the last answer to a ping. error: why there will be no other actor; "" while there may be one.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Actor],
        open: Callable[[Actor], Awaitable[None]],
        notify: Callable[[str], None],
    ) -> None:
        self._name, self._make, self._open, self._notify = name, make, open, notify
        self.error, self.said = "", None
        self._loop = asyncio.get_running_loop()
        self._actor: asyncio.Future[Actor] = self._loop.create_future()
        self._ending: asyncio.Future[str] = self._loop.create_future()
        self._answered = 0
        self._keeping = self._loop.create_task(self._keep())

    @property
    def is_up(self) -> bool:
        return self._actor.done() and not self.error

    @property
    def actor(self) -> Actor | None:
        """The actor that is there now."""
        return self._actor.result() if self.is_up else None

    @property
    def process(self) -> ProcessId | None:
        return self._actor.result().process if self.is_up else None

    async def ready(self) -> Actor:
        """Return the actor, once there is one. Raises what opening it raised, and PlacementError."""
        return await asyncio.shield(self._actor)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the actor, once there is one. Raises as `Actor.call` and `ready` do."""
        actor = await self.ready()
        try:
            answer = await actor.call(method, *arguments)
        except ActorLost as error:
            self._lose(actor, str(error))
            raise
        self._answered += 1
        return answer

    async def close(self) -> None:
        """End the actor. Idempotent."""
        self.error = self.error or f"{self._name} was closed"
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        if not self._actor.done():
            self._actor.set_exception(PlacementError(self.error))
        self._actor.exception()  # retrieve it so that asyncio does not log it

    def _lose(self, actor: Actor, reason: str) -> None:
        if self.is_up and self._actor.result() is actor:
            self._actor = self._loop.create_future()
            self._ending.set_result(reason)

    async def _keep(self) -> None:
        """Start actors, one after the other's end."""
        fruitless = 0
        while True:
            actor = self._make()
            try:
                await self._opened(actor)
                self._ending, self._answered = self._loop.create_future(), 0
                self._actor.set_result(actor)
                await self._watch(actor)
                fruitless = 0 if self._answered else fruitless + 1
                ending = self._ending.result()
            except ActorLost as error:  # its node may be lost, which Ray has not noticed yet
                fruitless, ending = fruitless + 1, str(error)
            except TreadleError as error:
                return self._give_up(error)
            finally:
                actor.kill()
            if fruitless == _FRUITLESS:
                return self._give_up(PlacementError(f"{ending}\nIt was started {_FRUITLESS} times in vain"))
            self._notify(f"{ending.splitlines()[0]}; starting it again")

    async def _opened(self, actor: Actor) -> None:
        try:
            async with asyncio.timeout(_STARTING):
                await actor.open()
                await self._open(actor)
        except TimeoutError as error:
            raise PlacementError(f"{self._name} did not start within {_STARTING:g} s{actor.tail()}") from error

    async def _watch(self, actor: Actor) -> None:
        """Return when the actor has ended or falls silent."""
        while not self._ending.done():
            try:
                async with asyncio.timeout(_SILENCE):
                    self.said = await actor.call("ping")
            except (ActorLost, TimeoutError) as error:
                silent = f"{self._name} did not answer for {_SILENCE:g} s{actor.tail()}"
                self._lose(actor, silent if isinstance(error, TimeoutError) else str(error))
            else:
                await asyncio.wait([self._ending], timeout=_PERIOD)

    def _give_up(self, error: TreadleError) -> None:
        self.error = str(error)
        if self._actor.done():
            self._actor = self._loop.create_future()
        self._actor.set_exception(error)
        self._actor.exception()  # retrieve it so that asyncio does not log it
