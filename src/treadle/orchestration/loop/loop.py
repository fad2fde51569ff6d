"""The loop, and who moves a group from one state to the next (`sampling.groups`):

    TaskQueue -> RolloutScheduler -> Groups.finish --> Groups.next_batch -> Trainer.train_batch -> WeightSync.publish
    (queued)     (sampling)          (recorded, ready) (training)                                  (trained)
                     ^                    |  dropped                                                  |
                     +--------------------+------------- start_groups(version + 1) -------------------+

After each publication, in this order: metrics, evaluation if due, checkpoint if due, then the next groups are started.
At the end the checkpoint comes first: an evaluation that is cut short is made when the run is resumed.
At `max_staleness` 0 nothing else is under way meanwhile: evaluations and checkpoints cannot change what is sampled. At
any other, groups go on beside all of it.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.core.errors import TrainingStopped
from treadle.core.outcomes import leave_out
from treadle.core.trainer import Trainer, WeightSync
from treadle.core.types import DropReason
from treadle.orchestration.config import RunConfig
from treadle.orchestration.loop.checkpointing import Checkpointer
from treadle.orchestration.loop.evaluation import Evaluator
from treadle.orchestration.loop.schedule import checkpoint_is_due, is_last
from treadle.orchestration.reporting.reporter import Reporter
from treadle.orchestration.sampling.groups import Batch
from treadle.orchestration.sampling.rollout_scheduler import RolloutScheduler
from treadle.orchestration.sampling.stop_conditions import StopConditionMet, check_failure_rate, check_refusal_rate
from treadle.orchestration.stop_request import StopRequest
from treadle.orchestration.store.ledger_reader import LoopState


class Loop:
    """Trains until `orchestration.updates`, a stop request or a stop condition.

    Invariant: `state` describes exactly the trainer's weights whenever a checkpoint is written.
    """

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        weight_sync: WeightSync,
        scheduler: RolloutScheduler,
        evaluator: Evaluator,
        checkpointer: Checkpointer,
        reporter: Reporter,
        stop: StopRequest,
    ) -> None:
        self.config, self.trainer, self.weight_sync, self.scheduler = config, trainer, weight_sync, scheduler
        self.evaluator, self.checkpointer, self.reporter, self.stop = evaluator, checkpointer, reporter, stop
        self.state = LoopState()

    async def run(self, state: LoopState) -> LoopState:
        """Run from this state to the end, and return the last one.

        Raises TrainingStopped (after a checkpoint where a stop condition was met), RunError or CheckpointError.
        """
        self.state = state
        try:
            await self._run()
        except StopConditionMet as condition:
            await self._save()
            raise TrainingStopped(
                f"{condition}. A checkpoint of update {self.state.update} is saved: fix the cause, then --resume"
            ) from None
        return self.state

    @property
    def finished(self) -> bool:
        """All updates are made, and the last weights are evaluated."""
        return is_last(self.config, self.state) and not self.evaluator.pending(self.state)

    async def _run(self) -> None:
        await self.weight_sync.publish(self.state.version)
        self.reporter.callbacks.publish(self.state.version)
        await self._evaluate()
        if not self.checkpointer.has_any:
            await self._save()
        async with self.scheduler.sampling():
            await self._train()
        await self._save()
        if is_last(self.config, self.state) and not self.finished:
            await self._evaluate()
            await self._save()

    async def _train(self) -> None:
        while not is_last(self.config, self.state) and not self.stop.requested:
            batch = await self._next_batch()
            if batch is None:
                return
            await self._train_batch(batch)
            if is_last(self.config, self.state):
                return
            if self.config.orchestration.max_staleness:
                self.scheduler.start_groups(self.state.version)  # what follows is no reason to wait
            await self._evaluate()
            if checkpoint_is_due(self.config, self.state):
                await self._save()

    async def _next_batch(self) -> Batch | None:
        """Wait for the next batch; None if a stop is requested first: what has finished until then is on record.

        At max_staleness 0 it would be sampled again, so that a stop waits for the batch.
        """
        self.scheduler.start_groups(self.state.version)
        with self.reporter.timed("rollout", self.state.update + 1):
            self.reporter.begin("rollout", self.config.groups_per_batch * self.config.training.group_size)
            batch = self.scheduler.next_batch(self.state)
            return await (self.stop.unless_requested(batch) if self.config.orchestration.max_staleness else batch)

    async def _train_batch(self, batch: Batch) -> None:
        groups, before = batch.groups, self.state
        self.reporter.batch(groups, first=before.update == 0)
        check_failure_rate(batch.window, self.config, before.update + 1)
        self.reporter.callbacks.batch(groups, before.version)
        with self.reporter.timed("update", before.update + 1):
            self.reporter.begin("update", 1)
            results = await self.trainer.train_batch(groups)
        with self.reporter.timed("publish", before.update + 1):
            await self.weight_sync.publish(before.version + 1)
        self.scheduler.trained()
        refused = {t: why for result in results for t, why in result.refused.items()}
        groups = [leave_out(group, DropReason.REFUSED, refused) for group in groups]
        await self.checkpointer.note_trained(groups, results, before.version)
        self.reporter.refusals(refused)
        self.reporter.updates(groups, results, before)
        self.state = self.scheduler.note(
            replace(before, update=before.update + len(results), version=before.version + 1)
        )
        self.reporter.callbacks.publish(self.state.version)
        check_refusal_rate(refused, self.config, self.state.update)

    async def _evaluate(self) -> None:
        self.state = await self.evaluator.evaluate(self.state, self.stop)

    async def _save(self) -> None:
        self.state = await self.checkpointer.save(self.state, self.finished)
