"""The flat arrays of a batch and the calls made of them: replayed experts, and what is refused before."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import each_step, make_group, make_step, ragged_groups, random_groups, routed
from treadle.core.outcomes import as_played, as_trained, leave_out
from treadle.core.rewards import Reward
from treadle.core.types import DropReason, Group, Ids, Routing, Step
from treadle.packing.checks import split_untrainable
from treadle.packing.flat import calls, distinct, flatten, replayed
from treadle.packing.layout import Packing, Sharing, arrange, chunks, micro_batches


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


def routing(*experts: int) -> Routing:
    """One layer, one expert a token."""
    return np.array(experts, np.int16)[:, None, None]


def step(prompt: list[int], completion: list[int], *experts: int, version: int = 0) -> Step:
    made = make_step(prompt, completion)
    versions = np.full(len(completion), version, np.int32)
    return replace(made, policy_versions=versions, routing=routing(*experts) if experts else None)


def experts_of(steps: list[Step]) -> list[list[int]]:
    """At every token of each step; -1: not replayed."""
    table, recorded = distinct(steps)
    found = replayed(steps, recorded)
    assert all(len(keys) == len(s.full_ids) and keys.dtype == np.int32 for keys, s in zip(found, steps, strict=True))
    return [[-1 if key < 0 or table is None else int(table[key, 0, 0]) for key in keys] for keys in found]


def test_other_weights_in_between_empty_the_cache() -> None:
    first = step([1, 2], [3, 4], 7, 8)
    mixed = replace(first, policy_versions=np.array([0, 1], np.int32))
    later = step([1, 2, 3, 4, 5], [6], 2, version=1)
    assert experts_of([first, later])[1] == experts_of([mixed, later])[1] == [-1, -1, -1, -1, 2, -1]
    again = step([1, 2, 3, 4, 5, 6], [6], 4, version=1)
    assert experts_of([first, later, again])[2] == [-1, -1, -1, -1, 2, 4, -1]


def slow(steps: tuple[Step, ...]) -> list[list[list[list[int]] | None]]:
    """What is replayed at each token of each step, token by token: for steps of one version."""
    found: list[list[list[list[int]] | None]] = []
    for number, this in enumerate(steps):
        prompt, own = this.prompt_ids.tolist(), [] if this.routing is None else this.routing.tolist()
        origin, most = None, 0
        for at in range(number) if len(this.completion_ids) else ():
            earlier = steps[at].full_ids.tolist()
            same = next((i for i, (a, b) in enumerate(zip(earlier, prompt, strict=False)) if a != b), None)
            same = min(len(earlier), len(prompt)) if same is None else same
            if len(steps[at].completion_ids) and min(same, len(prompt) - 1) >= most:
                origin, most = at, min(same, len(prompt) - 1)
        inherited = [] if origin is None else found[origin][:most]
        keys = inherited + [None] * (len(this.full_ids) - len(inherited))
        for at, row in enumerate(own):
            keys[len(prompt) - 1 + at] = row
        found.append(keys)
    return found


@given(st.data())
def test_calls_carry_the_experts_of_their_tokens(data: st.DataObject) -> None:
    """Absent, empty, short or whole routing; what is dropped is inherited from all the same."""
    batch = flatten(each_step(drop_some, data.draw(routed(data.draw(ragged_groups(vocabulary=3))))))
    made = calls(batch, routing=True)
    wanted = [
        keys
        for t in batch.trajectories
        for one, keys in zip(t.steps, slow(t.steps), strict=True)
        if one.dropped is None
    ]
    assert len(made) == len(wanted)
    for call, keys in zip(made, wanted, strict=True):
        if call.keys is None:
            assert not any(keys) and call.routing is None
            continue
        assert call.routing is not None
        assert call.routing is made[0].routing
        assert [None if key < 0 else call.routing[key].tolist() for key in call.keys[:, 0]] == keys
    if made and made[0].routing is not None:
        rows = made[0].routing.reshape(len(made[0].routing), -1)
        assert len(np.unique(rows, axis=0)) == len(rows)  # equal choices have equal keys, and are shared
    assert all(call.keys is None for call in calls(batch))


def drop_some(one: Step) -> Step:
    return replace(one, dropped=DropReason.CANCELLED) if one.completion_ids.sum() % 4 == 3 else one


@settings(max_examples=30)
@given(st.data(), st.sampled_from(Packing), st.sampled_from([1, 2, 5, 17, 8192]))
def test_nodes_carry_the_experts_of_their_token_in_every_layout(
    data: st.DataObject, packing: Packing, budget: int
) -> None:
    groups: list[Group] = data.draw(routed(data.draw(ragged_groups(vocabulary=3)), layers=1, top_k=1))
    made = calls(flatten(groups), routing=True)
    wanted: dict[int, tuple[list[int], list[int]]] = {}
    for call in made:
        experts = experts_at(call.keys, call.routing, len(call.token_ids))
        for n in range(call.prompt_length, len(call.token_ids)):
            wanted[call.first + n - call.prompt_length] = call.token_ids[:n].tolist(), experts[:n]
    found: dict[int, tuple[list[int], list[int]]] = {}
    for tree in micro_batches(arrange(made, packing, Sharing.BATCH), budget):
        experts = experts_at(tree.keys, tree.routing, len(tree))
        for node, flat in zip(tree.source.tolist(), tree.flat.tolist(), strict=True):
            path = np.flatnonzero((np.arange(len(tree)) <= node) & (node < tree.subtree_end))
            found[flat] = tree.token_ids[path].tolist(), [experts[i] for i in path]
        parts = [
            [-1] * len(part.token_ids) if part.routing is None else part.routing[:, 0, 0].tolist()
            for part in chunks(tree, budget)
        ]
        assert [expert for part in parts for expert in part] == experts
    assert found == wanted


def experts_at(keys: Ids | None, table: Routing | None, tokens: int) -> list[int]:
    if keys is None or table is None:
        return [-1] * tokens
    return [-1 if key < 0 else int(table[key, 0, 0]) for key in keys[:, 0]]


def test_equal_ids_with_other_experts_share_nothing_from_there_on() -> None:
    one, same, other = (step([1, 2], [3, 4], *experts) for experts in ((7, 8), (7, 8), (7, 9)))
    nodes = {}
    for name, second in (("same", same), ("other", other), ("not recorded", step([1, 2], [3, 4]))):
        made = calls(flatten([make_group([([one], 1.0), ([second], 0.0)])]), routing=True)
        [tree] = micro_batches(arrange(made, Packing.TREE), 100)
        nodes[name] = len(tree)
    assert nodes == {"same": 4, "other": 6, "not recorded": 7}


GOOD = make_step([1, 2, 3], [4, 5])


def with_routing(routing: list[list[list[int]]]) -> Step:
    return replace(GOOD, routing=np.array(routing, np.int16))


@pytest.mark.parametrize(
    ("routing", "fault"),
    [
        ([[[0, 1]]], "its routing has 1 layers and 2 experts up to 1, the model has 2 layers with 2 of 4 experts"),
        ([[[0], [1]]], "its routing has 2 layers and 1 experts up to 1"),
        ([[[0, 1], [2, 4]]], "its routing has 2 layers and 2 experts up to 4"),
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


def test_a_step_as_long_as_the_context_is_trained() -> None:
    assert not split_untrainable(with_step(make_step([1] * 32, [2] * 8)), 32, context=40)[1]


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
