"""Engines that are Ray actors: `ProcessEngine` with an actor at the other end, and a pool of them.

EnginePool -> ProcessEngine -> Link -> ActorChannel --(actor calls)--> EngineActor -> EngineServer -> TorchEngine
                                        rollout workers --(generate)------^
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
import torch
from ray.exceptions import ActorDiedError, RayError
from torch import Tensor
from transformers.utils import logging as hf_logging

from treadle.core.engine import Completion, Engine
from treadle.core.errors import ConfigError, EngineError
from treadle.core.status import ProcessId
from treadle.core.trainer import WeightSync
from treadle.core.types import Ids, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.engines.pool import EnginePool, PoolSync
from treadle.engines.process.engine import ProcessEngine, connect_engine
from treadle.engines.process.protocol import Message
from treadle.engines.process.rpc import Link
from treadle.engines.process.server import EngineServer, error_message
from treadle.engines.torch.engine import TorchEngine
from treadle.models.config import ModelConfig
from treadle.orchestration.config import RunConfig
from treadle.orchestration.setup.chat_interface import load_chat_interface
from treadle.orchestration.setup.engines import EngineSpec, torch_options
from treadle.placement.reserve import Bundle, Reservation
from treadle.placement.server_actors import open_servers
from treadle.placement.stored_weights import ObjectStore
from treadle.placement.turns import ColocatedPool, ColocatedTrainer
from treadle.training.make import load_model

_SIDE_BY_SIDE = 1_000_000  # calls at a time, of one actor
_OPENING = 60.0  # seconds for a session to be opened that is called already: calls come from several processes


@dataclass(frozen=True, slots=True)
class ActorEngine:
    """Holds what an actor makes its engine from. threads, deterministic, device: how and where it computes."""

    config: EngineConfig
    model: ModelConfig
    seed: int
    routing: bool
    threads: int
    deterministic: bool
    device: str

    def make(self) -> TorchEngine:
        """Return the engine, in this process. Raises what loading raises."""
        hf_logging.disable_progress_bar()
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic)
        chat = load_chat_interface(self.model)
        options = torch_options(self.config, chat, self.routing)
        model = load_model(self.model, self.seed)
        model.to(self.device)  # type: ignore[arg-type]  # a wrapper hides the signature
        return TorchEngine(model, options, decode=chat.decode)


class EngineActor:
    """Is a `TorchEngine` in a process of its own, which takes messages and hands out what it posts."""

    def __init__(self) -> None:
        self._server: EngineServer | None = None
        self._opened: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # session -> whether it is open
        self._early: dict[int, Sequence[Message]] = {}  # by number, what came before what it follows
        self._next = 0
        self._posted: list[Message] = []
        self._any = asyncio.Event()

    async def process(self) -> ProcessId:
        """Return which process this is."""
        return ProcessId.own()

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, session: str, cache_salt: str | None
    ) -> Completion:
        """Sample for a rollout worker, in a session that the run's process has opened, or is about to.

        Raises EngineError.
        """
        try:
            async with asyncio.timeout(_OPENING):
                await self._opened[session].wait()
        except TimeoutError as error:
            self._opened.pop(session, None)  # several calls may have waited for it
            raise EngineError(f"session {session!r} is not open") from error
        assert self._server is not None
        return await self._server.engine.generate(prompt_ids, sampling, session=session, cache_salt=cache_salt)

    async def take(self, number: int, messages: Sequence[Message]) -> None:
        """Do what messages say, in the order of numbers, which Ray does not promise; the first one loads the engine."""
        self._early[number] = messages
        while (following := self._early.pop(self._next, None)) is not None:
            self._next += 1
            for message in following:
                self._do(message)

    async def posted(self) -> list[Message]:
        """Wait for messages; return those that were posted since the last call."""
        await self._any.wait()
        messages, self._posted = self._posted, []
        self._any.clear()
        return messages

    def _do(self, message: Message) -> None:
        if message["do"] == "load":
            self._post({"call": message["call"], **self._load(message["engine"])})
        elif self._server is not None:
            self._server.take(message)
            if message["do"] == "open":
                self._opened[message["session"]].set()
            elif message["do"] == "close":
                self._opened.pop(message["session"], None)

    def _load(self, engine: ActorEngine) -> Message:
        try:
            made = engine.make()
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller must know
            return error_message(error)
        self._server = EngineServer(made, self._post, _fetch)
        return asdict(made.limits)

    def _post(self, message: Message) -> None:
        self._posted.append(message)
        self._any.set()


async def _fetch(message: Message) -> Mapping[str, Tensor]:
    weights: dict[str, Tensor] = await asyncio.to_thread(message["weights"].fetch)
    return weights


class ActorChannel:
    """Reaches an `EngineActor` (a `Channel`). Made by `start`."""

    def __init__(self, actor: Any, process: ProcessId) -> None:
        self.route, self.process = actor, process
        self.log = f"Ray's logs of process {process.pid} on {process.host}"
        self._messages: list[Message] = []
        self._sent = 0
        self._ending = "it was ended"

    @classmethod
    async def start(cls, options: Mapping[str, Any]) -> ActorChannel:
        """Start an actor at a place. Raises EngineError."""
        for last in (False, True):  # the place may be on a node whose loss Ray has not noticed yet
            actor = (
                ray.remote(EngineActor)
                .options(max_restarts=0, max_task_retries=0, max_concurrency=_SIDE_BY_SIDE, **options)
                .remote()
            )
            try:
                return cls(actor, await actor.process.remote())
            except RayError as error:
                if last or not isinstance(error, ActorDiedError):
                    raise EngineError(f"an engine did not start: {error}") from error
            except asyncio.CancelledError:
                ray.kill(actor)
                raise
        raise AssertionError("unreachable")

    def post(self, message: Message) -> None:
        """Send the message; all of one turn of the event loop go together."""
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(message)

    async def received(self) -> AsyncIterator[Sequence[Message]]:
        """Yield what the actor posts until it has ended."""
        while True:
            try:
                messages: list[Message] = await self.route.posted.remote()
            except RayError as error:
                self._ending = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                return
            yield messages

    def kill(self) -> None:
        ray.kill(self.route, no_restart=True)

    def abort(self) -> None:
        self.kill()

    async def reap(self) -> str:
        self.kill()  # it may only have been out of reach
        return self._ending

    def tail(self) -> str:
        return f"{self.log} have more"

    def note(self, line: str) -> None:
        """Do nothing: an actor's output is its own."""

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        self.route.take.remote(self._sent, messages)
        self._sent += 1


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
    engine = ActorEngine(
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
            pool: EnginePool = ColocatedPool(await _open_all(engine, reservation, spec), spec.source.turns)
    else:
        pool = EnginePool(await _open_all(engine, reservation, spec))
    return pool, PoolSync(spec.source, pool, destination)


async def _open_all(engine: ActorEngine, reservation: Reservation, spec: EngineSpec) -> list[ProcessEngine]:
    starting = [asyncio.create_task(_open(engine, reservation, b, spec)) for b in reservation.of("engine")]
    try:
        return await asyncio.gather(*starting)
    except BaseException:
        for task in starting:
            task.cancel()
        for found in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(found, ProcessEngine):
                await found.close()
        raise


async def _open(engine: ActorEngine, reservation: Reservation, bundle: Bundle, spec: EngineSpec) -> ProcessEngine:
    async def connect() -> Link:
        return Link(await ActorChannel.start(reservation.options(bundle)))

    return await connect_engine(
        connect,
        {"do": "load", "engine": engine},
        lock_step=engine.config.lock_step is not False,
        tolerance=engine.config.tolerance,
        name=str(bundle),
        notify=spec.log,
    )
