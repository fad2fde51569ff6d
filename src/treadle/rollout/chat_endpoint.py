"""`ChatEndpoint`: a model behind a URL that speaks OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from treadle.core.errors import EngineError
from treadle.core.text import read_json
from treadle.core.types import Message, StopReason, as_messages

FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds between two tries
_PASSING = (408, 409, 429, 500, 502, 503, 504, 529)  # statuses that may pass by themselves
_MESSAGE = ("role", "content", "reasoning_content", "tool_calls")


class ChatAnswer(NamedTuple):
    """A reply, and the tokens that it cost as the server reports them."""

    message: Message
    stop_reason: StopReason
    prompt_tokens: int
    completion_tokens: int


class ChatEndpoint:
    """Asks a model, again until it answers: with growing pauses, or when the server says (`Retry-After`).

    concurrency: calls at a time, without pauses; per_second: calls begun in a second, at most. timeout: seconds for a
    call. patience: seconds of calls and pauses after which one that fails is given up. api_key_env: the environment
    variable that has the key. options: of each request. on_try: called after each try, with its answer, if it got one,
    and its seconds.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        concurrency: int = 64,
        per_second: float = math.inf,
        timeout: float,
        patience: float,
        api_key_env: str | None = None,
        options: Mapping[str, Any],
        on_try: Callable[[ChatAnswer | None, float], None] = lambda answer, seconds: None,
    ) -> None:
        self.url, self._model, self._options = f"{url.rstrip('/')}/chat/completions", model, dict(options)
        self._concurrency, self._interval = concurrency, 1 / per_second
        self._timeout, self._patience, self._key_env, self._on_try = timeout, patience, api_key_env, on_try
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore] | None = None
        self._next_call = -math.inf

    async def ask(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatAnswer:
        """Return the reply to a conversation. options: of this request.

        Raises EngineError, with the problem alone, for an outage longer than `patience`, and for a refusal.
        """
        body = {"model": self._model, "messages": messages, **self._options, **options}
        loop, (_, http, places) = asyncio.get_running_loop(), self._opened()
        left, pause = self._patience, FIRST_PAUSE  # waiting for a place tries nobody's patience
        while True:
            async with places:
                began = max(loop.time(), self._next_call)
                self._next_call = began + self._interval
                await asyncio.sleep(began - loop.time())
                answer, problem, least = await self._try(http, body, min(self._timeout, left))
            if answer is not None:
                return answer
            wait = max(pause, least)
            left -= loop.time() - began + wait
            if left <= 0:
                raise EngineError(f"no answer within {self._patience:g} s, at last: {problem}")
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _try(
        self, http: httpx.AsyncClient, body: Mapping[str, Any], timeout: float
    ) -> tuple[ChatAnswer | None, str, float]:
        """Make one call: the answer, or None, the problem and the seconds that the server asks to wait."""
        headers = {"Authorization": f"Bearer {os.environ[self._key_env]}"} if self._key_env else {}
        began, answer = time.monotonic(), None
        try:
            async with asyncio.timeout(timeout):
                response = await http.post(self.url, json=body, headers=headers)
            if response.status_code == 200:
                answer = _read(response.text)
                return answer, "", 0.0
        except TimeoutError:
            return None, f"none within {timeout:.3g} s", 0.0
        except (httpx.RequestError, ValueError) as error:
            return None, str(error) or type(error).__name__, 0.0
        finally:
            self._on_try(answer, time.monotonic() - began)
        if response.status_code not in _PASSING:
            raise EngineError(f"status {response.status_code}: {response.text:.200}")
        after = response.headers.get("Retry-After", "")
        return None, f"status {response.status_code}", float(after) if after.isdecimal() else 0.0  # it may be a date

    def _opened(self) -> tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore]:
        """Return what belongs to this event loop. No connection is kept, so that none needs to be closed."""
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            limits = httpx.Limits(max_keepalive_connections=0)
            secure = self.url.startswith("https")
            http = httpx.AsyncClient(timeout=None, limits=limits, verify=secure, trust_env=secure)
            self._open, self._next_call = (loop, http, asyncio.Semaphore(self._concurrency)), -math.inf
        return self._open


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
