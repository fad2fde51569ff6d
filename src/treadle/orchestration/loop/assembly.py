"""Putting a loop together from a configuration and what it works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle.core.trainer import Trainer, WeightSync
from treadle.core.types import Group
from treadle.orchestration.config import RunConfig
from treadle.orchestration.loop.checkpointing import Checkpointer
from treadle.orchestration.loop.evaluation import Evaluator
from treadle.orchestration.loop.loop import Loop
from treadle.orchestration.reporting.callbacks import Callbacks
from treadle.orchestration.reporting.reporter import Clock, Reporter
from treadle.orchestration.sampling.concurrency import ConcurrencyController
from treadle.orchestration.sampling.groups import Groups
from treadle.orchestration.sampling.rollout_scheduler import RolloutScheduler
from treadle.orchestration.sampling.task_queue import Backlog, TaskOrder, TaskQueue
from treadle.orchestration.setup.inputs import Inputs
from treadle.orchestration.store.ledger_reader import LoopState
from treadle.orchestration.store.run_store import RunStore
from treadle.rollout.attempt import RolloutRunner


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where a run starts or resumes. restored: group index -> group with attempts that are not sampled again."""

    state: LoopState = field(default_factory=LoopState)
    restored: Mapping[int, Group] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)


def make_loop(
    config: RunConfig,
    inputs: Inputs,
    trainer: Trainer,
    weight_sync: WeightSync,
    runner: RolloutRunner,
    store: RunStore,
    callbacks: Callbacks,
    start: StartingPoint,
) -> Loop:
    """Return the loop that trains on the inputs' tasks; `loop.run(start.state)` runs it.

    weight_sync: makes the engines that `runner` plays with serve the trainer's weights.
    """
    reporter, state = Reporter(config, callbacks, start.clock), start.state
    times_sampled = store.ledger.times_sampled()
    backlog = Backlog(state.cursor, state.outstanding, start.restored, times_sampled, state.failed_tasks)
    order = TaskOrder(inputs.train, config.seed, config.data.shuffle)
    queue = TaskQueue(order, config.failures.task_limit, backlog)
    groups = Groups(config, queue, store, reporter)
    scheduler = RolloutScheduler(config, queue, runner, groups, ConcurrencyController(config.engine_capacity))
    evaluator = Evaluator(config, runner, inputs.held_out, store, reporter)
    checkpointer = Checkpointer(config, trainer, store, reporter)
    return Loop(config, trainer, weight_sync, scheduler, evaluator, checkpointer, reporter, callbacks.stop)
