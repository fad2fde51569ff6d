"""Forward and backward passes under every packing, on workloads of agents; and what bounded memory costs.

Random weights and ids: the figures depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from treadle.benchmarks import kernels
from treadle.benchmarks.meter import MIB, clock, peak_bytes
from treadle.benchmarks.report import Report, Reports, Row, median_seconds
from treadle.benchmarks.workloads import CLASSIC, VOCABULARY, WORKLOADS, Size
from treadle.core.errors import ConfigError
from treadle.core.types import Group
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.packing.flat import PackedCall, calls, flatten
from treadle.packing.layout import Packing, Sharing, arrange, micro_batches
from treadle.packing.tree import PrefixTree
from treadle.training.attention import select
from treadle.training.attention.interface import Kernel, Shape
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
CUDA_SIZE = Size(system=768, task=256, thinking=320, action=160, observation=320)
CUDA_BUDGETS = (8192, 32768)
CUDA_KERNELS = ("varlen", "flex")  # those of `select.KERNELS` that need a GPU

MakeKernel = Callable[[Shape], Kernel]
Way = tuple[Packing, Sharing]
WAYS: Mapping[str, Way] = {
    "step": (Packing.STEP, Sharing.GROUP),
    "chain": (Packing.CHAIN, Sharing.GROUP),
    "tree, trajectory": (Packing.TREE, Sharing.TRAJECTORY),
    "tree, group": (Packing.TREE, Sharing.GROUP),
}


def measure(threads: int, repeats: int, device: str = "cpu") -> Reports:
    """Measure all tables. Raises ConfigError if this torch does not see the device."""
    if device == "cuda":
        return _measure_cuda(repeats)
    torch.set_num_threads(threads)
    model = _model(CPU_MODEL, VOCABULARY)
    tables = [
        packings(Forward(model, BUDGET), repeats, Size()),
        recomputed(Size()),
        streaming(model, repeats, Size()),
        kernels.attention(repeats),
        kernels.logprobs(),
    ]
    return Reports("packing", tables)


def _measure_cuda(repeats: int) -> Reports:
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch sees no CUDA device")
    model = _model(CUDA_MODEL, VOCABULARY).bfloat16().cuda()  # type: ignore[call-arg]  # a wrapper hides the signature
    chosen = {name: select.KERNELS[name] for name in CUDA_KERNELS}
    tables = []
    for budget in CUDA_BUDGETS:
        others = {name: Forward(model, budget, True, make_kernel=make) for name, make in chosen.items()}
        tables.append(packings(Forward(model, budget, True), repeats, CUDA_SIZE, others))
    return Reports("packing", tables)


def _model(build: Mapping[str, Any], vocabulary: int) -> PreTrainedModel:
    return make_model(ModelConfig(build=dict(build), tokenizer="demo"), vocabulary, seed=0)


def packings(
    forward: Forward, repeats: int, size: Size, others: Mapping[str, Forward] = MappingProxyType({})
) -> Report:
    """Measure every workload under every packing.

    others: the same model with other kernels, for tree packing by group.
    """
    rows: list[Row] = []
    for workload, make in WORKLOADS.items():
        rows += _compare(workload, make(size), forward, repeats, others)
    return Report("packing", _note(forward, repeats), rows)


def _compare(
    workload: str, groups: Sequence[Group], forward: Forward, repeats: int, others: Mapping[str, Forward]
) -> list[Row]:
    batch = flatten(groups)
    found, device = calls(batch), forward.model.device
    plans: dict[str, tuple[Forward, Way]] = {name: (forward, way) for name, way in WAYS.items()}
    if len(groups) > 1:
        plans["tree, batch"] = (forward, (Packing.TREE, Sharing.BATCH))
    plans |= {f"tree, group, {name}": (other, WAYS["tree, group"]) for name, other in others.items()}
    laid_out = {name: own.trees(found, *way) for name, (own, way) in plans.items()}
    _zero_gradients(forward.model)
    peaks = {name: _peak(own, laid_out[name], len(batch)) for name, (own, _) in plans.items()}  # warms up, too
    runs = {name: partial(_pass, own, found, way, len(batch)) for name, (own, way) in plans.items()}
    seconds = median_seconds(runs, repeats, clock(device))
    rows: list[Row] = []
    for name, trees in laid_out.items():
        starts = [np.flatnonzero(tree.depth == 0) for tree in trees]
        rows.append(
            {
                "workload": workload,
                "packing": name,
                "sequences": sum(map(len, starts)),
                "longest row": max(
                    int(np.diff(start, append=len(tree)).max()) for start, tree in zip(starts, trees, strict=True)
                ),
                "trained tokens": len(batch),
                "tokens computed": sum(map(len, trees)),
                _seconds(device): seconds[name],
                "peak MiB": peaks[name] / MIB,
                "times step": seconds["step"] / seconds[name],
                "times chain": seconds["chain"] / seconds[name],
            }
        )
    return rows


def _pass(forward: Forward, found: Sequence[PackedCall], way: Way, tokens: int) -> None:
    """Lay out, forward, backward: what an update is but for the optimizer."""
    _differentiate(forward, forward.trees(found, *way), tokens)


def _peak(forward: Forward, trees: Sequence[PrefixTree], tokens: int) -> int:
    """Return the peak of the micro-batch with the most nodes and pairs; they are computed one after the other."""
    largest = max(trees, key=lambda tree: len(tree) + len(tree.flat))
    return peak_bytes(partial(_differentiate, forward, [largest], tokens), forward.model.device)


def _differentiate(forward: Forward, trees: Sequence[PrefixTree], tokens: int) -> None:
    temperature = torch.ones(tokens, device=forward.model.device)
    for tree in trees:
        forward.backward(tree, temperature, _gradient)


def _gradient(scores: TokenScores) -> LossGradients:
    return LossGradients(torch.full_like(scores.logp, 1e-4))


def _zero_gradients(model: PreTrainedModel) -> None:
    """Make the gradients before the first pass, whose peak would include them otherwise."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def _seconds(device: torch.device) -> str:
    return "s" if device.type == "cuda" else "CPU s"


