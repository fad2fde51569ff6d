"""`RemoteEngine`: a `TorchEngine` in a separate process, so that engine, learner and environments never block one
another.

    open / close / generate -> waiting -> wave --(Worker.call)--> EngineService -> TorchEngine
    update_weights -> staged weights -----------------^

It samples the same bits as the same engine in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from treadle.core.engine import Completion, ComponentStatus
from treadle.core.errors import DataError, EngineEnded, EngineError, PlacementError, TreadleError, WorkerLost
from treadle.core.images import PromptImage
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.config import tolerance_of
from treadle.engines.staging import Staged
from treadle.engines.torch.engine import Limits, everybody_waits
from treadle.engines.torch.options import TorchEngineOptions
from treadle.engines.torch.pinned import LocalEngine, load_engine
from treadle.workers.child import ChildProcess
from treadle.workers.supervised import SILENCE, Supervised
from treadle.workers.worker import Worker

_PROBE = 64  # tokens with scores that a restarted engine must reproduce

MakeEngine = Callable[[], LocalEngine]


class Call(NamedTuple):
    """One call of `generate`."""

    prompt_ids: Ids
    sampling: SamplingParams
    session: str
    cache_salt: str | None
    images: Sequence[PromptImage]


class EngineService:
    """Answers a `RemoteEngine`'s calls in the engine's process. A session is opened by its first call."""

    def __init__(self) -> None:
        self._engine: LocalEngine
        self._sessions: set[str] = set()
        self._wave: dict[int, asyncio.Task[None]] = {}

    async def load(self, make: MakeEngine) -> Limits:
        self._engine = make()
        return self._engine.limits

    async def ping(self) -> ComponentStatus:
        return self._engine.status()[-1]

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        session: str,
        cache_salt: str | None,
        images: Sequence[PromptImage],
    ) -> Completion:
        self._open(session)
        return await self._engine.generate(prompt_ids, sampling, session=session, cache_salt=cache_salt, images=images)

    async def wave(self, calls: Mapping[int, Call], closed: Sequence[str]) -> dict[int, Completion | TreadleError]:
        """Close sessions, then sample for all other open ones; return answers in order of completion.

        calls: by number, in the order in which their sessions were opened. Cancelled ones have no answer.
        """
        await self.close_sessions(closed)
        for call in calls.values():
            self._open(call.session)
        answers: dict[int, Completion | TreadleError] = {}

        async def sample(number: int, call: Call) -> None:
            try:
                answers[number] = await self.generate(*call)
            except (EngineError, DataError) as error:
                answers[number] = error

        self._wave = {number: asyncio.ensure_future(sample(number, call)) for number, call in calls.items()}
        done, _ = await asyncio.wait(self._wave.values())
        for each in done:
            if not each.cancelled():
                each.result()
        return answers

    async def cancel(self, number: int) -> None:
        if number in self._wave:
            self._wave[number].cancel()

    async def close_sessions(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self._sessions.discard(session)
            self._engine.close_session(session)

    async def publish(self, staged: Staged, version: int, probe: Ids) -> Floats:
        """Serve staged weights; return the log-probabilities of the probe under them."""
        await self._engine.update_weights(await staged.fetch(), version)
        return await self._engine.score(probe)

    async def score(self, ids: Ids, temperature: float, images: Sequence[PromptImage]) -> Floats:
        return await self._engine.score(ids, temperature=temperature, images=images)

    async def sleep(self) -> None:
        await self._engine.sleep()

    def _open(self, session: str) -> None:
        if session not in self._sessions:
            self._sessions.add(session)
            self._engine.open_session(session)


@dataclass(slots=True)
class _Published:
    """The latest published weights. scores: scores of the probe under them, once computed."""

    staged: Staged
    version: int
    scores: Floats | None = None


class RemoteEngine:
    """Client of an engine in another process (a `pool.Member`). Call `open` first.

    make: creates the engine in that process. start: starts a worker that serves an `EngineService`. tolerance: largest
    mean difference of log-probabilities under the same weights, in nats. on_close: called after closing. losses: number
    of processes lost during one call before it fails; a pool asks another engine after the first.

    In lock-step, waves are formed here by TorchEngine's rule, in as many turns of the event loop, and each is one call
    of the worker; in the other process they would depend on the arrival times of messages.

    When the process ends, another is started with the latest published weights, and must reproduce the probe's scores.
    Until then calls wait.
    """

    def __init__(
        self,
        name: str,
        make: MakeEngine,
        start: Callable[[], Worker],
        *,
        lock_step: bool,
        tolerance: float,
        notify: Callable[[str], None] = lambda line: None,
        on_close: Callable[[], None] = lambda: None,
        silence: float = SILENCE,
        losses: int = 1,
    ) -> None:
        self._make, self._lock_step, self._tolerance, self._on_close = make, lock_step, tolerance, on_close
        self._losses = losses
        self.limits: Limits
        self._probe: Ids
        self._published: _Published | None = None
        self._turn = asyncio.Lock()  # held while weights are published, and while a wave is sampled
        self._sessions: dict[str, None] = {}  # in the order of opening
        self._closed: list[str] = []  # since the last wave
        self._running = 0  # calls
        self._waiting: dict[int, Call] = {}  # for the next wave, by number
        self._answers: dict[int, asyncio.Future[Completion]] = {}  # of calls that wait or are sampled
        self._driver: asyncio.Task[None] | None = None
        self._numbers = count()
        self._supervised = Supervised(name, start, self._prepare, notify, silence)

    async def open(self) -> None:
        """Wait until the engine is loaded. Raises EngineError, and passes on errors of loading."""
        try:
            await self._supervised.ready()
        except PlacementError as error:
            raise EngineError(str(error)) from error

    @property
    def is_down(self) -> bool:
        return not self._supervised.is_up

    @property
    def failure(self) -> str | None:
        return self._supervised.error or None

    @property
    def route(self) -> Any:
        """The worker, which other processes may call; None in lock-step, because waves are formed here."""
        return None if self._lock_step else self._supervised.worker

    def open_session(self, session: str) -> None:
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        self._sessions[session] = None

    def close_session(self, session: str) -> None:
        """End a session. Its waiting calls fail, running ones finish. May start a wave."""
        if session not in self._sessions:
            return
        del self._sessions[session]
        self._fail_waiting(EngineError(f"session {session!r} was closed while its call waited"), session)
        if self._lock_step:
            self._closed.append(session)
            self._start()
        elif worker := self._supervised.worker:
            worker.post("close_sessions", [session])

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Sample one completion, repeated if the process ends. Raises EngineError; EngineEnded after `losses`."""
        for losses in count(1):
            if self.failure:
                raise EngineEnded(self.failure)
            if session not in self._sessions:
                raise EngineError(f"session {session!r} is not open")
            self.limits.check_call(prompt_ids, sampling, session, images)
            call = Call(prompt_ids, sampling, session, cache_salt, images)
            self._running += 1
            try:
                if self._lock_step:
                    return await self._in_a_wave(call)
                completion: Completion = await self._call("generate", *call)
                return completion
            except EngineEnded:
                if losses >= self._losses:
                    raise
            finally:
                self._running -= 1
        raise AssertionError("unreachable")

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        scores: Floats = await self._call("score", ids, temperature, images)
        return scores

    async def update_weights(self, stage: Callable[[], Awaitable[Staged]], version: int) -> None:
        """Serve the weights returned by `stage`, for calls in flight and later waves.

        Raises EngineError, and changes nothing, if weights are missing or have another shape.
        """
        async with self._turn:
            before, self._published = self._published, _Published(await stage(), version)
            try:
                # The next process begins with these weights.
                with suppress(EngineEnded):
                    await self._publish(self._call, self._published)
                await self._ready()
            except BaseException:
                self._published.staged.discard()
                self._published = before
                raise
            if before is not None:
                before.staged.discard()

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        """Serve the latest published weights again. Raises EngineError if the probe scores differently."""
        assert self._published is not None
        await self._publish(self._call, self._published)

    def status(self) -> list[ComponentStatus]:
        """Return the current load; cache and calls of other processes are as of the last ping."""
        ping: ComponentStatus | None = self._supervised.last_ping
        running, waiting = self._running - len(self._waiting), len(self._waiting)
        if ping is not None and not self._lock_step:
            running, waiting = max(running, ping.running or 0), ping.waiting or 0
        return [
            ComponentStatus(
                "engine",
                "process",
                process=self._supervised.process,
                running=running,
                waiting=waiting,
                sessions=len(self._sessions),
                cache=ping.cache if ping else None,
                version=self._published.version if self._published else None,
                error=self._supervised.error,
            )
        ]

    async def close(self) -> None:
        await self._supervised.close()
        self._fail_waiting(EngineEnded(self._supervised.error))
        if self._driver is not None:
            await asyncio.wait([self._driver])
        async with self._turn:
            if self._published is not None:
                self._published.staged.discard()
        self._on_close()

    # --- the process -----------------------------------------------------------------------------------------------

    async def _prepare(self, worker: Worker) -> None:
        self.limits = await worker.call("load", self._make)
        self.limits.warn_of_slowness()
        rng = np.random.default_rng(0)
        self._probe = rng.integers(0, self.limits.vocabulary, min(_PROBE, self.limits.context)).astype(np.int32)
        if self._published is not None:
            await self._publish(worker.call, self._published)

    async def _publish(self, call: Callable[..., Awaitable[Any]], published: _Published) -> None:
        scores: Floats = await call("publish", published.staged, published.version, self._probe)
        if published.scores is None:
            published.scores = scores
        gap = float(np.abs(scores - published.scores).mean())
        if not gap <= self._tolerance:
            raise EngineError(
                f"log-probabilities differ by {gap:.2e} on average from those before the engine slept or restarted, "
                f"with the same weights (at most {self._tolerance:g})"
            )

    async def _call(self, method: str, *arguments: Any) -> Any:
        await self._ready()
        try:
            return await self._supervised.call(method, *arguments)
        except WorkerLost as error:
            raise EngineEnded(self._supervised.error or str(error)) from error
        except PlacementError as error:
            raise EngineError(str(error)) from error

    async def _ready(self) -> None:
        try:
            await self._supervised.ready()
        except TreadleError as error:
            raise EngineEnded(str(error)) from error

    # --- lock-step -----------------------------------------------------------------------------------------------

    async def _in_a_wave(self, call: Call) -> Completion:
        number = next(self._numbers)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[number], self._answers[number] = call, answer
        self._start()
        try:
            return await answer
        except asyncio.CancelledError:
            if number not in self._waiting and (worker := self._supervised.worker):
                worker.post("cancel", number)
            raise
        finally:
            self._waiting.pop(number, None)
            del self._answers[number]

    def _start(self) -> None:
        """Sample a wave if every open session waits; call after any change."""
        if self._driver is None and self._wave_is_complete():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        try:
            while True:
                # Lets answers and closings of the same tick take effect.
                await asyncio.sleep(0)
                if not self._wave_is_complete():
                    return
                async with self._turn:
                    await self._sample_wave()
        finally:
            self._driver = None

    def _wave_is_complete(self) -> bool:
        return everybody_waits([call.session for call in self._waiting.values()], self._sessions.keys())

    async def _sample_wave(self) -> None:
        try:
            await self._ready()
        except EngineEnded as error:
            self._fail_waiting(error)
        # A publication or a restart intervened.
        if not self._wave_is_complete():
            return
        closed, self._closed = self._closed, []
        order = {session: number for number, session in enumerate(self._sessions)}
        wave = dict(sorted(self._waiting.items(), key=lambda item: order[item[1].session]))
        self._waiting = {}
        answers: Mapping[int, Completion | TreadleError] = {}
        failure = EngineError("the engine was interrupted")
        try:
            answers = await self._call("wave", wave, closed)
        except EngineError as error:
            failure = error
        finally:
            for number in (*answers, *wave):
                self._settle(number, answers.get(number, failure))

    def _fail_waiting(self, error: EngineError, session: str | None = None) -> None:
        for number in [n for n, call in self._waiting.items() if session in (None, call.session)]:
            del self._waiting[number]
            self._settle(number, error)

    def _settle(self, number: int, completion: Completion | TreadleError) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():  # cancelled
            return
        if isinstance(completion, TreadleError):
            answer.set_exception(completion)
        else:
            answer.set_result(completion)


async def start_engine(
    model: Path,
    options: TorchEngineOptions,
    *,
    log: Path,
    notify: Callable[[str], None] = lambda line: None,
    on_close: Callable[[], None] = lambda: None,
    silence: float = SILENCE,
) -> RemoteEngine:
    """Start a process on this machine that serves `model`, a directory needed until `on_close`; return its engine.

    Thread count and determinism are copied from this process. log: file for the process's output. notify: receives a
    line at each restart. Raises EngineError, with the end of the log.
    """
    name = "the engine"
    make = partial(load_engine, model, options, torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
    engine = RemoteEngine(
        name,
        make,
        partial(ChildProcess, name, EngineService, log),
        lock_step=options.lock_step,
        tolerance=tolerance_of(options.dtype),
        notify=notify,
        on_close=on_close,
        silence=silence,
        losses=2,
    )
    try:
        await engine.open()
    except BaseException:
        await engine.close()
        raise
    return engine
