"""`Judge`: asks a model behind an OpenAI-compatible URL, and makes a reward of its answers."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.core.metrics import Measures, Metric, Tally
from treadle.core.rewards import Reward
from treadle.core.text import read_json
from treadle.judge.prompt import TEMPLATE, Criterion, messages
from treadle.rollout.isolation.user_code import RUNNING

CALLS = Metric("judge_calls", "trajectory", "sum", "calls", "calls that judges answered")
ERRORS = Metric("judge_errors", "trajectory", "sum", "calls", "calls that judges did not answer, or with an error")
VERDICTS = Metric("judge_verdicts", "trajectory", "sum", "votes", "votes that were counted, from the cache or not")
TOKENS = Metric("judge_tokens", "trajectory", "sum", "tokens", "tokens that judges read and wrote, as they report")
SECONDS = Metric("judge_seconds", "trajectory", "sum", "seconds", "time that calls of judges took")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds between two tries
_PASSING = (408, 409, 429, 500, 502, 503, 504, 529)  # statuses that may pass by themselves


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the calls of one judge, in this process. Raises ConfigError.

    concurrency: calls at a time. per_second: calls begun in a second, at most. timeout: seconds for a call. patience:
    seconds of calls and pauses after which a question is given up; until then a call that fails is made again, with
    growing pauses. tries: replies to a question until one can be read.
    """

    concurrency: int = 8
    per_second: float = math.inf
    timeout: float = 30.0
    patience: float = 45.0
    tries: int = 3

    def __post_init__(self) -> None:
        if min(self.concurrency, self.tries) < 1 or min(self.per_second, self.timeout, self.patience) <= 0:
            raise ConfigError(f"{self}: concurrency and tries are at least 1, the others above 0")


