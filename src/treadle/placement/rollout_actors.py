"""Rollout workers: environments and agent programs in separate processes.

    RolloutPool.start -> RolloutActor.play -> Rollouts -> Session -> WorkerEngine --(route)--> the engine's actor
                                                                          '--requests--> _Worker -> Engine

The run's process opens every session, in order, which chooses its engine. A worker calls an engine with a `route`
itself. The run's process makes the other calls: to an engine in lock-step, because waves are formed there, to one with
a budget, and once a session's engine has ended. A worker imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ray
from ray.exceptions import RayError

from treadle.core.engine import Completion, ComponentStatus, Engine
from treadle.core.errors import Cause, EngineError, TreadleError, WorkerLost
from treadle.core.images import PromptImage
from treadle.core.types import Failure, Floats, Ids, SamplingParams, Status, Task, Trajectory, trajectory_id
from treadle.engines.vllm.server import ServerLost
from treadle.placement.actors import Actor, Placed
from treadle.placement.reserve import Reservation
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.attempt import NO_PREFIXES, CallLog, Players, Rollouts, open_rollouts, recorded_calls
from treadle.rollout.config import RolloutConfig
from treadle.rollout.replay import AnsweredCall, Prefix
from treadle.rollout.rewards import RewardsConfig
from treadle.rollout.session import Address
from treadle.workers.calls import Answer, Calls, Request, Service
from treadle.workers.child import described
from treadle.workers.supervised import Supervised

_CLOSING = 20.0  # seconds for a worker to finish


class WorkerEngine:
    """The `Engine` of a worker: calls the session's route, an engine's actor, or asks the run's process to call."""

    def __init__(self) -> None:
        self.routes: dict[str, Actor | None] = {}
        self.calls = Calls(self._ask, EngineError)
        self._closed = set[str]()
        self._requests: list[Request] = []
        self._any = asyncio.Event()

    def open_session(self, session: str) -> None:
        # Otherwise the run's process has opened it.
        if session not in self.routes or session in self._closed:
            self._closed.discard(session)
            self.calls.post("open_session", session)

    def close_session(self, session: str) -> None:
        self._closed.add(session)
        self.calls.post("close_session", session)

    def forget(self, session: str) -> None:
        del self.routes[session]
        self._closed.discard(session)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        completion: Completion
        if route := self.routes.get(session):
            try:
                completion = await route.call("generate", prompt_ids, sampling, session, cache_salt, images)
            except (WorkerLost, ServerLost):
                # The run's process knows the session's next engine.
                self.routes[session] = None
            else:
                return completion
        completion = await self.calls.call("generate", prompt_ids, sampling, session, cache_salt, images)
        return completion

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        scores: Floats = await self.calls.call("score", ids, temperature, images)
        return scores

    def status(self) -> list[ComponentStatus]:
        """Return nothing: the run's process queries the engine itself."""
        return []

    async def close(self) -> None:
        """No-op: the engine belongs to the run."""

    async def requests(self) -> AsyncIterator[list[Request]]:
        """Yield the requests of each turn of the event loop."""
        while await self._any.wait():
            requests, self._requests = self._requests, []
            self._any.clear()
            yield requests

    def _ask(self, request: Request) -> None:
        self._requests.append(request)
        self._any.set()


class WorkerLog:
    """The `CallLog` of one attempt in a worker: notifies the run's process, without waiting."""

    def __init__(self, engine: WorkerEngine, name: str, recorded: Sequence[AnsweredCall]) -> None:
        self._engine, self._name, self._recorded = engine, name, recorded

    def recorded(self, address: Address) -> Sequence[AnsweredCall]:
        return self._recorded

    def add(self, address: Address, call: AnsweredCall) -> Awaitable[None]:
        self._engine.calls.post("add_call", self._name, call)
        return asyncio.sleep(0)

    def forget(self, address: Address) -> None:
        self._engine.calls.post("forget", self._name)

    def restarted(self, address: Address, player: str, what: str) -> None:
        self._engine.calls.post("restarted", self._name, player, what)


