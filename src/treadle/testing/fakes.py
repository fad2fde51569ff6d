"""Fakes of Treadle's protocols: an engine, a runner of attempts and a trainer. They need no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from treadle.core.engine import Completion, ComponentStatus, VersionSpan
from treadle.core.errors import Cause, EngineError
from treadle.core.files import Manifest
from treadle.core.images import PromptImage
from treadle.core.metrics import Measures
from treadle.core.trainer import Conversation, ModelInfo, UpdateResult, WeightsDestination
from treadle.core.types import (
    Failure,
    Floats,
    Group,
    Ids,
    Routing,
    SamplingParams,
    Status,
    Step,
    StopReason,
    Task,
    Trajectory,
    trajectory_id,
)
from treadle.rollout.attempt import NO_PREFIXES, CallLog
from treadle.rollout.replay import Prefix
from treadle.rollout.session import Address


class FakeEngine:
    """Answers each call with `reply(prompt_ids, sampling)`, cut to `max_tokens`, every token at logprob `logprob`.

    A completion counts as stopped unless it was cut. `reply` may raise to simulate a failing engine. For deterministic
    sampling (temperature 0, top_k 1) tokens have logprob 0.
    delay: called once per call, returns its duration in seconds; tokens arrive evenly over that time, each with the
    latest published version. A cancelled call ends immediately. `calls` records every prompt, `seen` its images,
    `running` counts calls in flight, `aborted` cancelled ones.
    """

    def __init__(
        self,
        reply: Callable[[Ids, SamplingParams], Sequence[int]],
        *,
        logprob: float = -0.5,
        delay: Callable[[], float] | None = None,
    ) -> None:
        self.reply, self.logprob, self.delay = reply, logprob, delay
        self.version = 0
        self.calls: list[Ids] = []
        self.seen: list[tuple[PromptImage, ...]] = []
        self.open: list[str] = []
        self.running = self.aborted = 0

    def open_session(self, session: str) -> None:
        if session in self.open:
            raise EngineError(f"session {session!r} is open already")
        self.open.append(session)

    def close_session(self, session: str) -> None:
        if session in self.open:
            self.open.remove(session)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        if session not in self.open:
            raise EngineError(f"session {session!r} is not open")
        self.calls.append(np.asarray(prompt_ids))
        self.seen.append(tuple(images))
        wanted = list(self.reply(prompt_ids, sampling))
        ids = wanted[: sampling.max_tokens]
        certain = sampling.temperature == 0 or sampling.top_k == 1
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), 0.0 if certain else self.logprob, np.float32),
            stop_reason=StopReason.STOP if ids == wanted else StopReason.LENGTH,
            policy_versions=tuple(VersionSpan(v, n, n + 1) for n, v in enumerate(await self._versions(len(ids)))),
        )

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        return np.full(len(ids) - 1, self.logprob, np.float32)

    async def publish(self, version: int) -> None:
        """Report this version for later tokens: an engine without weights is its own `WeightSync`."""
        self.version = version

    def status(self) -> list[ComponentStatus]:
        return [ComponentStatus("engine", "fake", running=self.running, sessions=len(self.open), version=self.version)]

    async def close(self) -> None:
        """No-op: there is nothing to release."""

    async def _versions(self, tokens: int) -> list[int]:
        if self.delay is None:
            return [self.version] * tokens
        pause = self.delay() / max(tokens, 1)
        versions = []
        self.running += 1
        try:
            for _ in range(tokens):
                await asyncio.sleep(pause)
                versions.append(self.version)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        return versions


@dataclass(frozen=True, slots=True)
class FakeAttempt:
    """`FakeAttempt((1.0, 2.5), reward=1.0)` has two steps, of 1 s and 2.5 s. reward: None if it fails."""

    seconds: Sequence[float]
    reward: float | None = 1.0


class FakeRunner:
    """Plays each attempt according to `script(trajectory_id, task, address)`, on the event loop's clock.

    A step has two tokens, of the engine's versions at its beginning and end. places: number of steps sampled
    concurrently; others wait, which counts as part of their seconds. playing: attempts in progress.
    """

    def __init__(
        self, engine: FakeEngine, script: Callable[[str, Task, Address], FakeAttempt], places: int = 2**31
    ) -> None:
        self.sampling, self.playing = SamplingParams(), 0
        self._engine, self._script = engine, script
        self._places = asyncio.Semaphore(places)
        self._sampling_now, self._sampled, self._since = 0, 0.0, 0.0

    def start(
        self,
        group_id: str,
        task: Task,
        addresses: list[Address],
        sampling: SamplingParams | None = None,
        log: CallLog | None = None,
        prefixes: Mapping[int, Prefix] = NO_PREFIXES,
    ) -> list[asyncio.Future[Trajectory]]:
        return [asyncio.ensure_future(self._play(trajectory_id(group_id, a.attempt), task, a)) for a in addresses]

    def step_seconds(self) -> float:
        now = asyncio.get_running_loop().time()
        self._sampled += self._sampling_now * (now - self._since)
        self._since = now
        return self._sampled

    async def _play(self, name: str, task: Task, address: Address) -> Trajectory:
        script = self._script(name, task, address)
        self.playing += 1
        try:
            steps = tuple([await self._step(seconds) for seconds in script.seconds])
        finally:
            self.playing -= 1
        return Trajectory(
            trajectory_id=name,
            task_id=task.task_id,
            attempt=address.attempt,
            steps=steps,
            reward=script.reward,
            status=Status.FAILED if script.reward is None else Status.DONE,
            failure=Failure(Cause.ENGINE, "gone") if script.reward is None else None,
            seconds=sum(step.seconds for step in steps),
        )

    async def _step(self, seconds: float) -> Step:
        clock = asyncio.get_running_loop()
        asked = clock.time()
        async with self._places:
            self.step_seconds()
            self._sampling_now += 1
            first = self._engine.version
            try:
                await asyncio.sleep(seconds)
            finally:
                self.step_seconds()
                self._sampling_now -= 1
        versions = np.array([first, self._engine.version], np.int32)
        taken = clock.time() - asked
        return Step(_PROMPT, _COMPLETION, _LOGPROBS, versions, _SAMPLING, StopReason.STOP, seconds=taken)


_PROMPT, _COMPLETION = np.array([0], np.int32), np.array([1, 2], np.int32)
_LOGPROBS, _SAMPLING = np.full(2, -0.5, np.float32), SamplingParams(max_tokens=2)

R = TypeVar("R")


class FakeTrainer:
    """Makes one update per batch, which takes `seconds` and changes nothing; there are no weights to publish or save.

    on_batch: called with the groups of each batch, before the update takes its time. logprob: logprob of every token.
    """

    checkpoint_bytes = 0
    model = ModelInfo(vocabulary=2**31 - 1, context=2**31 - 1, parameters=0, shapes=MappingProxyType({}))

    def __init__(
        self,
        seconds: float = 0.0,
        on_batch: Callable[[Sequence[Group]], object] = lambda groups: None,
        *,
        logprob: float = -0.5,
    ) -> None:
        self._seconds, self._on_batch, self._logprob = seconds, on_batch, logprob

    async def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        self._on_batch(groups)
        await asyncio.sleep(self._seconds)
        return [UpdateResult(Measures(), {})]

    async def supervised_step(self, conversations: Sequence[Conversation], step: int) -> float:
        return 0.0

    async def stage(self, destination: WeightsDestination[R]) -> R:
        return destination.write({}, ())

    async def score(self, ids: Ids, images: Sequence[PromptImage] = ()) -> Floats:
        return np.full(len(ids) - 1, self._logprob, np.float32)

    async def experts(self, ids: Ids) -> Routing:
        return np.empty((len(ids), 0, 0), np.int16)

    async def export(self, directory: Path, more: Mapping[str, bytes] | None = None) -> None:
        """Write nothing."""

    async def digest(self) -> str:
        return ""

    async def save(self, directory: Path) -> str:
        return ""

    async def load(self, saved: Manifest) -> None:
        """Read nothing."""

    def status(self) -> list[ComponentStatus]:
        return []

    def close(self) -> None:
        """No-op: there is nothing to release."""
