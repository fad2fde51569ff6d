"""A batch as flat arrays in canonical (group, trajectory, step, token) order.

Shapes: N completion tokens and S steps that are trained, K steps that were played, J trajectories with a reward, G
groups.

Everything the loss needs is an array over N; packing only decides how the learner's log-probabilities [N] are computed.
Returns are over the K played steps: rewards do not depend on which steps are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treadle.core.images import ImageIds, PromptImage, axes
from treadle.core.outcomes import as_played, as_trained, played_rewards, step_drop_reason
from treadle.core.support import Probabilities, Support
from treadle.core.types import Group, Ids, Routing, Step, Trajectory, common_prefix, seen_ids

Indices = NDArray[np.int64]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """The trained part of some groups: trajectories with a reward to train, and their steps.

    groups, trajectories, steps: in canonical order; trajectories without a reward to train are left out.
    step_start   int64[S + 1]  step s owns tokens [step_start[s], step_start[s + 1])
    trajectory_of_step, group_of_trajectory: int64[S], int64[J], indices into `trajectories` and `groups`
    played, trajectory_of_played: the trajectories' steps as they were played, and int64[K]
    played_of_step int64[S]    index of each trained step among the played ones
    rewards      float64[J]    as trained, after shaping; the same holds for rewards of steps and tokens
    played_rewards float64[K]  sum to `rewards` over the steps of a trajectory (if it has any); a remainder not given to
    a
                               step belongs to the last one
    token_rewards float64[N]   the part of `played_rewards` given to single tokens
    mask         bool[N]       trainable tokens
    logp_rollout float32[N]    log-probabilities as reported by the engine
    temperature  float32[N]    sampling temperature of each token
    version      int32[N]      policy version that sampled each token
    support                    ids that could have been sampled, of N tokens; None: every id, everywhere
    probabilities              the sampler's, of its most probable ids, of N tokens; None: recorded nowhere
    """

    groups: tuple[Group, ...]
    trajectories: tuple[Trajectory, ...]
    steps: tuple[Step, ...]
    step_start: Indices
    trajectory_of_step: Indices
    group_of_trajectory: Indices
    played: tuple[Step, ...]
    trajectory_of_played: Indices
    played_of_step: Indices
    rewards: Doubles
    played_rewards: Doubles
    token_rewards: Doubles
    mask: NDArray[np.bool_]
    logp_rollout: NDArray[np.float32]
    temperature: NDArray[np.float32]
    version: Ids
    support: Support | None = None
    probabilities: Probabilities | None = None

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def step_id(self) -> Indices:
        """Return int64[N]: the step of each token."""
        return np.repeat(np.arange(len(self.steps)), np.diff(self.step_start))

    @property
    def played_id(self) -> Indices:
        """Return int64[N]: the played step of each token."""
        return self.played_of_step[self.step_id]

    @property
    def trajectory_id(self) -> Indices:
        """Return int64[N]: the trajectory of each token."""
        return self.trajectory_of_step[self.step_id]

    @property
    def group_id(self) -> Indices:
        """Return int64[N]: the group of each token."""
        return self.group_of_trajectory[self.trajectory_id]

    @property
    def step_number(self) -> list[int]:
        """Return the number of each of the S steps among all recorded steps of its trajectory."""
        return [n for t in self.trajectories for n, step in enumerate(t.steps) if step_drop_reason(t, step) is None]

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """Return bool[N]: whether `logp_rollout` refers to a truncated distribution, whose support is not recorded."""
        unknown = [(s.sampling.truncates or s.sampling.constrains) and s.support is None for s in self.steps]
        return np.repeat(np.array(unknown, np.bool_), np.diff(self.step_start))


def flatten(groups: Sequence[Group]) -> FlatBatch:
    """Lay out the trained part of the groups (`core.outcomes.as_trained`) as flat arrays.

    Trajectories without a trained reward (ungraded, or left out whole) enter no array, no count, no baseline.
    """
    graded = [(g, t) for g, group in enumerate(groups) for t in group.trajectories if as_trained(t).reward is not None]
    played = [(j, t, step) for j, (_, t) in enumerate(graded) for step in as_played(t).steps]
    kept = [(k, j, step) for k, (j, t, step) in enumerate(played) if step_drop_reason(t, step) is None]
    steps = [step for _, _, step in kept]
    lengths = [len(step.completion_ids) for step in steps]
    given = [step.given.tokens for step in steps]
    token_rewards = [np.zeros(n) if r is None else r for n, r in zip(lengths, given, strict=True)]

    def joined(parts: list[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
        return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)

    return FlatBatch(
        groups=tuple(groups),
        trajectories=tuple(t for _, t in graded),
        steps=tuple(steps),
        step_start=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        trajectory_of_step=np.array([j for _, j, _ in kept], np.int64),
        group_of_trajectory=np.array([g for g, _ in graded], np.int64),
        played=tuple(step for _, _, step in played),
        trajectory_of_played=np.array([j for j, _, _ in played], np.int64),
        played_of_step=np.array([k for k, _, _ in kept], np.int64),
        rewards=np.array([as_trained(t).reward for _, t in graded], np.float64),
        played_rewards=np.array([r for _, t in graded for r in played_rewards(t)], np.float64),
        token_rewards=joined(token_rewards, np.float64),  # type: ignore[arg-type]
        mask=joined([step.mask for step in steps], np.bool_),  # type: ignore[arg-type]
        logp_rollout=joined([step.logprobs for step in steps], np.float32),  # type: ignore[arg-type]
        temperature=np.repeat(np.array([step.sampling.temperature for step in steps], np.float32), lengths),
        version=joined([step.policy_versions for step in steps], np.int32),  # type: ignore[arg-type]
        support=Support.joined([(n, step.support) for n, step in zip(lengths, steps, strict=True)]),
        probabilities=Probabilities.joined([(n, step.probabilities) for n, step in zip(lengths, steps, strict=True)]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedCall:
    """Inputs of packing for one step.

    token_ids int32[L]: prompt, then completion from `prompt_length` on; placeholders of images have ids of `table`,
    which all calls of a batch share; None without images. axes int64[3, L]: positions on three axes, if images have
    such.
    first: index of the completion's first token in the flat arrays.
    trajectory, group: scopes within which tokens may be shared, by `training.sharing`.
    keys int32[L, K], or None: further inputs of a hidden state at each token (adapter, expert routing); -1 for none.
    Nodes are shared where ids and keys agree. routing int16[D, M, k], or None: experts indexed by
    the first key, one array shared by all calls of a batch.
    """

    token_ids: Ids
    prompt_length: int
    first: int
    trajectory: int = 0
    group: int = 0
    keys: NDArray[np.int32] | None = None
    routing: Routing | None = None
    table: ImageIds | None = None
    axes: Indices | None = None

    @classmethod
    def of(
        cls,
        prompt: Ids,
        completion: Ids,
        first: int,
        trajectory: int = 0,
        group: int = 0,
        *,
        images: Sequence[PromptImage] = (),
        table: ImageIds,
    ) -> PackedCall:
        """Return the call with a prompt int32[P], of these images, and its completion int32[C]. Raises DataError."""
        ids = np.concatenate([table.put(prompt, images), completion])
        seen = table if images else None
        return cls(ids, len(prompt), first, trajectory, group, table=seen, axes=axes(len(ids), images))


def calls(batch: FlatBatch, routing: bool = False) -> list[PackedCall]:
    """Return the batch's steps as inputs of packing; with their experts if `routing` is to be replayed."""
    group, table = batch.group_of_trajectory[batch.trajectory_of_step], ImageIds()
    made = [
        PackedCall.of(
            *(step.prompt_ids, step.completion_ids, int(first), int(trajectory), int(group)),
            images=step.images,
            table=table,
        )
        for step, first, trajectory, group in zip(
            batch.steps, batch.step_start[:-1], batch.trajectory_of_step, group, strict=True
        )
    ]
    return _with_routing(batch, made) if routing else made


