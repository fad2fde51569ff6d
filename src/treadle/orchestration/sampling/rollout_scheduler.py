"""From tasks to batches: `TaskQueue` -> `RolloutScheduler` -> `GroupIntake` -> `ReplayBuffer`."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from treadle.core.draws import Stream
from treadle.core.errors import TreadleError
from treadle.core.outcomes import as_played
from treadle.core.status import ComponentStatus
from treadle.core.types import Group, Trajectory
from treadle.orchestration.config import RunConfig
from treadle.orchestration.sampling.concurrency import ConcurrencyController
from treadle.orchestration.sampling.failures import Retries
from treadle.orchestration.sampling.group_intake import Batch, GroupIntake
from treadle.orchestration.sampling.replay_buffer import ReplayBuffer
from treadle.orchestration.sampling.task_queue import TaskQueue
from treadle.orchestration.store.ledger import LoopState
from treadle.rollout.attempt import RolloutRunner
from treadle.rollout.session import Address


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Bounds how much is sampled at a time.

    max_groups_under_way: being sampled, or finished and waiting to be trained. max_groups: being sampled, if there is
    a limit. synchronous: groups start only when none is running, so that what an engine in lock-step samples together
    never depends on timing, and as many attempts are played as there are.
    """

    seed: int
    group_size: int
    max_groups_under_way: int
    max_groups: int | None
    synchronous: bool

    @classmethod
    def of(cls, config: RunConfig) -> SamplingLimits:
        """Return those of a configuration.

        (1 + max_staleness) * groups_per_batch groups are under way: at max_staleness 0 exactly the next batch, all of
        it sampled by the version that will be trained. Synchronous training is a value here, not a code path.
        """
        section = config.orchestration
        return cls(
            seed=config.seed,
            group_size=config.training.group_size,
            max_groups_under_way=(1 + section.max_staleness) * config.groups_per_batch,
            max_groups=section.max_concurrent_groups,
            synchronous=section.max_staleness == 0,
        )


