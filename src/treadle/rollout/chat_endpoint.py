"""`Endpoint`: a URL that is asked until it answers; `ChatEndpoint`: one that speaks OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import httpx

from treadle.core.errors import EngineError
from treadle.core.text import read_json
from treadle.core.types import Message, StopReason, as_messages

FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds between two tries
_PASSING = (408, 409, 429, 500, 502, 503, 504, 529)  # statuses that may pass by themselves
_MESSAGE = ("role", "content", "reasoning_content", "tool_calls")


Answer = TypeVar("Answer")


class ChatAnswer(NamedTuple):
    """A reply, and the tokens that it cost as the server reports them."""

    message: Message
    stop_reason: StopReason
    prompt_tokens: int
    completion_tokens: int


class _Passing(Exception):
    """A problem that may pass by itself. wait: seconds that the server asks to wait."""

    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


class Endpoint(Generic[Answer]):
    """Posts requests to a URL, again until it answers: with growing pauses, or when the server says (`Retry-After`).

    concurrency: calls at a time, without pauses; per_second: calls begun in a second, at most. timeout: seconds for a
    call. patience: seconds of calls and pauses after which one that fails is given up. api_key_env: the environment
    variable that has the key. on_try: called after each try, with its answer, if it got one, and its seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 64,
        per_second: float = math.inf,
        timeout: float,
        patience: float,
        api_key_env: str | None = None,
        on_try: Callable[[Answer | None, float], None] = lambda answer, seconds: None,
    ) -> None:
        self.url, self._concurrency, self._interval = url, concurrency, 1 / per_second
        self._timeout, self._patience, self._key_env, self._on_try = timeout, patience, api_key_env, on_try
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore] | None = None
        self._next_call = -math.inf

    def _read(self, text: str) -> Answer:
        """Read an answer. Raises ValueError."""
        raise NotImplementedError

    async def post(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to a request.

        Raises EngineError, with the problem alone, for an outage longer than `patience`, and for a refusal.
        """
        loop, (_, _, places) = asyncio.get_running_loop(), self._opened()
        left, pause = self._patience, FIRST_PAUSE  # waiting for a place tries nobody's patience
        while True:
            async with places:
                began = max(loop.time(), self._next_call)
                self._next_call = began + self._interval
                await asyncio.sleep(began - loop.time())
                answer, problem, least = await self._try(body, min(self._timeout, left))
            if answer is not None:
                return answer
            wait = max(pause, least)
            left -= loop.time() - began + wait
            if left <= 0:
                raise EngineError(f"no answer within {self._patience:g} s, at last: {problem}")
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _try(self, body: Mapping[str, Any], timeout: float) -> tuple[Answer | None, str, float]:
        """Make one call: the answer, or None, the problem and the seconds that the server asks to wait."""
        began, answer = time.monotonic(), None
        try:
            async with asyncio.timeout(timeout):
                answer = await self._send(body)
            return answer, "", 0.0
        except TimeoutError:
            return None, f"none within {timeout:.3g} s", 0.0
        except _Passing as problem:
            return None, str(problem), problem.wait
        finally:
            self._on_try(answer, time.monotonic() - began)

    async def _send(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to a request. Raises _Passing for what may pass by itself, EngineError for a refusal."""
        headers = {"Authorization": f"Bearer {os.environ[self._key_env]}"} if self._key_env else {}
        try:
            response = await self._opened()[1].post(self.url, json=body, headers=headers)
            if response.status_code == 200:
                return self._read(response.text)
        except (httpx.RequestError, ValueError) as error:
            raise _Passing(str(error) or type(error).__name__) from error
        if response.status_code not in _PASSING:
            raise EngineError(f"status {response.status_code}: {response.text:.200}")
        after = response.headers.get("Retry-After", "")  # it may be a date
        raise _Passing(f"status {response.status_code}", float(after) if after.isdecimal() else 0.0)

    def _opened(self) -> tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore]:
        """Return what belongs to this event loop. No connection is kept, so that none needs to be closed."""
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            limits = httpx.Limits(max_keepalive_connections=0)
            secure = self.url.startswith("https")
            http = httpx.AsyncClient(timeout=None, limits=limits, verify=secure, trust_env=secure)
            self._open, self._next_call = (loop, http, asyncio.Semaphore(self._concurrency)), -math.inf
        return self._open


class JsonEndpoint(Endpoint[Any]):
    """A URL that answers with JSON."""

    def _read(self, text: str) -> Any:
        return read_json(text)


class ChatEndpoint(Endpoint[ChatAnswer]):
    """A model behind a URL. model: its name there. options: of each request; others are those of `Endpoint`."""

    def __init__(self, url: str, model: str, *, options: Mapping[str, Any], **limits: Any) -> None:
        super().__init__(f"{url.rstrip('/')}/chat/completions", **limits)
        self.model, self._options = model, dict(options)

    async def ask(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatAnswer:
        """Return the reply to a conversation. options: of this request. Raises EngineError as `post` does."""
        return await self.post({"model": self.model, "messages": messages, **self._options, **options})

    def _read(self, text: str) -> ChatAnswer:
        return _read(text)


def _read(text: str) -> ChatAnswer:
    """Read a chat completion. Raises ValueError."""
    try:
        answer = read_json(text)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        said = {name: choice["message"][name] for name in _MESSAGE if choice["message"].get(name) is not None}
        [message] = as_messages([{**said, "role": "assistant"}], "the answer")
        whole, read = usage.get("total_tokens") or 0, usage.get("prompt_tokens") or 0
        wrote = usage.get("completion_tokens") or max(whole - read, 0)
        if not isinstance(read, int) or not isinstance(wrote, int) or not (said.keys() & {"content", "tool_calls"}):
            raise TypeError
        cut = choice.get("finish_reason") == "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer {text!r:.200} is no chat completion") from error
    return ChatAnswer(message, StopReason.LENGTH if cut else StopReason.STOP, read, wrote)
