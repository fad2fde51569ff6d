"""The memory and disk space that a run needs, estimated before it starts."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from treadle.core.errors import ConfigError
from treadle.core.text import shown_bytes
from treadle.models.states import StateMemory, state_memory
from treadle.models.support import attending_layers, layer_kinds, why_not_packable
from treadle.models.weights import published, rest_of, trained
from treadle.plan.config import RunConfig
from treadle.training.lm_head import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Memory of one part of a run: `MemoryPart("gradients", 538_060_032, "4 bytes x P")`.

    Letters: P weights of the model, A of its adapters, R of the reference, D of the teacher; T tokens of a micro-batch,
    L layers, a of them with attention, m with an MLP, h hidden and i intermediate size, q and k widths of all query and
    of all key heads, V vocabulary. For layers with states, in total (the largest one): S (s) bytes of a sequence's
    states, C (c) bytes kept by autograd per token.
    """

    name: str
    bytes: int
    formula: str
    on_gpu: bool = False


def compare_memory(parts: Sequence[MemoryPart], ranks: int) -> str:
    """Compare needed with available memory on this machine, and on its GPUs, if used. Raises ConfigError."""
    texts: list[str] = []
    lacking: MemoryPart | None = None
    for on_gpu in (True, False):
        there = [part for part in parts if part.on_gpu is on_gpu]
        if not there:
            continue
        needed = sum(part.bytes for part in there)
        available = gpu_memory(ranks) if on_gpu else machine_memory()
        here = "" if available is None else f", of {shown_bytes(available)} here"
        texts.append(f"about {shown_bytes(needed)} {'on the GPU ' if on_gpu else ''}at the peak{here}")
        if available is not None and needed > available:
            lacking = lacking or max(there, key=lambda part: part.bytes)
    text = "; ".join(texts)
    if lacking is not None:
        raise ConfigError(
            f"{text}; most for {lacking.name} ({shown_bytes(lacking.bytes)}): take a smaller model, or lower "
            "training.max_tokens_per_microbatch or engine.batch; training.gradient_checkpointing=true needs less, too"
        )
    return text


_FLOAT32 = 4
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def estimate_memory(
    config: RunConfig,
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    teacher: PreTrainedModel | None = None,
    prompt: int | None = None,
    tower: int = 0,
) -> list[MemoryPart]:
    """Estimate the peak memory of the run's own processes, in bytes; vLLM's servers are not included.

    model, reference, teacher: shapes suffice. prompt: length of the longest one in tokens, if an attempt is a reply to
    it. tower: weights of the part for images, if `model` is without it. Weights and optimizer, of all ranks together,
    are exact, the engine's cache is its maximum size, micro-batches are as large as settings allow, and activations are
    an estimate for decoders with gated MLPs (for Llama and Qwen: 2% below to 25% above the memory kept by autograd).
    Layers with states are measured (`states.state_memory`).
    """
    moved = sum(p.numel() for _, p in trained(model)) * _FLOAT32
    served = sum(t.numel() for _, t in published(model)) * _FLOAT32
    lora = config.training.lora is not None
    unique = {id(t): t.numel() for t in model.state_dict(keep_vars=True).values()}
    base = sum(unique.values()) * _FLOAT32 - served if lora else 0
    if config.training.precision == "bfloat16_pure":
        base //= 2
    weights, letter = base + served, "A" if lora else "P"
    ranks, resident = config.placement.learner.ranks, _resident_bytes()
    host = [MemoryPart("Python and libraries", resident, "this process now")]
    if ranks > 1:
        host.append(MemoryPart("the ranks' own", ranks * resident, f"{ranks} x as much as this process now"))
    if on_gpu := config.device == "cuda":
        host.append(MemoryPart("weights while they are read", 2 * weights, "2 x the learner's, before they are moved"))
    parts = [
        MemoryPart("weights", weights, "the base's, and 4 bytes x A" if lora else "4 bytes x P"),
        MemoryPart("gradients", moved, f"4 bytes x {letter}"),
        MemoryPart("AdamW's moments", 2 * moved, f"8 bytes x {letter}"),
    ]
    if config.algorithm.kl is not None:
        other = model if reference is None else reference
        size = sum(t.numel() for _, t in published(other)) * _FLOAT32
        parts.append(MemoryPart("reference", size, "4 bytes x R" if reference else f"4 bytes x {letter}, a copy"))
    if teacher is not None:
        parts.append(MemoryPart("teacher", sum(p.numel() for p in teacher.parameters()) * _FLOAT32, "4 bytes x D"))
    elif _keeps_teacher(config):
        parts.append(MemoryPart("teacher", served, f"4 bytes x {letter}, a copy"))
    if tower and not config.training.trains_tower:
        parts.append(MemoryPart("tower", tower * _FLOAT32, "4 bytes x its weights, once there is an image"))
    states = state_memory(model, "cuda" if on_gpu and torch.cuda.is_available() else "meta")
    engine, staged = _engine_parts(config, model, base, served, prompt, states)
    parts += [*engine, *_activations(config, model, prompt, states)]
    return [*host, *staged, *(replace(part, on_gpu=on_gpu) for part in parts)]


