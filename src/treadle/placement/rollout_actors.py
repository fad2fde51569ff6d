"""Rollout workers: environments and agent programs in processes of their own, whose calls the run's process passes on.

    RolloutPool.start -> RolloutActor.play -> Rollouts -> Session -> WorkerCalls --posted--> _Worker -> Engine
                                                                        |  ^-------answers--------'
                                                                        '--(the session's route)--> its engine's actor

The run's process opens every session, in order, and so chooses its engine. A worker calls that engine itself, where it
has a `route` (an engine in lock-step has none: its waves are formed in the run's process); otherwise, and once that
engine's process has ended, the run's process makes the call. A worker imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from treadle.core.engine import Completion, Engine
from treadle.core.errors import Cause, EngineError, PlacementError, TreadleError
from treadle.core.status import ComponentStatus, ProcessId
from treadle.core.types import Failure, Floats, Ids, SamplingParams, Status, Task, Trajectory, trajectory_id
from treadle.engines.vllm.server import ServerLost
from treadle.placement.reserve import Reservation
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.attempt import Players, Rollouts, open_rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.rewards import RewardsConfig
from treadle.rollout.session import Address

_BEAT = 5.0  # seconds after which a worker that has nothing to say says so
_SILENCE = 60.0  # seconds without a word after which a worker is replaced
_CLOSING = 20.0  # seconds for a worker to end what it has started
_SIDE_BY_SIDE = 1_000_000  # attempts, and answers, in one worker
_FRUITLESS = 3  # processes in a row that end before they have played an attempt


@dataclass(frozen=True, slots=True)
class Posted:
    """Is what a worker asks the run's process for: to open or close a session, to make or cancel call `number`, to log.

    arguments, options: those of `Engine.generate` or `Engine.score`, or the name of the session, or the line.
    """

    do: Literal["open", "close", "generate", "score", "cancel", "log"]
    number: int = 0
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Answers call `number`: with a value, or with an error."""

    number: int
    value: Any = None
    error: TreadleError | None = None


