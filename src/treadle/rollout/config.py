"""`rollout` of a run's configuration, and the address of its gateway."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import AnyHttpUrl, Field, ValidationError, field_validator, model_validator

from treadle.core.config import Config
from treadle.core.errors import ConfigError
from treadle.core.images import ImageLimits
from treadle.core.types import SamplingParams
from treadle.rendering.replies import AUTO


class GatewayConfig(Config):
    """Address of the gateway, and the URL at which agent programs reach it."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen on; any but the loopback address is open to other machines",
    )
    port: int = Field(0, ge=0, lt=2**16, description="port to listen on; 0: any free one")
    advertised_url: str | None = Field(
        None,
        description="base URL for agents that reach it under another name, such as containers: "
        "http://host.docker.internal:8123",
    )

    @field_validator("advertised_url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        with suppress(ValidationError):
            url = AnyHttpUrl(value)
            if not (url.query or url.fragment):
                return value.rstrip("/").removesuffix("/v1")
        raise ValueError(f"{value!r} is not a base URL; write scheme and host, as in http://host.docker.internal:8123")

    @model_validator(mode="after")
    def _has_port(self) -> GatewayConfig:
        if self.advertised_url is not None and not self.port:
            raise ValueError(
                f"advertised_url is {self.advertised_url!r}, but port is 0, any free one, which no URL can name; set "
                "the port that the URL leads to"
            )
        return self


def listen(config: GatewayConfig, setting: str = "rollout.gateway.{}={}") -> socket.socket:
    """Open a socket that listens at the configured address.

    setting: format of a field and its value in errors. Raises ConfigError if the address is not available.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listening = socket.create_server((config.host, config.port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        # The latter for a name that cannot be resolved.
        reason = getattr(error, "strerror", None) or error
        text = f"{setting.format('host', config.host)}: cannot listen there: {reason}"
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            taken = "is in use" if error.errno == errno.EADDRINUSE else "needs special rights"  # type: ignore[union-attr]
            free = setting.format("port", 0)
            text = f"{setting.format('port', config.port)} {taken}; choose another, or {free} for any free one"
        raise ConfigError(text) from error
    # Inherited by connections; saves 40 ms per answer.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket: `http://127.0.0.1:54321`."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ImagesConfig(Config):
    """Which images messages may have."""

    max_bytes: int = Field(20 * 2**20, ge=1, description="largest file of an image, in bytes")
    max_pixels: int = Field(
        2**25,
        ge=1,
        description="most pixels of an image, width times height; decoding needs some 12 bytes of memory for each",
    )
    fetch: Literal["never", "public", "any"] = Field(
        "never",
        description="images that the gateway fetches for agent programs, by http(s): none, those at public addresses, "
        "or any, also of this machine and its network",
    )

    @property
    def limits(self) -> ImageLimits:
        return ImageLimits(self.max_bytes, self.max_pixels)


class CompactionConfig(Config):
    """When and how a conversation with an environment is replaced by the policy's own summary."""

    at: float = Field(
        0.8,
        gt=0,
        allow_inf_nan=False,
        description="longest prompt without a summary: a share of max_input_tokens (below 1), or tokens",
    )
    keep_last: int = Field(2, ge=0, description="messages kept at the end, extended to whole turns")
    prompt: str = Field(
        "Your context is almost full. Write a summary of what you have found out and done so far, and of what is left "
        "to do: it will replace the conversation above.",
        min_length=1,
        description="the user message that requests the summary",
    )
    max_tokens: int = Field(256, ge=1, description="limit on tokens of a summary; one that reaches it is rejected")
    attempts: int = Field(2, ge=1, description="requests for a summary before the attempt ends as `context`")
    trained: bool = Field(True, description="train summaries, too; false: only play them")

    @field_validator("at")
    @classmethod
    def _share_or_tokens(cls, value: float) -> float:
        if value > 1 and not value.is_integer():
            raise ValueError(f"{value:g} is neither a share below 1 nor a number of tokens")
        return value


class StartsConfig(Config):
    """Groups whose attempts begin in the middle of a recorded attempt at the same task."""

    source: str = Field(
        "own",
        min_length=1,
        description="recorded attempts: own (the run's, that succeeded), a file of trajectories or conversations with "
        "task ids (.jsonl, .parquet, .json), or a function of the task that returns a conversation, module:function",
    )
    target: float = Field(
        0.5, gt=0, lt=1, description="expected success of a start; a group begins at the step that comes nearest"
    )
    share: float = Field(
        0.5, gt=0, le=1, description="share of the groups that may begin in the middle; the others begin at step 0"
    )


class ForksConfig(Config):
    """Attempts of a group that branch from a sibling's step."""

    width: int = Field(2, ge=2, description="attempts that share a fork: one that is played first, and its branches")
    at: Literal["random", "entropy"] | Annotated[int, Field(ge=1)] = Field(
        "random",
        description="step at which they branch: any but the first; more often where the sampled tokens were less "
        "probable; or this one, counted from 0",
    )


class RolloutConfig(Config):
    """How an agent plays one attempt."""

    max_steps: int = Field(8, ge=1, description="limit on LLM calls per trajectory, not counting summaries")
    max_total_tokens: int = Field(
        0,
        ge=0,
        description="limit on sampled and newly read tokens of a trajectory before it stops making calls; 0: none",
    )
    max_input_tokens: int = Field(1024, ge=1, description="longest prompt, in tokens")
    max_completion_tokens: int = Field(256, ge=1, description="limit on tokens sampled per call")
    temperature: float = Field(1.0, gt=0, description="sampling temperature in training")
    top_k: int = Field(0, ge=0, description="in training: keep the k most probable tokens (0: all)")
    top_p: float = Field(
        1.0, gt=0, le=1, description="in training: keep the most probable tokens with this total probability"
    )
    min_p: float = Field(0.0, ge=0, le=1, description="in training: keep tokens with p >= min_p * max p")
    stop: tuple[str, ...] = Field((), description="strings that end a completion")
    conversation: Literal["turns", "single_message"] = Field(
        "turns", description="place of observations: separate messages, or text within the assistant's single message"
    )
    environment_timeout: float = Field(60.0, gt=0, description="limit on each call of an environment, in seconds")
    trajectory_timeout: float = Field(
        3600.0, gt=0, description="limit on a whole attempt, including waits for the engine, in seconds"
    )
    agent_timeout: float = Field(600.0, gt=0, description="limit on a whole attempt of an agent program, in seconds")
    reply_parser: str = Field(
        AUTO, description="parser of agent programs' tool calls: a registered name, module:function, or auto"
    )
    infer_rejected: bool = Field(
        True, description="reject calls of agent programs that were repeated, if they go on from another answer"
    )
    gateway: GatewayConfig = Field(GatewayConfig(), description="address at which agent programs reach the model")
    images: ImagesConfig = Field(ImagesConfig(), description="limits of images in tasks and messages")
    compaction: CompactionConfig | None = Field(
        None, description="summaries of long conversations with environments; null: none"
    )
    starts: StartsConfig | None = Field(
        None, description="groups that begin in the middle of recorded attempts; null: none"
    )
    forks: ForksConfig | None = Field(
        None, description="attempts that branch from a sibling's step; null: all begin at step 0"
    )

    @model_validator(mode="after")
    def _compacts(self) -> RolloutConfig:
        if self.compaction is None:
            return self
        if self.conversation == "single_message":
            raise ValueError("compaction needs a conversation of several messages; set conversation to 'turns'")
        if self.compaction_mark >= self.max_input_tokens:
            raise ValueError(
                f"compaction.at is {self.compaction.at:g}, which leaves nothing of max_input_tokens "
                f"{self.max_input_tokens} for the call that requests the summary; lower it"
            )
        return self

    @property
    def goes_back(self) -> bool:
        """Whether attempts in training may begin in the middle of recorded ones."""
        return self.starts is not None or self.forks is not None

    @property
    def compaction_mark(self) -> int:
        """The longest next prompt, in tokens, without a request for a summary."""
        at = self.max_input_tokens if self.compaction is None else self.compaction.at
        return int(at * self.max_input_tokens if at <= 1 else at)

    @property
    def longest_call(self) -> int:
        """The maximum number of tokens of a prompt and its completion in training."""
        summary = 0 if self.compaction is None else self.compaction.max_tokens
        return self.max_input_tokens + max(self.max_completion_tokens, summary)

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
