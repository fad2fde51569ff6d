"""Settings of worker processes, the same for every library."""

from __future__ import annotations

from pydantic import Field

from treadle.core.config import Config


class WorkerConfig(Config):
    """Configures the processes that run a library in a Python of its own."""

    processes: int = Field(1, ge=1, description="processes, each of which imports the library once")
    attempts: int = Field(256, ge=1, description="most attempts at once in one process; further ones wait")
    memory_limit: int = Field(
        8 * 2**30,
        ge=2**26,
        description="memory that one process may allocate, and each that it starts, bytes (on Linux)",
    )
    output_limit: int = Field(16 * 2**20, ge=2**10, description="longest result of one attempt, as JSON, bytes")
    heartbeat: float = Field(1.0, gt=0, description="seconds between a process's signs of life")
    patience: float = Field(
        60.0, gt=0, description="seconds without a sign of life after which a process is killed and replaced"
    )
    start_timeout: float = Field(120.0, gt=0, description="limit on starting a process, imports included, seconds")
    cleanup_timeout: float = Field(
        10.0, gt=0, description="seconds that an attempt has to clean up when it is cancelled or the run ends"
    )
    inherit: tuple[str, ...] = Field(
        (), description='names of more of the run\'s environment variables that processes get, or patterns: "AWS_*"'
    )
    environment: dict[str, str] = Field(default_factory=dict, description="environment variables of their own")
