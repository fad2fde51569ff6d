"""Reading GGUF files by transformers: weights of any quantization as float32, and the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from treadle.core.errors import ConfigError
from treadle.models.pretrained import load_pretrained

# By the file's `tokenizer.ggml.pre`: tokenizers that transformers takes for GPT-2's, but that split digits differently.
_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
}


def read_model(file: Path) -> PreTrainedModel:
    """Return the model in a GGUF file, in float32. Raises ConfigError if transformers cannot read it."""
    model = load_pretrained(file.parent, str(file.parent), file.name)
    # Its weights are no longer quantized.
    model.config.__dict__.pop("quantization_config", None)
    # Files beside it do not belong to the model.
    model.name_or_path = ""
    return model


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a GGUF file. Raises ConfigError if transformers cannot read it."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(file.parent), gguf_file=file.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # A third-party library, which raises any exception for a damaged file.
        raise ConfigError(f"{str(file)!r}: its tokenizer cannot be read: {error}") from error
    if make := _PRE_TOKENIZERS.get(_read_text(file, gguf.Keys.Tokenizer.PRE)):
        tokenizer.backend_tokenizer.pre_tokenizer = make()
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def read_licence(file: Path) -> str:
    """Return the license named in a GGUF file. Raises ConfigError for any other file."""
    return _read_text(file, gguf.Keys.General.LICENSE) or "not named in the file"


def _read_text(file: Path, key: str) -> str:
    """Return a text of the file's metadata, "" if missing. Raises ConfigError if it is not a GGUF file."""
    try:
        field = gguf.GGUFReader(file).get_field(key)
    except Exception as error:  # as above
        raise ConfigError(f"{str(file)!r} cannot be read as a GGUF file: {error}") from error
    return "" if field is None else str(field.contents())
