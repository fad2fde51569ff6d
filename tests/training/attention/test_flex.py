"""The mask, block by block and element by element."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.utils.cpp_extension  # the compiler imports it late, and refuses a distutils that came before it
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as stock

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
)
from treadle.packing.layout import chunks
from treadle.training.attention import flex
from treadle.training.attention.flex import Flex, block_mask
from treadle.training.attention.interface import Shape
from treadle.training.attention.select import Dense, visible

CPU = torch.device("cpu")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def blocked(mask: Tensor, size: int) -> Tensor:
    """bool[T, C + T] -> bool[A, B, size * size]; what pads the last blocks is not visible."""
    rows, columns = mask.shape
    padded = torch.nn.functional.pad(mask, (0, -columns % size, 0, -rows % size))
    return padded.view(-(-rows // size), size, -(-columns // size), size).transpose(1, 2).flatten(2)


def dense(count: Tensor | None, index: Tensor | None) -> Tensor:
    """bool[A, B] of one of a block mask's lists."""
    assert count is not None and index is not None and count.dtype == index.dtype == torch.int32
    found = torch.zeros(index.shape[2:], dtype=torch.bool)
    for row, number in enumerate(count[0, 0].tolist()):
        found[row, index[0, 0, row, :number].long()] = True
        assert int(found[row].sum()) == number
    return found


@pytest.mark.parametrize("size", [4, 128])
@given(shape=shapes(longest=60, ahead=True), window=st.sampled_from([*WINDOWS, 8, 20]))
def test_blocks(size: int, shape: Shape, window: int | None) -> None:
    """Nothing visible is left out, full blocks are full; without a window, the lists are exactly that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_BLOCK", size)
        found = block_mask(shape, window, CPU)
    partial, full = (
        dense(found.kv_num_blocks, found.kv_indices),
        dense(found.full_kv_num_blocks, found.full_kv_indices),
    )
    wanted = blocked(visible(shape, window), size)
    some, every = wanted.any(-1), wanted.all(-1)
    assert not (partial & full).any()
    assert not (some & ~(partial | full)).any()
    assert not (full & ~every).any()
    if window is None:
        assert torch.equal(partial | full, some)
        assert torch.equal(full, every)
    assert torch.equal(found.to_dense()[0, 0].bool(), partial | full)
    assert found.shape == (1, 1, *visible(shape, window).shape)
    assert (size, size) == found.BLOCK_SIZE


@pytest.mark.parametrize("context", [0, 127, 500])  # 127: the first query ends a block of keys
def test_through_a_window_far_blocks_are_left_out_and_near_ones_full(context: int) -> None:
    """On a chain the bounds by depth are exact."""
    shape = chain(2000, context)
    found, wanted = block_mask(shape, 700, CPU), blocked(visible(shape, 700), 128)
    full = dense(found.full_kv_num_blocks, found.full_kv_indices)
    assert torch.equal(full, wanted.all(-1))
    assert torch.equal(dense(found.kv_num_blocks, found.kv_indices), wanted.any(-1) & ~full)
    assert full.any()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("longest", [12, 150])
def test_it_is_the_reference(longest: int) -> None:
    @settings(max_examples=20)
    @given(
        shape=shapes(longest, ahead=True),
        heads=HEADS,
        window=st.sampled_from(WINDOWS),
        scale=st.sampled_from([0.05, 0.5, 2.0]),
        asks=st.sampled_from([(False, None), *ASKS]),
    )
    def check(shape: Shape, heads: Heads, window: int | None, scale: float, asks: tuple[bool, float | None]) -> None:
        problem, kernel = Problem.of(shape, heads, window, scale, sinks=asks[0], softcap=asks[1]), Flex(shape)
        for _ in range(2):
            assert gap(problem.forward(kernel), problem.forward(Dense(shape))) < 1e-12
        assert len(kernel.masks) == 1

    check()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("sinks", "softcap"), [(False, None), *ASKS])
def test_gradients_are_the_references(
    window: int | None, sinks: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch refuses gradients on the CPU, for want of a compiled kernel; its uncompiled one has them."""
    monkeypatch.setattr(stock, "_validate_device", lambda query, key, value: None)
    tree = tree_of(random_calls(np.random.default_rng(0), 12, 40))
    for batch in chunks(tree, 100):
        shape = Shape.of(batch)
        problem = Problem.of(shape, window=window, sinks=sinks, softcap=softcap)
        for found, wanted in zip(problem.solve(Flex(shape)), problem.solve(Dense(shape)), strict=True):
            assert gap(found, wanted) < 1e-12


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="PyTorch compiles it from AVX2 on")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's
def test_compiled_it_uses_the_blocks_for_any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, in float32, as a GPU would: compiled for any lengths, a handful of times for dozens of trees."""
    compiled: Callable[..., Tensor] = flex._attend("cuda")
    monkeypatch.setattr(flex, "_attend", lambda device: compiled)
    # Its key leaves out the vector width: what is made under ATEN_CPU_CAPABILITY=avx2 is wrong with AVX-512.
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for seed in range(6):
        tree = tree_of(random_calls(np.random.default_rng(seed), 12, 150))
        for budget in (10**6, 300 + 7 * seed):
            for batch in chunks(tree, budget):
                shape = Shape.of(batch)
                for window in (None, 70):
                    problem = Problem.of(shape, Heads(4, 2, 16), window, 0.25, torch.float32)
                    assert gap(problem.forward(Flex(shape)), problem.forward(Dense(shape))) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 16
    torch._dynamo.reset()


def test_nothing_quadratic_is_made_for_64k_nodes() -> None:
    """Of 64k x 64k even bits would be half a gigabyte; of 512 x 512 blocks, 8 bytes each are 2 MB."""
    tree = tree_of(random_calls(np.random.default_rng(0), 200, 800))
    shape = Shape.of(chunks(tree, 2**16)[0])
    assert shape.nodes == 2**16
    with Made() as made:
        tracemalloc.start()
        mask = block_mask(shape, 4096, CPU)
        _, peak = tracemalloc.get_traced_memory()  # numpy's arrays; torch's are in `made`
        tracemalloc.stop()
    assert mask.kv_indices.shape == (1, 1, 512, 512)
    assert peak < 64e6
    assert 2**16 <= max(x.numel() for x in made.tensors) <= 2 * 512 * 513
