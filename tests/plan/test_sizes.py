"""docs/models.md: which models fit one card, by the dry run, from the shapes of their published configurations."""

from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.worlds import ROOT
from treadle.models.lora import adapt
from treadle.plan.config import load_recipe
from treadle.plan.device import settled
from treadle.plan.memory import estimate_memory

HEAD = "| model | weights, 10^9 | all weights, GB | rank 16, GB | fits one card, all weights | rank 16 |"
CARDS = (24, 80)  # GB, of which a tenth is for CUDA itself and gaps between tensors
SETTINGS = ("device=cuda", "training.gradient_checkpointing=true", "engine.cache_gib=4")


def qwen(hidden: int, layers: int, mlp: int, heads: int, keys: int, states: int, tied: bool = True) -> dict[str, Any]:
    return dict(
        model_type="qwen3_5_text",
        vocab_size=248320,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=states,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=tied,
    )


def gemma(version: int, hidden: int, layers: int, mlp: int, heads: int, keys: int, **more: Any) -> dict[str, Any]:
    return dict(
        model_type=f"gemma{version}_text",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        **{"head_dim": 256, "vocab_size": 262208 if version == 3 else 262144, **more},
    )


GPT_OSS: dict[str, Any] = dict(
    model_type="gpt_oss",
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    head_dim=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    num_experts_per_tok=4,
)
GLOBAL: dict[str, Any] = dict(global_head_dim=512, hidden_size_per_layer_input=0, attention_k_eq_v=True)
SIZES: dict[str, tuple[float, dict[str, Any]]] = {  # weights, 10^9, of the language model
    "Qwen3.5-0.8B": (0.75, qwen(1024, 24, 3584, 8, 2, 16)),
    "Qwen3.5-2B": (1.88, qwen(2048, 24, 6144, 8, 2, 16)),
    "Qwen3.5-4B": (4.21, qwen(2560, 32, 9216, 16, 4, 32)),
    "Qwen3.5-9B": (8.95, qwen(4096, 32, 12288, 16, 4, 32, tied=False)),
    "Qwen3.5-27B, Qwen3.6-27B": (26.90, qwen(5120, 64, 17408, 24, 4, 48, tied=False)),
    "Qwen3.5-35B-A3B, Qwen3.6-35B-A3B": (
        34.66,
        {
            **qwen(2048, 40, 512, 16, 2, 32, tied=False),
            "model_type": "qwen3_5_moe_text",
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "gpt-oss-20b": (20.91, {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": (116.83, {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}),
    "Gemma 3 270M": (0.27, gemma(3, 640, 18, 2048, 4, 1, vocab_size=262144)),
    "Gemma 3 1B": (1.00, gemma(3, 1152, 26, 6912, 4, 1, vocab_size=262144)),
    "Gemma 3 4B": (3.88, gemma(3, 2560, 34, 10240, 8, 4)),
    "Gemma 3 12B": (11.77, gemma(3, 3840, 48, 15360, 16, 8)),
    "Gemma 3 27B": (27.01, gemma(3, 5376, 62, 21504, 32, 16, head_dim=128)),
    "Gemma 4 E2B": (
        4.63,
        gemma(
            4,
            1536,
            35,
            6144,
            8,
            1,
            global_head_dim=512,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
            layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        ),
    ),
    "Gemma 4 E4B": (7.46, gemma(4, 2560, 42, 10240, 8, 2, global_head_dim=512, num_kv_shared_layers=18)),
    "Gemma 4 26B-A4B": (
        25.23,
        gemma(
            4,
            2816,
            30,
            2112,
            16,
            8,
            **GLOBAL,
            num_global_key_value_heads=2,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
        ),
    ),
    "Gemma 4 31B": (30.70, gemma(4, 5376, 60, 21504, 32, 16, **GLOBAL, num_global_key_value_heads=4)),
    "Nemotron 3 Nano 30B-A3B": (
        31.58,
        dict(
            model_type="nemotron_h",
            vocab_size=131072,
            hidden_size=2688,
            hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            num_attention_heads=32,
            num_key_value_heads=2,
            head_dim=128,
            mamba_num_heads=64,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            intermediate_size=1856,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
            n_routed_experts=128,
            num_experts_per_tok=6,
        ),
    ),
}


def table() -> str:
    return "\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *(row(name) for name in SIZES)])


def row(name: str) -> str:
    weights, whole = needed(name)
    _, adapted = needed(name, "training.lora.rank=16")
    return f"| {name} | {weights:.2f} | {whole:,.1f} | {adapted:,.1f} | {card(whole)} | {card(adapted)} |"


def card(size: float) -> str:
    """The smallest card that holds so many GB."""
    return next((f"{each} GB" for each in CARDS if size <= 0.9 * each), "")


def needed(name: str, *overrides: str) -> tuple[float, float]:
    """10^9 weights of the model, and GB on the GPU."""
    config = settled(load_recipe("smollm2-tools", [*SETTINGS, *overrides]))
    model = without_weights(**SIZES[name][1])
    weights = sum(p.numel() for p in model.parameters())
    if config.training.lora is not None:
        adapt(model, None, config.training.lora, 0, half=False, weights=False)
    return weights / 1e9, sum(part.bytes for part in estimate_memory(config, model, None) if part.on_gpu) / 1e9


def without_weights(model_type: str, **fields: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32)
    return cast(PreTrainedModel, model)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if w < 1 else pytest.mark.slow) for n, (w, _) in SIZES.items()]
)
def test_the_page_says_which_models_fit_a_card(name: str) -> None:
    assert needed(name)[0] == pytest.approx(SIZES[name][0], abs=0.005)
    assert row(name) in (ROOT / "docs" / "models.md").read_text(), "run python -m tests.plan.test_sizes"


if __name__ == "__main__":
    print(table())
