"""The gateway before a fake engine: what it adds to calling the session directly, in CPU time and in latency.

Simplified: every request sends the same 20 messages, of about 3.3k tokens, as a new conversation, so that rendering,
which both ways pay alike, is warm. The load comes from a process of its own, over kept-alive connections; CPU time is
that of the server's process alone.

    python -m benchmarks.gateway
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.measure import Row, Table, make_parser, show
from treadle.core.draws import Stream
from treadle.core.engine import Completion
from treadle.core.types import Ids, Message, SamplingParams
from treadle.models.chat import load_tokenizer
from treadle.models.config import ModelConfig
from treadle.models.model_files import tokenizer_directory
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rollout.gateway.gateway import Gateway
from treadle.rollout.gateway.serving import serving
from treadle.rollout.session import Address, Session, SessionSpec
from treadle.testing import FakeEngine

_MESSAGES, _TOKENS, _REPLY = 20, 4000, 32


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrent` sessions, each making `requests` requests one after the other. latency: the engine's, seconds."""

    concurrent: int
    requests: int
    latency: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of each request; wall-clock seconds of all together, and CPU seconds of the serving process."""

    seconds: Sequence[float]
    wall: float
    cpu: float


class _SlowEngine(FakeEngine):
    """Engine that takes `latency` seconds for every completion."""

    def __init__(self, latency: float) -> None:
        super().__init__(lambda prompt, sampling: range(3, 3 + _REPLY))
        self.latency = latency

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        await asyncio.sleep(self.latency)
        return await super().generate(prompt_ids, sampling, session=session, **more)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure latency, throughput and CPU time of each load, through the gateway and without it; print a table."""
    options = make_parser(__doc__, repeats=3).parse_args(arguments)
    loads = (Load(2, 5, 0.01),) if options.small else (Load(1, 200, 0.0), Load(32, 40, 0.1), Load(32, 40, 0.0))
    renderer = _renderer()
    messages = conversation(renderer)
    gc.freeze()  # or garbage collection of what libraries hold would halt a few requests for some 200 ms
    rows = [row for load in loads for row in compare(load, renderer, messages, options.repeats)]
    tokens = len(Conversation(renderer).render(messages).ids)
    note = f"{_MESSAGES} messages, {tokens} prompt tokens, {_REPLY} sampled ones; median of {options.repeats}"
    show(options.json, Table("gateway", note, rows))


def compare(load: Load, renderer: ChatRenderer, messages: list[Message], repeats: int) -> list[Row]:
    """Measure one load both ways, after a warm-up of each."""
    rows: list[Row] = []
    total, base = load.concurrent * load.requests, 0.0
    for name, way in (("session", _direct), ("gateway", _through_gateway)):
        runs = [asyncio.run(way(load, renderer, messages)) for _ in range(repeats + 1)][1:]
        p50, p99 = (median(float(np.quantile(run.seconds, q)) for run in runs) for q in (0.5, 0.99))
        base = base or p50
        rows.append(
            {
                "way": name,
                "engine ms": load.latency * 1e3,
                "sessions": load.concurrent,
                "requests per s": total / median(run.wall for run in runs),
                "p50 ms": p50 * 1e3,
                "p99 ms": p99 * 1e3,
                "added p50 ms": (p50 - base) * 1e3,
                "CPU ms per request": median(run.cpu for run in runs) / total * 1e3,
            }
        )
    return rows


def _renderer() -> ChatRenderer:
    tokenizer = load_tokenizer(tokenizer_directory(ModelConfig(build={"model_type": "qwen3"}, tokenizer="demo")))
    return ChatRenderer(tokenizer, [int(tokenizer.eos_token_id)])


def conversation(renderer: ChatRenderer) -> list[Message]:
    """Return messages of user and assistant in turn, with about the wanted number of tokens."""
    words = "Anna plays chess with Bob. "
    each = _TOKENS // _MESSAGES // len(renderer.encode(words))
    roles = ("user", "assistant")
    return [Message(role=roles[i % 2], content=f"{i}: " + words * each) for i in range(_MESSAGES - 1)] + [
        Message(role="user", content="Who?")
    ]


def _session(engine: FakeEngine, renderer: ChatRenderer, number: int) -> Session:
    sampling, address = SamplingParams(max_tokens=_REPLY + 1), Address(0, Stream.BENCH, 0, number, 0)
    return Session(SessionSpec(f"{number}", engine, renderer, sampling, 10**6, address))


async def _direct(load: Load, renderer: ChatRenderer, messages: list[Message]) -> Measured:
    engine = _SlowEngine(load.latency)
    sessions = [_session(engine, renderer, i) for i in range(load.concurrent)]

    async def play(session: Session) -> list[float]:
        return [await _timed(lambda: session.chat(messages)) for _ in range(load.requests)]

    wall, cpu = time.perf_counter(), time.process_time()
    taken = await asyncio.gather(*map(play, sessions))
    return Measured([s for times in taken for s in times], time.perf_counter() - wall, time.process_time() - cpu)


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


async def _through_gateway(load: Load, renderer: ChatRenderer, messages: list[Message]) -> Measured:
    engine, gateway = _SlowEngine(load.latency), Gateway()
    body = json.dumps({"model": "policy", "messages": messages})
    async with serving(gateway):
        urls = [gateway.attach(_session(engine, renderer, i)).address.base_url for i in range(load.concurrent)]
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            await loop.run_in_executor(pool, _play_all, urls, body, 2)  # imports, connections, caches
            wall, cpu = time.perf_counter(), time.process_time()
            seconds = await loop.run_in_executor(pool, _play_all, urls, body, load.requests)
            return Measured(seconds, time.perf_counter() - wall, time.process_time() - cpu)


def _play_all(urls: Sequence[str], body: str, requests: int) -> list[float]:
    """Return the seconds of every request; runs in the process of the load."""

    async def play() -> list[float]:
        return [s for times in await asyncio.gather(*(_play(url, body, requests) for url in urls)) for s in times]

    return asyncio.run(play())


async def _play(url: str, body: str, requests: int) -> list[float]:
    """Play one client on one connection. Every body differs, so that none passes for a retry."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)

    async def ask(number: int) -> None:
        sent = f'{body[:-1]}, "user": "{number:09d}"}}'.encode()
        head = f"POST {place.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(answer.partition(b"content-length:")[2].split(b"\r\n")[0]))
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(f"the gateway answered {answer.decode()}")

    seconds = [await _timed(lambda n=number: ask(n)) for number in range(requests)]  # type: ignore[misc]
    writer.close()
    await writer.wait_closed()
    return seconds


if __name__ == "__main__":
    main()