class RolloutActor(Placed):
    """One worker, in a separate process."""

    def __init__(self) -> None:
        self._engine = WorkerEngine()
        self._opened = AsyncExitStack()
        self._rollouts: Rollouts

    async def open(self, make: Callable[..., AbstractAsyncContextManager[Rollouts]]) -> None:
        """Open its runner. make: `open_rollouts` without the engine and the log. Passes on errors of opening."""
        loop = asyncio.get_running_loop()

        def log(line: str) -> None:  # perhaps from another thread
            loop.call_soon_threadsafe(self._engine.calls.post, "notify", line)

        self._rollouts = await self._opened.enter_async_context(make(engine=self._engine, log=log))

    async def requests(self) -> AsyncIterator[list[Request]]:
        async for requests in self._engine.requests():
            yield requests

    async def answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._engine.calls.take(*answer)

    async def play(
        self,
        group_id: str,
        task: Task,
        address: Address,
        sampling: SamplingParams | None,
        route: Actor | None,
        recorded: Sequence[AnsweredCall] | None,
        prefix: Prefix | None,
    ) -> Trajectory:
        name = trajectory_id(group_id, address.attempt)
        self._engine.routes[name] = route
        log = None if recorded is None else WorkerLog(self._engine, name, recorded)
        try:
            prefixes = {} if prefix is None else {address.attempt: prefix}
            [attempt] = self._rollouts.start(group_id, task, [address], sampling, log, prefixes)
            return await attempt
        finally:
            self._engine.forget(name)

    async def check(self, tasks: Sequence[Task]) -> None:
        await self._rollouts.check(tasks)

    async def close(self) -> None:
        await self._opened.aclose()


@runtime_checkable
class Routed(Protocol):
    """An engine that other processes can call directly: `EnginePool`, `VLLMEngine`."""

    def route(self, session: str) -> Any:
        """Return the actor (`Actor`) that makes the session's calls; None to make them here."""


class RolloutPool:
    """Plays attempts in workers (a `RolloutRunner`): each goes to the least busy one. Created by `open_workers`.

    A worker that ends, or is silent for a minute, is replaced. Its attempts continue there once, with their recorded
    calls; unrecorded ones fail as `infrastructure`, and are retried.
    """

    def __init__(self, workers: Sequence[_Worker], sampling: SamplingParams) -> None:
        self._workers, self.sampling = workers, sampling

    def start(
        self,
        group_id: str,
        task: Task,
        addresses: list[Address],
        sampling: SamplingParams | None = None,
        log: CallLog | None = None,
        prefixes: Mapping[int, Prefix] = NO_PREFIXES,
    ) -> list[asyncio.Future[Trajectory]]:
        """Open one session per address, now and in order, and start the attempts; return their futures."""
        attempts: list[asyncio.Future[Trajectory]] = []
        for address in addresses:
            worker = min(self._workers, key=lambda each: each.playing)
            attempts.append(worker.start(group_id, task, address, sampling, log, prefixes.get(address.attempt)))
        return attempts

    async def check(self, tasks: Sequence[Task]) -> None:
        """Have a worker check that each driver can play. Raises ConfigError or EngineError."""
        firsts = {task.player: task for task in reversed(tasks)}
        await self._workers[0].place.call("check", list(firsts.values()))

    def status(self) -> list[ComponentStatus]:
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
    """Open workers at their places; see `open_rollouts`. Passes on its errors, and raises PlacementError."""
    where = directory and directory.absolute()
    made = partial(open_rollouts, renderer=renderer, players=players, config=config, rewards=rewards, directory=where)
    make = ray.put(made)
    async with AsyncExitStack() as opened:
        workers = []
        for bundle in reservation.of("rollout worker"):
            workers.append(_Worker(str(bundle), reservation.options(bundle), make, engine, log))
            opened.push_async_callback(workers[-1].close)
        await asyncio.gather(*(worker.place.ready() for worker in workers))
        yield RolloutPool(workers, config.sampling)


@dataclass(frozen=True, slots=True)
class _Log:
    """The call log of an attempt, and its recorded calls, in the order of their answers. first: number of the first."""

    log: CallLog
    address: Address
    calls: list[AnsweredCall]
    first: int

    def first_calls(self) -> list[AnsweredCall]:
        """Return the calls up to the first unrecorded one; calls may be concurrent."""
        ordered = sorted(self.calls, key=lambda call: call.number)
        self.calls[:] = [call for number, call in enumerate(ordered, self.first) if call.number == number]
        return list(self.calls)


