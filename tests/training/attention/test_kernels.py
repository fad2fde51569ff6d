"""Tree attention: the reference, which kernel is chosen, variable-length attention, and what layers may not ask for."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models import tiny
from tests.training.attention.trees import ASKS, HEADS, WINDOWS, Heads, Made, Problem, chain, gap, parts, shapes
from treadle.core.errors import ConfigError
from treadle.models.passing import Passing
from treadle.packing.layout import MicroBatch
from treadle.packing.tree import PrefixTree
from treadle.training.attention.flex import Flex
from treadle.training.attention.interface import ATTENTION, Past, Shape, Tree, tree_attention
from treadle.training.attention.select import Cuda, Dense, kernel_for, visible
from treadle.training.attention.tiles import Tiles
from treadle.training.attention.varlen import Varlen, _gather, gathered, paths, stretches


def ancestors(tree: PrefixTree) -> list[set[int]]:
    """Of each node, and itself: a node's parent is the last one before it that is one token shorter."""
    found: list[set[int]] = []
    newest: dict[int, int] = {}
    for node, depth in enumerate(tree.depth.tolist()):
        newest[depth] = node
        found.append({node} | (found[newest[depth - 1]] if depth else set()))
    return found


@pytest.mark.parametrize("window", WINDOWS)
@given(part=parts())
def test_a_node_sees_its_ancestors_and_itself(window: int | None, part: tuple[PrefixTree, MicroBatch]) -> None:
    tree, batch = part
    nodes = range(batch.start, batch.start + len(batch.token_ids))
    above = ancestors(tree)
    assert visible(Shape.of(batch), window).tolist() == [
        [
            key in above[node] and (window is None or tree.depth[node] - tree.depth[key] < window)
            for key in [*batch.context.tolist(), *nodes]
        ]
        for node in nodes
    ]


