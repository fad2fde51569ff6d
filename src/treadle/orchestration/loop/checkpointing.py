"""Making a run's progress durable: the trainer's weights, then one ledger transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.core.outcomes import dropped_steps
from treadle.core.trainer import Trainer, UpdateResult
from treadle.core.types import Group
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.reporter import Reporter
from treadle.orchestration.store.checkpoint_retention import checkpoint_name, checkpoint_updates, retained
from treadle.orchestration.store.ledger import TrainedBatch
from treadle.orchestration.store.ledger_reader import LoopState
from treadle.orchestration.store.run_store import RunStore
from treadle.training.checkpoint import remove_others


class Checkpointer:
    """Saves the trainer, makes that the run's latest checkpoint, then removes older ones.

    Invariant: a checkpoint's ledger state describes exactly the weights in its directory.
    """

    def __init__(self, config: RunConfig, trainer: Trainer, store: RunStore, reporter: Reporter) -> None:
        self._config, self._trainer, self._store, self._reporter = config, trainer, store, reporter
        latest = store.ledger.latest_checkpoint()
        self._saved = None if latest is None else latest[1].update  # of the newest checkpoint on disk
        self._batches: list[TrainedBatch] = []  # since that one

    @property
    def has_any(self) -> bool:
        """Whether the run has a checkpoint."""
        return self._saved is not None

    async def note_trained(self, groups: Sequence[Group], results: Sequence[UpdateResult], version: int) -> None:
        """Note a trained batch for the next checkpoint's transaction. version: of the policy before it was trained.

        What was trained, with which advantages, and why trajectories could not be, goes into the ledger at once, traces
        into a file.
        """
        names = [group.group_id for group in groups]
        advantages = {t: a for result in results for t, a in result.advantage.items()}
        self._store.ledger.note_trained(version, names, advantages)
        if refused := {t: why for result in results for t, why in result.refused.items()}:
            self._store.ledger.note_refused(refused)
        traces = await self._store.write_traces(version, [trace for result in results for trace in result.traces])
        self._batches.append(TrainedBatch(tuple(dropped_steps(groups)), traces))

    async def save(self, state: LoopState, finished: bool) -> LoopState:
        """Save a checkpoint; return the state with the seconds so far. finished: nothing will be trained any more.

        Raises CheckpointError.
        """
        wall, cpu = self._reporter.clock.read()
        state = replace(state, wall_seconds=wall, cpu_seconds=cpu)
        name, folder = checkpoint_name(state.update), self._store.run.checkpoints
        new = self._saved != state.update
        with self._reporter.timed("checkpoint", state.update):
            manifest = await self._trainer.save(folder / name) if new else None
            self._store.ledger.commit_checkpoint(name, state, self._batches, finished, manifest)
            self._store.ledger.copy_out()  # before older checkpoints are removed
        self._batches.clear()
        self._saved = state.update
        remove_others(folder, retained(checkpoint_updates(folder), self._config, state.evaluations))
        if new:
            self._reporter.callbacks.checkpoint(folder / name, state.update)
        return state
