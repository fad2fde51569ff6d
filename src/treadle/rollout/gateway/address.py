"""Where a gateway listens, and what agents call it. Needs none of the packages that serve it."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from treadle.core.config import Config
from treadle.core.errors import ConfigError


class GatewayConfig(Config):
    """Configures where the gateway listens, and under which URL agent programs reach it."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address of this machine that it listens on; any but the loopback one is open to other machines",
    )
    port: int = Field(0, ge=0, lt=2**16, description="port that it listens on; 0: any free one")
    advertised_url: str | None = Field(
        None,
        description="base URL that agents are given, if they reach it under another name, as containers do: "
        "http://host.docker.internal:8123",
    )

    @field_validator("advertised_url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            usable = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
            usable = usable and parts.port != 0  # reading it raises for one that is no number, or too large
        except ValueError:  # a port that is none, brackets that do not match
            usable = False
        if not usable:
            raise ValueError(f"{value!r} is no base URL; write scheme and host, as in http://host.docker.internal:8123")
        return value.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _knows_its_port(self) -> GatewayConfig:
        if self.advertised_url is not None and not self.port:
            raise ValueError(
                f"advertised_url is {self.advertised_url!r}, but port is 0, any free one, which no URL can name; set "
                "the port that the URL leads to"
            )
        return self


def listen(config: GatewayConfig, setting: str = "rollout.gateway.{}={}") -> socket.socket:
    """Return a socket that listens at the configured address.

    setting: how an error names a field and its value. Raises ConfigError for an address that cannot be had.
    """
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # the latter for a name that cannot be looked up
        raise ConfigError(_problem(error, host, port, setting)) from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: saves 40 ms an answer
    return listening


def _problem(error: OSError | UnicodeError, host: str, port: int, setting: str) -> str:
    match getattr(error, "errno", None):
        case errno.EADDRINUSE:
            free = setting.format("port", 0)
            return f"{setting.format('port', port)} is in use; choose another, or {free} for any free one"
        case errno.EACCES:
            return f"{setting.format('port', port)} needs special rights; choose one from 1024 on"
    return f"{setting.format('host', host)}: cannot listen there: {getattr(error, 'strerror', None) or error}"


def url_of(listening: socket.socket) -> str:
    """Return the URL of what listens on the socket: `http://127.0.0.1:54321`."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
