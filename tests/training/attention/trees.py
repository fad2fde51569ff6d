"""Random prefix trees, whole and in chunks, and what a kernel makes of them beside the reference."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.packing.flat import PackedCall
from treadle.packing.layout import MicroBatch, Packing, Sharing, arrange, chunks, micro_batches
from treadle.packing.tree import PrefixTree
from treadle.training.attention.interface import Kernel, Shape
from treadle.training.attention.select import Dense
from treadle.training.attention.tiles import runs

WINDOWS = (None, 1, 3, 70)
# What a layer may ask for beside a window: sinks, or not; the cap of scores.
ASKS = ((True, None), (False, 1.5), (True, 0.7))


def random_calls(random: np.random.Generator, count: int, longest: int) -> list[PackedCall]:
    """Each begins with some of an earlier one's tokens and adds up to `longest` of its own."""
    made: list[PackedCall] = []
    first = 0
    for _ in range(count):
        past = made[random.integers(len(made))].token_ids if made else np.empty(0, np.int32)
        kept = past[: (0, len(past), random.integers(len(past) + 1))[random.integers(3)]]
        fresh = random.integers(0, 50, random.integers(2, longest + 2)).astype(np.int32)
        made.append(PackedCall(np.concatenate([kept, fresh]), 1, first))
        first += len(kept) + len(fresh) - 1
    return made


def tree_of(calls: list[PackedCall], packing: Packing = Packing.TREE) -> PrefixTree:
    [tree] = micro_batches(arrange(calls, packing, Sharing.BATCH), 10**9)
    return tree


@st.composite
def parts(draw: st.DrawFn, longest: int = 12, count: int = 8) -> tuple[PrefixTree, MicroBatch]:
    """A tree and one of its chunks, often with a context."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tree = tree_of(random_calls(random, draw(st.integers(1, count)), longest), draw(st.sampled_from(list(Packing))))
    cut = chunks(tree, draw(st.integers(1, len(tree))))
    return tree, draw(st.sampled_from(cut))


def shapes(longest: int = 12, count: int = 8, ahead: bool = False) -> st.SearchStrategy[Shape]:
    """ahead: often with nodes that see each other, as placeholders of one image."""
    made = parts(longest, count).map(lambda part: Shape.of(part[1]))
    return st.builds(with_images, made, st.integers(0, 2**32 - 1)) if ahead else made


def with_images(shape: Shape, seed: int) -> Shape:
    """The shape with up to two stretches in each run whose nodes all see each other; seed 0: without."""
    random, ends = np.random.default_rng(seed), np.arange(shape.nodes) + shape.context + 1
    for start, end, _ in runs(shape) if seed else []:
        if start >= shape.context:
            a, b, c, d = sorted(random.integers(start, end + 1, 4) - shape.context)
            ends[a:b], ends[c:d] = b + shape.context, d + shape.context
    return replace(shape, ahead=torch.from_numpy(ends)) if seed else shape


def chain(nodes: int, context: int = 0) -> Shape:
    """One sequence without a branch."""
    return Shape(torch.arange(context + nodes), torch.full((context + nodes,), context + nodes), context)


@dataclass(frozen=True)
class Heads:
    """How many, and how large."""

    query: int = 4
    key: int = 2
    size: int = 4


HEADS = st.sampled_from([Heads(), Heads(3, 3, 2), Heads(6, 1, 8), Heads(1, 1, 1)])


@dataclass(frozen=True)
class Problem:
    """Inputs of attention, and a gradient [T, H, D] of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor
    scale: float
    window: int | None
    sinks: Tensor | None = None
    softcap: float | None = None

    @classmethod
    def of(
        cls,
        shape: Shape,
        heads: Heads = Heads(),
        window: int | None = None,
        scale: float = 0.5,
        dtype: torch.dtype = torch.float64,
        size: float = 1.0,
        sinks: bool = False,
        softcap: float | None = None,
    ) -> "Problem":
        """Drawn from normal distributions; size: of queries and keys."""
        random, nodes, keys = torch.Generator().manual_seed(0), shape.nodes, len(shape.depth)

        def normal(count: int, number: int) -> Tensor:
            return torch.randn(count, number, heads.size, generator=random, dtype=torch.float64).to(dtype)

        query, key = normal(nodes, heads.query) * size, normal(keys, heads.key) * size
        value, upstream = normal(keys, heads.key), normal(nodes, heads.query)
        of_heads = torch.linspace(-2, 3, heads.query, dtype=torch.float64).to(dtype) if sinks else None
        return cls(query, key, value, upstream, scale, window, of_heads, softcap)

    def solve(self, kernel: Kernel, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The output [T, H, D] and the gradients by query, key, value and sinks; dtype: computed in."""
        inputs = [x for x in (self.query, self.key, self.value, self.sinks) if x is not None]
        q, k, v, *sinks = leaves = [x.to(dtype or x.dtype).clone().requires_grad_() for x in inputs]
        out = kernel(q, k, v, self.scale, self.window, sinks[0] if sinks else None, self.softcap)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.upstream.to(out.dtype))]

    def forward(self, kernel: Kernel) -> Tensor:
        return kernel(self.query, self.key, self.value, self.scale, self.window, self.sinks, self.softcap)


def gap(found: Tensor, wanted: Tensor) -> float:
    """The largest difference; infinite for anything but numbers."""
    assert found.shape == wanted.shape
    difference = float((found.double() - wanted.double()).abs().max())
    return difference if difference == difference else float("inf")


def worst(make: Callable[[Shape], Kernel], shape: Shape, problem: Problem) -> float:
    """The largest difference to the reference in output and gradients."""
    found, wanted = problem.solve(make(shape)), problem.solve(Dense(shape))
    return max(gap(f, w) for f, w in zip(found, wanted, strict=True))


class Made(TorchDispatchMode):
    """Every tensor that an operator returns while this is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tensors.extend(x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor))
        return out
