"""Parts of a packed pass alone: attention over a tree, and log-probabilities at a large vocabulary. On the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.benchmarks.meter import MIB, peak_bytes
from treadle.benchmarks.report import Report, Row, cpu_seconds
from treadle.benchmarks.workloads import CLASSIC, Size
from treadle.packing.flat import calls, flatten
from treadle.packing.layout import Packing, arrange, chunks
from treadle.packing.tree import PrefixTree
from treadle.training.attention.dense import visible
from treadle.training.attention.interface import Shape
from treadle.training.attention.tiles import Tiles
from treadle.training.lm_head import Head, pair_logprobs

_HEADS, _KEY_HEADS, _HEAD_SIZE = 8, 4, 64
_QWEN = 151_669  # ids of Qwen3's tokenizer


def attention(repeats: int, lengths: Sequence[int] = (2048, 4096, 8192)) -> Report:
    """Compare one layer's tree attention with a dense mask and with plain causal attention of as many tokens."""
    rows = [_attention(length, repeats) for length in lengths]
    note = (
        f"{_HEADS} heads, {_KEY_HEADS} of keys, of size {_HEAD_SIZE}, float32, forward and backward pass, the first "
        f"nodes of a group's tree (20% drift), masks and plans made before, median of {repeats}"
    )
    return Report("packing: attention alone", note, rows)


def branched(nodes: int) -> Shape:
    """Return the first nodes of a group with about a thousand for each attempt."""
    group = CLASSIC["20% drift"](replace(Size(), attempts=nodes // 1000 + 2))
    arranged = arrange(calls(flatten(group)), Packing.TREE)
    return Shape.of(chunks(PrefixTree.of(arranged.calls, arranged.shared), nodes)[0])


def _attention(nodes: int, repeats: int) -> Row:
    shape = branched(nodes)
    tiles, mask = Tiles(shape), visible(shape, None)
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(nodes, heads, _HEAD_SIZE, generator=generator) for heads in (_HEADS, _KEY_HEADS, _KEY_HEADS, _HEADS)
    )
    leaves = tuple(x.requires_grad_() for x in (query, key, value))

    def differentiate(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(attend(*leaves), leaves, gradient)

    taken = cpu_seconds(
        {
            "tree": partial(differentiate, partial(tiles, scale=_HEAD_SIZE**-0.5, window=None)),
            "dense": partial(differentiate, partial(_stock, mask)),
            "causal": partial(differentiate, partial(_stock, None)),
        },
        repeats,
    )
    return {
        "tokens": nodes,
        "tree ms": 1e3 * taken["tree"],
        "dense mask ms": 1e3 * taken["dense"],
        "plain causal ms": 1e3 * taken["causal"],
        "times dense": taken["dense"] / taken["tree"],
        "times causal": taken["causal"] / taken["tree"],
    }


def _stock(mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's own attention: under the mask, or causal without one."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def logprobs(rows: int = 8192, whole_rows: int = 1024, vocabulary: int = _QWEN, hidden_size: int = 256) -> Report:
    """Measure log-probabilities and entropies of many tokens.

    All logits at once, where they fit, and in chunks of rows.
    """
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.nn.Linear(hidden_size, vocabulary, bias=False), scale=1.0, cap=None)
    head.embedding.weight.grad = torch.zeros_like(head.embedding.weight)

    def differentiate(way: Callable[..., tuple[Tensor, Tensor]], count: int) -> None:
        hidden = torch.randn(count, hidden_size, generator=generator, requires_grad=True)
        targets = torch.randint(vocabulary, (count,), generator=generator)
        logp, _ = way(head, hidden, targets, torch.ones(count), False)
        logp.sum().backward()

    table: list[Row] = []
    for name, way, count in (
        ("all at once", _at_once, whole_rows),
        ("in chunks", pair_logprobs, whole_rows),
        ("in chunks", pair_logprobs, rows),
    ):
        started = time.process_time()
        peak = peak_bytes(partial(differentiate, way, count), torch.device("cpu"))
        seconds = time.process_time() - started
        table.append(
            {
                "logits": name,
                "tokens": count,
                "CPU s": seconds,
                "ms per token": 1e3 * seconds / count,
                "peak MiB": peak / MIB,
                "KiB per token": peak / 1024 / count,
            }
        )
    note = f"vocabulary {vocabulary}, hidden size {hidden_size}, float32, forward and backward pass, once each"
    return Report("packing: log-probabilities alone", note, table)


def _at_once(
    head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    distribution = (head(hidden) / temperature[:, None]).log_softmax(-1)
    with torch.set_grad_enabled(entropy_grad):
        entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(1, targets[:, None])[:, 0], entropy
