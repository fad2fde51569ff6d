"""Packing loses nothing, invents nothing and shares exactly what may be shared."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import make_group, make_step, ragged_groups
from treadle.core.errors import DataError
from treadle.core.types import Group, Ids
from treadle.packing.flat import Span, flatten, spans
from treadle.packing.layout import MicroBatch, PackedSequence, Packing, micro_batches, pack

EVERY = st.sampled_from(list(Packing))


def span(prompt: Sequence[int], completion: Sequence[int], first: int = 0, owner: int = 0) -> Span:
    return Span(np.array(prompt, np.int32), np.array(completion, np.int32), first, owner)


def calls_of(*calls: tuple[Sequence[int], Sequence[int]], owner: int = 0, first: int = 0) -> list[Span]:
    made = []
    for prompt, completion in calls:
        made.append(span(prompt, completion, first, owner))
        first += len(completion)
    return made


def tokens(sequences: Sequence[PackedSequence]) -> list[list[int]]:
    return [s.token_ids.tolist() for s in sequences]


def before(call: Span, number: int) -> list[int]:
    """All a completion's token `number` was sampled after."""
    return [*call.prompt_ids.tolist(), *call.completion_ids[:number].tolist()]


def split(batch: MicroBatch) -> list[Ids]:
    return np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1].tolist())


@given(ragged_groups(vocabulary=3), EVERY, st.integers(1, 120))
def test_every_pair_is_read_once_after_exactly_what_preceded_it(
    groups: list[Group], packing: Packing, budget: int
) -> None:
    """For each completion token: its id, and everything the model sees before it, are those of the recorded call."""
    batch = flatten(groups)
    calls = spans(batch)
    wanted = {
        call.first + number: (int(token), before(call, number))
        for call in calls
        for number, token in enumerate(call.completion_ids)
    }
    found: dict[int, tuple[int, list[int]]] = {}
    for part in micro_batches(pack(calls, packing), budget):
        starts = np.cumsum(part.lengths) - part.lengths
        for source, target, flat in zip(part.source, part.target_ids, part.flat, strict=True):
            start = starts[np.searchsorted(starts, source, side="right") - 1]
            assert int(flat) not in found
            found[int(flat)] = (int(target), part.token_ids[start : source + 1].tolist())
    assert found == wanted
    assert sorted(found) == list(range(len(batch)))


@given(ragged_groups(vocabulary=3), EVERY, st.integers(1, 120))
def test_micro_batches_are_the_sequences_laid_end_to_end_within_the_budget(
    groups: list[Group], packing: Packing, budget: int
) -> None:
    sequences = pack(spans(flatten(groups)), packing)
    parts = micro_batches(sequences, budget)
    assert sorted(s.tolist() for part in parts for s in split(part)) == sorted(tokens(sequences))
    for part in parts:
        assert len(part.token_ids) <= budget or len(part.lengths) == 1
        assert part.position_ids.tolist() == [i for n in part.lengths for i in range(n)]
        assert part.lengths.min() > 0
        assert (part.position_ids[part.source] >= 0).all()
        assert (part.position_ids[part.source + 1] == part.position_ids[part.source] + 1).all()
        assert part.lengths.tolist() == sorted(part.lengths.tolist(), reverse=True)
        dtypes = [getattr(part, f).dtype for f in ("token_ids", "position_ids", "source", "target_ids", "flat")]
        assert dtypes == ["int32", "int64", "int64", "int32", "int64"]
    needed = sum(map(len, tokens(sequences)))
    assert not parts or len(parts) <= 1 + 2 * needed // budget + sum(len(s) > budget for s in tokens(sequences))


@given(ragged_groups(vocabulary=3))
def test_step_packing_gives_every_call_with_a_completion_its_own_sequence(groups: list[Group]) -> None:
    calls = spans(flatten(groups))
    wanted = [before(c, len(c.completion_ids)) for c in calls if len(c.completion_ids)]
    assert tokens(pack(calls, Packing.STEP)) == wanted


