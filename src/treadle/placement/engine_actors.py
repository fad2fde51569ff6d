"""Engines that are Ray actors, and a pool of them.

EnginePool -> RemoteEngine --(wave, publish)--> EngineActor -> TorchEngine
                    rollout workers --(generate)----^
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.utils import logging as hf_logging

from treadle.core.engine import Completion, Engine
from treadle.core.errors import ConfigError, EngineError, PlacementError
from treadle.core.status import ComponentStatus
from treadle.core.trainer import WeightSync
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.engines.limits import Limits
from treadle.engines.lock_step import everybody_waits
from treadle.engines.pool import EnginePool, PoolSync
from treadle.engines.process.rpc import EngineEnded
from treadle.engines.staging import Staged
from treadle.engines.torch.engine import TorchEngine
from treadle.models.config import ModelConfig
from treadle.orchestration.config import RunConfig
from treadle.orchestration.setup.chat_interface import load_chat_interface
from treadle.orchestration.setup.engines import EngineSpec, torch_options
from treadle.placement.actors import Actor, ActorLost, Placed, Supervised
from treadle.placement.reserve import Reservation
from treadle.placement.server_actors import open_servers
from treadle.placement.stored_weights import ObjectStore
from treadle.placement.turns import ColocatedPool, ColocatedTrainer
from treadle.training.make import load_model

_PROBE = 64  # tokens that an engine which replaces another one is proven with


MakeEngine = Callable[[], TorchEngine]


def make_engine(
    config: EngineConfig, model: ModelConfig, seed: int, routing: bool, threads: int, deterministic: bool, device: str
) -> TorchEngine:
    """Return an engine in this process. threads, deterministic, device: how and where it computes."""
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    chat = load_chat_interface(model)
    loaded = load_model(model, seed)
    loaded.to(device)  # type: ignore[arg-type]  # a wrapper hides the signature
    return TorchEngine(loaded, torch_options(config, chat, routing), decode=chat.decode)


class Call(NamedTuple):
    """One call of `generate`."""

    prompt_ids: Ids
    sampling: SamplingParams
    session: str
    cache_salt: str | None


class EngineActor(Placed):
    """A `TorchEngine` in a process of its own. A session is opened there by its first call."""

    def __init__(self) -> None:
        self._engine: TorchEngine
        self._sessions: set[str] = set()

    async def load(self, make: MakeEngine) -> Limits:
        """Load the engine."""
        self._engine = make()
        return self._engine.limits

    async def ping(self) -> ComponentStatus:
        """Return what the engine does now."""
        return self._engine.status()[0]

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, session: str, cache_salt: str | None
    ) -> Completion:
        """Sample one completion. Raises EngineError."""
        self._open(session)
        return await self._engine.generate(prompt_ids, sampling, session=session, cache_salt=cache_salt)

    async def wave(self, calls: Sequence[Call], closed: Sequence[str]) -> list[Completion | EngineError]:
        """Close sessions, then sample for all other open ones. calls: in the order in which sessions were opened."""
        await self.close_sessions(closed)
        for call in calls:
            self._open(call.session)
        answers = [asyncio.ensure_future(self.generate(*call)) for call in calls]
        return await asyncio.gather(*answers, return_exceptions=True)  # type: ignore[return-value]

    async def close_sessions(self, sessions: Sequence[str]) -> None:
        """Forget sessions and their caches."""
        for session in sessions:
            self._sessions.discard(session)
            self._engine.close_session(session)

    async def publish(self, message: Mapping[str, Any], version: int, probe: Ids) -> Floats:
        """Serve the weights of a `Staged.message`; return the log-probabilities of the probe under them."""
        await self._engine.update_weights(await message["weights"].fetch(), version)
        return await self._engine.score(probe)

    async def score(self, ids: Ids, temperature: float) -> Floats:
        """Return the log-probability of ids[1:]. Raises EngineError."""
        return await self._engine.score(ids, temperature=temperature)

    async def sleep(self) -> None:
        """Give back memory until weights are published. Raises EngineError while calls run."""
        await self._engine.sleep()

    def _open(self, session: str) -> None:
        if session not in self._sessions:
            self._sessions.add(session)
            self._engine.open_session(session)


@dataclass(slots=True)
class _Published:
    """Weights that were published last. scores: of the probe under them, once an actor has them."""

    staged: Staged
    version: int
    scores: Floats | None = None


class RemoteEngine:
    """The engine of an actor, seen from the run's process (a `pool.Member`). Call `open` before anything else.

    In lock-step, waves are formed here by TorchEngine's rule, and each is one call of the actor; in the other process
    they would depend on when messages arrive. A wave that nobody waits for any more is cancelled.

    When the actor ends, its calls fail with EngineEnded, and another one takes its place with the weights that were
    published last, which must score the probe alike.
    """

    def __init__(
        self,
        name: str,
        make: MakeEngine,
        config: EngineConfig,
        options: Mapping[str, Any],
        notify: Callable[[str], None],
    ) -> None:
        self._make, self._lock_step, self._tolerance = make, config.lock_step is not False, config.tolerance
        self.limits: Limits
        self._probe: Ids
        self._published: _Published | None = None
        self._turn = asyncio.Lock()  # held while weights are published, and while a wave is sampled
        self._sessions: dict[str, None] = {}  # in the order of opening
        self._closed: list[str] = []  # since the last wave
        self._running = 0  # calls
        self._waiting: dict[asyncio.Future[Completion], Call] = {}  # for the next wave
        self._driver: asyncio.Task[None] | None = None
        self._place = Supervised(name, lambda: Actor(name, EngineActor, options), self._prepare, notify)

    async def open(self) -> None:
        """Wait until the engine is loaded. Raises EngineError, and what loading raises."""
        await self._ready()

    @property
    def is_down(self) -> bool:
        return not self._place.is_up

    @property
    def over(self) -> str | None:
        return self._place.error or None

    @property
    def route(self) -> Actor | None:
        """The actor that rollout workers call; None in lock-step, whose waves are formed here."""
        return None if self._lock_step else self._place.actor

    def open_session(self, session: str) -> None:
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        self._sessions[session] = None

    def close_session(self, session: str) -> None:
        """End a session. Its calls that wait fail, others finish; a wave may be waiting for this."""
        if session not in self._sessions:
            return
        del self._sessions[session]
        self._fail_waiting(EngineError(f"session {session!r} was closed while its call waited"), session)
        if self._lock_step:
            self._closed.append(session)
            self._start()
        elif actor := self._place.actor:
            actor.handle.close_sessions.remote([session])

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        """Sample one completion. Raises as `TorchEngine` does."""
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        self.limits.check_call(prompt_ids, sampling, session)
        call = Call(prompt_ids, sampling, session, cache_salt)
        self._running += 1
        try:
            return await (self._in_a_wave(call) if self._lock_step else self._call("generate", *call))
        finally:
            self._running -= 1

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        scores: Floats = await self._call("score", ids, temperature)
        return scores

    async def update_weights(self, stage: Callable[[], Awaitable[Staged]], version: int) -> None:
        """Serve what `stage` returns: calls in flight continue with it, waves that start later have it.

        Raises EngineError, and changes nothing, where weights are missing or of another shape.
        """
        async with self._turn:
            before, self._published = self._published, _Published(await stage(), version)
            try:
                await self._publish(self._call, self._published)
            except EngineEnded:
                await self._ready()  # the next actor begins with these weights
            except BaseException:
                self._published = before
                raise

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        """Serve what was published last. Raises EngineError if it does not score the probe as before."""
        assert self._published is not None
        await self._publish(self._call, self._published)

    def status(self) -> list[ComponentStatus]:
        """Return what it does now. How full its cache is, and what others call it for, it said some seconds ago."""
        said: ComponentStatus | None = self._place.said
        running, waiting = self._running - len(self._waiting), len(self._waiting)
        if said is not None and not self._lock_step:
            running, waiting = max(running, said.running or 0), said.waiting or 0
        return [
            ComponentStatus(
                "engine",
                "actor",
                process=self._place.process,
                running=running,
                waiting=waiting,
                sessions=len(self._sessions),
                cache=said.cache if said else None,
                version=self._published.version if self._published else None,
                error=self._place.error,
            )
        ]

    async def close(self) -> None:
        await self._place.close()
        self._fail_waiting(EngineEnded(self._place.error))
        if self._driver is not None:
            await asyncio.wait([self._driver])

    # --- the actor -----------------------------------------------------------------------------------------------

    async def _prepare(self, actor: Actor) -> None:
        self.limits = await actor.call("load", self._make)
        rng = np.random.default_rng(0)
        self._probe = rng.integers(0, self.limits.vocabulary, min(_PROBE, self.limits.context)).astype(np.int32)
        if self._published is not None:
            await self._publish(actor.call, self._published)

    async def _publish(self, call: Callable[..., Awaitable[Any]], published: _Published) -> None:
        scores: Floats = await call("publish", published.staged.message, published.version, self._probe)
        if published.scores is None:
            published.scores = scores
        gap = float(np.abs(scores - published.scores).mean())
        if not gap <= self._tolerance:
            raise EngineError(
                f"log-probabilities differ by {gap:.2e} on average from those of the engine before it slept or was "
                f"started again, with the same weights (at most {self._tolerance:g})"
            )

    async def _call(self, method: str, *arguments: Any) -> Any:
        await self._ready()
        try:
            return await self._place.call(method, *arguments)
        except ActorLost as error:
            raise EngineEnded(str(error)) from error
        except PlacementError as error:
            raise EngineError(str(error)) from error

    async def _ready(self) -> None:
        try:
            await self._place.ready()
        except PlacementError as error:
            raise EngineEnded(str(error)) from error

    # --- lock-step -----------------------------------------------------------------------------------------------

    async def _in_a_wave(self, call: Call) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = call
        self._start()
        try:
            return await answer
        finally:
            self._waiting.pop(answer, None)

    def _start(self) -> None:
        """Sample a wave if every open session waits; to be called after any change."""
        if self._driver is None and self._wave_is_complete():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        try:
            await asyncio.sleep(0)  # what is closed or opened in this same tick may change who waits
            async with self._turn:
                while self._wave_is_complete():
                    await self._wave()
        finally:
            self._driver = None

    def _wave_is_complete(self) -> bool:
        return everybody_waits([call.session for call in self._waiting.values()], self._sessions.keys())

    async def _wave(self) -> None:
        waiting, self._waiting, closed, self._closed = self._waiting, {}, self._closed, []
        order = {session: number for number, session in enumerate(self._sessions)}
        answers = sorted(waiting, key=lambda answer: order[waiting[answer].session])
        wave = asyncio.ensure_future(self._call("wave", [waiting[answer] for answer in answers], closed))

        def cancel(_: object) -> None:
            if all(answer.cancelled() for answer in answers):
                wave.cancel()

        for answer in answers:
            answer.add_done_callback(cancel)
        await asyncio.wait([wave])
        if wave.cancelled():
            return
        error = wave.exception()
        for answer, completion in zip(answers, [error] * len(answers) if error else wave.result(), strict=True):
            if answer.done():  # cancelled
                continue
            if isinstance(completion, BaseException):
                answer.set_exception(completion)
            else:
                answer.set_result(completion)

    def _fail_waiting(self, error: EngineError, session: str | None = None) -> None:
        for answer, call in list(self._waiting.items()):
            if session in (None, call.session) and not answer.done():
                del self._waiting[answer]
                answer.set_exception(error)


async def open_engines(config: RunConfig, reservation: Reservation, spec: EngineSpec) -> tuple[Engine, WeightSync]:
    """Open an engine at each of its places; see `OpenEngine`. config: whose model they serve.

    Beside a trainer that takes turns, they are loaded in theirs.
    """
    if spec.config.kind == "vllm":
        return await open_servers(config, reservation, spec)
    if spec.config.kind != "torch":
        raise ConfigError(
            f"engine.kind is {spec.config.kind!r}, and placement.kind 'ray' starts engines of kind torch and vllm; set "
            "one of them to another"
        )
    make = partial(
        make_engine,
        spec.config,
        config.model,
        config.seed,
        spec.routing,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        "cuda" if "GPU" in reservation.of("engine")[0].resources else "cpu",
    )
    destination = ObjectStore(getattr(torch, spec.config.dtype))
    if isinstance(spec.source, ColocatedTrainer):
        async with spec.source.turns.of("engines"):
            pool: EnginePool = ColocatedPool(await _open_all(make, reservation, spec), spec.source.turns)
    else:
        pool = EnginePool(await _open_all(make, reservation, spec))
    return pool, PoolSync(spec.source, pool, destination)


async def _open_all(make: MakeEngine, reservation: Reservation, spec: EngineSpec) -> list[RemoteEngine]:
    engines = [
        RemoteEngine(str(bundle), make, spec.config, reservation.options(bundle), spec.log)
        for bundle in reservation.of("engine")
    ]
    try:
        await asyncio.gather(*(each.open() for each in engines))
    except BaseException:
        await asyncio.gather(*(each.close() for each in engines))
        raise
    return engines
