"""Options of the driver `openenv`."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from treadle.core.config import Config
from treadle.integrations.worker.config import WorkerConfig

PORT = "{port}"


class OpenEnvConfig(Config):
    """Configures where the server of an environment is, and how it is talked to."""

    url: str = Field("", description="base URL of a running server; or give a command")
    command: tuple[str, ...] = Field(
        (), description=f"what starts the server, for as long as the run lasts; {PORT} in it is a free port"
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

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no base URL; write it as in http://127.0.0.1:8000")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _one_server(self) -> OpenEnvConfig:
        if bool(self.url) == bool(self.command):
            raise ValueError("give either the url of a running server, or the command that starts one")
        if self.command and not any(PORT in word for word in self.command):
            raise ValueError(
                f"the command {' '.join(self.command)!r} has no {PORT}, the port that the server must take"
            )
        return self