@given(ragged_groups(vocabulary=2))
def test_chain_merges_exactly_when_an_open_chain_ends_in_a_prefix(groups: list[Group]) -> None:
    """Against the definition: the newest chain of the same trajectory whose last call is a prefix is continued."""
    calls = [c for c in spans(flatten(groups)) if len(c.completion_ids)]
    chains: list[list[Span]] = []
    for call in calls:
        prompt = call.prompt_ids.tolist()
        fitting = []
        for chain in chains:
            whole = before(chain[-1], len(chain[-1].completion_ids))
            if chain[-1].owner == call.owner and prompt[: len(whole)] == whole:
                fitting.append(chain)
        if fitting:
            fitting[-1].append(call)
        else:
            chains.append([call])
    sequences = pack(calls, Packing.CHAIN)
    assert tokens(sequences) == [before(c[-1], len(c[-1].completion_ids)) for c in chains]
    assert [s.flat.tolist() for s in sequences] == [
        [call.first + i for call in chain for i in range(len(call.completion_ids))] for chain in chains
    ]


def test_an_append_only_trajectory_is_one_sequence() -> None:
    calls = calls_of(([1, 2], [3]), ([1, 2, 3, 9], [4, 5]), ([1, 2, 3, 9, 4, 5], [6]))
    (sequence,) = pack(calls, Packing.CHAIN)
    assert sequence.token_ids.tolist() == [1, 2, 3, 9, 4, 5, 6]
    assert sequence.target.tolist() == [2, 4, 5, 6]
    assert sequence.flat.tolist() == [0, 1, 2, 3]


def test_merging_does_not_need_consecutive_calls() -> None:
    """A sub-agent's call in between does not break the main chain."""
    main, between, later = ([1, 2], [3]), ([7, 7], [8]), ([1, 2, 3, 9], [4])
    assert tokens(pack(calls_of(main, between, later), Packing.CHAIN)) == [[1, 2, 3, 9, 4], [7, 7, 8]]


@pytest.mark.parametrize(
    "later",
    [
        [1, 2, 4, 9],  # another sampled token
        [1, 5, 3, 9],  # another prompt
        [1, 2],  # shorter
        [2, 3, 9],
    ],
)
def test_anything_but_a_prefix_is_not_merged(later: list[int]) -> None:
    sequences = pack(calls_of(([1, 2], [3]), (later, [4])), Packing.CHAIN)
    assert tokens(sequences) == [[1, 2, 3], [*later, 4]]


def test_two_continuations_of_one_call_share_it_only_once() -> None:
    calls = calls_of(([1], [2]), ([1, 2, 5], [6]), ([1, 2, 7], [8]))
    sequences = pack(calls, Packing.CHAIN)
    assert tokens(sequences) == [[1, 2, 5, 6], [1, 2, 7, 8]]
    assert [s.flat.tolist() for s in sequences] == [[0, 1], [2]]


def test_trajectories_never_share() -> None:
    calls = [span([1], [2], 0, owner=0), span([1, 2, 3], [4], 1, owner=1)]
    assert tokens(pack(calls, Packing.CHAIN)) == [[1, 2], [1, 2, 3, 4]]


@pytest.mark.parametrize("packing", list(Packing))
def test_a_call_without_completion_takes_no_room(packing: Packing) -> None:
    calls = calls_of(([1], [2]), ([1, 2, 3], []), ([1, 2, 3, 4], [5]))
    assert tokens(pack(calls, packing)) == ([[1, 2], [1, 2, 3, 4, 5]] if packing is Packing.STEP else [[1, 2, 3, 4, 5]])
    assert pack(calls_of(([1], [])), packing) == []
    assert micro_batches([], 10) == []


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("completion", [[], [1]])
def test_an_empty_prompt_is_an_error(packing: Packing, completion: list[int]) -> None:
    with pytest.raises(DataError, match="owner 3 has an empty prompt"):
        pack([span([], completion, owner=3)], packing)


def test_a_sequence_longer_than_the_budget_is_alone() -> None:
    calls = [span([1] * n, [1], 10 * n, owner=n) for n in (2, 9, 3, 2)]
    parts = micro_batches(pack(calls, Packing.STEP), 7)
    assert [part.lengths.tolist() for part in parts] == [[10], [4, 3], [3]]


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


@pytest.mark.parametrize("groups", [[], [make_group([])], [make_group([([], None)])], [make_group([([], 1.0)])]])
def test_a_batch_without_tokens_has_arrays_of_the_right_types(groups: list[Group]) -> None:
    batch = flatten(groups)
    assert len(batch) == 0 and batch.step_start.tolist() == [0]
    dtypes = [a.dtype for a in (batch.mask, batch.logp_rollout, batch.temperature, batch.step_id, batch.rewards)]
    assert dtypes == ["bool", "float32", "float32", "int64", "float64"]
    assert batch.trajectory_id.dtype == batch.group_id.dtype == "int64"
    assert spans(batch) == []