def _with_routing(batch: FlatBatch, made: Sequence[PackedCall]) -> list[PackedCall]:
    everything = [step for trajectory in batch.trajectories for step in trajectory.steps]  # including dropped ones
    table, recorded = distinct(everything)
    if table is None:
        return list(made)
    ends = np.cumsum([0, *(len(trajectory.steps) for trajectory in batch.trajectories)]).tolist()
    keys = [replayed(everything[a:b], recorded[a:b]) for a, b in pairwise(ends)]
    trained = zip(made, batch.trajectory_of_step, batch.step_number, strict=True)
    return [replace(call, keys=keys[t][number][:, None], routing=table) for call, t, number in trained]


def distinct(steps: Sequence[Step]) -> tuple[Routing | None, list[Ids]]:
    """Return the distinct recorded routing choices, int16[D, M, k], and each step's as indices int32[R].

    D distinct choices, M layers with experts, k experts per token, R recorded tokens of the step. (None, empty indices)
    if no step has any.
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
    """Return the recorded choices to replay for one trajectory's steps: int32[P + C] per step, -1 for none.

    recorded: each step's choices as returned by `distinct`, for the tokens it predicted from: its prompt's last one and
    all sampled ones but the last. Prompt tokens shared with an earlier step were in the engine's cache, with the
    choices made then. They are therefore inherited, from the step that shares most and, among equals, the latest;
    unless the weights changed in between, which empties the cache. Other prompt tokens have no recorded choices.
    """
    places: list[Ids] = []
    seen = list(seen_ids(steps))
    for number, (step, choices) in enumerate(zip(steps, recorded, strict=True)):
        last = len(step.prompt_ids) - 1
        keys = np.full(last + 1 + len(step.completion_ids), -1, np.int32)
        shared = [min(common_prefix(earlier, seen[number]), last) for earlier in seen[:number]]
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
