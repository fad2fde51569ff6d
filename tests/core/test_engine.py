"""Which policy version sampled which token."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import EngineError
from treadle.core.types import StopReason


def make_completion(length: int, *spans: tuple[int, int, int]) -> Completion:
    return Completion(
        token_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        stop_reason=StopReason.STOP,
        policy_versions=tuple(VersionSpan(*span) for span in spans),
    )


@given(st.lists(st.integers(0, 5), max_size=30), st.data())
def test_spans_that_cover_the_completion_give_each_token_its_version(versions: list[int], data: st.DataObject) -> None:
    changes = {i for i in range(1, len(versions)) if versions[i] != versions[i - 1]}
    needless = data.draw(st.sets(st.integers(0, len(versions))))  # splits and empty spans are fine
    cuts = sorted(changes | needless | {0, len(versions)})
    spans = [(versions[a], a, b) for a, b in pairwise(cuts)]
    found = make_completion(len(versions), *spans).versions_per_token()
    assert found.tolist() == versions
    assert found.dtype == np.int32


@pytest.mark.parametrize(
    "spans",
    [
        *([], [(1, 0, 2)], [(1, 0, 4)], [(1, 1, 3)], [(1, 0, 1), (2, 2, 3)], [(1, 0, 2), (2, 1, 3)]),
        [(1, 0, 2), (2, 2, 1), (3, 1, 3)],
        [(2, 2, 3), (1, 0, 2)],
    ],
)
def test_gaps_overlaps_and_wrong_ends_are_refused(spans: list[tuple[int, int, int]]) -> None:
    with pytest.raises(EngineError, match="version spans"):
        make_completion(3, *spans).versions_per_token()
