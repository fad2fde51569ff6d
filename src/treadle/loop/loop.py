"""The loop, which moves groups from one state to the next (`groups.py`):

    TaskQueue -> RolloutScheduler -> Groups.finish --> Groups.next_batch -> Trainer.train_batch -> WeightSync.publish
    (queued)     (sampling)          (recorded, ready) (training)                                  (trained)
                     ^                    |  dropped                                                  |
                     +--------------------+------------- start_groups(version + 1) -------------------+

After each publication, in this order: metrics, evaluation if due, checkpoint if due, then the next groups start. At the
end the checkpoint comes first: an interrupted evaluation is made when the run is resumed. At `max_staleness` 0 nothing
else runs meanwhile, so that evaluations and checkpoints cannot change samples. At any other value, groups continue
beside all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from treadle.core.outcomes import dropped_steps, leave_out
from treadle.core.stop import stopped
from treadle.core.trainer import Trainer, UpdateResult, WeightSync
from treadle.core.types import DropReason, Group
from treadle.loop.config import LoopPlan
from treadle.loop.evaluation import Evaluator
from treadle.loop.groups import Batch, Groups
from treadle.loop.rollout_scheduler import ConcurrencyController, RolloutScheduler
from treadle.loop.starts import Demonstrated, Starts
from treadle.loop.stopping import StopConditionMet, check_failure_rate, check_refusal_rate
from treadle.loop.task_queue import Backlog, TaskOrder, TaskQueue
from treadle.record.checkpoint_retention import best_update, checkpoint_name, checkpoint_updates, retained
from treadle.record.ledger import AttemptKey, TrainedBatch
from treadle.record.ledger_reader import LoopState
from treadle.record.run_store import RunStore
from treadle.rendering.grammars import Grammars, with_supports
from treadle.report.callbacks import Callbacks
from treadle.report.reporter import Clock, Reporter
from treadle.rollout.attempt import RolloutRunner
from treadle.rollout.replay import AnsweredCall
from treadle.rollout.rewards import RewardShaper
from treadle.training.checkpoint import remove_others


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a run starts or resumes. restored: group index -> group with attempts that are not sampled again. calls:
    recorded calls of unfinished attempts, which continue with them.
    """

    state: LoopState = field(default_factory=LoopState)
    restored: Mapping[int, Group] = field(default_factory=dict)
    calls: Mapping[AttemptKey, Sequence[AnsweredCall]] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)


class Loop:
    """Trains until `orchestration.updates`, a stop request or a stop condition.

    Invariant: `state` describes exactly the trainer's weights whenever a checkpoint is written.

    weight_sync: publishes the trainer's weights to the engines used by `runner`. shaper: shaper of rewards. grammars:
    over the policy's tokenizer, if samples may follow one. demonstrated: demonstrations for `rollout.starts`.
    """

    def __init__(
        self,
        plan: LoopPlan,
        trainer: Trainer,
        weight_sync: WeightSync,
        runner: RolloutRunner,
        shaper: RewardShaper,
        store: RunStore,
        callbacks: Callbacks,
        start: StartingPoint,
        grammars: Grammars | None = None,
        demonstrated: Demonstrated | None = None,
    ) -> None:
        self.grammars = grammars
        self.plan, self.trainer, self.weight_sync = plan, trainer, weight_sync
        self.stop, self.state, state = callbacks.stop, start.state, start.state
        self.reporter = Reporter(plan.grading, callbacks, start.clock)
        times_sampled = store.ledger.times_sampled()
        backlog = Backlog(state.cursor, state.outstanding, start.restored, times_sampled, state.failed_tasks)
        starts = Starts(plan, store.steps, demonstrated, state.starts, callbacks.message)
        order = TaskOrder(plan.train, plan.seed, plan.shuffle, starts.draw)
        queue = TaskQueue(order, plan.failures.task_limit, backlog)
        groups = Groups(plan, queue, store, self.reporter, starts)
        concurrency = ConcurrencyController(plan.engine_capacity)
        self.scheduler = RolloutScheduler(plan, queue, runner, groups, concurrency, shaper)
        self.evaluator = Evaluator(plan, runner, store, self.reporter, shaper)
        self.checkpointer = Checkpointer(plan, trainer, store, self.reporter)

    async def run(self) -> LoopState:
        """Run from the starting point to the end, and return the last state.

        Raises TrainingStopped (after a checkpoint if a stop condition was met), RunError or CheckpointError.
        """
        try:
            await self.weight_sync.publish(self.state.version)
            self.reporter.callbacks.publish(self.state.version)
            await self._evaluate()
            if self.checkpointer.saved is None:
                await self._save()
            async with self.scheduler.sampling():
                await self._train()
            await self._save()
            if self.is_last and not self.finished:
                await self._evaluate()
                await self._save()
        except StopConditionMet as condition:
            await self._save()
            raise stopped(condition, self.state.update) from None
        return self.state

    @property
    def is_last(self) -> bool:
        return self.plan.is_last(self.state.update)

    @property
    def finished(self) -> bool:
        """Return whether all updates are made, and the last weights are evaluated."""
        return self.is_last and not self.evaluator.pending(self.state)

    async def _train(self) -> None:
        while not self.is_last and not self.stop.requested:
            batch = await self._next_batch()
            if batch is None:
                return
            await self._train_batch(batch)
            if self.is_last:
                return
            if self.plan.max_staleness:
                # Sampling need not wait for the steps below.
                self.scheduler.start_groups(self.state.version)
            await self._evaluate()
            if self.checkpointer.is_due(self.state):
                await self._save()

    async def _next_batch(self) -> Batch | None:
        """Return the next batch, or None if a stop is requested first.

        Synchronous runs finish the batch first, because it would have to be sampled again.
        """
        self.scheduler.start_groups(self.state.version)
        with self.reporter.timed("rollout", self.state.update + 1):
            self.reporter.begin("rollout", self.plan.groups_per_batch * self.plan.group_size)
            batch = self.scheduler.next_batch(self.state)
            return await (self.stop.unless_requested(batch) if self.plan.max_staleness else batch)

    async def _train_batch(self, batch: Batch) -> None:
        groups, before = batch.groups, self.state
        self.reporter.batch(groups, first=before.update == 0)
        check_failure_rate(batch.window, self.plan, before.update + 1)
        self.reporter.callbacks.batch(groups, before.version)
        with self.reporter.timed("update", before.update + 1):
            self.reporter.begin("update", 1)
            results = await self.trainer.train_batch(await self._with_supports(groups))
        with self.reporter.timed("publish", before.update + 1):
            await self.weight_sync.publish(before.version + 1)
        self.scheduler.groups.trained()
        refused = {t: why for result in results for t, why in result.refused.items()}
        groups = [leave_out(group, DropReason.REFUSED, refused) for group in groups]
        await self.checkpointer.note_trained(groups, results, before.version)
        self.reporter.refusals(refused)
        self.reporter.updates(groups, results, before)
        self.state = self.scheduler.note(
            replace(before, update=before.update + len(results), version=before.version + 1)
        )
        self.reporter.callbacks.publish(self.state.version)
        check_refusal_rate(refused, self.plan, self.state.update)

    async def _with_supports(self, groups: Sequence[Group]) -> Sequence[Group]:
        steps = (step for group in groups for trajectory in group.everyone for step in trajectory.steps)
        if self.grammars is None or not any(step.sampling.constrains for step in steps):
            return groups
        # In a thread, so that environments keep stepping.
        return await asyncio.to_thread(with_supports, groups, self.grammars)

    async def _evaluate(self) -> None:
        self.state = await self.evaluator.evaluate(self.state, self.stop)

    async def _save(self) -> None:
        self.state = await self.checkpointer.save(self.state, self.finished)


