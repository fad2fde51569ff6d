"""Which experts are replayed at which token of a step, from what was recorded.

Shapes: P prompt and C completion tokens of a step, M layers with experts, k experts a token, D distinct choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.core.prefix import common_prefix
from treadle.core.types import Ids, Routing, Step


def distinct(steps: Sequence[Step]) -> tuple[Routing | None, list[Ids]]:
    """The different choices among all that were recorded, int16[D, M, k], and each step's as numbers of them, int32[R].

    None, and no numbers, if no step has any.
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
    """Where the recorded choices of one trajectory's steps are replayed: int32[P + C] a step, -1 where nothing is.

    A step's own choices are those of the tokens that it predicted from: its prompt's last and all sampled ones but the
    last. What its prompt shares with an earlier step was not computed again: the engine had it in its cache, with the
    choices of that time. So they are inherited, from the step that shares most and, of these, the latest; unless other
    weights sampled in between, which empty the cache. Other tokens of prompts are not recorded.
    """
    found: list[Ids] = []
    for number, (step, own) in enumerate(zip(steps, recorded, strict=True)):
        last = len(step.prompt_ids) - 1
        keys = np.full(last + 1 + len(step.completion_ids), -1, np.int32)
        shared = [min(common_prefix(earlier.full_ids, step.prompt_ids), last) for earlier in steps[:number]]
        usable = [at for at, earlier in enumerate(steps[:number]) if _one_version(earlier, step)]
        if usable:
            origin = max(usable, key=lambda at: (shared[at], at))
            keys[: shared[origin]] = found[origin][: shared[origin]]
        keys[last : last + len(own)] = own
        found.append(keys)
    return found


def _one_version(earlier: Step, step: Step) -> bool:
    """Whether all of `earlier` was sampled by the weights that `step` began with."""
    versions = earlier.policy_versions
    return bool(len(versions) and len(step.policy_versions) and (versions == step.policy_versions[0]).all())