@pytest.mark.parametrize(("sinks", "softcap"), [(False, None), *ASKS])
def test_it_is_the_softmax_of_scaled_scores(sinks: bool, softcap: float | None) -> None:
    """By hand, without torch's attention: two query heads to one key head."""
    shape = chain(5, context=2)
    problem = Problem.of(shape, window=3, scale=0.7, sinks=sinks, softcap=softcap)
    q, k, v = (x.numpy() for x in (problem.query, problem.key, problem.value))
    out = np.zeros(q.shape)
    for node in range(5):
        for head in range(4):
            keys = range(max(0, node + 2 - 2), node + 3)
            scores = np.array([0.7 * q[node, head] @ k[key, head // 2] for key in keys])
            weights = np.exp(scores if softcap is None else softcap * np.tanh(scores / softcap))
            total = weights.sum() + (0 if problem.sinks is None else np.exp(problem.sinks[head].item()))
            out[node, head] = sum(w * v[key, head // 2] for w, key in zip(weights / total, keys, strict=True))
    assert gap(problem.forward(Dense(shape)), torch.from_numpy(out)) < 1e-14


class Layer(nn.Module):
    """All that tree attention reads of a layer."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.layer_idx, self.is_causal = 1, is_causal


def rows(nodes: int, heads: int) -> Tensor:
    return torch.randn(1, heads, nodes, 4, generator=torch.Generator().manual_seed(nodes), dtype=torch.float64)


def attend(module: nn.Module, tree: Tree, **options: Any) -> Tensor:
    passing = Passing[Tree]()
    with passing.through(module):
        passing.current = tree
        return tree_attention(module, rows(5, 4), rows(5, 2), rows(5, 2), None, **options)[0]


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        (Layer(), {"dropout": 0.1}, r"Layer has attention dropout 0.1; packing needs 0 \(set attention_dropout: 0\)"),
        (Layer(is_causal=False), {}, "Layer is not causal; it cannot be packed"),
    ],
)
def test_what_it_cannot_express_is_refused(layer: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attend(layer, Tree(Dense(chain(5))), **options)


@pytest.mark.parametrize(("scaling", "scale"), [(None, 0.5), (0.3, 0.3)])
def test_the_kernel_gets_the_contexts_keys_before_the_layers_own(scaling: float | None, scale: float) -> None:
    shape = chain(5, context=3)
    earlier = rows(3, 2), rows(3, 2) + 1
    tree = Tree(Dense(shape), Past({0: (rows(3, 2) + 7,) * 2, 1: earlier}), fresh=Past())
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64)
    found = attend(Layer(), tree, scaling=scaling, sliding_window=4, s_aux=sinks, softcap=0.8)
    query, key, value = (x[0].transpose(0, 1) for x in (rows(5, 4), rows(5, 2), rows(5, 2)))
    keys, values = (
        torch.cat([before[0].transpose(0, 1), own]) for before, own in zip(earlier, (key, value), strict=True)
    )
    wanted = Dense(shape)(query, keys, values, scale, 4, sinks, 0.8)
    assert torch.equal(found[0], wanted)
    assert tree.attended == {1: 4}
    assert tree.fresh is not None
    assert all(torch.equal(x[0].transpose(0, 1), own) for x, own in zip(tree.fresh.keys[1], (key, value), strict=True))


# --- half precision ---


class Spy:
    """Notes the precisions that a kernel is called with."""

    def __init__(self, shape: Shape) -> None:
        self.kernel, self.seen = Dense(shape), set[torch.dtype]()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *how: Any, **more: Any) -> Tensor:
        self.seen |= {query.dtype, key.dtype, value.dtype}
        return self.kernel(query, key, value, *how, **more)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3-half-sliding", "gpt-oss-half-sliding"])
@pytest.mark.parametrize("half", [False, True])
def test_kernels_get_one_precision_though_layers_mix_them(family: str, half: bool) -> None:
    """Under autocast rotary embeddings make queries and keys float32, beside values in bfloat16."""
    model, kernel = tiny(family), Spy(chain(5))
    model.set_attn_implementation(ATTENTION)
    fresh, passing = Past(), Passing[Tree]()
    with torch.autocast("cpu", torch.bfloat16, enabled=half), passing.through(model):
        passing.current = Tree(kernel, fresh=fresh)
        model.get_decoder()(input_ids=torch.arange(5)[None], use_cache=False)
    wanted = {torch.bfloat16 if half else torch.float32}
    assert kernel.seen == wanted
    assert {x.dtype for pair in fresh.keys.values() for x in pair} == wanted


@dataclass(frozen=True)
class Named(Exception):
    """A kernel that only says its name."""

    name: str

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        raise self


def fan(trunk: int, leaves: int) -> Shape:
    """A trunk with so many leaves below it."""
    nodes = trunk + leaves
    depth = [*range(trunk), *([trunk] * leaves)]
    return Shape(torch.tensor(depth), torch.tensor([nodes] * trunk + [*range(trunk + 1, nodes + 1)]), 0)


def chosen(shape: Shape, dtype: torch.dtype, size: int = 8, window: int | None = None, **asks: Any) -> str:
    kernel = Cuda(shape, Named("varlen"), Named("flex"))
    with pytest.raises(Named) as caught:
        Problem.of(shape, Heads(size=size), window, dtype=dtype, **asks).forward(kernel)
    return caught.value.name


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(torch.bfloat16, "varlen"), (torch.float16, "varlen"), (torch.float32, "flex"), (torch.float64, "flex")],
)
def test_flash_attention_computes_in_half_precision_only(dtype: torch.dtype, wanted: str) -> None:
    assert chosen(chain(10), dtype) == wanted


@pytest.mark.parametrize(("size", "wanted"), [(8, "varlen"), (12, "flex"), (256, "varlen"), (264, "flex")])
def test_and_for_its_sizes_of_heads(size: int, wanted: str) -> None:
    assert chosen(chain(10), torch.bfloat16, size) == wanted


@pytest.mark.parametrize(("sinks", "softcap"), ASKS)
def test_it_has_neither_sinks_nor_soft_caps(sinks: bool, softcap: float | None) -> None:
    shape = chain(10)
    assert chosen(shape, torch.bfloat16, sinks=sinks, softcap=softcap) == "flex"
    with pytest.raises(ConfigError, match="neither sinks nor soft caps; use FlexAttention"):
        Problem.of(shape, sinks=sinks, softcap=softcap).forward(varlen(shape))


def test_a_tree_of_which_more_than_four_copies_would_be_gathered_is_not() -> None:
    """A leaf's path below a trunk of 20 has 21 keys."""
    assert chosen(fan(20, 4), torch.bfloat16) == "varlen"  # 84 of 96
    assert chosen(fan(20, 5), torch.bfloat16) == "flex"  # 105 of 100
    assert chosen(fan(20, 5), torch.bfloat16, window=19) == "varlen"  # 21 and 4 x 19 of 100


def test_a_cpu_computes_by_tiles_and_a_gpu_by_flash_or_flex_attention() -> None:
    assert kernel_for(torch.device("cpu")) is Tiles
    assert kernel_for(torch.device("mps")) is Dense
    cuda = kernel_for(torch.device("cuda", 1))(chain(3))
    assert isinstance(cuda, Cuda) and isinstance(cuda.varlen, Varlen) and isinstance(cuda.flex, Flex)


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