def _note(forward: Forward, repeats: int) -> str:
    model, text = forward.model, forward.model.config.get_text_config()
    cuda = model.device.type == "cuda"
    parts = [
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M-parameter Qwen3 ({text.num_hidden_layers} layers, "
        f"hidden size {text.hidden_size}, random weights, {str(model.dtype).removeprefix('torch.')})",
        *(["gradient checkpointing"] if cuda else []),
        f"micro-batches of {forward.budget} tokens",
        "layout, forward and backward pass",
        f"median of {repeats}",
        torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} thread(s)",
        "peak: tensor memory of the largest micro-batch beyond weights and gradients",
    ]
    return ", ".join(parts)


# --- bounded memory ---


def recomputed(size: Size, budgets: Sequence[int] = (2048, 4096, 8192)) -> Report:
    """Count the tokens that tree packing by group computes more than once because micro-batches are cut."""
    rows: list[Row] = []
    for workload, make in CLASSIC.items():
        arranged = arrange(calls(flatten(make(size))), Packing.TREE, Sharing.GROUP)
        for budget in budgets:
            trees = micro_batches(arranged, budget)
            tokens = sum(map(len, trees))
            rows.append(
                {
                    "workload": workload,
                    "micro-batch tokens": budget,
                    "micro-batches": len(trees),
                    "unique nodes": arranged.nodes,
                    "tokens computed": tokens,
                    "of unique": tokens / arranged.nodes,
                }
            )
    return Report("packing: tokens computed again", "tree packing by group, no pass", rows)


def streaming(model: PreTrainedModel, repeats: int, size: Size, budgets: Sequence[int] = (1024, 2048)) -> Report:
    """Measure passes over one tree, whole and in chunks."""
    batch = flatten(CLASSIC["20% drift"](size))
    arranged = arrange(calls(batch), Packing.TREE, Sharing.GROUP)
    tree = PrefixTree.of(arranged.calls, arranged.shared)
    widths = (len(tree), *budgets)
    runs = {str(width): partial(_differentiate, Forward(model, width), [tree], len(batch)) for width in widths}
    _zero_gradients(model)
    peaks = {width: peak_bytes(run, model.device) for width, run in runs.items()}  # warms up, too
    seconds = median_seconds(runs, repeats, clock(model.device))
    whole = str(len(tree))
    rows: list[Row] = [
        {
            "nodes at a time": width,
            "chunks": -(-len(tree) // width),
            "nodes": len(tree),
            "CPU s": seconds[str(width)],
            "of whole": seconds[str(width)] / seconds[whole],
            "peak MiB": peaks[str(width)] / MIB,
            "of whole's peak": peaks[str(width)] / peaks[whole],
        }
        for width in widths
    ]
    return Report("packing: streaming", f"the same model, one tree of 20% drift, median of {repeats}", rows)
