"""`Endpoint`: a URL with retries; `ChatEndpoint`: one that speaks OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import httpx

from treadle.core.errors import EngineError
from treadle.core.text import keys_in, read_json, redacted, without_keys
from treadle.core.types import Message, StopReason, as_messages, in_parts

FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds between attempts
_PASSING = (408, 409, 429, 500, 502, 503, 504, 529)  # transient statuses
_MESSAGE = ("role", "content", "reasoning_content", "tool_calls")
_WHOLE = (
    None,
    "stop",
    "tool_calls",
    "function_call",
    "eos",
    "eos_token",
    "stop_sequence",
    "end_turn",
)  # finish reasons
_LARGEST = 2**22  # bytes of an answer: a million tokens
_LARGEST_PROBLEM = 2**16  # bytes read of an answer with a status other than 200
_MOST_TOKENS = 2**31

Answer = TypeVar("Answer")


class ChatAnswer(NamedTuple):
    """A reply, with its token counts as reported by the server."""

    message: Message
    stop_reason: StopReason
    prompt_tokens: int
    completion_tokens: int


class _Passing(Exception):
    """A transient problem. wait: delay requested by the server, in seconds."""

    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


class Endpoint(Generic[Answer]):
    """Posts requests to a URL, retrying with growing pauses, or when the server says (`Retry-After`).

    concurrency: number of concurrent calls, without pauses; per_second: maximum number of calls begun per second.
    timeout: limit of a call, in seconds. patience: seconds of calls and pauses before a failing call is given up.
    api_key_env: environment variable with the key. largest: maximum size of an answer, in bytes.

    Invariant: the key is in no answer and no error, even if the server repeats it.
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
        largest: int = _LARGEST,
    ) -> None:
        self.url, self._concurrency, self._interval = url, concurrency, 1 / per_second
        self._timeout, self._patience, self._key_env = timeout, patience, api_key_env
        self._largest = largest
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore] | None = None
        self._next_call = -math.inf

    def _read(self, text: str) -> Answer:
        """Parse an answer. Raises ValueError."""
        raise NotImplementedError

    async def post(
        self, body: Mapping[str, Any], on_try: Callable[[Answer | None, float], None] = lambda answer, seconds: None
    ) -> Answer:
        """Return the answer to a request. on_try: called after each try, with its answer, if any, and its seconds.

        Raises EngineError, with only the problem, for an outage longer than `patience`, for a refusal, and for an
        answer that is too large.
        """
        loop, (_, _, places) = asyncio.get_running_loop(), self._opened()
        left, pause = self._patience, FIRST_PAUSE  # waiting for a slot does not count
        while True:
            async with places:
                began = max(loop.time(), self._next_call)
                self._next_call = began + self._interval
                await asyncio.sleep(began - loop.time())
                answer, problem, least = await self._try(body, min(self._timeout, left), on_try)
            if answer is not None:
                return answer
            wait = max(pause, least)
            left -= loop.time() - began + wait
            if left <= 0:
                raise EngineError(self.redacted(f"no answer within {self._patience:g} s, at last: {problem}"))
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _try(
        self, body: Mapping[str, Any], timeout: float, on_try: Callable[[Answer | None, float], None]
    ) -> tuple[Answer | None, str, float]:
        """Make one call: return the answer, or None, the problem and the server's requested delay in seconds."""
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
            on_try(answer, time.monotonic() - began)

    async def _send(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to a request. Raises _Passing for a transient problem, EngineError for a refusal."""
        # So that counted bytes equal read bytes.
        headers = {"Accept-Encoding": "identity"}
        if self._key_env:
            headers["Authorization"] = f"Bearer {os.environ[self._key_env]}"
        try:
            async with self._opened()[1].stream("POST", self.url, json=body, headers=headers) as response:
                text = without_keys(await self._text(response), *self._keys())
            if response.status_code == 200:
                return self._read(text)
        except (httpx.RequestError, ValueError) as error:
            raise _Passing(self.redacted(str(error)) or type(error).__name__) from None  # its text may hold the key
        if response.status_code not in _PASSING:
            raise EngineError(f"status {response.status_code}: {self.redacted(text):.200}")
        after = response.headers.get("Retry-After", "")  # may also be a date
        raise _Passing(f"status {response.status_code}", float(after) if after.isdecimal() else 0.0)

    def redacted(self, problem: str) -> str:
        """Return an error's text without the key."""
        return redacted(problem, *self._keys())

    def _keys(self) -> tuple[str, ...]:
        return os.environ.get(self._key_env or "", ""), *keys_in(self.url)

    async def _text(self, response: httpx.Response) -> str:
        """Return the body of a response. Raises ValueError if it is compressed, EngineError if it is too large."""
        if (coding := response.headers.get("Content-Encoding", "identity")) != "identity":
            raise ValueError(f"the answer is compressed ({coding!r:.40}), although identity was requested")
        body = bytearray()
        async for part in response.aiter_raw():
            body += part
            if response.status_code != 200 and len(body) > _LARGEST_PROBLEM:
                break
            if len(body) > self._largest:
                raise EngineError(f"the answer has more than {self._largest} bytes")
        return body.decode(errors="replace")

    def _opened(self) -> tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore]:
        """Return this event loop's resources. No connection is kept, so that none needs closing."""
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
    """A model behind a URL. model: its name there. options: fields of each request; further ones as in `Endpoint`."""

    def __init__(self, url: str, model: str, *, options: Mapping[str, Any], **limits: Any) -> None:
        super().__init__(f"{url.rstrip('/')}/chat/completions", **limits)
        self.model, self._options = model, dict(options)

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        on_try: Callable[[ChatAnswer | None, float], None] = lambda answer, seconds: None,
        **options: Any,
    ) -> ChatAnswer:
        """Return the reply to a conversation. options: fields of this request. Raises EngineError as `post` does."""
        return await self.post(
            {"model": self.model, "messages": [*map(in_parts, messages)], **self._options, **options}, on_try
        )

    def _read(self, text: str) -> ChatAnswer:
        return _read(text)


def _read(text: str) -> ChatAnswer:
    """Parse a chat completion. Raises ValueError."""
    try:
        answer = read_json(text)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        sent = choice["message"]
        said = {name: sent[name] for name in _MESSAGE if sent.get(name) is not None}
        if isinstance(thought := sent.get("reasoning"), str):  # vLLM's newer name
            said.setdefault("reasoning_content", thought)
        [message] = as_messages([{**said, "role": "assistant"}], "the answer")
        reported = [usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total")]
        finished = choice.get("finish_reason")
        if not said.keys() & {"content", "tool_calls"} and finished != "length":  # cut off before any text
            raise TypeError
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer {text[:200]!r:.200} is not a chat completion") from error
    if wrong := [count for count in reported if not (count is None or _is_count(count))]:
        raise ValueError(f"its usage reports {wrong[0]!r:.40} tokens; it must be a whole number, 0 or more")
    read, wrote, whole = (count or 0 for count in reported)
    cut = StopReason.LENGTH if finished == "length" else StopReason.ABORT
    return ChatAnswer(message, StopReason.STOP if finished in _WHOLE else cut, read, wrote or max(whole - read, 0))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_TOKENS
