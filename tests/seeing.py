"""Tiny models that see, each with its family's own processor: written as directories, loaded by transformers."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.towers import TOKENIZER
from tests.worlds import Vowels
from treadle.core.images import PLACE, Picture, PromptImage, read_image
from treadle.core.types import Message, Task
from treadle.envs.base import EnvStep
from treadle.models.vision import ImageProcessor

SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
IDEFICS = (
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    "<end_of_utterance>",
    "<row_1_col_1>",
    "<row_1_col_2>",
)
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
GEMMA |= {"audio_token": "<audio_soft_token>", "boa_token": "<start_of_audio>", "eoa_token": "<end_of_audio>"}
FAMILIES = ("idefics3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4")
"""Families whose images are trained and sampled; SmolVLM has Idefics 3's architecture and processor."""

_TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def _fields(family: str, ids: dict[str, int], vocabulary: int) -> dict[str, Any]:
    text = {**_TEXT, "vocab_size": vocabulary}
    if family == "idefics3":
        vision: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        vision |= {"image_size": 32, "patch_size": 8}
        return {
            "text_config": {**text, "model_type": "llama"},
            "vision_config": vision,
            "image_token_id": ids["<image>"],
            "scale_factor": 2,
            "tie_word_embeddings": False,
        }
    if family == "gemma3":
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        sliding = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
        return {
            "text_config": {**text, **sliding, "hidden_size": 64},  # its root, a factor of embeddings, is exact
            "vision_config": {**vision, "image_size": 32, "patch_size": 8},
            "mm_tokens_per_image": 4,
            "image_token_index": ids["<image_soft_token>"],
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
        }
    if family == "gemma4":
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 8, "pooling_kernel_size": 2}
        sliding = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
        by_layer = {"vocab_size_per_layer_input": vocabulary, "hidden_size_per_layer_input": 4}
        return {
            "text_config": {
                **{**text, **sliding, **by_layer, "hidden_size": 64, "global_head_dim": 8, "num_kv_shared_layers": 0},
                "use_bidirectional_attention": "vision",
            },
            "vision_config": vision,
            "image_token_id": ids["<image_soft_token>"],
            "boi_token_id": ids["<start_of_image>"],
            "eoi_token_id": ids["<end_of_image>"],
        }
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2}
    text["rope_parameters"] = dict(_MROPE)
    if family == "qwen2_5_vl":
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    else:
        vision |= {"num_position_embeddings": 16}
        text["rope_parameters"]["mrope_interleaved"] = True
    if family == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0]}
    if family == "qwen3_5":
        text |= {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
        text |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def tokenizer(family: str) -> PreTrainedTokenizerBase:
    """The demo's tokenizer with the family's tokens around images, and a template that writes them."""
    named = GEMMA if family.startswith("gemma") else {}
    made = AutoTokenizer.from_pretrained(TOKENIZER, extra_special_tokens=named)
    if not named:
        made.add_special_tokens({"additional_special_tokens": list(IDEFICS if family == "idefics3" else SPECIAL)})
    written = {"idefics3": "<image>", "gemma3": "<start_of_image>", "gemma4": "<image_soft_token>"}.get(
        family, "<|vision_start|><|image_pad|><|vision_end|>"
    )
    made.chat_template = _TEMPLATE.replace("IMAGE", written)
    return cast(PreTrainedTokenizerBase, made)


def write(directory: Path, family: str, dtype: torch.dtype = torch.float32, **text: Any) -> Path:
    """Write a model of the family with random weights, its tokenizer and its processor; returns the directory."""
    own = tokenizer(family)
    ids = own.get_vocab()
    fields = _fields(family, ids, len(own))
    fields["text_config"] |= text
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(family, **fields))
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.0, 0.2)
    model.to(dtype).save_pretrained(directory)
    own.save_pretrained(directory)
    processor: Any
    if family == "idefics3":
        sides = {"longest_edge": 32}
        processor = Idefics3ImageProcessorPil(size=sides, max_image_size=sides, do_image_splitting=True)
        (directory / "processor_config.json").write_text('{"processor_class": "Idefics3Processor", "image_seq_len": 4}')
    elif family == "gemma4":
        processor = Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=2, max_soft_tokens=70)
        (directory / "processor_config.json").write_text('{"processor_class": "Gemma4Processor"}')
    elif family == "gemma3":
        processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
        (directory / "processor_config.json").write_text(
            '{"processor_class": "Gemma3Processor", "image_seq_length": 4}'
        )
    else:
        limits = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
        processor = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=limits)
    processor.save_pretrained(directory)
    return directory


