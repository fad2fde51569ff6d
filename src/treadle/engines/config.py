"""The `engine` section of a configuration. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from treadle.core.config import Config
from treadle.core.errors import ConfigError
from treadle.core.registry import NoOptions, build_options

InFlight = Literal["keep", "recompute"]
Device = Literal["auto", "cpu", "cuda", "mps"]


class VLLMConfig(Config):
    """Options of engine vllm: servers that already run, or that Treadle starts and stops."""

    servers: Annotated[int, Field(ge=1)] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        1, description="number of servers to start, or URLs of running ones: [http://127.0.0.1:8000]"
    )
    python: str | None = Field(
        None, description="interpreter with vLLM; default: $TREADLE_VLLM_VENV, .venv-vllm, or Treadle's own"
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="additional server arguments: {tensor-parallel-size: 2, enforce-eager: true}; null drops one",
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="additional environment variables of the servers"
    )
    transfer: Literal["shared_memory", "collective"] = Field(
        "shared_memory",
        description="transfer of weights to servers: shared file, or broadcast (NCCL between GPUs, else gloo)",
    )

    @model_validator(mode="after")
    def _running_or_started(self) -> VLLMConfig:
        if self.urls and (unused := [k for k in ("python", "args", "environment") if getattr(self, k)]):
            raise ValueError(
                f"engine.options.{unused[0]} is for servers that Treadle starts, and engine.options.servers names "
                "running ones; leave it out"
            )
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        return self.servers if isinstance(self.servers, tuple) else ()

    @property
    def count(self) -> int:
        return self.servers if isinstance(self.servers, int) else len(self.servers)


class EngineConfig(Config):
    """Configures the inference engine that samples.

    Options of the embedded engine are keys here, marked `torch:`; `options` are for vLLM and engines from outside.
    """

    kind: str = Field(
        "torch",
        description="torch: embedded; vllm: servers beside this process; or another registered name or module:function",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="options of the kind; vllm: {python: /opt/vllm/bin/python} (docs/vllm.md)"
    )
    batch: int = Field(256, ge=1, description="maximum number of sequences decoded together")
    cache_gib: float = Field(
        4.0,
        gt=0,
        description="torch: memory limit for keys and values; the least recently used are evicted and recomputed",
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="dtype of the engine's weights; default: float32, on a GPU bfloat16"
    )
    in_flight: InFlight = Field(
        "keep",
        description="KV caches of completions in flight when weights change: keep them, or recompute them with the new "
        "weights",
    )
    lock_step: bool | None = Field(
        None,
        description="torch: decode only when every open session waits, to repeat runs bit for bit; false: start each "
        "call at once, for slow agents; default: only in synchronous training",
    )
    own_process: bool = Field(
        False, description="torch: compute in a separate process, beside environments and learner, with the same bits"
    )
    kv_budget: int | None = Field(
        None,
        ge=1,
        description="capacity of one engine's KV cache in tokens: an episode starts only when its expected tokens fit "
        "beside the others'; for engine.kind=torch without lock-step. Default: unlimited",
    )

    @model_validator(mode="after")
    def _settings_are_of_this_kind(self) -> EngineConfig:
        if self.own_process and self.kind == "vllm":
            raise ValueError(
                "engine.own_process is for engine.kind=torch: vLLM's servers are separate processes; leave it out"
            )
        if self.kv_budget is not None and self.kind == "vllm":
            raise ValueError("engine.kv_budget is for engine.kind=torch: vLLM preempts episodes itself; leave it out")
        try:
            if self.kind in ("torch", "vllm"):
                build_options(
                    VLLMConfig if self.kind == "vllm" else NoOptions, self.options, "engine.options", self.kind
                )
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def vllm(self) -> VLLMConfig:
        return build_options(VLLMConfig, self.options, "engine.options", self.kind)

    @property
    def count(self) -> int:
        return self.vllm.count if self.kind == "vllm" else 1

    @property
    def capacity(self) -> int:
        """Return the number of sequences decoded together, over all servers."""
        return self.batch * self.count

    @property
    def dtype_name(self) -> Literal["float32", "bfloat16"]:
        return self.dtype or "float32"

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.dtype_name)


def tolerance_of(dtype: str | None) -> float:
    """Return the largest mean difference of log-probabilities under the same weights. None: the model's precision."""
    return 1e-4 if dtype == "float32" else 0.05
