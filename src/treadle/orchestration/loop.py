"""The loop.

    TaskCursor -> Producer -> GroupBuffer -> Trainer.train_batch -> WeightSync.publish(version + 1)
                     ^                                                           |
                     +------------------- admit(version) ------------------------+

After each publication, in this order: metrics, evaluation if due, checkpoint if due, then the next batch is admitted.
At the end the checkpoint comes first: an evaluation that is cut short is made when the run is resumed.
At `max_staleness` 0 nothing else is under way meanwhile: evaluations and checkpoints cannot change what is sampled. At
any other, groups go on beside all of it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from treadle.algorithms import estimators
from treadle.algorithms.dynamic_sampling import learns_nothing
from treadle.core.errors import TrainingStopped, TreadleError
from treadle.core.outcomes import dropped_steps, leave_out, reject_reason
from treadle.core.trainer import Trainer, UpdateResult, WeightSync
from treadle.core.types import DropReason, Group, Task, Trajectory
from treadle.orchestration.buffer import GroupBuffer
from treadle.orchestration.callbacks import Callback
from treadle.orchestration.concurrency import Concurrency
from treadle.orchestration.config import RunConfig
from treadle.orchestration.evaluation import play_held_out
from treadle.orchestration.failures import Retries, fails_by_task
from treadle.orchestration.giving_up import Since, too_many_discarded, too_many_failed, too_many_refused
from treadle.orchestration.ledger import Ledger, LoopState, TrainedBatch
from treadle.orchestration.metrics import EvaluationResult, evaluation_result, run_metrics, trajectory_metrics
from treadle.orchestration.producer import Producer, TaskCursor
from treadle.orchestration.progress import Progress
from treadle.orchestration.recorder import Recorder
from treadle.orchestration.retention import best_update, checkpoint_name, checkpoint_updates, retained
from treadle.orchestration.rewards import reward_notes
from treadle.orchestration.rollout_store import write_shard
from treadle.orchestration.run_directory import RunDirectory
from treadle.orchestration.stopping import StopRequest
from treadle.rollout.attempt import RolloutRunner
from treadle.rollout.threads import abandoned_threads
from treadle.training.checkpoint import remove_others

T = TypeVar("T")


@dataclass(slots=True)
class Clock:
    """Wall and CPU seconds of a run, over all its processes."""

    wall_before: float = 0.0
    cpu_before: float = 0.0
    _wall: float = field(default_factory=time.perf_counter)
    _cpu: float = field(default_factory=time.process_time)

    def read(self) -> tuple[float, float]:
        """(wall, cpu) seconds so far."""
        return (
            self.wall_before + time.perf_counter() - self._wall,
            self.cpu_before + time.process_time() - self._cpu,
        )


class Loop:
    """Trains until `orchestration.updates`, a stop request, or a reason to give up.

    trainer: its learned weights; weight_sync: makes the engines that `rollouts` plays with serve them.
    record: makes a group's newly finished trajectories durable; default: in the run directory and its ledger.
    kept: groups on record of an earlier process that are gone on with, by index.

    Invariant: `state` describes exactly the trainer's weights whenever a checkpoint is written.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        run: RunDirectory,
        ledger: Ledger,
        trainer: Trainer,
        weight_sync: WeightSync,
        rollouts: RolloutRunner,
        train: Sequence[Task],
        held_out: Sequence[Task],
        state: LoopState,
        clock: Clock,
        progress: Progress,
        stop: StopRequest,
        callbacks: Callback,
        kept: Mapping[int, Group] = MappingProxyType({}),
        record: Callable[[Group], Awaitable[None]] | None = None,
    ) -> None:
        self.config, self.run_directory, self.ledger, self.trainer = config, run, ledger, trainer
        self.weight_sync, self.rollouts, self.held_out = weight_sync, rollouts, held_out
        self.state, self.clock, self.progress, self.stop = state, clock, progress, stop
        self.callbacks = callbacks
        self._cursor = TaskCursor(train, config.seed, config.data.shuffle)
        self._saved = state.update if ledger.latest_checkpoint() else None  # update of the newest checkpoint on disk
        self._told: set[str] = set()
        self._name, self._total, self._finished_trajectories = "", 0, 0  # of the phase that is shown
        self._recorder = Recorder(run.rollouts, ledger, lambda: self.state.version, callbacks.rollout)
        self._record = record or self._recorder
        self._buffer = GroupBuffer(
            max_staleness=config.orchestration.max_staleness,
            late=config.orchestration.late,
            judge=self._judge,
            discard=self._discard,
        )
        self._since = Since()
        self._concurrency = Concurrency(config.engine.capacity)
        self._kept = kept
        self._estimator = estimators.by_name(config.algorithm.advantage)
        least, baseline = config.training.min_group_size, self._estimator.by_group
        self._least = least or (min(2, config.training.group_size) if baseline else 1)
        self._batches: list[TrainedBatch] = []  # since the newest checkpoint
        self._failed_tasks: dict[str, int] = dict(state.failed_tasks)

    async def run(self) -> LoopState:
        """Run to the end; returns the final state. Raises TrainingStopped, RunError or CheckpointError."""
        try:
            return await self._run()
        finally:
            await self._recorder.settled()

    async def _run(self) -> LoopState:
        await self.weight_sync.publish(self.state.version)
        self.callbacks.publish(self.state.version)
        await self._evaluate()
        if self._saved is None:
            await self._checkpoint()
        try:
            async with asyncio.TaskGroup() as tasks:
                producer = self._producer(tasks)
                await self._train(producer)
                producer.stop()
        except BaseExceptionGroup as several:
            if all(isinstance(error, TreadleError) for error in several.exceptions) or len(several.exceptions) == 1:
                raise several.exceptions[0] from None
            raise
        await self._recorder.settled()  # nothing is recorded after the last checkpoint
        await self._checkpoint()
        if self._is_last and self._owed:
            await self._evaluate()
            await self._checkpoint()
        return self.state

    async def _train(self, producer: Producer) -> None:
        while not self._is_last and not self.stop.asked:
            producer.admit(self.state.version)
            if not await self._train_batch(producer):
                return
            if self._is_last:
                return
            if self.config.orchestration.max_staleness:
                producer.admit(self.state.version)  # what follows is no reason to wait
            await self._evaluate()
            if self._checkpoint_due:
                await self._checkpoint()

    # --- one batch -----------------------------------------------------------------------------------------------

    async def _train_batch(self, producer: Producer) -> bool:
        """Whether there was a batch."""
        seconds: dict[str, float] = {}
        with _timed(seconds, "rollout"):
            self._phase("rollout", self.config.groups_per_batch * self.config.training.group_size)
            taken = await self._unless_stopped(self._next_batch(producer))
        if taken is None:
            return False
        groups = self._note_taken(taken)
        await self._give_up_if(too_many_failed(self._since, self.config, self.state.update + 1))
        self._since = Since()
        self.callbacks.batch(groups, self.state.version)
        with _timed(seconds, "update"):
            self._phase("update", 1)
            results = await self.trainer.train_batch(groups)
        with _timed(seconds, "publish"):
            await self.weight_sync.publish(self.state.version + 1)
        self._buffer.trained()
        self.ledger.note_advantages({t: a for result in results for t, a in result.advantage.items()})
        refused = {t: why for result in results for t, why in result.refused.items()}
        self._refuse(refused)
        groups = [leave_out(group, DropReason.REFUSED, refused) for group in groups]
        self._log(groups, results, seconds)
        self._batches.append(
            TrainedBatch(self.state.version, tuple(group.group_id for group in groups), tuple(dropped_steps(groups)))
        )
        self.state = replace(
            self.state,
            update=self.state.update + len(results),
            version=self.state.version + 1,
            cursor=producer.next_index,
            outstanding=tuple(sorted((*self._buffer.outstanding, *producer.again))),
            failed_tasks=dict(self._failed_tasks),
        )
        self.callbacks.publish(self.state.version)
        everyone = sum(len(group.trajectories) for group in groups)
        await self._give_up_if(too_many_refused(refused, everyone, self.config, self.state.update))
        return True

    async def _next_batch(self, producer: Producer) -> list[Group]:
        """Wait for enough groups; for those that were discarded others are started."""
        while (batch := self._buffer.batch(self.config.groups_per_batch, self.state.version)) is None:
            since, waited_for = self._since, self.state.update + 1
            await self._give_up_if(too_many_failed(since, self.config, waited_for))
            await self._give_up_if(too_many_discarded(since, self.config, waited_for))
            producer.admit(self.state.version)
            if not self._buffer.running:
                await self._give_up(
                    "every task is left out: its last groups had too few graded attempts (failures.task_limit is "
                    f"{self.config.failures.task_limit}, training.min_group_size {self._least})"
                )
            await self._buffer.arrival()
        return batch

    def _note_taken(self, groups: list[Group]) -> list[Group]:
        """Return the batch as it is trained: without what dynamic sampling leaves out."""
        self._tell_failures(groups)
        for text in reward_notes(groups, self.config, self._estimator, first=self.state.update == 0):
            self._tell(text, text)
        if self.config.algorithm.dynamic_sampling != "replace":
            return groups
        return [
            leave_out(group, DropReason.FILTERED) if learns_nothing(group, self.config.algorithm) else group
            for group in groups
        ]

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result, or None if a stop is asked for first: what has finished until then is on record and reused.

        At max_staleness 0 it would be sampled again, so that it is worth waiting for.
        """
        return await (work if self.config.orchestration.max_staleness == 0 else self.stop.unless_asked(work))

    # --- what becomes of groups ----------------------------------------------------------------------------------

    def _judge(self, group: Group) -> DropReason | None:
        """Why a finished group cannot be trained, or None."""
        self._since.groups += 1
        reason = reject_reason(group, self._least)
        if reason is DropReason.FAILED:
            if fails_by_task(group, self.config.training.group_size, self._least):
                self._note_failed(group.task)
            self._tell_failures([group])
            return reason
        self._failed_tasks.pop(group.task.task_id, None)
        filtering = reason is None and self.config.algorithm.dynamic_sampling == "filter"
        return DropReason.FILTERED if filtering and learns_nothing(group, self.config.algorithm) else reason

    def _note_failed(self, task: Task) -> None:
        failed = self._failed_tasks[task.task_id] = self._failed_tasks.get(task.task_id, 0) + 1
        if failed == self.config.failures.task_limit:
            what = f"its last {failed} groups had fewer than {self._least} graded attempts"
            self.progress.say(f"task {task.task_id} is left out: {what}")

    def _discard(self, group: Group, reason: DropReason) -> None:
        self._since.discarded[reason] += 1
        self.ledger.note_dropped(leave_out(group, reason))

    def _log(self, groups: list[Group], results: list[UpdateResult], seconds: dict[str, float]) -> None:
        """One line of metrics.jsonl per optimizer update, each about its own groups."""
        size, section = self.config.training.tasks_per_update, self.config.evaluation
        phases = {phase: value / len(results) for phase, value in seconds.items()}
        each = run_metrics(phases, *self.clock.read(), len(abandoned_threads()))
        for number, result in enumerate(results):
            first = number * size % len(groups)  # each epoch goes through them again
            own = groups[first : first + size]
            played = trajectory_metrics(own, section.success_at, self.state.version, section.success_of)
            row = {
                "kind": "update",
                "update": self.state.update + number + 1,
                "version": self.state.version,
                **(played + result.metrics + each),
            }
            self.callbacks.update(row)
            self.progress.updated(row, self.config.orchestration.updates)

    def _tell_failures(self, groups: list[Group]) -> None:
        """Each new failure or warning once, the first twenty of a run."""
        for trajectory in (t for group in groups for t in group.trajectories):
            text = trajectory.failure.message if trajectory.failure else trajectory.warning
            self._tell(text, f"task {trajectory.task_id}, trajectory {trajectory.trajectory_id}: {text}")

    def _tell(self, text: str, line: str) -> None:
        if text and text not in self._told and len(self._told) < 20:
            self._told.add(text)
            self.progress.say(line)

    def _refuse(self, refused: dict[str, str]) -> None:
        if refused:
            self.ledger.note_refused(refused)
            for why in refused.values():
                self._tell(why, f"not trained: {why}")

    async def _give_up_if(self, why: str | None) -> None:
        if why is not None:
            await self._give_up(why)

    async def _give_up(self, why: str) -> NoReturn:
        await self._checkpoint()
        raise TrainingStopped(
            f"{why}. A checkpoint of update {self.state.update} is saved: fix the cause, then --resume"
        )

    # --- evaluation and checkpoints ------------------------------------------------------------------------------

    @property
    def _owed(self) -> list[float]:
        """Temperatures at which the present weights are to be evaluated and have not been yet."""
        section, ends = self.config.evaluation, self.state.update == 0 or self._is_last
        if not self.held_out or not (ends or self._due(section.every)):
            return []
        greedy = [0.0] if ends and section.greedy_too and section.temperature > 0 else []
        made = [row["temperature"] for row in self.state.evaluations if row["update"] == self.state.update]
        return [temperature for temperature in (section.temperature, *greedy) if temperature not in made]

    async def _evaluate(self) -> None:
        """Make the evaluations that are owed; where a stop is asked for, the run owes them when it is resumed."""
        section = self.config.evaluation
        for temperature in self._owed:
            name = f"e{self.state.update:06d}" + ("g" if temperature == 0 else "")
            again = len(
                self.ledger.query(
                    "SELECT 1 FROM groups WHERE group_id = ? OR group_id GLOB ?", f"{name}-0000", f"{name}r*-0000"
                )
            )
            if again:
                name += f"r{again}"
            self._phase("evaluation", len(self.held_out) * section.attempts_at(temperature))
            playing = play_held_out(
                self.rollouts,
                self.held_out,
                name=name,
                seed=self.config.seed,
                epoch=self.state.update,
                temperature=temperature,
                config=section,
                on_trajectory=self._advance,
            )
            groups = await self.stop.unless_asked(playing)
            if groups is None:
                return
            shard = write_shard(self.run_directory.rollouts, f"evaluation-{name}", groups)
            self.ledger.record(groups, "held_out", self.state.version, shard)
            result = evaluation_result(
                groups,
                self.state.update,
                temperature,
                section.success_at,
                self.config.data.table_by,
                section.success_of,
            )
            self._note(result)

    def _note(self, result: EvaluationResult) -> None:
        row = asdict(result)
        self.callbacks.evaluate(result)
        self.state = replace(self.state, evaluations=(*self.state.evaluations, row))
        self.progress.evaluated(result)

    async def _checkpoint(self) -> None:
        """Write the trainer, then make it the latest in one ledger transaction, then remove older ones."""
        wall, cpu = self.clock.read()
        self.state = replace(self.state, wall_seconds=wall, cpu_seconds=cpu)
        name, folder = checkpoint_name(self.state.update), self.run_directory.checkpoints
        new = self._saved != self.state.update
        manifest = await self.trainer.save(folder / name) if new else None
        self.ledger.commit_checkpoint(name, self.state, self._batches, self.finished, manifest)
        self._batches.clear()
        self._saved = self.state.update
        remove_others(folder, retained(checkpoint_updates(folder), self.config, self.state.evaluations))
        if new:
            self.callbacks.checkpoint(folder / name, self.state.update)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do: all updates are made, and the last weights are evaluated."""
        return self._is_last and not self._owed

    @property
    def _is_last(self) -> bool:
        return self.state.update >= self.config.orchestration.updates

    @property
    def _checkpoint_due(self) -> bool:
        """At multiples of `checkpoint_every` and `keep_every`, and after an evaluation that is the best so far."""
        section, temperature = self.config.orchestration, self.config.evaluation.temperature
        if self._due(section.checkpoint_every) or self._due(section.keep_every or 0):
            return True
        best = section.keep_best and best_update(self.state.evaluations, section.keep_best, temperature)
        return best == self.state.update

    def _due(self, every: int) -> bool:
        """Whether the last batch reached a multiple of `every` updates."""
        return every > 0 and self.state.update % every < self.config.training.updates_between_publications

    # --- small things --------------------------------------------------------------------------------------------

    def _producer(self, tasks: asyncio.TaskGroup) -> Producer:
        section = self.config.orchestration
        synchronous = section.max_staleness == 0
        return Producer(
            self._cursor,
            self.rollouts,
            self._buffer,
            tasks,
            seed=self.config.seed,
            group_size=self.config.training.group_size,
            capacity=(1 + section.max_staleness) * self.config.groups_per_batch,
            in_rounds=synchronous,
            most=section.max_concurrent_groups,
            most_attempts=lambda: math.inf if synchronous else self._concurrency.attempts,
            next_index=self.state.cursor,
            again=self.state.outstanding,
            kept=self._kept,
            times_sampled=self.ledger.times_sampled(),
            retries=Retries(self.config.failures),
            record=self._record,
            left_out=lambda task: self._failed_tasks.get(task.task_id, 0) >= self.config.failures.task_limit,
            on_trajectory=self._trajectory_finished,
        )

    def _trajectory_finished(self, trajectory: Trajectory, again: bool) -> None:
        """again: another attempt takes its place, and counts instead."""
        self._concurrency.note(trajectory)
        if again:
            return
        self._since.trajectories += 1
        if trajectory.failure is not None:
            self._since.failures[trajectory.failure.cause, trajectory.failure.message] += 1
        if self._name == "rollout":  # others finish beside updates and evaluations
            self._advance()

    def _phase(self, name: str, total: int) -> None:
        self._name, self._total, self._finished_trajectories = name, total, 0
        self.progress.phase(name, total)

    def _advance(self) -> None:
        self._finished_trajectories = min(self._finished_trajectories + 1, self._total)
        self.progress.advance(self._finished_trajectories)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
