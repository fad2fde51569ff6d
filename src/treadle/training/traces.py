"""Which groups are traced, and what an update computed of each of their sampled tokens.

Shapes: N completion tokens, S steps and G groups of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.core.draws import Stream, task_uniforms
from treadle.core.trainer import StepTrace
from treadle.core.types import Group
from treadle.packing.flat import FlatBatch
from treadle.training.objective import TokenTrace


@dataclass(frozen=True, slots=True)
class TracedGroups:
    """Draws a share of all groups, each by the run's seed, its epoch and its task: sampled again, it is drawn again."""

    seed: int = 0
    share: float = 0.0

    def among(self, groups: Sequence[Group]) -> NDArray[np.bool_]:
        """Return bool[G], which of the groups are traced."""
        if not self.share:
            return np.zeros(len(groups), np.bool_)
        draws = task_uniforms(self.seed, Stream.TRACE, [g.epoch for g in groups], [g.position for g in groups])
        return draws < self.share

    def traces(self, batch: FlatBatch, trace: Callable[[], TokenTrace], update: int) -> tuple[StepTrace, ...]:
        """Return the traces of the trained steps of traced groups, in order.

        trace: returns what the update of this number computed of all N; called only if there is such a step.
        """
        group_of_step = batch.group_of_trajectory[batch.trajectory_of_step]
        chosen = np.flatnonzero(self.among(batch.groups)[group_of_step])
        if not len(chosen):
            return ()
        values, number = trace(), batch.step_number
        logp, entropy, advantage, ratio = (None if x is None else x.float().cpu().numpy() for x in values[:4])
        clipped = None if values.clipped is None else values.clipped.cpu().numpy()
        assert logp is not None and entropy is not None and advantage is not None

        def made(step: int) -> StepTrace:
            tokens = slice(batch.step_start[step], batch.step_start[step + 1])
            return StepTrace(
                update=update,
                group_id=batch.groups[group_of_step[step]].group_id,
                trajectory_id=batch.trajectories[batch.trajectory_of_step[step]].trajectory_id,
                step=number[step],
                logprobs=logp[tokens].copy(),
                entropy=entropy[tokens].copy(),
                advantage=advantage[tokens].copy(),
                ratio=None if ratio is None else ratio[tokens].copy(),
                clipped=None if clipped is None else clipped[tokens].copy(),
            )

        return tuple(made(int(step)) for step in chosen)
