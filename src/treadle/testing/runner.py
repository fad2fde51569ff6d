"""`FakeRunner`: plays attempts that only take their time, for tests and simulations of the loop. Needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.core.errors import Cause
from treadle.core.types import Failure, SamplingParams, Status, Step, StopReason, Task, Trajectory, trajectory_id
from treadle.rollout.session import Address
from treadle.testing.engine import FakeEngine


@dataclass(frozen=True, slots=True)
class FakeAttempt:
    """Scripts one attempt: `FakeAttempt((1.0, 2.5), reward=1.0)` has two steps, which take 1 s and 2.5 s.

    reward: None if the engine fails it in the end.
    """

    seconds: Sequence[float]
    reward: float | None = 1.0


class FakeRunner:
    """Plays each attempt as `script(trajectory_id, task, address)` says, on the event loop's clock.

    A step has two tokens, of the engine's versions when it began and when it ended. places: steps that the engine
    samples at a time; others wait, which counts as part of their seconds. playing: attempts that are under way.
    """

    def __init__(
        self, engine: FakeEngine, script: Callable[[str, Task, Address], FakeAttempt], places: int = 2**31
    ) -> None:
        self.sampling, self.playing = SamplingParams(), 0
        self._engine, self._script = engine, script
        self._places = asyncio.Semaphore(places)
        self._sampling_now, self._sampled, self._since = 0, 0.0, 0.0

    def start(
        self, group_id: str, task: Task, addresses: list[Address], sampling: SamplingParams | None = None
    ) -> list[asyncio.Future[Trajectory]]:
        """Start one attempt per address."""
        return [asyncio.ensure_future(self._play(trajectory_id(group_id, a.attempt), task, a)) for a in addresses]

    def step_seconds(self) -> float:
        """Return the seconds for which steps have been sampled so far, summed over steps."""
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
