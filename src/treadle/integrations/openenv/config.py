"""Options of the driver `openenv`."""

from __future__ import annotations

from types import MappingProxyType

from pydantic import Field, field_validator

from treadle.core.config import Config
from treadle.integrations.worker.config import WorkerConfig

PORT = "{port}"


class OpenEnvConfig(Config):
    """Configures the server of an environment, and how replies become actions."""

    removed_keys = MappingProxyType(
        {
            "url": "set server to it",
            "command": "set server to it",
            "directory": "begin the command in server with [env, -C, DIR, ...]",
        }
    )

    server: str | tuple[str, ...] = Field(
        description="base URL of a running one, or the command that starts one, for as long as the run lasts; "
        f"{PORT} in it is a free port"
    )
    action: str = Field(
        "",
        description="field of the action that takes the model's reply; default: the only one, if that is text; "
        "otherwise the reply must be the action as JSON",
    )
    observation: str = Field("", description="field of the observation that the model reads; default: all, as JSON")
    python: str | None = Field(
        None, description="interpreter that has openenv-core; default: of $TREADLE_OPENENV_VENV, else .venv-openenv"
    )
    worker: WorkerConfig = Field(WorkerConfig(), description="the processes that play attempts")

    @field_validator("server")
    @classmethod
    def _can_be_reached(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(value, tuple):
            if not any(PORT in word for word in value):
                raise ValueError(f"the command {' '.join(value)!r} has no {PORT}, the port that the server must take")
            return value
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not a base URL; write it as in http://127.0.0.1:8000")
        return value.rstrip("/")
