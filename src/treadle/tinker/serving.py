"""A Tinker server on a socket, over the run that it records into."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from treadle.record.recording import Recording
from treadle.rollout.config import url_of
from treadle.rollout.gateway.serving import running
from treadle.tinker.app import make_app
from treadle.tinker.models import Models
from treadle.tinker.record import SampleRecorder
from treadle.tinker.service import Limits, Service

_KEY = "tinker.key"


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that runs. resumed: requests of an earlier server that it took up."""

    url: str
    service: Service
    resumed: int


@asynccontextmanager
async def serving(
    models: Models,
    recording: Recording,
    names: Sequence[str],
    tokenizer: Path,
    key: str,
    listening: socket.socket,
    refuse: bool = True,
    limits: Limits | None = None,
) -> AsyncIterator[Serving]:
    """Serve models inside the context. names: the base's, for clients; the first one is told. See `Service`."""
    service = Service(models, recording.path, names, tokenizer, SampleRecorder(recording), refuse, limits or Limits())
    try:
        resumed = await service.start()
        async with running(make_app(service, key), listening):
            yield Serving(url_of(listening), service, resumed)
    finally:
        await service.close()


def api_key(directory: Path) -> str:
    """Return the key of a run's server, the same after a restart, from a file that only its user can read."""
    file = directory / _KEY
    if not file.is_file():
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(f"tml-{secrets.token_urlsafe(24)}")  # the SDK takes keys that begin so
    return file.read_text()
