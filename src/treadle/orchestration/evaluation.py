"""Playing held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from treadle.core.draws import Stream
from treadle.core.types import Group, Task
from treadle.rollout.attempt import Player, gather_group
from treadle.rollout.session import Address


async def play_held_out(
    rollouts: Player,
    tasks: Sequence[Task],
    *,
    name: str,
    seed: int,
    epoch: int,
    temperature: float,
    concurrency: int,
    on_trajectory: Callable[[], None],
) -> list[Group]:
    """One attempt at each task, `concurrency` at a time in fixed cohorts (so that batch shapes are reproducible).

    name: prefix of group ids. epoch keys the draws together with the seed: it is the update evaluated at.
    """
    groups: list[Group] = []
    for start in range(0, len(tasks), concurrency):
        running = []
        for position, task in enumerate(tasks[start : start + concurrency], start):
            group = f"{name}-{position:04d}"
            [attempt] = rollouts.start(group, task, [Address(seed, Stream.EVALUATE, epoch, position, 0)], temperature)
            attempt.add_done_callback(lambda _: on_trajectory())
            running.append(gather_group(group, position, epoch, position, task, [attempt]))
        groups += await asyncio.gather(*running)
    return groups