def checkpoint_size(config: RunConfig, model: PreTrainedModel, reference: PreTrainedModel | None) -> int:
    """Return the approximate size of a checkpoint on disk: weights, two moments, and its reference and teacher."""
    beside = () if config.algorithm.kl is None else (model if reference is None else reference,)
    modules = (model, *beside, *([model] * _keeps_teacher(config)))
    moments = 2 * sum(parameter.numel() for _, parameter in trained(model))
    rest = sum(tensor.nbytes for tensor in rest_of(model).values())
    return rest + _FLOAT32 * (moments + sum(t.numel() for module in modules for _, t in published(module)))


def _keeps_teacher(config: RunConfig) -> bool:
    """Return whether the teacher is an earlier policy, kept in memory and in checkpoints."""
    section = config.algorithm.distillation
    return section is not None and section.teacher is None and section.weights != "current"


def machine_memory() -> int:
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # missing, or "max"
            limits.append(int(file.read_text()))
    return min(limits)


def gpu_memory(number: int) -> int | None:
    """Return the total bytes of this many GPUs on this machine; None if it has fewer."""
    if torch.cuda.device_count() < number:
        return None
    return sum(int(torch.cuda.get_device_properties(n).total_memory) for n in range(number))


def _resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _engine_parts(
    config: RunConfig, model: PreTrainedModel, base: int, served: int, prompt: int | None, states: StateMemory
) -> tuple[list[MemoryPart], list[MemoryPart]]:
    """Return the memory where the engine computes, and the memory in this machine in any case.

    base: size of an adapter's base, which an engine in the learner's process shares if it has the same dtype.
    """
    engine, size = config.engine, 4 if config.engine.dtype_name == "float32" else 2
    letter, copy = "A" if base else "P", served * size // _FLOAT32
    if engine.kind != "torch":
        return [], [MemoryPart("weights on their way to the engine", copy, f"{size} bytes x {letter}")]
    apart = engine.own_process or config.placement.learner.ranks > 1
    half = config.training.precision == "bfloat16_pure"
    if apart or half != (size == 2):
        copy += base * size // (2 if half else _FLOAT32)
    parts = [MemoryPart("the engine's weights", copy, "its base and adapters" if base else f"{size} bytes x P")]
    staged = [MemoryPart("weights on their way to it", served, f"4 bytes x {letter}")] if apart else []
    widths = _widths(model.config)
    if widths is not None:
        longest = config.rollout.longest_call if prompt is None else prompt + config.rollout.max_completion_tokens
        limit, sessions = int(engine.cache_gib * 2**30), _open_attempts(config)
        cache = min(limit, sessions * (longest * widths.cached * size + 2 * states.state))
        each = f"{longest} tokens x a x 2k x {size} bytes"
        each = f"({each} + 2 S)" if states.state else each
        formula = f"at most {sessions} sessions x {each}, and {limit / 2**30:g} GiB"
        parts.append(MemoryPart("the engine's KV cache", cache, formula))
    return parts, staged


def _open_attempts(config: RunConfig) -> int:
    """Return the maximum number of concurrent attempts, in training or an evaluation."""
    plan = config.loop
    size, groups = plan.group_size, plan.max_concurrent_groups
    evaluated = 0 if config.data.held_out is None else plan.evaluated_together
    wanted = plan.groups_per_batch * size
    training = max(wanted, config.engine.batch) if plan.max_staleness else wanted
    return max(training if groups is None else min(training, groups * size), evaluated)


def _tokens_of_pass(config: RunConfig, prompt: int | None) -> int:
    """Return the maximum tokens of one pass: a full micro-batch, or all attempts of an update or of the warm start."""
    training, rollout = config.training, config.rollout
    if config.player.kind in ("agent", "driver"):  # the number of calls is unknown
        return training.max_tokens_per_microbatch
    if prompt is None:
        group = training.group_size * rollout.max_steps * rollout.longest_call
    else:
        shared = training.packing == "tree" and training.sharing != "trajectory"
        prompts = prompt if shared else prompt * training.group_size
        group = prompts + training.group_size * rollout.max_completion_tokens
    warm = 0 if config.warm_start is None else config.warm_start.batch_size * rollout.longest_call
    return min(training.max_tokens_per_microbatch, max(training.tasks_per_update * group, warm))


