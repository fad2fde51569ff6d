"""Playing held-out tasks, in a run or by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from treadle.core.draws import Stream
from treadle.core.types import Group, Task
from treadle.orchestration.config import EvaluationConfig
from treadle.rollout.attempt import RolloutRunner, gather_group
from treadle.rollout.session import Address


async def play_held_out(
    rollouts: RolloutRunner,
    tasks: Sequence[Task],
    *,
    name: str,
    seed: int,
    epoch: int,
    temperature: float,
    config: EvaluationConfig,
    side_by_side: int,
    on_trajectory: Callable[[], None],
) -> list[Group]:
    """Play `config.attempts` at each task, `side_by_side` together in fixed cohorts, so that batches repeat.

    name: prefix of group ids. epoch keys the draws together with the seed: it is the update evaluated at.
    """
    groups: list[Group] = []
    attempts, sampling = config.attempts_at(temperature), config.sampling(rollouts.sampling, temperature)
    cohort = max(1, side_by_side // attempts)
    for start in range(0, len(tasks), cohort):
        running = []
        for position, task in enumerate(tasks[start : start + cohort], start):
            group = f"{name}-{position:04d}"
            addresses = [Address(seed, Stream.EVALUATE, epoch, position, attempt) for attempt in range(attempts)]
            started = rollouts.start(group, task, addresses, sampling)
            for attempt in started:
                attempt.add_done_callback(lambda _: on_trajectory())
            running.append(gather_group(group, position, epoch, position, task, started))
        groups += await asyncio.gather(*running)
    return groups
