"""Tiny checkpoints with towers, written by transformers' own classes, and an image prompt for each."""

from importlib.resources import files
from pathlib import Path
from shutil import copy
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

TOKENIZER = Path(str(files("treadle.recipes") / "tokenizer"))
VOCABULARY = 768
IMAGE, START, END, VIDEO = range(764, 768)

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_HALF_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_QWEN: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "patch_size": 4,
    "temporal_patch_size": 2,
}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "text_config": {
            **_TEXT,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
        },
        "vision_config": _QWEN,
        **_QWEN_TOKENS,
    },
    "qwen3_vl": {"text_config": _TEXT, "vision_config": {**_QWEN, "deepstack_visual_indexes": [0]}, **_QWEN_TOKENS},
    "gemma3": {
        "text_config": {**_TEXT, **_HALF_SLIDING},
        "vision_config": _VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            **_HALF_SLIDING,
            "global_head_dim": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 4,
            "num_kv_shared_layers": 0,
        },
        "vision_config": {**_VISION, "head_dim": 8, "num_key_value_heads": 2, "pooling_kernel_size": 2},
        "image_token_id": IMAGE,
        "boi_token_id": START,
        "eoi_token_id": END,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8},
        "spatial_merge_size": 2,
        "image_token_index": IMAGE,
    },
}


def whole(family: str, tied: bool | None = None) -> PreTrainedModel:
    """A model with its tower, as transformers makes it."""
    fields = dict(TOWERS[family])
    if tied is not None:
        text = {**fields["text_config"], "tie_word_embeddings": tied}
        fields |= {"text_config": text, "tie_word_embeddings": tied}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(family, **fields))
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.0, 0.3)
    return cast(PreTrainedModel, model)


def write(directory: Path, family: str, tied: bool | None = None) -> Path:
    """Write such a model's directory, in bfloat16 as they are published; returns it."""
    whole(family, tied).bfloat16().save_pretrained(directory)
    for file in TOKENIZER.iterdir():
        copy(file, directory / file.name)
    (directory / "preprocessor_config.json").write_text('{"size": 16}')
    return directory


def is_of_language(name: str) -> bool:
    """Whether a weight or adapter of that name is of the language model."""
    return "language_model" in name or name == "lm_head.weight"


def original(directory: Path) -> PreTrainedModel:
    """What transformers loads by the class that the directory names, which has no missing and no unexpected names."""
    model, report = AutoModelForMultimodalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return cast(PreTrainedModel, model)


def tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files, by name."""
    found: dict[str, Tensor] = {}
    for path in directory.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def image_logits(model: Any, family: str) -> Tensor:
    """Logits [T, V] of a prompt with an image of 16 patches, 4 of which become a token."""
    ids = torch.tensor([[5, 6, START, IMAGE, IMAGE, IMAGE, IMAGE, END, 7, 8]])
    is_image = (ids == IMAGE).long()
    generator = torch.Generator().manual_seed(0)

    def pixels(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).view(1, 16, 2)
    more: dict[str, dict[str, Tensor]] = {
        "qwen3_5": {"pixel_values": pixels(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])},
        "qwen3_vl": {"pixel_values": pixels(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])},
        "gemma3": {"pixel_values": pixels(1, 3, 16, 16), "token_type_ids": is_image},
        "gemma4": {"pixel_values": pixels(1, 16, 48), "image_position_ids": grid, "mm_token_type_ids": is_image},
        "mistral3": {"pixel_values": pixels(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])},
    }
    if family.startswith("qwen"):
        more[family]["mm_token_type_ids"] = is_image
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=ids, use_cache=False, **more[family]).logits[0]
    return logits