def _activations(
    config: RunConfig, model: PreTrainedModel, prompt: int | None, states: StateMemory
) -> list[MemoryPart]:
    text, training, ranks = model.config.get_text_config(), config.training, config.placement.learner.ranks
    tokens, each = _tokens_of_pass(config, prompt), f"{ranks} ranks x " if ranks > 1 else ""
    logits = ranks * 4 * min(CHUNK_BYTES, tokens * int(text.vocab_size) * _FLOAT32)
    parts = [MemoryPart("logits", logits, f"{each}4 x min(T x V x 4 bytes, {CHUNK_BYTES / 2**20:g} MiB)")]
    if (widths := _widths(model.config)) is not None:
        block, mlp = 8 * widths.hidden, 4 * widths.intermediate
        attention = [3 * queries + 4 * keys for queries, keys in widths.attention]
        kept = _FLOAT32 * (widths.layers * block + widths.mlps * mlp + sum(attention)) + states.kept
        formula = "T x ((8 L h + 4 m i + a (3q + 4k)) x 4 bytes + C)"
        if training.gradient_checkpointing:
            one = max(_FLOAT32 * max(attention, default=0), states.one_kept)
            kept = _FLOAT32 * (widths.layers * widths.hidden + block + mlp) + one
            formula = "T x ((L h + 8h + 4i) x 4 bytes + the larger of (3q + 4k) x 4 bytes and c)"
        parts.append(MemoryPart("activations", ranks * tokens * kept, f"about {each}{formula}, T {tokens}"))
    if states.state and why_not_packable(model.config) is None:
        ends = _ends_of_pass(config, tokens)
        state = states.one_state if training.gradient_checkpointing else states.state
        formula = f"at most {each}{ends} ends of calls x 2 {'s' if training.gradient_checkpointing else 'S'}"
        parts.append(MemoryPart("states", ranks * ends * 2 * state, formula))
    return parts


def _ends_of_pass(config: RunConfig, tokens: int) -> int:
    """Return the number of calls in a pass with states that others begin with, for completions of maximum length."""
    training, rollout = config.training, config.rollout
    calls = training.tasks_per_update * training.group_size * rollout.max_steps
    return min(calls, max(1, tokens // rollout.max_completion_tokens))


@dataclass(frozen=True, slots=True)
class _Widths:
    """L, m, h and i (of all experts of a token); q and k of each layer with attention."""

    layers: int
    mlps: int
    hidden: int
    intermediate: int
    attention: list[tuple[int, int]]

    @property
    def cached(self) -> int:
        """Return the numbers per token in the engine's cache."""
        return sum(2 * keys for _, keys in self.attention)


def _widths(config: PretrainedConfig) -> _Widths | None:
    text, attending = config.get_text_config(), sorted(attending_layers(config))
    layers, hidden = _number(text, "num_hidden_layers"), _number(text, "hidden_size")
    intermediate = _number(text, "intermediate_size")
    heads = [_heads(text.per_layer_config[layer]) for layer in attending]
    attention = [each for each in heads if each is not None]
    if layers is None or hidden is None or (intermediate is None and attending) or len(attention) < len(attending):
        return None
    # Nemotron-H's blocks with only an MLP.
    blocks = [kind for kind in layer_kinds(text) if kind in ("mlp", "moe")]
    expert = _number(text, "moe_intermediate_size") or (_number(text, "num_local_experts") and intermediate)
    if expert and set(blocks) != {"mlp"}:
        shared = _number(text, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size") or 0
        intermediate = expert * (_number(text, "num_experts_per_tok", "top_k_experts") or 1) + shared
    return _Widths(layers, len(blocks) or layers, hidden, intermediate or 0, attention)


def _heads(layer: PretrainedConfig) -> tuple[int, int] | None:
    """Return q and k of a layer; its configuration may differ from the others'."""
    heads, hidden = _number(layer, "num_attention_heads"), _number(layer, "hidden_size") or 0
    if not heads:
        return None
    size = _number(layer, "head_dim") or hidden // heads
    return heads * size, (_number(layer, "num_key_value_heads") or heads) * size


def _number(config: PretrainedConfig, *names: str) -> int | None:
    """Return the first of these in a configuration."""
    first: Any = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    return first if isinstance(first, int) else None
