"""The `model` section of a configuration. Needs no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from treadle.core.config import Config


class LoraConfig(Config):
    """Configures adapters to train instead of the model (LoRA)."""

    rank: int = Field(ge=1, le=512, description="inner size of each adapter")
    alpha: int | None = Field(
        None, ge=1, description="adapters are scaled by alpha / rank; default: twice the rank, for a scale of 2"
    )
    targets: Literal["all-linear", "attention", "mlp"] | tuple[str, ...] = Field(
        "all-linear", description="linear layers to adapt: all but the head, or names such as [q_proj, v_proj]"
    )
    pin_attempts: bool = Field(
        False, description="asynchronous runs: sample all calls of an attempt by the version of its first one"
    )
    rank_stabilized: bool = Field(False, description="scale by alpha / sqrt(rank) instead (rsLoRA)")

    @property
    def scale(self) -> int:
        """Return alpha."""
        return 2 * self.rank if self.alpha is None else self.alpha


class ModelConfig(Config):
    """Configures the Hugging Face causal LM to train: one at a path, or one built from a small config."""

    path: str | None = Field(
        None,
        description="directory of a Hugging Face causal LM (code in it is never run), or a hub's ORG/NAME[@REVISION], "
        "or smollm2 or a GGUF file after `treadle models get`",
    )
    adapter: str | None = Field(
        None,
        description="directory of a LoRA adapter to start from, as from `treadle export`; model.path then defaults "
        "to the base that it names",
    )
    build: dict[str, Any] | None = Field(
        None, description="instead of path: a transformers config (model_type and its fields) initialised from the seed"
    )
    tokenizer: str | None = Field(
        None,
        description="directory of a tokenizer, a shipped recipe's (demo, sql-small, search-small, tools-small, "
        "look-small), or a name as in model.path; default: model.path",
    )
    chat_template: str | None = Field(
        None, description="file of a chat template, or the name of one of the tokenizer's or ours; default: its own"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="options of the chat template (enable_thinking, ...)"
    )
    roles: dict[str, str] = Field(
        default_factory=dict,
        description="roles unknown to the chat template -> roles to write instead: {developer: system, tool: user}",
    )
    stop_tokens: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="tokens that end a reply, such as [<|im_end|>]; default: the ones named by the tokenizer, "
        "generation_config.json or the chat template",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.adapter is not None and self.build is not None:
            raise ValueError("model.adapter belongs to a model with files; give model.path, and null for model.build")
        if (self.path is None and self.adapter is None) == (self.build is None):
            raise ValueError("give exactly one of model.path and model.build, and null for the other")
        if self.build is not None and "model_type" not in self.build:
            raise ValueError(f"model.build needs model_type (for example qwen3); it has {sorted(self.build)}")
        if self.build is not None and self.tokenizer is None:
            raise ValueError("model.build needs model.tokenizer: a directory, or 'demo'")
        return self
