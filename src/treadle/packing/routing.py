"""Which experts are replayed at which token of a step, from what was recorded.

Shapes: P prompt and C completion tokens of a step, M layers with experts, k experts a token, D distinct choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.core.types import Ids, Routing, Step, common_prefix


def distinct(steps: Sequence[Step]) -> tuple[Routing | None, list[Ids]]:
    """Return the distinct choices of all that were recorded, int16[D, M, k], and each step's as indices int32[R].

    R: recorded tokens of the step. (None, empty indices) if no step has any.
    """
    recorded = [step.routing for step in steps if step.routing is not None and len(step.routing)]
    if not recorded:
        return None, [np.empty(0, np.int32) for _ in steps]
    rows = np.concatenate(recorded)
    opaque = rows.reshape(len(rows), -1).view(np.dtype((np.void, rows[0].nbytes)))[:, 0]
    _, first, number = np.unique(opaque, return_index=True, return_inverse=True)
    ends = np.cumsum([0 if step.routing is None else len(step.routing) for step in steps])
    return rows[first], np.split(number.astype(np.int32), ends[:-1])


def replayed(steps: Sequence[Step], recorded: Sequence[Ids]) -> list[Ids]:
    """Return where the recorded choices of one trajectory's steps are replayed: int32[P + C] a step, -1 where none is.

    recorded: each step's choices as `distinct` returns them, for the tokens that it predicted from: its prompt's last
    one and all sampled ones but the last. The tokens that its prompt shares with an earlier step were in the engine's
    cache, with the choices made then. So those are inherited, from the step that shares most and, of these, the latest;
    unless the weights changed in between, which empties the cache. Other tokens of prompts have no recorded choices.
    """
    places: list[Ids] = []
    for number, (step, choices) in enumerate(zip(steps, recorded, strict=True)):
        last = len(step.prompt_ids) - 1
        keys = np.full(last + 1 + len(step.completion_ids), -1, np.int32)
        shared = [min(common_prefix(earlier.full_ids, step.prompt_ids), last) for earlier in steps[:number]]
        usable = [at for at, earlier in enumerate(steps[:number]) if _one_version(earlier, step)]
        if usable:
            origin = max(usable, key=lambda at: (shared[at], at))
            keys[: shared[origin]] = places[origin][: shared[origin]]
        keys[last : last + len(choices)] = choices
        places.append(keys)
    return places


def _one_version(earlier: Step, step: Step) -> bool:
    """Return whether all of `earlier` was sampled by the weights that `step` began with."""
    versions = earlier.policy_versions
    return bool(len(versions) and len(step.policy_versions) and (versions == step.policy_versions[0]).all())
