"""A step that the model cannot train costs its trajectory, by name, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from tests.models import make_group, make_step, random_groups
from treadle.core.outcomes import as_played, as_trained, leave_out
from treadle.core.types import DropReason, Group, Step
from treadle.packing.checks import split_untrainable

GOOD = make_step([1, 2, 3], [4, 5])


def with_routing(routing: list[list[list[int]]]) -> Step:
    return replace(GOOD, routing=np.array(routing, np.int16))


@pytest.mark.parametrize(
    ("routing", "fault"),
    [
        ([[[0, 1]]], "its routing is of 1 layers and 2 experts up to 1, the model has 2 layers with 2 of 4 experts"),
        ([[[0], [1]]], "its routing is of 2 layers and 1 experts up to 1"),
        ([[[0, 1], [2, 4]]], "its routing is of 2 layers and 2 experts up to 4"),
    ],
)
def test_routing_of_another_model_costs_its_trajectory_alone(routing: list[list[list[int]]], fault: str) -> None:
    for step in (with_routing(routing), replace(with_routing(routing), dropped=DropReason.CANCELLED)):
        groups = with_step(step)
        _, refused = split_untrainable(groups, 32, 40, (2, 2, 4))
        assert list(refused) == ["g000001.1"] and f"step 2: {fault}" in refused["g000001.1"]
        assert not split_untrainable(groups, 32, 40)[1]  # where nothing is replayed, nobody looks


def test_sound_short_and_empty_routing_passes() -> None:
    for routing in ([[[0, 1], [3, 2]]] * 2, [[[0, 1], [3, 2]]]):
        assert not split_untrainable(with_step(with_routing(routing)), 32, 40, (2, 2, 4))[1]
    nothing = replace(GOOD, routing=np.empty((0, 0, 0), np.int16))
    assert not split_untrainable(with_step(nothing), 32, 40, (2, 2, 4))[1]


def with_step(step: Step) -> list[Group]:
    """Two groups; attempt 1 of the second has the step as its third."""
    return [*random_groups(0, groups=1), make_group([([GOOD], 1.0), ([GOOD, GOOD, step], 0.0), ([GOOD], 0.5)], index=1)]


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (make_step([1, 2], []), "the completion is empty"),
        (make_step([1, 2], [3, 32]), "token 1 of the completion has id 32, the model's vocabulary has 32"),
        (make_step([40, 2], [3]), "token 0 of the prompt has id 40"),
        (make_step([1] * 32, [2] * 9), "41 tokens do not fit the model's context of 40"),
    ],
)
def test_a_faulty_step_costs_its_trajectory_alone(step: Step, fault: str) -> None:
    groups = with_step(step)
    kept, refused = split_untrainable(groups, vocabulary=32, context=40)
    assert list(refused) == ["g000001.1"]
    assert refused["g000001.1"].startswith(f"task task-1, trajectory g000001.1, step 2: {fault}")
    assert kept[0].trajectories == groups[0].trajectories
    first, bad, last = kept[1].trajectories
    assert (first, last) == (groups[1].trajectories[0], groups[1].trajectories[2])
    assert bad.dropped is DropReason.REFUSED and bad.steps == groups[1].trajectories[1].steps
    assert as_trained(bad).reward is None and as_played(bad).reward == bad.reward == 0.0


def test_a_group_of_which_too_few_are_left_is_left_out() -> None:
    groups = with_step(make_step([1, 2], []))
    assert list(split_untrainable(groups, 32, 40, least=2)[1]) == ["g000001.1"]
    kept, refused = split_untrainable(groups, 32, 40, least=3)
    assert list(refused) == ["g000001.0", "g000001.1", "g000001.2"]
    assert "step 2: the completion is empty" in refused["g000001.1"]
    for other in ("g000001.0", "g000001.2"):
        assert refused[other].endswith("only 2 of its group can be trained, training.min_group_size is 3")
    assert all(as_trained(t).reward is None for t in kept[1].trajectories)
    sound = [make_group([([GOOD], 1.0)])]  # what is too small already is not this check's
    assert split_untrainable(sound, 32, 40, least=2) == (sound, {})


def test_a_dropped_step_is_not_looked_at() -> None:
    groups = with_step(replace(make_step([1, 2], []), dropped=DropReason.CANCELLED))
    assert split_untrainable(groups, vocabulary=32, context=40) == (groups, {})


def test_a_trajectory_that_is_left_out_anyway_is_not_looked_at() -> None:
    group = make_group([([make_step([99], [99])], 1.0), ([GOOD], 1.0)])
    groups = [leave_out(group, DropReason.FILTERED)]
    assert split_untrainable(groups, vocabulary=32, context=20) == (groups, {})