class Judge:
    """A model that judges by a rubric. May be shared by all attempts; make it once.

        judge = Judge("http://127.0.0.1:8000/v1", "qwen", [Criterion("polite", "Is the agent polite?")])
        reward = await judge.grade(transcript)

    votes: replies to each question. cache: a directory for replies that could be read; none is asked for again.
    api_key_env: the environment variable that has the key. options: of the request, as `{"temperature": 1.0,
    "max_tokens": 500}`.

    Raises ConfigError.
    """

    def __init__(
        self,
        url: str,
        model: str,
        rubric: Sequence[Criterion],
        *,
        votes: int = 1,
        limits: Limits = Limits(),
        cache: str | Path | None = None,
        api_key_env: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url {url!r} is none of a judge; write http://127.0.0.1:8000/v1")
        names = [criterion.name for criterion in rubric]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a rubric needs criteria of different names, got {names}")
        if votes < 1:
            raise ConfigError(f"votes is {votes}; it must be at least 1")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigError(f"api_key_env: the environment variable {api_key_env!r} is not set")
        self._url, self._model, self._rubric = f"{url.rstrip('/')}/chat/completions", model, tuple(rubric)
        self._votes, self._limits, self._options = votes, limits, dict(options or {})
        self._cache, self._key_env = cache and Path(cache), api_key_env
        self._open: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore] | None = None
        self._next_call = -math.inf

    async def grade(self, transcript: str, *, task: str = "", reference: str = "") -> Reward:
        """Return the reward for a transcript: of each criterion a component, its weight times the mean vote.

        task: what the agent was to do; quoted like the transcript. reference: what the judge is to know besides, like
        the right answer; it is trusted.

        Raises TrajectoryFailure of cause verifier if a vote is missing: an outage longer than `patience`, a refusal, or
        replies that cannot be read.
        """
        votes = {
            c.name: [asyncio.create_task(self._vote(c, n, transcript, task, reference)) for n in range(self._votes)]
            for c in self._rubric
        }
        await asyncio.gather(*itertools.chain(*votes.values()), return_exceptions=True)  # all are counted, and cached
        return Reward({c.name: c.weight * fmean(vote.result() for vote in votes[c.name]) for c in self._rubric})

    async def _vote(self, criterion: Criterion, number: int, transcript: str, task: str, reference: str) -> float:
        asked = [self._url, self._model, self._options, TEMPLATE, criterion.prompt, criterion.form]
        content = json.dumps([*asked, number, transcript, task, reference], sort_keys=True)
        file = self._cache and self._cache / f"{hashlib.sha256(content.encode()).hexdigest()}.txt"
        cached = [file.read_text("utf-8", "replace")] if file and file.is_file() else []
        for _ in range(len(cached) + self._limits.tries):
            known = bool(cached)
            reply = cached.pop() if known else await self._ask(messages(criterion, transcript, task, reference))
            try:
                value = criterion.read(reply)
            except ValueError as error:
                problem = f"{criterion.name}: {error}, in {reply!r:.200}"
                continue
            if file and not known:
                await asyncio.to_thread(_store, file, reply)
            _count(VERDICTS, 1)
            return value
        raise self._failure(problem)

    async def _ask(self, request: list[dict[str, str]]) -> str:
        """Return the reply to a request, made again until there is one. A pause takes no other call's place."""
        loop, (_, http, places) = asyncio.get_running_loop(), self._opened()
        left, pause = self._limits.patience, _FIRST_PAUSE  # waiting for a place tries nobody's patience
        while True:
            async with places:
                began = max(loop.time(), self._next_call)
                self._next_call = began + 1 / self._limits.per_second
                await asyncio.sleep(began - loop.time())
                reply, problem, least = await self._try(http, request, min(self._limits.timeout, left))
            if reply is not None:
                return reply
            wait = max(pause, least)
            left -= loop.time() - began + wait
            if left <= 0:
                raise self._failure(f"no answer within {self._limits.patience:g} s, at last: {problem}")
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _try(
        self, http: httpx.AsyncClient, request: list[dict[str, str]], timeout: float
    ) -> tuple[str | None, str, float]:
        """Make one call: the reply, or None, the problem and the seconds that the server asks to wait."""
        headers = {"Authorization": f"Bearer {os.environ[self._key_env]}"} if self._key_env else {}
        body = {"model": self._model, "messages": request, **self._options}
        began, counted = time.monotonic(), ERRORS
        try:
            async with asyncio.timeout(timeout):
                response = await http.post(self._url, json=body, headers=headers)
            if response.status_code == 200:
                reply, tokens = _reply(response.text)
                counted = CALLS
                _count(TOKENS, tokens)
                return reply, "", 0.0
        except TimeoutError:
            return None, f"none within {timeout:.3g} s", 0.0
        except (httpx.RequestError, ValueError) as error:
            return None, str(error) or type(error).__name__, 0.0
        finally:
            _count(counted, 1)
            _count(SECONDS, time.monotonic() - began)
        if response.status_code not in _PASSING:
            raise self._failure(f"status {response.status_code}: {response.text:.200}")
        after = response.headers.get("Retry-After", "")
        return None, f"status {response.status_code}", float(after) if after.isdecimal() else 0.0  # it may be a date

    def _opened(self) -> tuple[asyncio.AbstractEventLoop, httpx.AsyncClient, asyncio.Semaphore]:
        """Return what belongs to this event loop. No connection is kept, so that none needs to be closed."""
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:
            limits = httpx.Limits(max_keepalive_connections=0)
            secure = self._url.startswith("https")
            http = httpx.AsyncClient(timeout=None, limits=limits, verify=secure, trust_env=secure)
            self._open, self._next_call = (loop, http, asyncio.Semaphore(self._limits.concurrency)), -math.inf
        return self._open

    def _failure(self, problem: str) -> TrajectoryFailure:
        return TrajectoryFailure(Cause.VERIFIER, f"the judge {self._model!r} at {self._url}: {problem}")


def _reply(text: str) -> tuple[str, int]:
    """Return the reply in an answer, and the tokens that it cost. Raises ValueError."""
    try:
        answer = read_json(text)
        reply, usage = answer["choices"][0]["message"]["content"], answer.get("usage") or {}
        tokens = usage.get("total_tokens") or 0
        if not isinstance(reply, str) or not isinstance(tokens, int):
            raise TypeError
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer {text!r:.200} is no chat completion") from error
    return reply, tokens


def _count(metric: Metric, value: float) -> None:
    """Count it for the attempt, or the group, whose code is running."""
    if (user := RUNNING.get()) is not None:
        user.measured += Measures([Tally.over(metric, [value])])


def _store(file: Path, reply: str) -> None:
    """Write a reply, whole or not at all; another task may do the same."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8", errors="replace") as new:
        new.write(reply)
    os.replace(new.name, file)
