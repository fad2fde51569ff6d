"""Tiny Hugging Face models, recorded groups of every shape, and references that know nothing of packing."""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from treadle.core.errors import Cause
from treadle.core.support import Support
from treadle.core.types import (
    Failure,
    Group,
    Ids,
    SamplingParams,
    Status,
    Step,
    StopReason,
    Task,
    Trajectory,
    group_id,
    trajectory_id,
)
from treadle.models.weights import whole

VOCABULARY = 32

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from uniform
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-untied": {"model_type": "qwen3", "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2"},
    "llama": {"model_type": "llama"},
    "mistral-sliding": {"model_type": "mistral", "sliding_window": 5},
    "qwen2-half-sliding": dict(model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "gemma3-half-sliding": dict(
        model_type="gemma3_text", sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
}
SLIDING = [name for name in FAMILIES if "sliding" in name]
_LATENT: dict[str, Any] = {  # values smaller than keys
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
}
# Trained, but not what the tests of engines and files go through.
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek-latent": {**_LATENT, "model_type": "deepseek_v3"},
    "qwen3-moe": dict(
        model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True
    ),
    "phi3": {"model_type": "phi3"},
    "olmo2": {"model_type": "olmo2"},
    "olmo3-half-sliding": dict(
        model_type="olmo3", sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
    "granite": {
        "model_type": "granite",
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "gemma3-capped": dict(
        model_type="gemma3_text", final_logit_softcapping=1.5, layer_types=["full_attention", "full_attention"]
    ),
    "gemma2-half-sliding": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt-oss-half-sliding": dict(
        model_type="gpt_oss",
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
    ),
    "glm4-moe-lite": {**_LATENT, "model_type": "glm4_moe_lite"},
    "nemotron": {"model_type": "nemotron"},
    "stablelm": {"model_type": "stablelm"},
}
_DELTA: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
)
_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True)
# Layers with a state beside attention: gated delta nets, Kimi delta attention, Mamba 2, short convolutions.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3-5": {"model_type": "qwen3_5_text", **_DELTA},
    "qwen3-next": {"model_type": "qwen3_next", "shared_expert_intermediate_size": 12, **_DELTA, **_EXPERTS},
    "olmo-hybrid": {"model_type": "olmo_hybrid", **_DELTA},
    "kimi-linear": {
        **_LATENT,
        "model_type": "kimi_linear",
        "num_local_experts": 4,
        "linear_num_heads": 2,
        "linear_head_dim": 4,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron-h": dict(
        model_type="nemotron_h",
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=4,
        n_groups=2,
        chunk_size=8,
        num_hidden_layers=3,
        layers_block_type=["mamba", "mlp", "attention"],
        time_step_min=1e-9,  # a limit that transformers leaves out where it computes single tokens
    ),
    "granite-hybrid": dict(
        model_type="granitemoehybrid",
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["mamba", "attention"],
        shared_intermediate_size=16,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_chunk_size=8,
    ),
    "bamba": dict(
        model_type="bamba", attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=8
    ),
    "falcon-h1": dict(
        model_type="falcon_h1", mamba_d_state=4, mamba_n_heads=4, mamba_d_head=8, mamba_d_ssm=32, mamba_chunk_size=8
    ),
    "mamba2": {"model_type": "mamba2", "state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "bailing-hybrid": {
        **_LATENT,
        "model_type": "bailing_hybrid",
        "num_local_experts": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "lfm2-moe": {
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 0,
        **_EXPERTS,
    },
}
# Their chunked rule rounds otherwise than the recurrent one, and otherwise where a segment begins elsewhere.
DELTA = ["qwen3-5", "qwen3-next", "olmo-hybrid", "kimi-linear"]
_INDEXED: dict[str, Any] = dict(index_topk=4, index_head_dim=8, index_n_heads=32)  # fewer heads often tie at 0
# Their layers cannot share prefixes: each step is a row of its own.
ROW_FAMILIES: dict[str, dict[str, Any]] = {
    "mamba": {"model_type": "mamba", "state_size": 4},
    "jamba": dict(
        model_type="jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    "deepseek-indexed": {**_LATENT, "model_type": "deepseek_v32", **_INDEXED},
    "glm-indexed": {**_LATENT, "model_type": "glm_moe_dsa", **_INDEXED},
    "deepseek-compressed": {**_LATENT, "model_type": "deepseek_v4", **_INDEXED},
    "llama4-chunked": dict(
        model_type="llama4_text",
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=6,
        intermediate_size_mlp=24,
    ),
    "minimax": dict(
        model_type="minimax",
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "recurrent-gemma": dict(
        model_type="recurrent_gemma",
        lru_width=16,
        attention_window_size=5,
        block_types=["recurrent", "attention"],
        logits_soft_cap=2.0,
    ),
    "bloom": {"model_type": "bloom", "n_head": 4, "n_layer": 2},
    "doge": {"model_type": "doge"},
    "rwkv": {"model_type": "rwkv", "attention_hidden_size": 16},
    "xlstm": dict(model_type="xlstm", num_heads=2, chunk_size=4, output_logit_soft_cap=2.0),
}
_EVERY = {**FAMILIES, **MORE_FAMILIES, **HYBRIDS, **ROW_FAMILIES}


def config_of(family: str, **fields: Any) -> PretrainedConfig:
    config = {**_SIZES, **_EVERY[family], **fields}
    return AutoConfig.for_model(config.pop("model_type"), **config)


def tiny(family: str = "qwen3", seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A model of that family with stock attention, in float32; 2 layers of width 16 unless `fields` say otherwise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(family, **fields))
        for name, parameter in model.named_parameters():
            if "norm" in name:  # 1 everywhere would hide a norm that is left out
                nn.init.normal_(parameter, 0.0 if "gemma" in family else 1.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):  # 0 everywhere would hide one that is not read
                nn.init.normal_(buffer, 0.0, 0.1)
    return cast(PreTrainedModel, model)


@cache
def _doubled(file: str) -> dict[str, Any]:
    """A module of transformers, read anew with float64 where it says float32."""
    stock = sys.modules[file]
    source = inspect.getsource(stock)
    for single, double in (
        ("torch.float32", "torch.float64"),
        (".float()", ".double()"),
        ("torch.float,", "torch.double,"),
    ):
        source = source.replace(single, double)
    read = {**vars(stock)}
    exec(compile(source, read["__file__"], "exec"), read)
    return read


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Make the model float64 throughout: some of its layers compute in float32 whatever its type."""
    for module in model.modules():
        if type(module).__module__.startswith("transformers.models."):
            module.__class__ = _doubled(type(module).__module__)[type(module).__name__]
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default has no float64
    return model.double()


def exact(family: str = "qwen3", seed: int = 0, **fields: Any) -> PreTrainedModel:
    return in_float64(tiny(family, seed, **fields))


# Recorded groups


def make_step(
    prompt: Sequence[int] | Ids,
    completion: Sequence[int] | Ids,
    temperature: float = 1.0,
    mask: Sequence[bool] | None = None,
    logprobs: Sequence[float] | NDArray[np.floating] | None = None,
) -> Step:
    return Step(
        prompt_ids=np.asarray(prompt, np.int32),
        completion_ids=np.asarray(completion, np.int32),
        logprobs=np.asarray([-1.5] * len(completion) if logprobs is None else logprobs, np.float32),
        policy_versions=np.zeros(len(completion), np.int32),
        sampling=SamplingParams(temperature=temperature),
        stop_reason=StopReason.STOP,
        mask=None if mask is None else np.asarray(mask, np.bool_),  # type: ignore[arg-type]
    )


def make_trajectory(steps: Sequence[Step], reward: float | None, group: int = 0, attempt: int = 0) -> Trajectory:
    return Trajectory(
        trajectory_id=trajectory_id(group_id(group), attempt),
        task_id=f"task-{group}",
        attempt=attempt,
        steps=tuple(steps),
        reward=reward,
        status=Status.DONE if reward is not None else Status.FAILED,
        failure=None if reward is not None else Failure(Cause.ENVIRONMENT, "played to fail"),
    )


def make_group(trajectories: Sequence[tuple[Sequence[Step], float | None]], index: int = 0) -> Group:
    made = [make_trajectory(steps, reward, index, number) for number, (steps, reward) in enumerate(trajectories)]
    return Group(group_id(index), index, 0, index, Task(f"task-{index}"), tuple(made))


def each_step(change: Callable[[Step], Step], groups: Sequence[Group]) -> list[Group]:
    """The groups with each step changed."""
    return [
        replace(g, trajectories=tuple(replace(t, steps=tuple(map(change, t.steps))) for t in g.trajectories))
        for g in groups
    ]


ROUTINGS = ("absent", "empty", "short", "whole")


@st.composite
def routed(
    draw: st.DrawFn, groups: list[Group], layers: int = 2, top_k: int = 2, experts: int = 4, choices: int = 3
) -> list[Group]:
    """The groups with routing: of all sampled tokens of a step, of the first ones, of no token, or none; few different
    ones, so that steps often agree. choices: how many."""
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    pool = random.random((choices, layers, experts)).argsort(-1)[..., :top_k]

    def of(step: Step) -> Step:
        how, tokens = draw(st.sampled_from(ROUTINGS)), len(step.completion_ids)
        if how == "absent":
            return step
        rows = {"empty": 0, "short": int(random.integers(0, tokens + 1)), "whole": tokens}[how]
        return replace(step, routing=pool[random.integers(0, choices, rows)].astype(np.int16))

    return each_step(of, groups)


REWARDS: tuple[float | None, ...] = (0.0, 1.0, 0.7, -2.5, None)
TEMPERATURES = (1.0, 0.6, 1.7, 0.0)
MOVES = ("append", "append", "append to an earlier one", "fork", "again", "leave its completion", "fresh")


@dataclass(frozen=True, slots=True)
class _Draws:
    """Choices from hypothesis (small, shrinking) and token ids from a generator (any will do)."""

    draw: st.DrawFn
    random: np.random.Generator
    vocabulary: int

    def ids(self, low: int, high: int) -> Ids:
        size = self.draw(st.integers(low, high))
        return self.random.integers(0, self.vocabulary, size).astype(np.int32)

    def step(self, steps: Sequence[Step], opening: Ids) -> Step:
        move = self.draw(st.sampled_from(MOVES)) if steps else "open"
        if move == "open":
            prompt = opening
        elif move == "append":
            prompt = np.concatenate([steps[-1].full_ids, self.ids(0, 4)])
        elif move == "append to an earlier one":
            prompt = np.concatenate([self.draw(st.sampled_from(list(steps))).full_ids, self.ids(0, 3)])
        elif move == "fork":
            past = self.draw(st.sampled_from(list(steps))).full_ids
            prompt = np.concatenate([past[: self.draw(st.integers(1, len(past)))], self.ids(0, 3)])
        elif move in ("again", "leave its completion"):
            prompt = self.draw(st.sampled_from(list(steps))).prompt_ids
        else:
            prompt = self.ids(1, 6)
        completion = self.ids(0, 5)
        if move in ("again", "leave its completion"):
            past = next(step for step in steps if step.prompt_ids is prompt).completion_ids
            kept = len(past) if move == "again" else self.draw(st.integers(0, len(past)))
            completion = np.concatenate([past[:kept], completion[: 0 if move == "again" else 2]])
        temperature = self.draw(st.sampled_from(TEMPERATURES))
        partial = temperature > 0 and self.draw(st.booleans())
        mask = self.random.random(len(completion)) < 0.6 if partial else None
        return make_step(
            prompt,
            completion,
            temperature,
            None if mask is None else mask.tolist(),
            (-self.random.exponential(2.0, len(completion))).tolist(),
        )

    def trajectory(self, opening: Ids, max_steps: int) -> list[Step]:
        steps: list[Step] = []
        for _ in range(self.draw(st.integers(0, max_steps))):
            steps.append(self.step(steps, opening))
        return steps


@st.composite
def ragged_groups(
    draw: st.DrawFn, max_groups: int = 3, max_size: int = 4, max_steps: int = 8, vocabulary: int = VOCABULARY
) -> list[Group]:
    """Groups of trajectories of 0 .. max_steps steps: appended, forked and fresh prompts, completions that are
    repeated, left halfway, cut short or empty, partial masks, greedy steps, every temperature, failed trajectories,
    equal rewards."""
    d = _Draws(draw, np.random.default_rng(draw(st.integers(0, 2**16))), vocabulary)
    groups = []
    for index in range(draw(st.integers(1, max_groups))):
        opening = d.ids(1, 6)
        made = [
            (d.trajectory(opening, max_steps), draw(st.sampled_from(REWARDS)))
            for _ in range(draw(st.integers(1, max_size)))
        ]
        groups.append(make_group(made, index))
    return groups


def random_groups(
    seed: int,
    groups: int = 2,
    size: int = 3,
    steps: int = 3,
    vocabulary: int = VOCABULARY,
    rewards: Sequence[float | None] = (0.0, 1.0, 0.7),
) -> list[Group]:
    """Plain append-only groups, everything trainable: for tests about something else than shapes."""
    random = np.random.default_rng(seed)

    def ids(low: int, high: int) -> Ids:
        return random.integers(0, vocabulary, random.integers(low, high + 1)).astype(np.int32)

    made = []
    for index in range(groups):
        opening = ids(3, 6)
        trajectories: list[tuple[list[Step], float | None]] = []
        for attempt in range(size):
            prompt, recorded = opening, list[Step]()
            for _ in range(steps):
                completion = ids(2, 5)
                recorded.append(make_step(prompt, completion, logprobs=(-random.exponential(2, len(completion)))))
                prompt = np.concatenate([prompt, completion, ids(1, 3)])
            trajectories.append((recorded, rewards[attempt % len(rewards)]))
        made.append(make_group(trajectories, index))
    return made


# References


def step_logprobs(model: PreTrainedModel, step: Step) -> tuple[Tensor, Tensor]:
    """(log-probability, entropy) of each completion token [C] by a plain forward pass of the step alone."""
    ids = torch.from_numpy(step.full_ids.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(step.prompt_ids) - 1 : -1]
    temperature = float(np.float32(step.sampling.temperature or 1.0))  # engines sample at a float32 temperature
    if step.support is not None:
        return _over_supports(logits / temperature, step, step.support)
    distribution = (logits / temperature).log_softmax(-1)
    chosen = distribution.gather(1, torch.from_numpy(step.completion_ids.astype(np.int64))[:, None])[:, 0]
    return chosen, -(distribution.exp() * distribution).sum(-1)


def _over_supports(logits: Tensor, step: Step, support: Support) -> tuple[Tensor, Tensor]:
    """As `step_logprobs`, with all other logits masked."""
    outside = torch.ones_like(logits, dtype=torch.bool)
    for token in range(len(support)):
        outside[token, support[token : token + 1].ids.tolist() or slice(None)] = False
    distribution = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    chosen = distribution.gather(1, torch.from_numpy(step.completion_ids.astype(np.int64))[:, None])[:, 0]
    return chosen, -(distribution.exp() * distribution.masked_fill(outside, 0)).sum(-1)


def cached_logits(model: PreTrainedModel, pieces: Sequence[Tensor]) -> Tensor:
    """Return logits [T, V] of a sequence that transformers computes piece by piece int64[1, n], by its own cache."""
    parameters = inspect.signature(model.forward).parameters
    name = next(name for name in ("cache", "cache_params", "past_key_values") if name in parameters)
    more: dict[str, Any] = {name: DynamicCache(config=model.config), "use_cache": True}
    found, start = [], 0
    for piece in pieces:
        if "position_ids" in parameters:  # some count from 0 again
            more["position_ids"] = torch.arange(start, start + piece.shape[1])[None]
        found.append(model(input_ids=piece, **more).logits[0])
        start += piece.shape[1]
    return torch.cat(found)


def drawn_token(logits: NDArray[np.float64], temperature: float, draw: float) -> tuple[int, float, float]:
    """(token, logprob, distance of the draw from the nearest boundary), by counting up in float64."""
    if temperature == 0:
        return int(logits.argmax()), 0.0, 1.0
    scaled = logits / float(np.float32(temperature))
    logprobs = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    total, bounds = 0.0, []
    for p in np.exp(logprobs):
        total += p
        bounds.append(total)
    token = next(i for i, bound in enumerate(bounds) if bound > draw * total)
    return token, float(logprobs[token]), min(abs(draw * total - b) for b in [0.0, *bounds[:-1]])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter's gradient, whole; zeros where there is none."""
    return {
        name: whole(torch.zeros_like(p) if p.grad is None else p.grad).detach().clone()
        for name, p in model.named_parameters()
    }


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors.values()))


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Euclidean, over all tensors."""
    assert a.keys() == b.keys()
    return norm({name: a[name].double() - b[name].double() for name in a})


def same_bits(a: dict[str, Tensor], *others: dict[str, Tensor]) -> bool:
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for b in others)


def full(array: Any) -> NDArray[np.float64]:
    if isinstance(array, Tensor):
        array = array.detach().cpu().numpy()
    return np.asarray(array, np.float64)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers tells on standard error which faster kernels it lacks."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)
