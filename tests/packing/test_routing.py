"""Where recorded experts are replayed: at tokens that a step predicted from, and where the engine had them cached."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import make_group, make_step, ragged_groups, routed
from treadle.core.types import DropReason, Group, Ids, Routing, Step
from treadle.packing.flat import calls, distinct, flatten, replayed
from treadle.packing.layout import Packing, Sharing, arrange, chunks, micro_batches


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
    groups = data.draw(routed(data.draw(ragged_groups(vocabulary=3))))
    groups = [
        replace(g, trajectories=tuple(replace(t, steps=tuple(map(drop_some, t.steps))) for t in g.trajectories))
        for g in groups
    ]
    batch = flatten(groups)
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