class Checkpointer:
    """Saves the trainer, makes that the run's latest checkpoint in one ledger transaction, then removes older ones.

    Invariant: a checkpoint's ledger state describes exactly the weights in its directory.
    saved: update of the newest checkpoint on disk.
    """

    def __init__(self, plan: LoopPlan, trainer: Trainer, store: RunStore, reporter: Reporter) -> None:
        self._plan, self._trainer, self._store, self._reporter = plan, trainer, store, reporter
        latest = store.ledger.latest_checkpoint()
        self.saved = None if latest is None else latest[1].update
        self._batches: list[TrainedBatch] = []  # batches since that checkpoint

    def is_due(self, state: LoopState) -> bool:
        """Return whether to save: by `checkpoint_every` and `keep_every`, and after the best evaluation."""
        kept, is_due = self._plan.retention, partial(self._plan.is_due, state.update)
        if is_due(self._plan.checkpoint_every) or is_due(kept.every):
            return True
        best = kept.best and best_update(state.evaluations, kept.best, kept.temperature)
        return best == state.update

    async def note_trained(self, groups: Sequence[Group], results: Sequence[UpdateResult], version: int) -> None:
        """Note a trained batch for the next checkpoint's transaction. version: policy version before it was trained.

        Trained steps, their advantages, and reasons for refused trajectories are written to the ledger immediately,
        traces to a file.
        """
        advantages = {t: a for result in results for t, a in result.advantage.items()}
        self._store.ledger.note_trained(version, [group.group_id for group in groups], advantages)
        if refused := {t: why for result in results for t, why in result.refused.items()}:
            self._store.ledger.note_refused(refused)
        traces = await self._store.write_traces(version, [trace for result in results for trace in result.traces])
        self._batches.append(TrainedBatch(tuple(dropped_steps(groups)), traces))

    async def save(self, state: LoopState, finished: bool) -> LoopState:
        """Save a checkpoint; return the state with the elapsed seconds. finished: whether training is complete.

        Raises CheckpointError.
        """
        wall, cpu = self._reporter.clock.read()
        state = replace(state, wall_seconds=wall, cpu_seconds=cpu)
        name, folder = checkpoint_name(state.update), self._store.run.checkpoints
        new = self.saved != state.update
        with self._reporter.timed("checkpoint", state.update):
            manifest = await self._trainer.save(folder / name) if new else None
            self._store.ledger.commit_checkpoint(name, state, self._batches, finished, manifest)
            # Before older checkpoints are removed.
            self._store.ledger.copy_out()
        self._batches.clear()
        self.saved = state.update
        remove_others(folder, retained(checkpoint_updates(folder), self._plan.retention, state.evaluations))
        if new:
            self._reporter.callbacks.checkpoint(folder / name, state.update)
        return state
