"""`Judge`: asks a model behind an OpenAI-compatible URL, and makes a reward of its answers."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from treadle.core.errors import Cause, ConfigError, EngineError, TrajectoryFailure
from treadle.core.metrics import Measures, Metric, Tally
from treadle.core.rewards import Reward
from treadle.judge.prompt import TEMPLATE, Criterion, messages
from treadle.rollout.chat_endpoint import ChatAnswer, ChatEndpoint
from treadle.rollout.isolation.user_code import RUNNING

CALLS = Metric("judge_calls", "trajectory", "sum", "calls", "calls that judges answered")
ERRORS = Metric("judge_errors", "trajectory", "sum", "calls", "calls that judges did not answer, or with an error")
VERDICTS = Metric("judge_verdicts", "trajectory", "sum", "votes", "votes that were counted, from the cache or not")
TOKENS = Metric("judge_tokens", "trajectory", "sum", "tokens", "tokens that judges read and wrote, as they report")
SECONDS = Metric("judge_seconds", "trajectory", "sum", "seconds", "time that calls of judges took")


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
        self._model, self._rubric, self._options = model, tuple(rubric), dict(options or {})
        self._votes, self._tries, self._cache = votes, limits.tries, cache and Path(cache)
        self._endpoint = ChatEndpoint(
            url,
            model,
            concurrency=limits.concurrency,
            per_second=limits.per_second,
            timeout=limits.timeout,
            patience=limits.patience,
            api_key_env=api_key_env,
            options=self._options,
            on_try=_count_try,
        )

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
        asked = [self._endpoint.url, self._model, self._options, TEMPLATE, criterion.prompt, criterion.form]
        content = json.dumps([*asked, number, transcript, task, reference], sort_keys=True)
        file = self._cache and self._cache / f"{hashlib.sha256(content.encode()).hexdigest()}.txt"
        cached = [file.read_text("utf-8", "replace")] if file and file.is_file() else []
        for _ in range(len(cached) + self._tries):
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
        try:
            return (await self._endpoint.ask(request)).message["content"]
        except EngineError as error:
            raise self._failure(str(error)) from error

    def _failure(self, problem: str) -> TrajectoryFailure:
        return TrajectoryFailure(Cause.VERIFIER, f"the judge {self._model!r} at {self._endpoint.url}: {problem}")


def _count_try(answer: ChatAnswer | None, seconds: float) -> None:
    if answer is not None:
        _count(TOKENS, answer.prompt_tokens + answer.completion_tokens)
    _count(ERRORS if answer is None else CALLS, 1)
    _count(SECONDS, seconds)


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
