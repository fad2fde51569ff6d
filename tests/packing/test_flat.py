"""The flat arrays describe the graded steps in canonical order, and so do the calls made of them."""

from dataclasses import replace

import numpy as np
from hypothesis import given

from tests.models import make_group, make_step, ragged_groups
from treadle.core.rewards import Reward
from treadle.core.types import DropReason, Group
from treadle.packing.flat import calls, flatten


def test_flatten_is_in_canonical_order_without_what_has_no_reward() -> None:
    first = make_group(
        [
            ([make_step([1], [2, 3], 0.5, [True, False], [-1.0, -2.0]), make_step([4], [])], 1.0),
            ([make_step([9], [9, 9])], None),
            ([], 0.25),
        ]
    )
    second = make_group([([], None)], 1)
    third = make_group([([make_step([5], [6], 0.0, logprobs=[0.0]), make_step([7], [8], 2.0)], -1.0)], 2)
    batch = flatten([first, second, third])
    assert [g.group_id for g in batch.groups] == ["g000000", "g000001", "g000002"]
    assert [t.trajectory_id for t in batch.trajectories] == ["g000000.0", "g000000.2", "g000002.0"]
    assert batch.rewards.tolist() == [1.0, 0.25, -1.0]
    assert batch.group_of_trajectory.tolist() == [0, 0, 2]
    assert batch.trajectory_of_step.tolist() == [0, 0, 2, 2]
    assert batch.step_start.tolist() == [0, 2, 2, 3, 4]
    assert batch.step_id.tolist() == [0, 0, 2, 3]
    assert batch.trajectory_id.tolist() == [0, 0, 2, 2]
    assert batch.group_id.tolist() == [0, 0, 2, 2]
    assert batch.mask.tolist() == [True, False, False, True]  # greedy tokens are never trained
    assert batch.temperature.tolist() == [0.5, 0.5, 0.0, 2.0]
    assert batch.logp_rollout.tolist() == [-1.0, -2.0, 0.0, -1.5]
    assert len(batch) == 4


def test_dropped_steps_are_left_out() -> None:
    lost = replace(make_step([1], []), dropped=DropReason.CANCELLED)
    batch = flatten([make_group([([make_step([1], [2]), lost, make_step([1], [3, 4])], 1.0), ([lost], 0.0)])])
    assert [step.completion_ids.tolist() for step in batch.steps] == [[2], [3, 4]]
    assert (batch.trajectory_of_step.tolist(), batch.rewards.tolist()) == ([0, 0], [1.0, 0.0])
    assert batch.played_rewards.tolist() == [0.0, 1.0]


def test_training_sees_shaped_rewards_and_nothing_of_what_shaping_dropped() -> None:
    given = Reward({"page": 0.5}, np.array([0.25, 0], np.float32))
    shaped = replace(make_step([1], [2, 3]), reward=0.75, shaping=-0.5, given=given)
    group = make_group([([shaped, make_step([1], [4])], 0.75), ([make_step([1], [5])], 1.0)])
    dropped = replace(group.trajectories[1], dropped=DropReason.OVERLONG)
    batch = flatten([replace(group, trajectories=(group.trajectories[0], dropped))])
    assert (batch.rewards.tolist(), batch.played_rewards.tolist()) == ([0.25], [0.25, 0.0])
    assert batch.token_rewards.tolist() == [0.25, 0, 0] and batch.token_rewards.dtype == "float64"


@given(ragged_groups(vocabulary=3))
def test_flat_arrays_describe_the_same_tokens(groups: list[Group]) -> None:
    batch = flatten(groups)
    graded = [(g, t) for g, group in enumerate(groups) for t in group.trajectories if t.reward is not None]
    rows = [
        (g, j, step, number)
        for j, (g, trajectory) in enumerate(graded)
        for step in trajectory.steps
        for number in range(len(step.completion_ids))
    ]
    assert batch.group_id.tolist() == [g for g, *_ in rows]
    assert batch.trajectory_id.tolist() == [j for _, j, *_ in rows]
    assert batch.mask.tolist() == [bool(step.mask[i]) for *_, step, i in rows]
    assert batch.logp_rollout.tolist() == [step.logprobs[i] for *_, step, i in rows]
    assert batch.temperature.tolist() == [np.float32(step.sampling.temperature) for *_, step, _ in rows]
    assert [id(batch.steps[s]) for s in batch.step_id] == [id(step) for *_, step, _ in rows]
    assert len(batch.trajectories) == len(batch.rewards) == len(batch.group_of_trajectory) == len(graded)


@given(ragged_groups(vocabulary=3))
def test_a_call_is_a_step_with_its_place(groups: list[Group]) -> None:
    batch = flatten(groups)
    made = calls(batch)
    assert len(made) == len(batch.steps)
    for number, (call, step) in enumerate(zip(made, batch.steps, strict=True)):
        assert call.token_ids.tolist() == [*step.prompt_ids.tolist(), *step.completion_ids.tolist()]
        assert call.token_ids.dtype == "int32" and call.keys is None
        assert call.prompt_length == len(step.prompt_ids)
        assert call.first == batch.step_start[number]
        assert step in batch.trajectories[call.trajectory].steps
        assert batch.trajectories[call.trajectory] in batch.groups[call.group].trajectories
