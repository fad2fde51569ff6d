"""Forward and backward passes under every packing, on workloads of agents; and tree attention alone, on a CPU.

Random weights and ids: the figures depend on shapes alone.

    python -m benchmarks.packing --repeats 1                       # minutes on one core
    python -m benchmarks.packing --hybrid                          # three gated delta nets to one layer of attention
    python -m benchmarks.packing --budget 512                      # trees against chains, a third of one a pass
    python -m benchmarks.packing --device cuda --json packing.json # a random Qwen3 of 0.6B parameters, bfloat16
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.measure import MIB, Row, Table, clock, cpu_seconds, make_parser, median_seconds, peak_bytes, show
from benchmarks.workloads import VOCABULARY, WORKLOADS, Size
from treadle.core.types import Group
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.packing.flat import calls, flatten
from treadle.packing.layout import Packing, Sharing, arrange, chunks
from treadle.packing.tree import PrefixTree
from treadle.training.attention import select
from treadle.training.attention.interface import Shape
from treadle.training.attention.select import visible
from treadle.training.attention.tiles import Tiles
from treadle.training.forward import Forward
from treadle.training.objective import LossGradients, TokenScores

BUDGET = 8192
CPU_MODEL: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}
HYBRID_MODEL: Mapping[str, Any] = {
    **CPU_MODEL,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
CUDA_MODEL: Mapping[str, Any] = {  # the shape of Qwen3-0.6B
    **CPU_MODEL,
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SMALL_MODEL: Mapping[str, Any] = {**CPU_MODEL, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
SMALL = Size(attempts=2, turns=4, system=10, task=4, thinking=6, action=4, observation=6)
CUDA_SIZE = Size(system=768, task=256, thinking=320, action=160, observation=320)
CUDA_BUDGETS = (8192, 32768)
CUDA_KERNELS = ("varlen", "flex")  # those of `select.KERNELS` that need a GPU

Way = tuple[Packing, Sharing]
WAYS: Mapping[str, Way] = {
    "step": (Packing.STEP, Sharing.GROUP),
    "chain": (Packing.CHAIN, Sharing.GROUP),
    "tree, trajectory": (Packing.TREE, Sharing.TRAJECTORY),
    "tree, group": (Packing.TREE, Sharing.GROUP),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print all tables."""
    parser = make_parser(__doc__, repeats=3, threads=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--budget", type=int, help="only compare trees with chains, with so many tokens a pass, on a CPU"
    )
    parser.add_argument("--hybrid", action="store_true", help="a model with recurrent layers, on a CPU")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("--device cuda: this torch sees no CUDA device")
        show(options.json, *(cuda_table(budget, options.repeats) for budget in CUDA_BUDGETS))
        return
    torch.set_num_threads(options.threads)
    size, lengths = (SMALL, (64,)) if options.small else (Size(), (2048, 4096, 8192))
    model = _model(SMALL_MODEL if options.small else HYBRID_MODEL if options.hybrid else CPU_MODEL)
    if options.budget:
        show(options.json, against_chains(Forward(model, options.budget), options.repeats, replace(size, attempts=3)))
        return
    table = packings(Forward(model, BUDGET), options.repeats, size)
    show(options.json, *((table,) if options.hybrid else (table, attention(options.repeats, lengths))))


def cuda_table(budget: int, repeats: int) -> Table:
    """Measure every packing on a GPU, with micro-batches of that budget."""
    forward, others = _on_cuda(budget)
    return packings(forward, repeats, CUDA_SIZE, others)


def cuda_rows(budget: int, repeats: int, size: Size) -> Iterator[Row]:
    """Yield the rows of such a table as they are measured."""
    forward, others = _on_cuda(budget)
    for name, make in WORKLOADS.items():
        yield from _compare(name, make(size), forward, repeats, others)


def _on_cuda(budget: int) -> tuple[Forward, Mapping[str, Forward]]:
    model = _model(CUDA_MODEL).bfloat16().cuda()  # type: ignore[call-arg]  # a wrapper hides the signature
    others = {name: Forward(model, budget, True, make_kernel=select.KERNELS[name]) for name in CUDA_KERNELS}
    return Forward(model, budget, True), others


def _model(build: Mapping[str, Any]) -> PreTrainedModel:
    return make_model(ModelConfig(build=dict(build), tokenizer="demo"), VOCABULARY, seed=0)


def packings(forward: Forward, repeats: int, size: Size, others: Mapping[str, Forward] = MappingProxyType({})) -> Table:
    """Measure every workload under every packing.

    others: the same model with other kernels, for tree packing by group.
    """
    rows = [row for name, make in WORKLOADS.items() for row in _compare(name, make(size), forward, repeats, others)]
    peak = "peak: tensor memory of the largest micro-batch beyond weights and gradients"
    return Table("packing", f"{_note(forward, repeats, 'layout, forward and backward pass')}, {peak}", rows)