class _Worker:
    """One place of a worker: its current actor, and that actor's requests."""

    def __init__(
        self, name: str, options: Mapping[str, Any], make: Any, engine: Engine, log: Callable[[str], None]
    ) -> None:
        self._make, self._engine, self.log = make, engine, log
        self.playing = 0
        self._logs: dict[str, _Log] = {}  # for attempts with recorded calls
        self._service: Service | None = None  # of the actor that is there now
        self._answers: list[Answer] = []
        self._serving: asyncio.Task[None] | None = None
        self.place = Supervised(name, lambda: Actor(name, RolloutActor, options), self._prepare, log)

    def start(
        self,
        group_id: str,
        task: Task,
        address: Address,
        sampling: SamplingParams | None,
        log: CallLog | None,
        prefix: Prefix | None,
    ) -> asyncio.Future[Trajectory]:
        """Open the attempt's session now, and play it."""
        name = trajectory_id(group_id, address.attempt)
        self._engine.open_session(name)
        self.playing += 1
        if log is not None:
            first = 0 if prefix is None else len(prefix.steps)
            self._logs[name] = _Log(log, address, list(recorded_calls(log, address, prefix)), first)
        attempt = asyncio.ensure_future(self._play(name, group_id, task, address, sampling, prefix))
        # Also covers attempts cancelled before they begin.
        attempt.add_done_callback(partial(self._ended, name))
        return attempt

    def status(self, name: str) -> ComponentStatus:
        return ComponentStatus(
            "worker",
            name,
            process=self.place.process,
            running=self.playing,
            sessions=self.playing,
            error=self.place.error,
        )

    async def close(self) -> None:
        if actor := self.place.worker:
            with suppress(TreadleError, TimeoutError):
                async with asyncio.timeout(_CLOSING):
                    await actor.call("close")
        await self.place.close()
        self._forget()

    async def _play(
        self,
        name: str,
        group_id: str,
        task: Task,
        address: Address,
        sampling: SamplingParams | None,
        prefix: Prefix | None,
    ) -> Trajectory:
        began, log = time.perf_counter(), self._logs.get(name)
        for losses in count(1):
            await self.place.ready()
            route = self._engine.route(name) if isinstance(self._engine, Routed) else None
            recorded = None if log is None else log.first_calls()
            try:
                call = (group_id, task, address, sampling, route, recorded, prefix)
                played: Trajectory = await self.place.call("play", *call)
                return played
            except WorkerLost as error:
                if losses == 1 and log is not None:
                    continue
                return Trajectory(
                    name,
                    task.task_id,
                    address.attempt,
                    steps=(),
                    reward=None,
                    status=Status.FAILED,
                    failure=Failure(Cause.INFRASTRUCTURE, str(error)),
                    seconds=time.perf_counter() - began,
                )
        raise AssertionError("unreachable")

    def _ended(self, name: str, _: object) -> None:
        self.playing -= 1
        self._logs.pop(name, None)
        self._engine.close_session(name)

    # --- requests of the actor -----------------------------------------------------------------------------------

    async def _prepare(self, actor: Actor) -> None:
        self._forget()
        self._service = Service(self, partial(self._send, actor), described)
        self._serving = asyncio.get_running_loop().create_task(self._serve(actor, self._service))
        await actor.call("open", self._make)

    async def _serve(self, actor: Actor, service: Service) -> None:
        with suppress(RayError):
            async for requests in actor.handle.requests.options(num_returns="streaming").remote():
                for request in await requests:
                    service.take(*request)

    def _forget(self) -> None:
        """Reset: drop pending calls of the previous actor."""
        if self._serving is not None and self._service is not None:
            self._serving.cancel()
            self._service.close()
        self._answers = []

    def _send(self, actor: Actor, answer: Answer) -> None:
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._flush, actor)  # all of this turn of the event loop
        self._answers.append(answer)

    def _flush(self, actor: Actor) -> None:
        answers, self._answers = self._answers, []
        if answers:
            actor.post("answer", answers)

    async def notify(self, line: str) -> None:
        self.log(line)

    async def add_call(self, session: str, call: AnsweredCall) -> None:
        if log := self._logs.get(session):  # it has not ended
            log.calls.append(call)
            log.log.add(log.address, call)

    async def forget(self, session: str) -> None:
        if log := self._logs.get(session):
            log.calls.clear()
            log.log.forget(log.address)

    async def restarted(self, session: str, player: str, what: str) -> None:
        if log := self._logs.get(session):
            log.calls.clear()
            log.log.restarted(log.address, player, what)

    async def open_session(self, session: str) -> None:
        with suppress(EngineError):  # calls of a closed session are refused
            self._engine.open_session(session)

    async def close_session(self, session: str) -> None:
        self._engine.close_session(session)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        session: str,
        cache_salt: str | None,
        images: Sequence[PromptImage],
    ) -> Completion:
        return await self._engine.generate(prompt_ids, sampling, session=session, cache_salt=cache_salt, images=images)

    async def score(self, ids: Ids, temperature: float, images: Sequence[PromptImage]) -> Floats:
        return await self._engine.score(ids, temperature=temperature, images=images)
