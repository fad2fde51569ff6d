import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.prefix import common_prefix

ids = st.lists(st.integers(0, 1), max_size=8)


@given(ids, ids)
def test_it_counts_leading_ids_that_agree(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected
