"""A gateway on a loopback socket, an engine that takes its time, and sessions on both."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from tests.until import CEILING
from tests.worlds import END, PlainTokenizer, plain_ids, plain_renderer
from treadle.core.draws import Stream
from treadle.core.engine import Completion
from treadle.core.types import Ids, SamplingParams, Step
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import ReplyParser, hermes, plain
from treadle.rollout.gateway.gateway import ClientSession, Gateway, SessionAddress
from treadle.rollout.gateway.serving import serving
from treadle.rollout.session import Address, Session, SessionSpec
from treadle.testing import FakeEngine

CALL = '<think>Who?</think>\nI look.<tool_call>{"name": "look", "arguments": {"who": "Anna"}}</tool_call>'
FINAL = "  Anna plays chess, no\u00a0doubt. "


class Slow(FakeEngine):
    """Takes `seconds()` for a completion; `gate` holds all of them back while it is cleared."""

    def __init__(
        self, reply: Callable[[Ids, SamplingParams], list[int]], seconds: Callable[[], float] = lambda: 0.0
    ) -> None:
        super().__init__(reply)
        self.seconds, self.gate = seconds, asyncio.Event()
        self.gate.set()
        self.aborted = 0

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        try:
            completion = await super().generate(prompt_ids, sampling, session=session, **more)
            await asyncio.sleep(self.seconds())
            await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return completion


def scripted(text: Callable[[str, int], str]) -> Callable[[Ids, SamplingParams], list[int]]:
    """A reply from the prompt's text and the number of the call."""
    numbers = itertools.count()
    tokenizer = PlainTokenizer()

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        written = text(str(tokenizer.decode(prompt, skip_special_tokens=False)), next(numbers))
        return [*plain_ids(written), END]

    return reply


def looks_then_answers(prompt: str, number: int) -> str:
    """A tool call first, an answer once the tool has spoken."""
    return FINAL if "<|im_start|>tool" in prompt else CALL


@dataclass
class Served:
    """A gateway that is being served."""

    gateway: Gateway
    url: str
    engine: Any
    renderer: ChatRenderer
    sessions: dict[str, ClientSession] = field(default_factory=dict)
    clients: list[Any] = field(default_factory=list)

    def open(self, name: str = "s", parse: ReplyParser = hermes, **settings: Any) -> SessionAddress:
        """A new session, attached."""
        sampling = SamplingParams(max_tokens=settings.pop("max_tokens", 500))
        address = Address(0, Stream.TRAIN, 0, len(self.sessions), 0)
        longest = settings.pop("longest", 10_000)
        spec = SessionSpec(name, self.engine, self.renderer, sampling, longest, address)
        self.sessions[name] = self.gateway.attach(Session(spec, parse, **settings))
        return self.sessions[name].address

    def openai(self, address: SessionAddress, url: str = "") -> openai.AsyncOpenAI:
        """An unmodified client, closed with the server. url: another base URL, then with the secret as API key."""
        key = address.secret if url else "unused"
        client = openai.AsyncOpenAI(base_url=url or address.base_url, api_key=key)
        self.clients.append(client)
        return client

    def anthropic(self, address: SessionAddress, url: str = "") -> Any:
        """The same for Anthropic's, whose import takes seconds: for tests of the group `anthropic`."""
        from anthropic import AsyncAnthropic

        key = address.secret if url else "unused"
        self.clients.append(AsyncAnthropic(base_url=url or address.anthropic_url, api_key=key))
        return self.clients[-1]

    def steps(self, name: str = "s") -> list[Step]:
        return self.sessions[name].session.steps


@asynccontextmanager
async def served(
    engine: Any, renderer: ChatRenderer | None = None, listening: socket.socket | None = None, **settings: Any
) -> AsyncIterator[Served]:
    gateway = Gateway(**settings)
    async with serving(gateway, listening=listening) as url:
        server = Served(gateway, url, engine, renderer or plain_renderer())
        try:
            yield server
        finally:
            for client in server.clients:
                await client.close()


def written(step: Step) -> str:
    """What the step's completion says."""
    return plain_renderer().text(step.completion_ids)


@asynccontextmanager
async def asked(engine: Any, **settings: Any) -> AsyncIterator[tuple[Served, httpx.AsyncClient, SessionAddress]]:
    """A gateway with one session whose replies are not parsed, and a bare client."""
    async with served(engine, **settings) as server, httpx.AsyncClient(timeout=CEILING) as http:
        yield server, http, server.open(parse=plain)
