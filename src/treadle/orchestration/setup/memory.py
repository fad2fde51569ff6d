"""How much memory a run needs, by what holds it, and how much this machine has.

Letters: P weights of the model, A of its adapters, R of the reference; T tokens of a micro-batch, L layers, h hidden
size, i intermediate size, q and k widths of all query and of all key heads, V vocabulary.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from treadle.models.weights import published, trained, unique_weights
from treadle.orchestration.config import RunConfig
from treadle.training.lm_head import CHUNK_BYTES

_FLOAT32 = 4
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Memory of one part of a run: `MemoryPart("gradients", 538_060_032, "4 bytes x P")`."""

    name: str
    bytes: int
    formula: str


def estimate_memory(config: RunConfig, model: PreTrainedModel, reference: PreTrainedModel | None) -> list[MemoryPart]:
    """Estimate what the run's own processes need at their peak, in bytes; servers of vLLM are not among them.

    model, reference: shapes suffice. Weights and optimizer, of all ranks together, are exact, the engine's cache is
    what it may grow to, and activations are an estimate for decoders with gated MLPs (those of Llama and Qwen: 2% below
    to 25% above what autograd keeps).
    """
    moved = sum(p.numel() for _, p in trained(model)) * _FLOAT32
    served = sum(t.numel() for _, t in published(model)) * _FLOAT32
    lora = config.training.lora is not None
    base = sum(t.numel() for t in unique_weights(model).values()) * _FLOAT32 - served if lora else 0
    if config.training.precision == "bfloat16_pure":
        base //= 2
    weights, letter = base + served, "A" if lora else "P"
    ranks, resident = config.placement.learner.ranks, _resident_bytes()
    parts = [
        MemoryPart("Python and libraries", resident, "of this process now"),
        *([MemoryPart("those of the ranks", ranks * resident, f"{ranks} x as much as this process now")] * (ranks > 1)),
        MemoryPart("weights", weights, "of the base, and 4 bytes x A" if lora else "4 bytes x P"),
        MemoryPart("gradients", moved, f"4 bytes x {letter}"),
        MemoryPart("AdamW's moments", 2 * moved, f"8 bytes x {letter}"),
    ]
    if config.algorithm.kl is not None:
        other = model if reference is None else reference
        size = sum(t.numel() for _, t in published(other)) * _FLOAT32
        parts.append(MemoryPart("reference", size, "4 bytes x R" if reference else f"4 bytes x {letter}, a copy"))
    return [*parts, *_engine_parts(config, model, base, served), *_activations(config, model)]


def checkpoint_size(config: RunConfig, model: PreTrainedModel, reference: PreTrainedModel | None) -> int:
    """About how many bytes a checkpoint takes on disk: weights, two moments, the reference if there is one."""
    beside = () if config.algorithm.kl is None else (model if reference is None else reference,)
    modules = (model, *beside)
    moments = 2 * sum(parameter.numel() for _, parameter in trained(model))
    return _FLOAT32 * (moments + sum(t.numel() for module in modules for _, t in published(module)))


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(file.read_text()))
    return min(limits)


def _resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _engine_parts(config: RunConfig, model: PreTrainedModel, base: int, served: int) -> list[MemoryPart]:
    """base: of adapters, which an engine in the learner's process shares if it has the same type."""
    engine, size = config.engine, 4 if config.engine.dtype == "float32" else 2
    letter, copy = "A" if base else "P", served * size // _FLOAT32
    if engine.kind != "torch":
        return [MemoryPart("weights on their way to the engine", copy, f"{size} bytes x {letter}")]
    apart = engine.own_process or config.placement.learner.ranks > 1
    half = config.training.precision == "bfloat16_pure"
    if apart or half != (size == 2):
        copy += base * size // (2 if half else _FLOAT32)
    parts = [MemoryPart("the engine's weights", copy, "its base and adapters" if base else f"{size} bytes x P")]
    if apart:
        parts.append(MemoryPart("weights on their way to it", served, f"4 bytes x {letter}"))
    widths = _widths(model.config.get_text_config())
    if widths is not None:
        longest = config.rollout.max_input_tokens + config.rollout.max_completion_tokens
        limit = int(engine.cache_gib * 2**30)
        sessions = max(engine.batch, config.training.tasks_per_update * config.training.group_size)
        cache = min(limit, sessions * longest * widths.layers * 2 * widths.keys * size)
        formula = f"at most {sessions} sessions x {longest} tokens x L x 2k x {size} bytes, and {limit / 2**30:g} GiB"
        parts.append(MemoryPart("the engine's KV cache", cache, formula))
    return parts


def _activations(config: RunConfig, model: PreTrainedModel) -> list[MemoryPart]:
    """What the backward pass keeps of the forward pass, on all ranks."""
    text, training, ranks = model.config.get_text_config(), config.training, config.placement.learner.ranks
    tokens, each = training.max_tokens_per_microbatch, f"{ranks} ranks x " if ranks > 1 else ""
    logits = ranks * 4 * min(CHUNK_BYTES, tokens * int(text.vocab_size) * _FLOAT32)
    parts = [MemoryPart("logits", logits, f"{each}4 x min(T x V x 4 bytes, {CHUNK_BYTES / 2**20:g} MiB)")]
    if (widths := _widths(text)) is not None:
        layer = 8 * widths.hidden + 4 * widths.intermediate + 3 * widths.queries + 4 * widths.keys
        kept, formula = widths.layers * layer, "T x L x (8h + 4i + 3q + 4k) x 4 bytes"
        if training.gradient_checkpointing:
            kept, formula = widths.layers * widths.hidden + layer, "T x (L h + 8h + 4i + 3q + 4k) x 4 bytes"
        size = ranks * tokens * kept * _FLOAT32
        parts.append(MemoryPart("activations", size, f"about {each}{formula}, T {tokens}"))
    return parts


@dataclass(frozen=True, slots=True)
class _Widths:
    """L, h, i (of all experts of a token), q and k."""

    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int


def _widths(text: PretrainedConfig) -> _Widths | None:
    """A decoder's widths; None if its configuration does not have them."""

    def number(*names: str) -> int | None:
        first: Any = next((value for name in names if (value := getattr(text, name, None)) is not None), None)
        return first if isinstance(first, int) else None

    layers, hidden = number("num_hidden_layers"), number("hidden_size")
    intermediate, heads = number("intermediate_size"), number("num_attention_heads")
    if layers is None or hidden is None or intermediate is None or not heads:
        return None
    if expert := number("moe_intermediate_size"):
        intermediate = expert * (number("num_experts_per_tok") or 1)
    head = number("head_dim") or hidden // heads
    return _Widths(layers, hidden, intermediate, heads * head, (number("num_key_value_heads") or heads) * head)
