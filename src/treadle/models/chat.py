"""The configured tokenizer with its chat template, and the tokens that end a reply: models have several.

    tokenizer_config.json    eos_token
    generation_config.json   eos_token_id   151645 or [151645, 151643]
    the chat template        its token after a reply, if it is none of these

`model.stop_tokens` overrides them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treadle.core.errors import ConfigError
from treadle.core.files import prove_files
from treadle.models.config import ModelConfig
from treadle.models.model_cache import remedy_for
from treadle.models.model_files import (
    GENERATION_CONFIG,
    base_directory,
    names_code,
    read_generation_config,
    tokenizer_directory,
)
from treadle.models.vision import ImageProcessor
from treadle.rendering.chat import ChatRenderer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def load_chat(config: ModelConfig, began: datetime | None) -> tuple[PreTrainedTokenizerBase, ChatRenderer]:
    """Return the configured tokenizer and its renderer; the renderer's `stop_ids` end a reply.

    began: see `ChatRenderer`; for a run's chat, the run's own date (`RunDirectory.began`), whenever it is loaded.

    Raises ConfigError or DamageError.
    """
    directory = tokenizer_directory(config)
    tokenizer = load_tokenizer(directory)

    places = [directory]
    if config.build is None:
        # A missing model is reported when it is loaded.
        with suppress(ConfigError):
            places.insert(0, base_directory(config))

    def renderer(stop: Sequence[int]) -> ChatRenderer:
        return ChatRenderer(
            tokenizer,
            stop,
            chat_template=config.chat_template,
            chat_template_kwargs=config.chat_template_kwargs,
            roles=config.roles,
            began=began,
            images=ImageProcessor.find(*dict.fromkeys(places)),
        )

    if config.stop_tokens is not None:
        return tokenizer, renderer(_named(config.stop_tokens, tokenizer))
    stop = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for place in dict.fromkeys(places):
        stop += _declared(place, len(tokenizer))
    made = renderer(tuple(dict.fromkeys(stop)))
    if made.own_end is not None and made.own_end not in stop:
        made = renderer((made.own_end, *made.stop_ids))
    if not made.stop_ids:
        raise ConfigError(
            f"the tokenizer in {str(directory)!r} names no eos_token, and neither {GENERATION_CONFIG} nor the chat "
            "template names another token that ends a reply; set model.stop_tokens"
        )
    return tokenizer, made


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory.

    Raises ConfigError; DamageError for files that do not match the directory's manifest (`core.files`).
    """
    # config.json names the tokenizer's class
    prove_files(directory, (*TOKENIZER_FILES, "config.json"), remedy_for(directory))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # A third-party library, which raises any exception for a damaged file.
        if names_code(directory / "tokenizer_config.json"):
            raise ConfigError(
                f"the tokenizer in {str(directory)!r} brings its own code (auto_map in tokenizer_config.json), "
                "which is never run; remove auto_map, and set tokenizer_class to PreTrainedTokenizerFast"
            ) from error
        raise ConfigError(f"the tokenizer in {str(directory)!r} cannot be loaded: {error}") from error
    return tokenizer


def end_tokens(generation_config: Mapping[str, Any]) -> list[int]:
    """Return the end-token ids in a generation config. Raises ConfigError."""
    ends = generation_config.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if wrong := [ident for ident in ids if type(ident) is not int]:
        raise ConfigError(f"{GENERATION_CONFIG}: eos_token_id is an id or a list of them, got {wrong[0]!r}")
    return ids


def _declared(directory: Path, vocabulary: int) -> list[int]:
    prove_files(directory, (GENERATION_CONFIG,), remedy_for(directory))
    ends = end_tokens(read_generation_config(directory))
    if wrong := [ident for ident in ends if not 0 <= ident < vocabulary]:
        raise ConfigError(
            f"{directory / GENERATION_CONFIG}: eos_token_id {wrong[0]} is none of the tokenizer's {vocabulary} ids; "
            "correct it, or set model.stop_tokens"
        )
    return ends


def _named(names: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    vocabulary = tokenizer.get_vocab()
    if missing := [name for name in names if name not in vocabulary]:
        raise ConfigError(
            f"model.stop_tokens: the tokenizer has no token {missing[0]!r}; give it as tokenizer.json does"
        )
    return tuple(dict.fromkeys(int(vocabulary[name]) for name in names))
