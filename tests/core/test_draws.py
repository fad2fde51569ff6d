"""Draws are Philox4x32-10, uniform, and functions of their address alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.draws import Stream, call_seed, permutation, philox4x32, token_uniforms

WORD = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)  # its digits
SEEDS = st.integers(0, 2**63 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers published with Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key)) == expected


def test_uniforms_are_uniform() -> None:
    seeds = np.array([call_seed(1, Stream.TRAIN, 0, task, 0, 0) for task in range(200)], np.uint64)
    draws = np.concatenate([token_uniforms(seeds, token) for token in range(500)])
    count = len(draws)
    assert draws.dtype == np.float64
    assert draws.min() >= 0.0 and draws.max() < 1.0
    assert abs(draws.mean() - 1 / 2) < 5 * (1 / 12 / count) ** 0.5
    assert abs(draws.var() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    observed, _ = np.histogram(draws, bins=100, range=(0.0, 1.0))
    chi2 = ((observed - count / 100) ** 2 / (count / 100)).sum()
    assert abs(chi2 - 99) < 5 * (2 * 99) ** 0.5


@given(st.lists(SEEDS, min_size=1, max_size=20), st.integers(0, 2**20), st.data())
def test_a_draw_does_not_depend_on_what_else_is_in_the_batch(seeds: list[int], token: int, data: st.DataObject) -> None:
    whole = token_uniforms(np.array(seeds, np.uint64), token)
    chosen = data.draw(st.permutations(range(len(seeds))))[: data.draw(st.integers(1, len(seeds)))]
    part = token_uniforms(np.array([seeds[i] for i in chosen], np.uint64), token)
    assert np.array_equal(part, whole[chosen])


def test_distinct_addresses_have_distinct_seeds() -> None:
    few = range(3)
    addresses = list(itertools.product((0, 1, 2**32, 2**40 + 1), Stream, few, few, few, few))
    seeds = [call_seed(*address) for address in addresses]
    assert len(set(seeds)) == len(addresses)


@given(st.integers(0, 300), SEEDS, st.integers(0, WORD))
def test_a_permutation_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    shuffled = permutation(size, seed, epoch)
    assert shuffled.dtype == np.int64
    assert sorted(shuffled.tolist()) == list(range(size))


def test_each_epoch_and_seed_has_its_own_permutation() -> None:
    orders = [tuple(permutation(50, seed, epoch).tolist()) for seed in (0, 1, 2**32) for epoch in range(4)]
    assert len(set(orders)) == len(orders)


def test_draws_are_the_same_in_every_version() -> None:
    """Frozen values: a change here would change every run of every user."""
    seed = call_seed(7, Stream.TRAIN, 1, 2, 3, 4)
    assert seed == 3700379278430166804
    assert token_uniforms(np.array([seed], np.uint64), 5)[0] == 0.5072559442516118
    assert permutation(8, 7, 1).tolist() == [6, 1, 7, 5, 2, 0, 4, 3]
