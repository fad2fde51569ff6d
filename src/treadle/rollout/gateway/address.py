"""Where a gateway listens, and what agents call it. Imports none of the packages that serve it."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

from pydantic import AnyHttpUrl, Field, ValidationError, field_validator, model_validator

from treadle.core.config import Config
from treadle.core.errors import ConfigError


class GatewayConfig(Config):
    """Where the gateway listens, and under which URL agent programs reach it."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen on; any but the loopback address is open to other machines",
    )
    port: int = Field(0, ge=0, lt=2**16, description="port to listen on; 0: any free one")
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

    setting: how an error names a field and its value. Raises ConfigError if the address is not available.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listening = socket.create_server((config.host, config.port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:  # the latter for a name that cannot be looked up
        reason = getattr(error, "strerror", None) or error
        text = f"{setting.format('host', config.host)}: cannot listen there: {reason}"
        if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
            taken = "is in use" if error.errno == errno.EADDRINUSE else "needs special rights"  # type: ignore[union-attr]
            free = setting.format("port", 0)
            text = f"{setting.format('port', config.port)} {taken}; choose another, or {free} for any free one"
        raise ConfigError(text) from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: saves 40 ms an answer
    return listening


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket: `http://127.0.0.1:54321`."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
