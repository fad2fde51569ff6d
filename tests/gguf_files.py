"""A tiny language model as a GGUF file, as quantized models are handed out."""

from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ Ġ", "ĠĠ Ġ", "h e", "1 2")  # blanks and digits, which pre-tokenizers cut differently
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, INNER, LAYERS, HEADS = 32, 64, 2, 2


def write_gguf(path: Path, template: str | None = TEMPLATE, architecture: str = "llama") -> dict[str, np.ndarray]:
    """Write the file, with weights in 8 bits; returns what the weights are, by their names in GGUF."""
    tokens = [*SPECIAL, *sorted(bytes_to_unicode().values()), *(merge.replace(" ", "") for merge in MERGES)]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_license("mit")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    weights = _weights(len(tokens))
    for name, values in weights.items():
        writer.add_tensor(name, values, raw_dtype=None if values.ndim == 1 else gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: _dequantized(values) for name, values in weights.items()}


def _weights(vocabulary: int) -> dict[str, np.ndarray]:
    """Quantized matrices, and the norms' vectors as they are."""
    shapes = {"token_embd": (vocabulary, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        inner = {name: (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        inner |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        inner |= {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}  # type: ignore[dict-item]
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in inner.items()}
    draw = np.random.default_rng(0)
    made = {}
    for name, shape in shapes.items():
        values = draw.normal(0, 0.1, shape).astype(np.float32)
        quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0) if len(shape) == 2 else 1 + values
        made[f"{name}.weight"] = quantized
    return made


def _dequantized(values: np.ndarray) -> np.ndarray:
    return values if values.ndim == 1 else gguf.quants.dequantize(values, gguf.GGMLQuantizationType.Q8_0)