class WorkerCalls:
    """Makes calls by the session's route, or has the run's process make them: the `Engine` of a worker.

    routes: session -> the `EngineActor` or `ServerActor` that samples for it, while that is known to live.
    """

    def __init__(self) -> None:
        self.routes: dict[str, Any] = {}
        self._posted: list[Posted] = []
        self._any = asyncio.Event()
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def open_session(self, session: str) -> None:
        """Announce the session, unless it was opened for this worker."""
        self.post(Posted("open", arguments=(session,)))

    def close_session(self, session: str) -> None:
        """Close the session."""
        self.post(Posted("close", arguments=(session,)))

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        """Return the engine's completion; raises what it raises."""
        if route := self.routes.get(session):
            calling = route.generate.remote(prompt_ids, sampling, session, cache_salt)
            try:
                direct: Completion = await _result(calling)
                return direct
            except asyncio.CancelledError:
                ray.cancel(calling)
                raise
            except (RayActorError, ServerLost):  # the run's process knows where the session goes, and will close it
                del self.routes[session]
        options = {"session": session, "cache_salt": cache_salt}
        completion: Completion = await self._call("generate", (prompt_ids, sampling), options)
        return completion

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        """Return the engine's scores."""
        scores: Floats = await self._call("score", (ids,), {"temperature": temperature})
        return scores

    def status(self) -> list[ComponentStatus]:
        """Return nothing: the run's process asks the engine itself."""
        return []

    async def close(self) -> None:
        """Do nothing: the engine is the run's."""

    def post(self, message: Posted) -> None:
        """Post a message, after those before."""
        self._posted.append(message)
        self._any.set()

    async def posted(self) -> list[Posted]:
        """Return what was posted since the last call, once there is something, or nothing after a while."""
        try:
            async with asyncio.timeout(_BEAT):
                await self._any.wait()
        except TimeoutError:
            return []
        self._any.clear()
        messages, self._posted = self._posted, []
        return messages

    def answer(self, answers: Sequence[Answer]) -> None:
        """Hand out answers to the calls that still wait."""
        for answer in answers:
            waiting = self._waiting.get(answer.number)
            if waiting is None or waiting.done():
                continue
            if answer.error is None:
                waiting.set_result(answer.value)
            else:
                waiting.set_exception(answer.error)

    async def _call(
        self, do: Literal["generate", "score"], arguments: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self.post(Posted(do, number, arguments, options))
        try:
            return await answer
        except asyncio.CancelledError:
            self.post(Posted("cancel", number))
            raise
        finally:
            del self._waiting[number]


@dataclass(frozen=True, slots=True)
class Plays:
    """Holds what a worker plays with: the arguments of `open_rollouts`."""

    renderer: ChatRenderer
    players: Players
    config: RolloutConfig
    rewards: RewardsConfig
    directory: Path | None


class RolloutActor:
    """Is one worker, in a process of its own."""

    def __init__(self) -> None:
        self._calls = WorkerCalls()
        self._opened = AsyncExitStack()
        self._rollouts: Rollouts | None = None

    async def open(self, plays: Plays) -> ProcessId:
        """Open what it plays with; return which process this is. Raises what `open_rollouts` raises."""
        loop = asyncio.get_running_loop()

        def log(line: str) -> None:  # from another thread
            loop.call_soon_threadsafe(self._calls.post, Posted("log", arguments=(line,)))

        rollouts = open_rollouts(
            self._calls, plays.renderer, plays.players, plays.config, plays.rewards, log, plays.directory
        )
        self._rollouts = await self._opened.enter_async_context(rollouts)
        return ProcessId.own()

    async def play(
        self, group_id: str, task: Task, address: Address, sampling: SamplingParams | None, route: Any
    ) -> Trajectory:
        """Play one attempt. route: of its session, if there is one."""
        assert self._rollouts is not None
        name = trajectory_id(group_id, address.attempt)
        if route is not None:
            self._calls.routes[name] = route
        try:
            [attempt] = self._rollouts.start(group_id, task, [address], sampling)
            return await attempt
        finally:
            self._calls.routes.pop(name, None)

    async def check(self, tasks: Sequence[Task]) -> None:
        """Check that the drivers can play; see `Rollouts.check`."""
        assert self._rollouts is not None
        await self._rollouts.check(tasks)

    async def posted(self) -> list[Posted]:
        """Return what is asked of the run's process."""
        return await self._calls.posted()

    async def answer(self, answers: Sequence[Answer]) -> None:
        """Take the answers to calls."""
        self._calls.answer(answers)

    async def close(self) -> None:
        """End what it plays with."""
        await self._opened.aclose()


@runtime_checkable
class Routed(Protocol):
    """Is an engine that other processes can call by themselves: `EnginePool`, `VLLMEngine`."""

    def route(self, session: str) -> Any:
        """Return the actor that makes the session's calls; None if they are to be made here."""
        ...


class RolloutPool:
    """Plays attempts in workers (a `RolloutRunner`): each goes to the one with the fewest. Made by `open_workers`.

    A worker that ends, or says nothing for a minute, is replaced; its attempts fail as `infrastructure`, which has them
    played again.
    """

    def __init__(self, workers: Sequence[_Worker], sampling: SamplingParams) -> None:
        self._workers, self.sampling = workers, sampling

    def start(
        self, group_id: str, task: Task, addresses: list[Address], sampling: SamplingParams | None = None
    ) -> list[asyncio.Future[Trajectory]]:
        """Open one session per address, now and in order, and start the attempts; return their futures."""
        attempts: list[asyncio.Future[Trajectory]] = []
        for address in addresses:
            worker = min(self._workers, key=lambda each: each.playing)
            attempts.append(worker.start(group_id, task, address, sampling))
        return attempts

    async def check(self, tasks: Sequence[Task]) -> None:
        """Have a worker check that each driver can play. Raises ConfigError or EngineError."""
        firsts = {task.player: task for task in reversed(tasks)}
        await self._workers[0].check(list(firsts.values()))

    def status(self) -> list[ComponentStatus]:
        """Return what each worker does now."""
        return [worker.status(str(number)) for number, worker in enumerate(self._workers)]


@asynccontextmanager
async def open_workers(
    reservation: Reservation,
    engine: Engine,
    renderer: ChatRenderer,
    players: Players,
    config: RolloutConfig,
    rewards: RewardsConfig,
    log: Callable[[str], None],
    directory: Path | None,
) -> AsyncIterator[RolloutPool]:
    """Open workers at their places; see `open_rollouts`. Raises what that raises, and PlacementError."""
    plays = ray.put(Plays(renderer, players, config, rewards, directory and directory.absolute()))
    async with AsyncExitStack() as opened:
        workers = []
        for bundle in reservation.of("rollout worker"):
            worker = _Worker(str(bundle), reservation.options(bundle), plays, engine, log)
            opened.push_async_callback(worker.close)
            workers.append(worker)
        await asyncio.gather(*(worker.ready() for worker in workers))
        yield RolloutPool(workers, config.sampling)


class _Worker:
    """One place of a worker: the actor that is there now, and the calls that it waits for."""

    def __init__(
        self, name: str, options: Mapping[str, Any], plays: Any, engine: Engine, log: Callable[[str], None]
    ) -> None:
        self._name, self._plays, self._engine, self._log = name, plays, engine, log
        self._make = partial(
            ray.remote(RolloutActor)
            .options(max_restarts=0, max_task_retries=0, max_concurrency=_SIDE_BY_SIDE, **options)
            .remote
        )
        self.playing = 0
        self._played = 0  # by the actor that is there now
        self._sessions: dict[str, None] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._answers: list[Answer] = []
        self._process: Any = None
        self._place: ProcessId | None = None
        self._error = ""
        self._actor: asyncio.Future[Any] = asyncio.get_running_loop().create_future()  # the same, once it is open
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def ready(self) -> Any:
        """Return the actor, once there is one. Raises what opening it raised, and PlacementError."""
        return await asyncio.shield(self._actor)

    def start(
        self, group_id: str, task: Task, address: Address, sampling: SamplingParams | None
    ) -> asyncio.Future[Trajectory]:
        """Open the attempt's session now, and play it."""
        name = trajectory_id(group_id, address.attempt)
        self._open(name)
        self.playing += 1
        attempt = asyncio.ensure_future(self._play(name, group_id, task, address, sampling))
        attempt.add_done_callback(partial(self._ended, name))  # also if it was cancelled before it began
        return attempt

    def status(self, name: str) -> ComponentStatus:
        return ComponentStatus(
            "worker",
            name,
            process=self._place,
            running=self.playing,
            sessions=len(self._sessions),
            error=self._error,
        )

    async def check(self, tasks: Sequence[Task]) -> None:
        actor = await self.ready()
        await _result(actor.check.remote(tasks))

    async def close(self) -> None:
        """End the worker and what it has started."""
        self._serving.cancel()
        await asyncio.wait([self._serving])
        for call in self._calls.values():
            call.cancel()
        if self._actor.done() and self._actor.exception() is None:
            await asyncio.wait([asyncio.ensure_future(_quietly(self._process.close.remote()))], timeout=_CLOSING)
        self._actor.cancel()
        if self._process is not None:
            ray.kill(self._process)

    async def _play(
        self, name: str, group_id: str, task: Task, address: Address, sampling: SamplingParams | None
    ) -> Trajectory:
        began = time.perf_counter()
        actor = await self.ready()
        route = self._engine.route(name) if isinstance(self._engine, Routed) else None
        playing = actor.play.remote(group_id, task, address, sampling, route)
        try:
            trajectory: Trajectory = await _result(playing)
        except asyncio.CancelledError:
            ray.cancel(playing)
            raise
        except RayActorError as error:
            failure = Failure(Cause.INFRASTRUCTURE, f"{self._name} ended: {_first_line(error)}")
            seconds = time.perf_counter() - began
            return Trajectory(
                name, task.task_id, address.attempt, (), None, Status.FAILED, failure=failure, seconds=seconds
            )
        self._played += 1
        return trajectory

    def _ended(self, name: str, _: object) -> None:
        self.playing -= 1
        self._close(name)

    async def _serve(self) -> None:
        """Start actors, one after the other's end, and do what they ask for."""
        fruitless = 0
        while True:
            actor = self._process = self._make()
            try:
                self._place = await _result(actor.open.remote(self._plays))
                self._actor.set_result(actor)
                await self._listen(actor)
            except (RayActorError, TimeoutError) as error:
                ending = f"no word for {_SILENCE:g} s" if isinstance(error, TimeoutError) else _first_line(error)
            except (RayError, TreadleError) as error:
                self._give_up(error if isinstance(error, TreadleError) else PlacementError(f"{self._name}: {error}"))
                return
            ray.kill(actor)
            fruitless = 0 if self._played else fruitless + 1
            self._forget()
            if fruitless == _FRUITLESS:
                self._give_up(PlacementError(f"{self._name} ended {fruitless} times before it had played: {ending}"))
                return
            self._log(f"{self._name} ended ({ending}); starting it again")

    def _give_up(self, error: TreadleError) -> None:
        self._error = str(error)
        if self._actor.done():
            self._actor = asyncio.get_running_loop().create_future()
        self._actor.set_exception(error)

    def _forget(self) -> None:
        """Be as before the first actor: nobody waits for the last one's calls."""
        for call in self._calls.values():
            call.cancel()
        self._calls, self._answers, self._played = {}, [], 0
        if self._actor.done():
            self._actor = asyncio.get_running_loop().create_future()

    async def _listen(self, actor: Any) -> None:
        """Do what the actor asks for until it ends. Raises TimeoutError where it says nothing."""
        while True:
            async with asyncio.timeout(_SILENCE):
                messages: list[Posted] = await _result(actor.posted.remote())
            for message in messages:
                self._do(actor, message)

    def _do(self, actor: Any, message: Posted) -> None:
        match message.do:
            case "open":
                self._open(message.arguments[0])
            case "close":
                self._close(message.arguments[0])
            case "log":
                self._log(message.arguments[0])
            case "cancel":
                if call := self._calls.get(message.number):
                    call.cancel()
            case do:
                asked = getattr(self._engine, do)(*message.arguments, **(message.options or {}))
                call = asyncio.get_running_loop().create_task(self._answer(actor, message.number, asked))
                self._calls[message.number] = call

    async def _answer(self, actor: Any, number: int, asked: Coroutine[Any, Any, Any]) -> None:
        try:
            answer = Answer(number, await asked)
        except EngineError as error:
            answer = Answer(number, error=error)
        finally:
            self._calls.pop(number, None)
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush, actor)  # all of this turn of the event loop
        self._answers.append(answer)

    def _flush(self, actor: Any) -> None:
        answers, self._answers = self._answers, []
        if answers:
            actor.answer.remote(answers)

    def _open(self, session: str) -> None:
        if session not in self._sessions:
            self._engine.open_session(session)
            self._sessions[session] = None

    def _close(self, session: str) -> None:
        if session in self._sessions:
            del self._sessions[session]
            self._engine.close_session(session)


async def _result(reference: Any) -> Any:
    """Return what an actor returned. Raises Treadle's own errors as they were raised there, and those of Ray."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, TreadleError):
            raise error.cause from None
        raise


async def _quietly(reference: Any) -> None:
    try:
        await reference
    except RayError:
        return


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
