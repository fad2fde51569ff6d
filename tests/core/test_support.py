"""Supports: what could have been sampled at each token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import make_step
from treadle.core.errors import DataError
from treadle.core.support import Support

TOKENS = st.lists(st.none() | st.sets(st.integers(0, 9), min_size=1).map(sorted), max_size=8)


@given(TOKENS, st.data())
def test_joining_taking_and_slicing_keep_each_tokens_ids(tokens: list[list[int] | None], data: st.DataObject) -> None:
    support = Support.of(tokens)
    of_each = [support[n : n + 1].ids.tolist() or None for n in range(len(support))]
    assert of_each == tokens
    order = data.draw(st.lists(st.sampled_from(range(len(tokens))), max_size=12)) if tokens else []
    taken = support.take(np.array(order, np.int64))
    assert [taken[n : n + 1].ids.tolist() or None for n in range(len(order))] == [tokens[n] for n in order]
    cut = data.draw(st.integers(0, len(tokens)))
    again = Support.joined([(cut, support[:cut]), (3, None), (len(tokens) - cut, support[cut:])])
    assert again is not None
    assert [again[n : n + 1].ids.tolist() or None for n in range(len(again))] == [
        *tokens[:cut],
        *[None] * 3,
        *tokens[cut:],
    ]
    sampled = data.draw(st.lists(st.integers(0, 9), min_size=len(tokens), max_size=len(tokens)))
    assert support.contains(np.array(sampled, np.int32)).tolist() == [
        ids is None or token in ids for token, ids in zip(sampled, tokens, strict=True)
    ]


def test_without_any_there_is_none() -> None:
    assert Support.joined([(2, None), (0, None)]) is None


@pytest.mark.parametrize(
    ("counts", "ids", "message"),
    [
        ([2], [1], "1 ids for counts of 2"),
        ([2], [3, 1], "ascend"),
        ([1, 2], [5, 2, 2], "ascend"),
        ([1], [-1], "ascend"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(counts: list[int], ids: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Support(np.array(counts), np.array(ids))


def test_a_step_has_one_support_per_token_with_the_sampled_id() -> None:
    step = replace(make_step([1], [2, 3]), support=Support.of([[2, 4], None]))
    assert step.support is not None and len(step.support) == 2
    with pytest.raises(DataError, match=r"Step\.support is of 1 tokens, the completion has 2"):
        replace(step, support=Support.of([[2]]))
    with pytest.raises(DataError, match=r"Step\.support of token 1 lacks the sampled id 3"):
        replace(step, support=Support.of([None, [2, 4]]))