class RolloutScheduler:
    """Keeps as many groups under way as `limits` allow, and as many attempts as fill the engine (`concurrency`)."""

    def __init__(
        self,
        queue: TaskQueue,
        runner: RolloutRunner,
        buffer: ReplayBuffer,
        intake: GroupIntake,
        retries: Retries,
        concurrency: ConcurrencyController,
        limits: SamplingLimits,
    ) -> None:
        self._queue, self._runner, self._buffer, self._intake = queue, runner, buffer, intake
        self._retries, self._concurrency, self._limits = retries, concurrency, limits
        self._version = self._playing = 0
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()  # one a group

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Within, groups can be started; on leaving, those that are being sampled are cancelled.

        Nothing is being recorded any more then: checkpoints and the end of the run find a ledger that stays as it is.
        Raises what playing one of them raised, which also cancels what is inside.
        """
        try:
            async with self._tasks:
                yield
                for task in self._running:
                    task.cancel()
        except BaseExceptionGroup as several:
            if all(isinstance(error, TreadleError) for error in several.exceptions) or len(several.exceptions) == 1:
                raise several.exceptions[0] from None
            raise
        finally:
            await self._intake.settled()

    def status(self) -> list[ComponentStatus]:
        """Return what is being sampled, and how many groups wait to be trained; from any thread."""
        return [
            ComponentStatus("rollout", "groups", running=self._buffer.running, waiting=self._buffer.ready),
            ComponentStatus("rollout", "attempts", running=self._playing),
        ]

    def note(self, state: LoopState) -> LoopState:
        """Return the state with where sampling stands: what was started, what of it was not taken, what has failed."""
        return replace(
            state,
            cursor=self._queue.next_index,
            outstanding=tuple(sorted((*self._buffer.outstanding, *self._queue.requeued))),
            failed_tasks=dict(self._queue.quarantine.failed_groups),
        )

    async def next_batch(self, state: LoopState) -> Batch:
        """Wait for enough groups; for those that are dropped others are started. Raises StopConditionMet."""
        while (batch := self._intake.batch(state)) is None:
            if not self.start_groups(state.version):
                raise self._intake.no_task_left()
            await self._buffer.arrival()
        return batch

    def trained(self) -> None:
        """Note that the last batch is trained and its weights are published, so that others may start."""
        self._buffer.trained()

    def start_groups(self, version: int) -> bool:
        """Start what this policy version admits; return whether any group is being sampled then."""
        self._version = version
        if not (self._limits.synchronous and self._buffer.running):
            while self._has_room() and (group := self._queue.pop()) is not None:
                self._start(group)
        return self._buffer.running > 0

    def _has_room(self) -> bool:
        limits, buffer = self._limits, self._buffer
        few = limits.max_groups is None or buffer.running < limits.max_groups
        attempts = math.inf if limits.synchronous else self._concurrency.limit
        return few and buffer.under_way < limits.max_groups_under_way and self._playing < attempts

    def _start(self, group: Group) -> None:
        """Open the sessions of all missing attempts now and in order."""
        versions = (as_played(t).oldest_version for t in group.trajectories)
        self._buffer.start(group.index, min([self._version, *(v for v in versions if v is not None)]))
        addresses = [
            Address(self._limits.seed, Stream.TRAIN, group.epoch, group.position, attempt)
            for attempt in self._missing(group)
        ]
        attempts = self._play(group, addresses)
        task = self._tasks.create_task(self._finish(group, list(zip(addresses, attempts, strict=True))))
        self._running.add(task)
        task.add_done_callback(partial(self._group_ended, attempts))

    def _missing(self, group: Group) -> list[int]:
        """The next attempt of each place in the group: the first, or the retry of one on record."""
        missing, size = [], self._limits.group_size
        for place in range(size):
            made = [t for t in group.trajectories if t.attempt % size == place]
            if not made:
                missing.append(place)
            elif self._retries.take_retry(made[-1], len(made)) is not None:
                missing.append(made[-1].attempt + size)
        return missing

    def _play(self, group: Group, addresses: list[Address]) -> list[asyncio.Future[Trajectory]]:
        attempts = self._runner.start(group.group_id, group.task, addresses)
        self._playing += len(attempts)
        for attempt in attempts:
            attempt.add_done_callback(self._attempt_ended)
        return attempts

    def _attempt_ended(self, _: asyncio.Future[Trajectory]) -> None:
        self._playing -= 1

    def _group_ended(self, attempts: Sequence[asyncio.Future[Trajectory]], task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        for attempt in attempts:
            attempt.cancel()  # of no effect but where the task was cancelled before it waited for them

    async def _finish(self, group: Group, attempts: list[tuple[Address, asyncio.Future[Trajectory]]]) -> None:
        playing = [asyncio.ensure_future(self._attempt(group, *attempt)) for attempt in attempts]
        try:
            played = await asyncio.gather(*playing)
        except Exception:
            for task in playing:
                task.cancel()
            await asyncio.wait(playing)  # nothing is sampled any more when the run ends
            raise
        trajectories = sorted([*group.trajectories, *itertools.chain(*played)], key=lambda t: t.attempt)
        self._intake.group(replace(group, trajectories=tuple(trajectories)))
        self.start_groups(self._version)

    async def _attempt(self, group: Group, address: Address, running: asyncio.Future[Trajectory]) -> list[Trajectory]:
        """Play one attempt, and retries in its place as far as the policy of its failure goes; return all of them."""
        played: list[Trajectory] = []
        while True:
            trajectory = await running
            pause = self._retries.take_retry(trajectory, address.attempt // self._limits.group_size + 1)
            if pause is None:
                trajectory = self._retries.final(trajectory)
            played.append(trajectory)
            await self._intake.attempt(replace(group, trajectories=(trajectory,)), self._version, pause is not None)
            self._concurrency.observe(trajectory)
            if pause is None:
                self.start_groups(self._version)
                return played
            await asyncio.sleep(pause)
            address = replace(address, attempt=address.attempt + self._limits.group_size)
            [running] = self._play(group, [address])