def against_chains(forward: Forward, repeats: int, size: Size) -> Table:
    """Measure every workload as chains and as trees, in turns: forward and backward pass."""
    rows: list[Row] = []
    for workload, make in WORKLOADS.items():
        batch = flatten(make(size))
        plans = {name: forward.trees(calls(batch), *way) for name, way in WAYS.items() if name != "step"}
        runs = {name: partial(_differentiate, forward, trees, len(batch)) for name, trees in plans.items()}
        seconds = cpu_seconds(runs, repeats)
        for name, trees in plans.items():
            rows.append(
                {
                    "workload": workload,
                    "packing": name,
                    "tokens computed": sum(map(len, trees)),
                    "passes": sum(map(forward.passes, trees)),
                    "CPU s": seconds[name],
                    "times chain": seconds["chain"] / seconds[name],
                }
            )
    return Table("trees against chains", _note(forward, repeats, "forward and backward pass"), rows)


def _compare(
    workload: str, groups: Sequence[Group], forward: Forward, repeats: int, others: Mapping[str, Forward]
) -> list[Row]:
    batch = flatten(groups)
    packed, device = calls(batch), forward.model.device
    plans: dict[str, tuple[Forward, Way]] = {name: (forward, way) for name, way in WAYS.items()}
    if len(groups) > 1:
        plans["tree, batch"] = (forward, (Packing.TREE, Sharing.BATCH))
    plans |= {f"tree, group, {name}": (other, WAYS["tree, group"]) for name, other in others.items()}
    laid_out = {name: model.trees(packed, *way) for name, (model, way) in plans.items()}
    for parameter in forward.model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # before the first pass, whose peak would include them
    # the peak of the micro-batch with the most nodes and pairs; this pass also warms up
    largest = {name: max(trees, key=lambda tree: len(tree) + len(tree.flat)) for name, trees in laid_out.items()}
    peaks = {
        name: peak_bytes(partial(_differentiate, model, [largest[name]], len(batch)), device)
        for name, (model, _) in plans.items()
    }

    def update(model: Forward, way: Way) -> None:
        _differentiate(model, model.trees(packed, *way), len(batch))

    seconds = median_seconds({name: partial(update, *plan) for name, plan in plans.items()}, repeats, clock(device))
    rows: list[Row] = []
    for name, trees in laid_out.items():
        lengths = [np.diff(np.flatnonzero(tree.depth == 0), append=len(tree)) for tree in trees]
        rows.append(
            {
                "workload": workload,
                "packing": name,
                "sequences": sum(map(len, lengths)),
                "longest row": max(int(length.max()) for length in lengths),
                "trained tokens": len(batch),
                "tokens computed": sum(map(len, trees)),
                "s" if device.type == "cuda" else "CPU s": seconds[name],
                "peak MiB": peaks[name] / MIB,
                "times step": seconds["step"] / seconds[name],
                "times chain": seconds["chain"] / seconds[name],
            }
        )
    return rows


def _differentiate(forward: Forward, trees: Sequence[PrefixTree], tokens: int) -> None:
    temperature = torch.ones(tokens, device=forward.model.device)
    for tree in trees:
        forward.backward(tree, temperature, _gradient)


def _gradient(scores: TokenScores) -> LossGradients:
    return LossGradients(torch.full_like(scores.logp, 1e-4))


def _note(forward: Forward, repeats: int, timed: str) -> str:
    model, text = forward.model, forward.model.config.get_text_config()
    cuda = model.device.type == "cuda"
    parts = [
        f"{text.model_type} of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters",
        f"{text.num_hidden_layers} layers of width {text.hidden_size}, random weights",
        str(model.dtype).removeprefix("torch."),
        *(["gradient checkpointing"] if cuda else []),
        f"micro-batches of {forward.budget} tokens",
        timed,
        f"median of {repeats}",
        torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} thread(s)",
    ]
    return ", ".join(parts)


# --- attention alone ---

HEADS, KEY_HEADS, HEAD_SIZE = 8, 4, 64


def attention(repeats: int, lengths: Sequence[int]) -> Table:
    """Compare one layer's tree attention with a dense mask and with plain causal attention of as many tokens."""
    rows = [_attention(length, repeats) for length in lengths]
    note = (
        f"{HEADS} heads, {KEY_HEADS} of keys, of size {HEAD_SIZE}, float32, forward and backward pass, the first "
        f"nodes of a group's tree (20% drift), masks and plans made before, median of {repeats}"
    )
    return Table("attention alone", note, rows)


def _attention(nodes: int, repeats: int) -> Row:
    groups = WORKLOADS["20% drift"](replace(Size(), attempts=nodes // 1000 + 2))
    arranged = arrange(calls(flatten(groups)), Packing.TREE)
    shape = Shape.of(chunks(PrefixTree.of(arranged.calls, arranged.shared), nodes)[0])
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(nodes, heads, HEAD_SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    leaves = tuple(x.requires_grad_() for x in (query, key, value))
    tree = partial(Tiles(shape), scale=HEAD_SIZE**-0.5, window=None)
    ways = {"tree": tree, "dense mask": partial(_stock, visible(shape, None)), "plain causal": partial(_stock, None)}

    def differentiate(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(attend(*leaves), leaves, gradient)

    seconds = cpu_seconds({name: partial(differentiate, attend) for name, attend in ways.items()}, repeats)
    return {
        "tokens": nodes,
        **{f"{name} ms": 1e3 * seconds[name] for name in ways},
        "times dense": seconds["dense mask"] / seconds["tree"],
        "times causal": seconds["plain causal"] / seconds["tree"],
    }


def _stock(mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's own attention: under the mask, or causal without one."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


if __name__ == "__main__":
    main()
