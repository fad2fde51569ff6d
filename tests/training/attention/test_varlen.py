"""Gathered paths make tree attention of causal sequences; FlashAttention itself is replaced by its definition."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.training.attention.trees import HEADS, WINDOWS, Heads, Made, Problem, chain, gap, shapes
from treadle.training.attention.interface import Shape
from treadle.training.attention.select import Dense, visible
from treadle.training.attention.varlen import Varlen, _gather, gathered, paths, stretches

CPU = torch.device("cpu")


def definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """`varlen_attn`: query i of sequence s sees key j if -left <= j - (i + keys - queries) <= right; -1: no limit."""
    assert isinstance(window_size, tuple)  # a list equal to (-1, 0) would not be taken as causal
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    queries, keys = cu_seq_q.diff(), cu_seq_k.diff()
    assert (int(cu_seq_q[0]), int(cu_seq_k[0])) == (0, 0)
    assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key)) and len(key) == len(value)
    assert (int(queries.max()), int(keys.max())) == (max_q, max_k)
    assert enable_gqa or query.shape[1] == key.shape[1]
    group, parts = query.shape[1] // key.shape[1], []
    for q, k, v in zip(
        query.split(queries.tolist()), key.split(keys.tolist()), value.split(keys.tolist()), strict=True
    ):
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
        left, right = (len(k) + len(q) if limit < 0 else limit for limit in window_size)
        scores = scale * torch.einsum("qhd,khd->hqk", q, k)
        weights = scores.masked_fill((ahead > right) | (ahead < -left), -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts)


def varlen(shape: Shape) -> Varlen:
    return Varlen(shape, definition)


@given(shape=shapes(), heads=HEADS, window=st.sampled_from(WINDOWS), scale=st.sampled_from([0.05, 0.5, 2.0]))
def test_it_is_the_reference(shape: Shape, heads: Heads, window: int | None, scale: float) -> None:
    problem = Problem.of(shape, heads, window, scale)
    kernel = varlen(shape)
    for _ in range(2):  # the second time from the plan that was kept
        for found, wanted in zip(problem.solve(kernel), problem.solve(Dense(shape)), strict=True):
            assert gap(found, wanted) < 1e-12


@given(shape=shapes(), window=st.sampled_from(WINDOWS))
def test_no_more_is_gathered_than_what_a_stretch_sees(shape: Shape, window: int | None) -> None:
    plan = paths(shape, window, CPU)
    starts, ends = stretches(shape)
    seen = visible(shape, window)
    wanted = [
        torch.nonzero(seen[start - shape.context : end - shape.context].any(0))[:, 0].tolist()
        for start, end in zip(starts, ends, strict=True)
    ]
    index = np.arange(len(shape.depth)) if plan.index is None else plan.index.numpy()
    assert [index[a:b].tolist() for a, b in zip(plan.keys, plan.keys[1:], strict=False)] == wanted
    assert gathered(shape, window) == sum(map(len, wanted))


def test_the_gradient_of_a_shared_key_is_summed_in_single_precision() -> None:
    """In bfloat16 400 times 1 can stop at 256. On the CPU it does not in any case, so this looks at what is made."""
    rows, index = torch.zeros(3, 1, 1, dtype=torch.bfloat16, requires_grad=True), torch.tensor([1] * 400 + [0])
    out = _gather(rows, index)
    with Made() as made:
        out.backward(torch.ones_like(out))
    assert rows.grad is not None
    assert rows.grad.flatten().tolist() == [1, 400, 0]
    zeros, total, *_ = (x.dtype for x in made.tensors if x.shape == rows.shape)
    assert zeros == total == torch.float32


def test_varlen_attn_takes_what_it_is_given() -> None:
    """Against the real operator's declaration, on tensors without data."""
    shape = chain(4, context=3)
    query, key = (torch.empty(n, heads, 8, dtype=torch.bfloat16, device="meta") for n, heads in ((4, 4), (7, 2)))
    for window in (None, 3):
        assert Varlen(shape)(query, key, key, 1.0, window).shape == query.shape
