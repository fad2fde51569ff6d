"""Clients in environments of their own: Tinker's SDK and its cookbook, against a server in this process."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from treadle.core.config import build
from treadle.models.chat import load_tokenizer
from treadle.plan.config import RunConfig
from treadle.plan.inputs import IN_MEMORY
from treadle.record.recording import Recording
from treadle.tinker.models import Models
from treadle.tinker.serving import api_key, serving

ROOT = Path(__file__).parents[2]


def client_python(variable: str, folder: str) -> str:
    """The interpreter of an environment that `make tinker-env` makes; the test is skipped without it."""
    python = Path(os.environ.get(variable) or ROOT / folder) / "bin" / "python"
    if not python.exists():
        missing = f"{python} is not there (make tinker-env)"
        if os.environ.get("CI"):
            pytest.fail(f"{missing}, and continuous integration must have it")
        pytest.skip(missing)
    return str(python)


@asynccontextmanager
async def served(models: Models, run: Path, tokenizer: Path, names: list[str]) -> AsyncIterator[dict[str, str]]:
    """The environment variables of a client of a new server that records into `run`."""
    data = {"recipe": "tinker", "data": {"train": {"source": IN_MEMORY}}, "model": {"path": str(tokenizer)}}
    recording = Recording(run, build(RunConfig, data, "test"), load_tokenizer(tokenizer).backend_tokenizer, names[0])
    listening = socket.create_server(("127.0.0.1", 0))
    try:
        key = api_key(run)
        async with serving(models, recording, names, tokenizer, key, listening) as server:
            yield {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": key}
    finally:
        recording.close()


async def run_client(python: str, *words: object, where: Path, env: Mapping[str, str], seconds: float = 120) -> str:
    """What a client's program prints; the test fails if it does."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0"}
    process = await asyncio.create_subprocess_exec(
        python,
        *map(str, words),
        cwd=where,
        env={**os.environ, **offline, **env},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), seconds)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, printed.decode()[-4000:]
    return printed.decode()