def whole(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The whole model of a directory, as transformers loads it."""
    model = AutoModelForMultimodalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return cast(PreTrainedModel, model.eval())


def picture(seed: int, size: tuple[int, int] = (32, 32)) -> Picture:
    """An image of drawn pixels, of that width and height."""
    draws = np.random.default_rng(seed)
    return read_image(Image.fromarray(draws.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)))


def prompt(
    processor: ImageProcessor, own: PreTrainedTokenizerBase, text: str, pictures: Sequence[Picture]
) -> tuple[np.ndarray[Any, np.dtype[np.int32]], tuple[PromptImage, ...]]:
    """Ids of a text with `PLACE` for each picture, and where these are in it."""
    parts = text.split(PLACE)
    assert len(parts) == len(pictures) + 1
    ids: list[int] = own.encode(parts[0], add_special_tokens=False)
    images = []
    for part, seen in zip(parts[1:], pictures, strict=True):
        made = processor.prepared(seen.url)
        expanded = own.encode(made.text, add_special_tokens=False)
        where = [at for at, ident in enumerate(expanded) if ident == processor.placeholder]
        images.append(
            PromptImage(
                sha256=made.sha256,
                processed=made.processed,
                settings=processor.settings,
                placeholder=processor.placeholder,
                tokens=made.tokens,
                start=len(ids) + where[0],
                length=where[-1] + 1 - where[0],
                grid=made.grid,
                url=seen.url,
            )
        )
        ids += [*expanded, *own.encode(part, add_special_tokens=False)]
    return np.array(ids, np.int32), tuple(images)


def own_logits(
    model: Any, processor: ImageProcessor, ids: Any, images: Sequence[PromptImage], grad: bool = False
) -> torch.Tensor:
    """Logits [T, V] of a sequence by transformers' own forward of the whole model, with all its images at once."""
    tokens = torch.from_numpy(np.asarray(ids)).long()[None]
    named: dict[str, Any] = {}
    if images:
        arrays = [processor.checked(image).arrays for image in images]
        join = 1 if "pixel_attention_mask" in arrays[0] else 0  # Idefics 3: [1, parts, ...]
        named = {key: torch.from_numpy(np.concatenate([a[key] for a in arrays], join)) for key in arrays[0]}
        if model.config.model_type != "gemma4":  # which begins to compute in the precision of the pixels
            named["pixel_values"] = named["pixel_values"].to(model.dtype)
        if "image_grid_thw" in named or model.config.model_type == "gemma4":
            named["mm_token_type_ids"] = (tokens == processor.placeholder).int()
        elif model.config.model_type == "gemma3":
            named["token_type_ids"] = (tokens == processor.placeholder).int()
    with torch.set_grad_enabled(grad):
        return cast(torch.Tensor, model(input_ids=tokens, use_cache=False, **named).logits[0])


class Looks(Vowels):
    """As `Vowels`; the task and each answer show a picture, which depends on what was said."""

    async def reset(self, task: Task) -> Sequence[Message]:
        return (*await super().reset(task), self._shown("user", task.task_id))

    async def step(self, text: str) -> EnvStep:
        answer = await super().step(text)
        return answer if answer.done else answer._replace(observations=[self._shown("tool", text)])

    def _shown(self, role: str, about: str) -> Message:
        seed = zlib.crc32(about.encode()) % 50
        size = ((32, 32), (64, 32))[seed % 2]
        return cast(Message, {"role": role, "content": [{"type": "image", "image": picture(seed, size).data}]})
