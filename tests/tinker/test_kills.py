"""A server in a process of its own, killed at random moments under sixteen clients, which are cut off, too."""

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.models import same_bits, tiny
from tests.tinker.kit import TOKENIZER, conversations
from tests.tinker.protocol import PROTOBUF, forward_backward_body, read_samples
from treadle.models.weights import adapter_weights
from treadle.tinker.data import AdamParams, Adapter
from treadle.tinker.learner import TrainedModel

DATA = conversations(("logprobs", "advantages"), samples=2, turns=2)
LOSS = "importance_sampling"
STEP = {"learning_rate": 0.01}
STEPS, MODELS, SAMPLERS = 12, 4, 12


@dataclass
class Server:
    """`treadle serve --tinker`, started again after each kill. peak: largest resident memory, in bytes."""

    model: Path
    run: Path
    port: int
    process: asyncio.subprocess.Process | None = None
    peak: list[int] = field(default_factory=list)

    async def start(self) -> None:
        command = [sys.executable, "-m", "treadle.cli.main", "serve", str(self.model), "--tinker"]
        self.process = await asyncio.create_subprocess_exec(
            *command, "--port", str(self.port), "--record", str(self.run), env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            if line.startswith(b"recorded in"):
                return
        raise AssertionError("the server did not start")

    async def kill(self) -> None:
        assert self.process is not None
        resident = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.peak.append(resident)
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    @property
    def key(self) -> str:
        return (self.run / "tinker.key").read_text()


class Retrying:
    """A client that repeats a request until it is answered, as the SDK does."""

    def __init__(self, server: Server) -> None:
        self.http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{server.port}/api/v1", headers={"x-api-key": server.key}, timeout=60
        )

    async def post(self, path: str, /, **body: Any) -> Any:
        return (await self._send(path, json=body)).json()

    async def _send(self, path: str, **request: Any) -> httpx.Response:
        while True:
            with suppress(httpx.TransportError):
                answer = await self.http.post(path, **request)
                if answer.status_code not in (408, 429):
                    assert answer.status_code == 200, (path, answer.status_code, answer.text)
                    return answer
            await asyncio.sleep(0.05)

    async def result(self, ask: Callable[[], Awaitable[Any]]) -> httpx.Response:
        future = await ask()
        answer = await self._send("/retrieve_future", json={"request_id": future["request_id"]})
        assert not answer.content.startswith(b'{"error"'), answer.text
        return answer

    async def backward(self, model: str, seq: int) -> Any:
        content = forward_backward_body(model, seq, DATA[seq % 3 : seq % 3 + 2], LOSS)
        return (await self._send("/forward_backward", content=content, headers=PROTOBUF)).json()


async def train(session: str, number: int, progress: list[int], client: Retrying) -> None:
    """Make `STEPS` steps, going on where an earlier client was cut off. progress: the last request with a result."""
    lora = {"rank": 3, "seed": number}
    body = {"session_id": session, "model_seq_id": number, "base_model": "base", "lora_config": lora}
    created = await client.result(lambda: client.post("/create_model", **body))
    model = created.json()["model_id"]
    for step in range(STEPS):
        first, second = 2 * step + 1, 2 * step + 2
        if progress[number] >= second:
            continue
        future = await client.backward(model, first)
        await client.result(lambda: client.post("/optim_step", model_id=model, seq_id=second, adam_params=STEP))  # noqa: B023
        await client.result(lambda: _same(future))  # noqa: B023
        progress[number] = second
    await client.result(lambda: client.post("/save_weights", model_id=model, seq_id=2 * STEPS + 1, path="end"))


async def _same(future: Any) -> Any:
    return future


async def sample(session: str, number: int, done: asyncio.Event, seen: dict[str, Any], client: Retrying) -> None:
    """Sample by the base until training is done; every repeated request has the same tokens."""
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "base"}
    sampler = (await client.post("/create_sampling_session", **body))["sampling_session_id"]
    seq = 0
    while not done.is_set():
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [3, number, 4]}]}}
        ask = {**body, "sampling_params": {"max_tokens": 6}, "num_samples": 2}
        tokens = [t for t, _ in read_samples((await client.result(lambda: client.post("/asample", **ask))).content)]  # noqa: B023
        assert seen.setdefault(f"{number}:{seq}", tokens) == tokens
        seq += 1 if random.random() < 0.7 else 0


async def cut_off(work: Callable[[Retrying], Awaitable[None]], server: Server, draw: random.Random) -> None:
    """Do work by clients that are cut off at random; each goes on as a new one."""
    while True:
        client = Retrying(server)
        async with client.http:
            task = asyncio.ensure_future(work(client))
            done, _ = await asyncio.wait({task}, timeout=draw.uniform(3, 12))
            if done:
                return task.result()
            task.cancel()
            await asyncio.wait({task})


async def storm(folder: Path, kills: int, seed: int = 0) -> Server:
    draw = random.Random(seed)
    base = tiny()
    model = folder / "base"
    base.save_pretrained(model)
    for file in TOKENIZER.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(model, folder / "run", port)
    await server.start()
    try:
        await _storm(server, base, kills, draw)
    finally:
        await server.kill()
    return server


async def _storm(server: Server, base: PreTrainedModel, kills: int, draw: random.Random) -> None:
    first = Retrying(server)
    async with first.http:
        session = (await first.post("/create_session", tags=[], user_metadata={}, sdk_version="0.38"))["session_id"]
    progress, seen, ended = [0] * MODELS, dict[str, Any](), asyncio.Event()
    training = [asyncio.create_task(cut_off(partial(train, session, n, progress), server, draw)) for n in range(MODELS)]
    sampling = [
        asyncio.create_task(cut_off(partial(sample, session, n, ended, seen), server, draw)) for n in range(SAMPLERS)
    ]
    for _ in range(kills):
        await asyncio.sleep(draw.uniform(0.05, 2.0))
        await server.kill()
        await server.start()
    await asyncio.gather(*training)
    ended.set()
    await asyncio.gather(*sampling)
    for number in range(MODELS):
        expected = TrainedModel(base, Adapter(3), number, 8192, TOKENIZER)
        for seq in range(1, 2 * STEPS + 1, 2):
            expected.forward(DATA[seq % 3 : seq % 3 + 2], LOSS, {}, backward=True)
            expected.optim_step(AdamParams(**STEP))
        saved = load_file(server.run / f"weights/s0-train-{number}/end/adapter_model.safetensors")
        assert same_bits(saved, adapter_weights(expected.model))


@pytest.mark.slow
async def test_killed_servers_and_clients_lose_no_step_and_make_none_twice(tmp_path: Path) -> None:
    server = await storm(tmp_path, kills=8)
    assert max(server.peak) < 2 * server.peak[0] + 2**28
