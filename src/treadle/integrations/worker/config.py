"""Settings of worker processes, the same for every library."""

from __future__ import annotations

from types import MappingProxyType

from pydantic import Field

from treadle.core.config import Config


class WorkerConfig(Config):
    """Configures the processes that run a library in a Python of its own."""

    removed_keys = MappingProxyType(
        dict.fromkeys(
            ("attempts", "output_limit", "heartbeat", "patience", "start_timeout", "cleanup_timeout"),
            "leave it out: the limits of worker processes are fixed",
        )
    )

    processes: int = Field(1, ge=1, description="processes, each of which imports the library once")
    memory_limit: int = Field(
        8 * 2**30,
        ge=2**26,
        description="memory that one process may allocate, and each that it starts, bytes (on Linux)",
    )
    inherit: tuple[str, ...] = Field(
        (), description='names of more of the run\'s environment variables that processes get, or patterns: "AWS_*"'
    )
    environment: dict[str, str] = Field(default_factory=dict, description="environment variables of their own")
