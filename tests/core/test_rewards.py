"""A reward is checked when it is made, adds up exactly, and survives copying."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.errors import DataError
from treadle.core.rewards import Reward

amounts = st.floats(-1e6, 1e6)
components = st.dictionaries(st.sampled_from(["answer", "page", "é"]), amounts)


def rewards(tokens: int | None = None) -> st.SearchStrategy[Reward]:
    some = st.lists(st.floats(-10, 10, width=32), min_size=tokens or 0, max_size=4 if tokens is None else tokens).map(
        lambda t: np.array(t, np.float32)
    )
    return st.builds(Reward, components, st.none() | some)


def test_components_and_tokens_add_up_and_weights_are_of_components() -> None:
    reward = Reward({"answer": 1.0, "page": 0.5}, np.array([0.25, -1], np.float32))
    assert reward.total() == 0.75
    assert reward.total({"page": 2.0, "unknown": 9.0}) == 1.25
    assert reward.by_name == {"answer": 1.0, "page": 0.5, "tokens": -0.75}


@given(rewards(tokens=3), rewards(tokens=3))
def test_both_together_are_their_sums(a: Reward, b: Reward) -> None:
    both = a.plus(b)
    for name in {*a.by_name, *b.by_name}:
        expected = a.by_name.get(name, 0.0) + b.by_name.get(name, 0.0)
        assert both.by_name[name] == pytest.approx(expected, rel=1e-6, abs=1e-5)
    assert math.isclose(both.total(), math.fsum(both.by_name.values()), abs_tol=1e-9)


@given(rewards())
def test_copies_are_equal_and_read_only(reward: Reward) -> None:
    for twin in (pickle.loads(pickle.dumps(reward)), copy.deepcopy(reward)):
        assert twin.by_name == reward.by_name
        assert twin.tokens is None or not twin.tokens.flags.writeable


@pytest.mark.parametrize(
    ("components", "tokens", "message"),
    [
        ({"a": math.nan}, None, r"'a' of a reward must be a finite number, at most 1e\+12 in size, got nan"),
        ({"a": 10**400}, None, "must be a finite number"),
        ({"a": "1"}, None, "must be a finite number, .* got '1'"),
        ({"": 1.0}, None, "needs a name"),
        ({"\ud800": 1.0}, None, "needs a name"),
        ({"tokens": 1.0}, None, "cannot be called 'tokens'"),
        (3.0, None, "must be numbers by name, got 3.0"),
        ({"a": -1.1e12}, None, r"must be a finite number, at most 1e\+12 in size, got -11"),
        ({"a": 1e12, "b": 1e12}, None, r"rewards add up to 2000000000000.0; the sum must"),
        ({"a": 1e12}, [1e12], r"rewards add up to 19999"),
        ({}, [1.0, math.inf], "must be one finite number, .* for each token"),
        ({}, [1e300], "must be one finite number, .* for each token"),
        ({}, [-1.1e12], "must be one finite number, .* for each token"),
        ({}, [[1.0]], "must be one finite number, .* for each token"),
        ({}, ["x"], "must be numbers, one a token"),
    ],
)
def test_what_cannot_be_a_reward_is_refused(components: Any, tokens: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Reward(components, tokens)
