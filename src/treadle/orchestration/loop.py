"""The loop.

    TaskCursor -> Producer -> GroupBuffer -> Learner.train_batch -> engine.publish(version + 1)
                     ^                                                        |
                     +------------------ admit(version) ----------------------+

After each publication, in this order: metrics, evaluation if due, checkpoint if due, then the next batch is admitted.
Evaluations and checkpoints therefore never share the engine with training, and cannot change it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from treadle.core.engine import Engine
from treadle.core.errors import TrainingStopped, TreadleError
from treadle.core.types import Group, Task
from treadle.orchestration.config import RunConfig
from treadle.orchestration.evaluation import play_held_out
from treadle.orchestration.ledger import Ledger, LoopState
from treadle.orchestration.metrics import EvaluationResult, evaluation_result, trajectory_metrics
from treadle.orchestration.producer import GroupBuffer, Producer, TaskCursor
from treadle.orchestration.progress import Progress
from treadle.orchestration.rollout_store import write_shard
from treadle.orchestration.run_directory import RunDirectory
from treadle.orchestration.stopping import StopRequest
from treadle.rollout.attempt import Rollouts
from treadle.training.checkpoint import remove_others, save_checkpoint
from treadle.training.learner import Learner, UpdateResult


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

    Invariant: `state` describes exactly the learner's weights whenever a checkpoint is written.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        run: RunDirectory,
        ledger: Ledger,
        learner: Learner,
        engine: Engine,
        rollouts: Rollouts,
        train: Sequence[Task],
        held_out: Sequence[Task],
        tokenizer: Path,
        state: LoopState,
        clock: Clock,
        progress: Progress,
        stop: StopRequest,
    ) -> None:
        self.config, self.run_directory, self.ledger, self.learner = config, run, ledger, learner
        self.engine, self.rollouts, self.held_out, self.tokenizer = engine, rollouts, held_out, tokenizer
        self.state, self.clock, self.progress, self.stop = state, clock, progress, stop
        self._cursor = TaskCursor(train, config.seed, config.data.shuffle)
        self._saved = state.update if ledger.latest_checkpoint() else None  # update of the newest checkpoint on disk
        self._told: set[str] = set()
        self._finished_trajectories = 0

    async def run(self) -> LoopState:
        """Run to the end; returns the final state. Raises TrainingStopped, RunError or CheckpointError."""
        await self.engine.publish(self.learner.weights(), self.state.version)
        if self._saved is None:
            await self._evaluate(final=True)
            self._checkpoint()
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._train(GroupBuffer(self.state.cursor, self._persist), tasks)
        except BaseExceptionGroup as several:
            if all(isinstance(error, TreadleError) for error in several.exceptions) or len(several.exceptions) == 1:
                raise several.exceptions[0] from None
            raise
        if self._is_last and self._saved != self.state.update:  # a last checkpoint contains the last evaluation
            await self._evaluate(final=True)
        self._checkpoint()
        return self.state

    async def _train(self, buffer: GroupBuffer, tasks: asyncio.TaskGroup) -> None:
        producer = self._producer(buffer, tasks)
        while not self._is_last and not self.stop.asked:
            producer.admit(self.state.version)
            await self._train_batch(buffer)
            if self._is_last:
                return
            if self._due(self.config.evaluation.every):
                await self._evaluate(final=False)
            if self._due(self.config.orchestration.checkpoint_every):
                self._checkpoint()

    # --- one batch -----------------------------------------------------------------------------------------------

    async def _train_batch(self, buffer: GroupBuffer) -> None:
        seconds: dict[str, float] = {}
        with _timed(seconds, "rollout"):
            self._phase("rollout", self.config.groups_per_batch * self.config.training.group_size)
            groups = await buffer.take(self.config.groups_per_batch)
        self._tell_failures(groups)
        self._tell_ignored_rewards(groups)
        self._give_up_if_failing(groups)
        with _timed(seconds, "update"):
            self._phase("update", 1)
            results = self.learner.train_batch(groups)  # on this thread: every environment waits for the next version
        with _timed(seconds, "publish"):
            await self.engine.publish(self.learner.weights(), self.state.version + 1)
        self.ledger.note_advantages({t: a for result in results for t, a in result.advantage.items()})
        refused = {t: why for result in results for t, why in result.refused.items()}
        self._refuse(refused)
        self._log(groups, results, seconds)
        self.state = replace(
            self.state,
            update=self.state.update + len(results),
            version=self.state.version + 1,
            cursor=self.state.cursor + len(groups),
        )
        self._give_up_if_refusing(refused, groups)

    def _log(self, groups: list[Group], results: list[UpdateResult], seconds: dict[str, float]) -> None:
        """One line of metrics.jsonl per optimizer update, each about its own groups."""
        size = self.config.training.tasks_per_update
        wall, cpu = self.clock.read()
        for number, result in enumerate(results):
            first = number * size % len(groups)  # each epoch goes through them again
            row = {
                "kind": "update",
                "update": self.state.update + number + 1,
                "version": self.state.version,
                **trajectory_metrics(groups[first : first + size], self.config.evaluation.success_at),
                "refused": len(result.refused),
                **result.metrics,
                **{f"seconds_{phase}": value / len(results) for phase, value in seconds.items()},
                "wall_seconds": wall,
                "cpu_seconds": cpu,
            }
            self.run_directory.log(row)
            self.progress.updated(row, self.config.orchestration.updates)

    def _tell_failures(self, groups: list[Group]) -> None:
        """Each new failure or warning once, the first twenty of a run."""
        for trajectory in (t for group in groups for t in group.trajectories):
            text = trajectory.failure.message if trajectory.failure else trajectory.warning
            self._tell(text, f"task {trajectory.task_id}, trajectory {trajectory.trajectory_id}: {text}")

    def _tell_ignored_rewards(self, groups: list[Group]) -> None:
        """Once, if the environment rewards steps and the advantage takes a trajectory's sum alone."""
        early = any(step.reward for group in groups for t in group.trajectories for step in t.steps[:-1])
        if early and not self.learner.advantage.by_step:
            text = (
                f"the environment rewards single steps, of which algorithm.advantage {self.config.algorithm.advantage} "
                "uses the sum alone; step_return, gigpo and reinforce++ use when each reward came"
            )
            self._tell(text, text)

    def _tell(self, text: str, line: str) -> None:
        if text and text not in self._told and len(self._told) < 20:
            self._told.add(text)
            self.progress.say(line)

    def _refuse(self, refused: dict[str, str]) -> None:
        if refused:
            self.ledger.note_refused(refused)
            for why in refused.values():
                self._tell(why, f"not trained: {why}")

    def _give_up_if_failing(self, groups: list[Group]) -> None:
        everyone = [t for group in groups for t in group.trajectories]
        failures = [t.failure for t in everyone if t.failure is not None]
        if failures:
            (cause, message), count = Counter((f.cause, f.message) for f in failures).most_common(1)[0]
            why = f"most often ({count}x) {cause}: {message}"
            self._give_up_beyond(len(failures), len(everyone), f"of update {self.state.update + 1} failed", why)

    def _give_up_if_refusing(self, refused: dict[str, str], groups: list[Group]) -> None:
        if refused:
            everyone = sum(len(group.trajectories) for group in groups)
            what, why = f"of update {self.state.update} could not be trained", f"for example {min(refused.values())}"
            self._give_up_beyond(len(refused), everyone, what, why)

    def _give_up_beyond(self, count: int, everyone: int, what: str, why: str) -> None:
        most = self.config.orchestration.max_failed_fraction
        if count > most * everyone:
            self._checkpoint()
            raise TrainingStopped(
                f"{count} of {everyone} trajectories {what} (orchestration.max_failed_fraction is {most}); {why}. "
                f"A checkpoint of update {self.state.update} is saved: fix the cause, then --resume"
            )

    # --- evaluation and checkpoints ------------------------------------------------------------------------------

    async def _evaluate(self, final: bool) -> None:
        """`final`: the evaluations before and after training, which may include a greedy one."""
        if not self.held_out:
            return
        section = self.config.evaluation
        temperatures = [section.temperature] + (
            [0.0] if final and section.greedy_too and section.temperature > 0 else []
        )
        for temperature in temperatures:
            name = f"e{self.state.update:06d}" + ("g" if temperature == 0 else "")
            again = len(
                self.ledger.query(
                    "SELECT 1 FROM groups WHERE group_id = ? OR group_id GLOB ?", f"{name}-0000", f"{name}r*-0000"
                )
            )
            if again:
                name += f"r{again}"
            self._phase("evaluation", len(self.held_out))
            groups = await play_held_out(
                self.rollouts,
                self.held_out,
                name=name,
                seed=self.config.seed,
                epoch=self.state.update,
                temperature=temperature,
                concurrency=section.concurrency,
                on_trajectory=self._trajectory_finished,
            )
            shard = write_shard(self.run_directory.rollouts, f"evaluation-{name}", groups)
            self.ledger.record(groups, "held_out", self.state.version, shard)
            result = evaluation_result(
                groups, self.state.update, temperature, section.success_at, self.config.data.table_by
            )
            self._note(result)

    def _note(self, result: EvaluationResult) -> None:
        row = asdict(result)
        self.run_directory.log({"kind": "evaluation", **row})
        self.state = replace(self.state, evaluations=(*self.state.evaluations, row))
        self.progress.evaluated(result)

    def _checkpoint(self) -> None:
        """Write the learner, then make it the latest in one ledger transaction, then remove older ones."""
        wall, cpu = self.clock.read()
        self.state = replace(self.state, wall_seconds=wall, cpu_seconds=cpu)
        name = f"step-{self.state.update:06d}"
        if self._saved != self.state.update:
            save_checkpoint(self.run_directory.checkpoints / name, self.learner, self.tokenizer)
        self.ledger.commit_checkpoint(name, self.state)
        self._saved = self.state.update
        newest = sorted(d.name for d in self.run_directory.checkpoints.iterdir() if d.name.startswith("step-"))
        remove_others(self.run_directory.checkpoints, newest[-self.config.orchestration.keep_last :])

    @property
    def _is_last(self) -> bool:
        return self.state.update >= self.config.orchestration.updates

    def _due(self, every: int) -> bool:
        """Whether the last batch reached a multiple of `every` updates."""
        return every > 0 and self.state.update % every < self.config.training.updates_between_publications

    # --- small things --------------------------------------------------------------------------------------------

    def _producer(self, buffer: GroupBuffer, tasks: asyncio.TaskGroup) -> Producer:
        return Producer(
            self._cursor,
            self.rollouts,
            buffer,
            tasks,
            seed=self.config.seed,
            group_size=self.config.training.group_size,
            groups_per_batch=self.config.groups_per_batch,
            max_staleness=self.config.orchestration.max_staleness,
            started=self.state.cursor,
            times_sampled=self.ledger.times_sampled(),
            on_trajectory=self._trajectory_finished,
        )

    def _persist(self, groups: list[Group]) -> None:
        """Token arrays first, then one ledger transaction."""
        first = groups[0]
        shard = write_shard(self.run_directory.rollouts, f"train-{first.group_id}", groups)
        self.ledger.record(groups, "train", self.state.version, shard)

    def _phase(self, name: str, total: int) -> None:
        self._finished_trajectories = 0
        self.progress.phase(name, total)

    def _trajectory_finished(self) -> None:
        self._finished_trajectories += 1
        self.progress.advance(self._finished_trajectories)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
