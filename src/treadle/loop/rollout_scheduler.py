"""Playing groups: starts and retries. For their further states, see `groups.py`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from treadle.core.draws import Stream
from treadle.core.engine import ComponentStatus
from treadle.core.errors import TreadleError
from treadle.core.outcomes import as_played
from treadle.core.types import Group, Start, Trajectory
from treadle.loop.config import LoopPlan
from treadle.loop.failures import has_not_failed, of_one_version, reward_together
from treadle.loop.forks import first_place, fork_of
from treadle.loop.groups import Batch, Groups
from treadle.loop.stopping import StopConditionMet
from treadle.loop.task_queue import TaskQueue
from treadle.record.ledger_reader import LoopState
from treadle.rollout.attempt import RolloutRunner, user_code
from treadle.rollout.replay import Prefix
from treadle.rollout.rewards import RewardShaper, with_measured
from treadle.rollout.session import Address

_MEMORY = 100  # number of trajectories after which an observation's weight decays to 1/e


@dataclass(slots=True)
class ConcurrencyController:
    """Tracks the share of time that attempts spend in the engine.

    capacity: sequences that the engine decodes together. An attempt has (seconds in the engine) / (its total seconds)
    calls there on average (Little's law), so capacity divided by that number is the number of attempts that fill it.
    Fewer leave it idle; with more, calls wait in its queue while their attempts' first tokens grow old. Waiting counts
    as time in the engine, so that too many attempts become fewer.
    """

    capacity: int
    _in_engine: float = 0.0
    _seconds: float = 0.0

    def observe(self, trajectory: Trajectory) -> None:
        """Learn from a finished attempt, weighted by its duration: longer ones are found running more often."""
        decay = 1 - 1 / _MEMORY
        in_engine = sum(t.engine_seconds for t in (trajectory, *trajectory.copies))
        self._in_engine = decay * self._in_engine + in_engine
        self._seconds = decay * self._seconds + trajectory.seconds

    @property
    def engine_share(self) -> float:
        """Mean number of concurrent calls per attempt in the engine; 1 before any attempt was observed."""
        return self._in_engine / self._seconds if self._in_engine > 0 and self._seconds > 0 else 1.0

    @property
    def limit(self) -> int:
        return math.ceil(self.capacity / self.engine_share)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt of a group being played.

    prefix: its start, if any. branch_of: id of the sibling from which it branches, or was to (`rollout.forks`); "" for
    any other attempt.
    """

    group: Group
    prefix: Prefix | None
    branch_of: str
    address: Address
    running: asyncio.Future[Trajectory]


class RolloutScheduler:
    """Keeps as many groups in progress as staleness allows, and as many attempts as fill the engine (`concurrency`).

    (1 + max_staleness) * groups_per_batch groups are in progress: at max_staleness 0 exactly the next batch, all
    sampled by the version to be trained. Such groups start only when none is being sampled, so that the composition of
    an engine's lock-step waves does not depend on timing.
    """

    def __init__(
        self,
        plan: LoopPlan,
        queue: TaskQueue,
        runner: RolloutRunner,
        groups: Groups,
        concurrency: ConcurrencyController,
        shaper: RewardShaper,
    ) -> None:
        self._plan, self._queue, self._runner, self.groups = plan, queue, runner, groups
        self._failures, self._concurrency, self._shaper = plan.failures, concurrency, shaper
        self._synchronous = plan.max_staleness == 0
        self._group_size = plan.group_size
        self._version = self._playing = 0
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()  # one per group; synchronously, one for all

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Allow groups to start inside the block; on leaving, cancel those being sampled.

        Afterwards nothing is being recorded: checkpoints and the end of the run see an unchanging ledger. Raises errors
        of playing, which also cancel the block.
        """
        try:
            async with self._tasks:
                yield
                for task in self._running:
                    task.cancel()
        except BaseExceptionGroup as several:
            if all(isinstance(error, TreadleError) for error in several.exceptions) or len(several.exceptions) == 1:
                raise several.exceptions[0] from several.exceptions[0].__cause__
            raise
        finally:
            # Even if its awaiters were cancelled.
            await self.groups.store.settled()

    def status(self) -> list[ComponentStatus]:
        """Return the groups being sampled and the number waiting to be trained; thread-safe."""
        return [
            ComponentStatus("rollout", "groups", running=self.groups.sampling, waiting=self.groups.ready),
            ComponentStatus("rollout", "attempts", running=self._playing),
        ]

    def note(self, state: LoopState) -> LoopState:
        """Add the position of sampling to the state: started groups, those not taken, failed tasks."""
        return replace(
            state,
            cursor=self._queue.next_index,
            outstanding=tuple(sorted((*self.groups.outstanding, *self._queue.requeued))),
            failed_tasks=dict(self._queue.failed_tasks),
            starts=self.groups.starts.state((*self.groups.outstanding, *self._queue.requeued)),
        )

    async def next_batch(self, state: LoopState) -> Batch:
        """Wait for enough groups, starting replacements for dropped ones. Raises StopConditionMet."""
        while (batch := self.groups.next_batch(state)) is None:
            if not self.start_groups(state.version):
                raise StopConditionMet(
                    "every task is left out: its last groups had too few graded attempts (failures.task_limit is "
                    f"{self._plan.failures.task_limit}, training.min_group_size {self._plan.min_group_size})"
                )
            await self.groups.arrived.wait()
        return batch

    def start_groups(self, version: int) -> bool:
        """Start the groups that this policy version admits; return whether any group is then being sampled."""
        self._version = version
        if not (self._synchronous and self.groups.sampling):
            groups: list[Group] = []
            together: list[_Attempt] = []
            while self._has_room() and (group := self._queue.pop()) is not None:
                attempts = self._start(group)
                if not self._synchronous:
                    self._create_task(self._play_alone(group, attempts), attempts)
                    continue
                groups.append(group)
                together += attempts
            if groups:
                self._create_task(self._play_together(groups, together), together)
        return self.groups.sampling > 0

    def _has_room(self) -> bool:
        plan, groups = self._plan, self.groups
        few = plan.max_concurrent_groups is None or groups.sampling < plan.max_concurrent_groups
        attempts = math.inf if self._synchronous else self._concurrency.limit
        limit = (1 + plan.max_staleness) * plan.groups_per_batch
        return few and groups.under_way < limit and self._playing < attempts

    def _start(self, group: Group) -> list[_Attempt]:
        """Open the sessions of all missing attempts now and in order."""
        versions = [as_played(t).oldest_version for t in group.everyone]
        if (calls := self.groups.store.calls) is not None:
            versions.append(calls.oldest_version(group))
        self.groups.start(group, min([self._version, *(v for v in versions if v is not None)]))
        # the next attempt of each place: the first, or the retry of a recorded one
        missing, forks, size = [], self._plan.forks, self._group_size
        for place in range(0 if self._is_rewarded(group) else size):
            made = [t for t in group.trajectories if t.attempt % size == place]
            if not made:
                missing.append(place)
            elif self._failures.retry_delay(made[-1], len(made)) is not None:
                missing.append(made[-1].attempt + size)
        waiting = {attempt % size for attempt in missing}
        firsts = [n for n in missing if first_place(forks, n % size) == n % size]
        branches = [n for n in missing if first_place(forks, n % size) not in waiting]
        prefix = self.groups.starts.prefix(group) if missing else None
        return [*self._play(group, firsts, prefix), *self._branch(group, branches)]

    def _branches(self, group: Group, played: Sequence[Trajectory], place: int | None = None) -> list[_Attempt]:
        """Start the branches of attempts that have ended: of the one in a place of the group, or of all."""
        if (forks := self._plan.forks) is None:
            return []
        made = {t.attempt % self._group_size for t in played}
        missing = [n for n in range(self._group_size) if n not in made]
        mine = [n for n in missing if place is None or first_place(forks, n) == place]
        return self._branch(replace(group, trajectories=tuple(played)), mine)

    def _branch(self, group: Group, attempts: Sequence[int]) -> list[_Attempt]:
        """Start attempts that go on from a step of the first one of their tree, which has ended."""
        started, size, forks = list[_Attempt](), self._group_size, self._plan.forks
        for number in attempts:
            assert forks is not None
            *_, first = (t for t in group.trajectories if t.attempt % size == first_place(forks, number % size))
            prefix = None
            if self._plan.may_start(group.task):
                prefix = fork_of(forks, first, self._address(group, first.attempt))
            started += self._play(group, [number], prefix, first.trajectory_id)
        return started

    def _address(self, group: Group, attempt: int) -> Address:
        return Address(self._plan.seed, Stream.TRAIN, group.epoch, group.position, attempt)

    def _play(
        self, group: Group, attempts: Sequence[int], prefix: Prefix | None, branch_of: str = ""
    ) -> list[_Attempt]:
        addresses = [self._address(group, attempt) for attempt in attempts]
        prefixes = {} if prefix is None else dict.fromkeys(attempts, prefix)
        futures = self._runner.start(
            group.group_id, group.task, addresses, log=self.groups.store.calls, prefixes=prefixes
        )
        self._playing += len(futures)
        for future in futures:
            future.add_done_callback(self._attempt_ended)
        return [_Attempt(group, prefix, branch_of, *attempt) for attempt in zip(addresses, futures, strict=True)]

    def _attempt_ended(self, _: asyncio.Future[Trajectory]) -> None:
        self._playing -= 1

    def _create_task(self, playing: Coroutine[Any, Any, None], attempts: list[_Attempt]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._running.discard(task)
            for attempt in attempts:
                # Only matters if the task was cancelled before it awaited them.
                attempt.running.cancel()

        task = self._tasks.create_task(playing)
        self._running.add(task)
        task.add_done_callback(ended)

    async def _play_together(self, groups: list[Group], attempts: list[_Attempt]) -> None:
        """Play all groups of a batch: all attempts end before failed ones are retried, and then before others branch
        from them; all groups are then rewarded and finished in order, so that nothing depends on which ends first.
        """
        played = {group.index: list(group.trajectories) for group in groups}
        while attempts:
            try:
                ended = await _together(self._ended(attempt) for attempt in attempts)
            finally:
                for attempt in attempts:
                    attempt.running.cancel()
            judged = await _together(self._judged(*one) for one in zip(attempts, ended, strict=True))
            for attempt, (trajectory, _) in zip(attempts, judged, strict=True):
                played[attempt.group.index].append(trajectory)
            failed = [(a, pause) for a, (_, pause) in zip(attempts, judged, strict=True) if pause is not None]
            if failed:
                await asyncio.sleep(max(pause for _, pause in failed))
            attempts = [self._retry(attempt) for attempt, _ in failed]
            if not attempts:
                attempts = [each for group in groups for each in self._branches(group, played[group.index])]
        for group in await _together(self._rewarded(group, played[group.index]) for group in groups):
            self.groups.finish(group)
        self.start_groups(self._version)

    async def _play_alone(self, group: Group, attempts: list[_Attempt]) -> None:
        """Play one group; each attempt is retried as soon as it has failed, and makes room for others once it ends: for
        its branches first.
        """

        async def play(attempt: _Attempt) -> list[Trajectory]:
            played = []
            while True:
                trajectory, pause = await self._judged(attempt, await self._ended(attempt))
                played.append(trajectory)
                if pause is None:
                    self.start_groups(self._version)
                    return played
                await asyncio.sleep(pause)
                attempt = self._retry(attempt)

        async def play_tree(attempt: _Attempt) -> list[Trajectory]:
            own = await play(attempt)
            place = attempt.address.attempt % self._group_size
            branches = self._branches(group, [*group.trajectories, *own], place)
            attempts.extend(branches)  # so that they are cancelled with the others
            return [*own, *(t for branch in await _together(map(play, branches)) for t in branch)]

        played = [t for tree in await _together(map(play_tree, list(attempts))) for t in tree]
        self.groups.finish(await self._rewarded(group, [*group.trajectories, *played]))
        self.start_groups(self._version)

    def _retry(self, failed: _Attempt) -> _Attempt:
        """Start the next attempt in a failed one's place."""
        number = failed.address.attempt + self._group_size
        [attempt] = self._play(failed.group, [number], failed.prefix, failed.branch_of)
        return attempt

    def _is_rewarded(self, restored: Group) -> bool:
        """Return whether a recorded group has the rewards of `rewards.group`: its attempts are recorded with them."""
        return self._shaper.group is not None and any(map(has_not_failed, restored.trajectories))

    async def _rewarded(self, group: Group, played: list[Trajectory]) -> Group:
        """Apply `rewards.group` to the finished attempts, then shape and record them."""

        async def reward(graded: Sequence[Trajectory]) -> list[Trajectory]:
            made = await self._shaper.reward_group(group.task, group.group_id, graded)
            return await _together(self._shaped(group, trajectory) for trajectory in made)

        graded = (
            [] if self._shaper.group is None or self._is_rewarded(group) else [t for t in played if has_not_failed(t)]
        )
        rewarded = {t.attempt: t for t in await reward_together(graded, reward, self._failures)}
        if rewarded:
            part = replace(group, trajectories=tuple(rewarded.values()))
            await self.groups.record(part, self._version, retried=False)
        whole = sorted((rewarded.get(t.attempt, t) for t in played), key=lambda t: t.attempt)
        return replace(group, trajectories=tuple(whole))

    async def _shaped(self, group: Group, trajectory: Trajectory) -> Trajectory:
        user = user_code(group.task, trajectory.trajectory_id)
        return with_measured(await self._shaper.shape(group.task.copy(), trajectory, user), user)

    async def _ended(self, attempt: _Attempt) -> Trajectory:
        """Wait for an attempt; whether a failed one is retried is decided later, as are group rewards."""
        trajectory = await attempt.running
        if attempt.branch_of and trajectory.start is None:
            trajectory = replace(trajectory, start=Start(attempt.branch_of, 0))
        if self._plan.pinned is not None:
            trajectory = of_one_version(trajectory)
        self._concurrency.observe(trajectory)
        if trajectory.failure is None and self._shaper.group is None:
            await self._record(attempt, trajectory, retried=False)
        return trajectory

    async def _judged(self, attempt: _Attempt, trajectory: Trajectory) -> tuple[Trajectory, float | None]:
        """Record a failed attempt. Return it as recorded, and the seconds before its retry; None without one."""
        if trajectory.failure is None:
            return trajectory, None
        pause = self._failures.retry_delay(trajectory, attempt.address.attempt // self._group_size + 1)
        trajectory = self._failures.final(trajectory) if pause is None else trajectory
        await self._record(attempt, trajectory, pause is not None)
        return trajectory, pause

    async def _record(self, attempt: _Attempt, trajectory: Trajectory, retried: bool) -> None:
        await self.groups.record(replace(attempt.group, trajectories=(trajectory,)), self._version, retried)


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results, in order; if one raises, cancel the others and wait for them."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except Exception:
        for task in tasks:
            task.cancel()
        # Nothing may be sampling when the run ends.
        await asyncio.wait(tasks)
        raise
