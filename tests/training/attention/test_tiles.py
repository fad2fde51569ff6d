"""Rectangles merged by their log-sum-exp are the whole softmax, to the rounding of float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.attention.trees import (
    ASKS,
    HEADS,
    WINDOWS,
    Heads,
    Made,
    Problem,
    chain,
    gap,
    random_calls,
    shapes,
    tree_of,
    worst,
)
from treadle.packing.layout import chunks
from treadle.training.attention import capped
from treadle.training.attention.interface import Shape
from treadle.training.attention.select import Dense, visible
from treadle.training.attention.tiles import Tiles, rectangles

LIMIT = 1e-12


def bushy(nodes: int, seed: int = 0, longest: int = 60) -> Shape:
    """A tree of about so many nodes."""
    random, calls = np.random.default_rng(seed), 2
    while len(tree := tree_of(random_calls(random, calls, longest))) < nodes:
        calls *= 2
    return Shape.of(chunks(tree, len(tree))[0])


@given(shape=shapes(ahead=True), heads=HEADS, window=st.sampled_from(WINDOWS), scale=st.sampled_from([0.05, 0.5, 2.0]))
def test_small_trees(shape: Shape, heads: Heads, window: int | None, scale: float) -> None:
    assert worst(Tiles, shape, Problem.of(shape, heads, window, scale)) < LIMIT


@given(shape=shapes(ahead=True), heads=HEADS, window=st.sampled_from(WINDOWS), asks=st.sampled_from(ASKS))
def test_sinks_and_soft_caps(shape: Shape, heads: Heads, window: int | None, asks: tuple[bool, float | None]) -> None:
    sinks, softcap = asks
    assert worst(Tiles, shape, Problem.of(shape, heads, window, 0.5, sinks=sinks, softcap=softcap)) < LIMIT


def test_soft_capped_scores_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capped, "_SCORES", 5000)
    shape = chain(600)
    problem = Problem.of(shape, Heads(1, 1, 1), softcap=1.5, sinks=True)
    with Made() as made:
        found = problem.solve(Tiles(shape))
    assert max(x.numel() for x in made.tensors) <= 5000  # of 360,000
    assert max(gap(f, w) for f, w in zip(found, problem.solve(Dense(shape)), strict=True)) < LIMIT


@settings(max_examples=20)
@given(shape=shapes(longest=250, count=6, ahead=True), window=st.sampled_from([*WINDOWS, 64, 200]))
def test_trees_whose_runs_are_longer_than_pieces_and_windows(shape: Shape, window: int | None) -> None:
    assert worst(Tiles, shape, Problem.of(shape, window=window)) < LIMIT


@pytest.mark.quick(6)
@pytest.mark.parametrize("window", [1, 63, 64, 65, 511, 512, 513, 600, 1499, 1500, 1501])
@pytest.mark.parametrize("context", [0, 700])
def test_a_long_run_under_windows_about_the_size_of_a_piece(window: int, context: int) -> None:
    shape = chain(1500 - context, context)
    assert worst(Tiles, shape, Problem.of(shape, Heads(2, 1, 4), window)) < LIMIT


@pytest.mark.parametrize("window", [None, 2])
def test_a_tree_as_deep_as_it_has_branches(window: int | None) -> None:
    """Each node of a trunk has a leaf of its own: as many rounds as levels."""
    levels = 40
    depth = torch.tensor([d for level in range(levels) for d in (level, level + 1)])
    order = [*range(0, 2 * levels, 2), *range(2 * levels - 1, 0, -2)]  # down the trunk, then the leaves from below
    shape = Shape(
        depth[order],
        torch.tensor(
            [2 * levels - level for level in range(levels)] + [end for end in range(levels + 1, 2 * levels + 1)]
        ),
        0,
    )
    assert worst(Tiles, shape, Problem.of(shape, window=window)) < LIMIT


@settings(max_examples=25)
@given(shape=shapes(longest=120, ahead=True), window=st.sampled_from(WINDOWS))
def test_rectangles_cover_what_is_visible_once_and_no_query_twice_in_a_round(shape: Shape, window: int | None) -> None:
    seen = torch.zeros(shape.nodes, len(shape.depth), dtype=torch.int64)
    for number, found in enumerate(rectangles(shape, window)):
        bounds = sorted((r.first_query, r.end_query) for r in found)
        assert all(a[1] <= b[0] for a, b in pairwise(bounds))
        assert all(r.causal == (number == 0) for r in found)
        for r in found:
            part = torch.ones(r.height, r.width, dtype=torch.int64)
            if r.causal:
                part = part.tril()
            if r.ahead:
                part = part.triu(1)
            if r.edge and window is not None:
                nodes = shape.depth[shape.context :][r.first_query : r.end_query, None]
                part = part * (nodes - shape.depth[r.first_key : r.end_key] < window)
            seen[r.first_query : r.end_query, r.first_key : r.end_key] += part
    assert torch.equal(seen, visible(shape, window).long())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize(("sinks", "softcap"), [(False, None), *ASKS])
@pytest.mark.parametrize("window", [None, 3, 70])
def test_lower_precision_is_off_by_its_rounding_alone(
    dtype: torch.dtype, limit: float, window: int | None, sinks: bool, softcap: float | None
) -> None:
    shape = bushy(500)
    problem = Problem.of(shape, Heads(4, 2, 16), window, scale=0.25, dtype=dtype, sinks=sinks, softcap=softcap)
    found, wanted = problem.solve(Tiles(shape)), problem.solve(Dense(shape), torch.float64)
    assert {f.dtype for f in found} == {dtype}
    assert max(gap(f, w) / max(1.0, float(w.abs().max())) for f, w in zip(found, wanted, strict=True)) < limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sinks", "softcap"), [(False, None), (True, None), (False, 1e4)])
@pytest.mark.parametrize("window", [None, 3])
def test_enormous_scores_leave_numbers(
    dtype: torch.dtype, window: int | None, sinks: bool, softcap: float | None
) -> None:
    """Scores of +-1e5: each row is all but one key, part by part, and padding must not win over it."""
    shape = bushy(300)
    problem = Problem.of(shape, window=window, dtype=dtype, size=300.0, sinks=sinks, softcap=softcap)
    assert all(bool(x.isfinite().all()) for x in problem.solve(Tiles(shape)))
    if dtype == torch.float64:
        assert worst(Tiles, shape, problem) < 1e-7  # gradients of size 1e3 through scores of 1e5
        assert gap(problem.forward(Tiles(shape)), problem.forward(Dense(shape))) < 1e-10


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_padding_weighs_nothing_where_all_scores_are_low_or_high(sign: float) -> None:
    """Padded keys have score 0, which would win over -1e4 and, in the gradient, be exp(1e4) against its lse."""
    shape = bushy(300)
    problem = Problem.of(shape)
    constant = torch.full_like(problem.query, 100.0), sign * torch.full_like(problem.key, 50.0)
    forced = Problem(*constant, problem.value, problem.upstream, 0.5, None)
    assert worst(Tiles, shape, forced) < 1e-9


def solved_on(threads: int, shape: Shape, problem: Problem) -> list[Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return problem.solve(Tiles(shape))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 70)])
@pytest.mark.parametrize(("sinks", "softcap"), [(False, None), (True, None), (True, 5.0)])
def test_the_same_bits_every_time_and_for_any_number_of_threads(
    dtype: torch.dtype, window: int | None, sinks: bool, softcap: float | None
) -> None:
    shape = bushy(300)
    problem = Problem.of(shape, Heads(4, 2, 32), window, dtype=dtype, sinks=sinks, softcap=softcap)
    first, *others = [solved_on(threads, shape, problem) for threads in (1, 1, 2, 3)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
