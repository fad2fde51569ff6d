"""`rollout` of a run's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from treadle.core.config import Config
from treadle.core.types import SamplingParams
from treadle.rendering.replies import AUTO
from treadle.rollout.gateway.address import GatewayConfig


class RolloutConfig(Config):
    """How an agent plays one attempt."""

    max_steps: int = Field(8, ge=1, description="limit on LLM calls of one trajectory")
    max_input_tokens: int = Field(1024, ge=1, description="longest prompt that may be sent, in tokens")
    max_completion_tokens: int = Field(256, ge=1, description="limit on tokens sampled per call")
    temperature: float = Field(1.0, gt=0, description="sampling temperature in training")
    top_k: int = Field(0, ge=0, description="in training: keep the k most probable tokens (0: all)")
    top_p: float = Field(
        1.0, gt=0, le=1, description="in training: keep the most probable tokens that make up this probability"
    )
    min_p: float = Field(0.0, ge=0, le=1, description="in training: keep tokens with p >= min_p * max p")
    stop: tuple[str, ...] = Field((), description="strings that end a completion")
    conversation: Literal["turns", "single_message"] = Field(
        "turns",
        description="where observations go: into messages of their own, or as text into the assistant's one message",
    )
    environment_timeout: float = Field(60.0, gt=0, description="limit on each call of an environment, seconds")
    trajectory_timeout: float = Field(
        3600.0, gt=0, description="limit on a whole attempt, waiting for the engine included, seconds"
    )
    agent_timeout: float = Field(600.0, gt=0, description="limit on a whole attempt of an agent program, seconds")
    reply_parser: str = Field(
        AUTO, description="how agent programs' tool calls are read: a registered name, module:function, or auto"
    )
    gateway: GatewayConfig = Field(GatewayConfig(), description="where agent programs reach the model")

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of training."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_completion_tokens,
            stop=self.stop,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )

    @property
    def filters(self) -> bool:
        """Whether training samples from a filtered distribution (`top_k`, `top_p` or `min_p`)."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0
