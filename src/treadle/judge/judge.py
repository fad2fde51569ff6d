"""`Judge`: asks a model, and turns its answers into a reward.

url     ChatEndpoint, over HTTP
path    RunEndpoint -> RUN_MODELS -> a model directory, in the run's process
policy  RunEndpoint -> RUN_MODELS -> the policy's engine
"""

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

from treadle.core.config import build
from treadle.core.errors import Cause, ConfigError, ContextExceeded, DataError, EngineError, TrajectoryFailure
from treadle.core.metrics import Measures, Metric, Tally
from treadle.core.rewards import Reward
from treadle.core.types import StopReason
from treadle.judge.prompt import TEMPLATE, Criterion, messages
from treadle.rollout.chat_endpoint import ChatAnswer, ChatEndpoint
from treadle.rollout.isolation.user_code import RUNNING
from treadle.rollout.other_models import POLICY, RUN_MODELS, OtherModelConfig

CALLS = Metric("judge_calls", "trajectory", "sum", "calls", "calls that judges answered")
ERRORS = Metric("judge_errors", "trajectory", "sum", "calls", "calls that judges did not answer, or with an error")
VERDICTS = Metric("judge_verdicts", "trajectory", "sum", "votes", "votes that were counted, from the cache or not")
TOKENS = Metric("judge_tokens", "trajectory", "sum", "tokens", "tokens that judges read and wrote, as they report")
SECONDS = Metric("judge_seconds", "trajectory", "sum", "seconds", "time that calls of judges took")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the calls of one judge, in this process. Raises ConfigError.

    concurrency: number of concurrent calls. per_second: maximum number of calls begun per second. timeout: limit of a
    call, in seconds. patience: seconds of calls and pauses before a question is given up; until then failed calls are
    retried, with growing pauses. tries: replies requested per question until one can be read.
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
    """A model that judges by a rubric. Create it once; all attempts may share it.

        judge = Judge("http://127.0.0.1:8000/v1", "qwen", [Criterion("polite", "Is the agent polite?")])
        reward = await judge.grade(transcript)

    Exactly one of url with model (its name there), path and policy is given. path: a model directory, loaded beside the
    policy at the first call. policy: the policy itself, with its current weights; without a cache.
    votes: replies per question. cache: directory for readable replies, which are never requested again.
    api_key_env: environment variable with the key. options: request options, as `{"temperature": 1.0, "max_tokens":
    500}`.


    Raises ConfigError.
    """

    def __init__(
        self,
        url: str | None = None,
        model: str | None = None,
        rubric: Sequence[Criterion] = (),
        *,
        path: str | Path | None = None,
        policy: bool = False,
        votes: int = 1,
        limits: Limits = Limits(),
        cache: str | Path | None = None,
        api_key_env: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if (url is not None) + (path is not None) + policy != 1:
            raise ConfigError("a judge needs exactly one of url, path and policy")
        if url is not None and (model is None or not url.startswith(("http://", "https://"))):
            raise ConfigError(f"url {url!r} is not a judge's; write http://127.0.0.1:8000/v1, and the model's name")
        if url is None and (model is not None or api_key_env is not None):
            raise ConfigError("model and api_key_env belong to a judge's url; leave them out")
        if path is not None and not Path(path).is_dir():
            raise ConfigError(f"path {str(path)!r} of a judge is not a directory; name one with a model")
        if policy and cache is not None:
            raise ConfigError("a judge that is the policy changes with every update; leave out its cache")
        names = [criterion.name for criterion in rubric]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a rubric needs criteria of different names, got {names}")
        if votes < 1:
            raise ConfigError(f"votes is {votes}; it must be at least 1")
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigError(f"api_key_env: the environment variable {api_key_env!r} is not set")
        self._rubric, self._in_run = tuple(rubric), url is None
        self._options = _sampling(options or {}) if url is None else dict(options or {})
        self._votes, self._tries, self._cache = votes, limits.tries, cache and Path(cache)
        self._endpoint = (RunEndpoint if url is None else ChatEndpoint)(
            url or "",
            model or (POLICY if path is None else str(Path(path).absolute())),
            concurrency=limits.concurrency,
            per_second=limits.per_second,
            timeout=limits.timeout,
            patience=limits.patience,
            api_key_env=api_key_env,
            options=self._options,
            on_try=_count_try,
        )

    async def grade(self, transcript: str, *, task: str = "", reference: str = "") -> Reward:
        """Return the reward for a transcript: one component per criterion, its weight times the mean vote.

        task: the agent's assignment; quoted like the transcript. reference: additional knowledge for the judge, such as
        the right answer; it is trusted.

        Raises TrajectoryFailure of cause verifier if a vote is missing: after an outage longer than `patience`, a
        refusal, or replies that cannot be read, or were truncated.
        """
        votes = {
            c.name: [asyncio.create_task(self._vote(c, n, transcript, task, reference)) for n in range(self._votes)]
            for c in self._rubric
        }
        # so that all are counted and cached
        await asyncio.gather(*itertools.chain(*votes.values()), return_exceptions=True)
        return Reward({c.name: c.weight * fmean(vote.result() for vote in votes[c.name]) for c in self._rubric})

    async def _vote(self, criterion: Criterion, number: int, transcript: str, task: str, reference: str) -> float:
        where = [self._endpoint.url, self._endpoint.model, self._options]
        asked = [*where, TEMPLATE, criterion.prompt, criterion.form]
        content = json.dumps([*asked, number, transcript, task, reference], sort_keys=True)
        file = self._cache and self._cache / f"{hashlib.sha256(content.encode()).hexdigest()}.txt"
        cached = [file.read_text("utf-8", "replace")] if file and file.is_file() else []
        for tried in range(len(cached) + self._tries):
            known = bool(cached)
            seed = _seed(f"{tried} {content}") if self._in_run else None
            request = messages(criterion, transcript, task, reference, seed)
            answer = None if known else await self._ask(request, seed)
            reply = cached.pop() if answer is None else answer.message["content"]
            try:
                # A truncated 10 would be read as 1.
                if answer is not None and answer.stop_reason is not StopReason.STOP:
                    raise ValueError(f"the reply was cut ({answer.stop_reason}; max_tokens in the judge's options)")
                value = criterion.read(reply)
            except ValueError as error:
                problem = f"{criterion.name}: {error}, in {reply!r:.200}"
                continue
            if file and not known:
                await asyncio.to_thread(_store, file, reply)
            _count(VERDICTS, 1)
            return value
        raise self._failure(problem)

    async def _ask(self, request: list[dict[str, str]], seed: int | None) -> ChatAnswer:
        draws = {} if seed is None else {"seed": seed}
        try:
            return await self._endpoint.ask(request, **draws)
        except EngineError as error:
            raise self._failure(str(error)) from error

    def _failure(self, problem: str) -> TrajectoryFailure:
        where = "" if self._in_run else f" at {self._endpoint.url}"
        message = f"the judge {self._endpoint.model!r}{where}: {problem}"
        return TrajectoryFailure(Cause.VERIFIER, self._endpoint.redacted(message))


class RunEndpoint(ChatEndpoint):
    """A model directory, or the policy, in the process of a run. Limits and record are as for any endpoint."""

    async def _send(self, body: Mapping[str, Any]) -> ChatAnswer:
        if (models := RUN_MODELS.get()) is None:
            raise EngineError(
                "only available in the process of a run, not to scripts or placement.rollout.workers; serve "
                "the model (`treadle serve`) and give the judge its url"
            )
        options = {name: value for name, value in body.items() if name not in ("model", "messages", "seed")}
        try:
            reply = await models.chat(self.model, body["messages"], options, body["seed"])
        except (ConfigError, DataError, ContextExceeded) as error:
            raise EngineError(str(error)) from error
        return ChatAnswer(reply.message, reply.stop_reason, reply.prompt_tokens, reply.completion_tokens)


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return validated sampling options. Raises ConfigError."""
    sampling = build(OtherModelConfig, {"path": ".", "options": options}, "options of a judge").sampling
    return {name: getattr(sampling, name) for name in options}


def _seed(content: str) -> int:
    return int.from_bytes(hashlib.sha256(content.encode(errors="surrogatepass")).digest()[:7], "big")


def _count_try(answer: ChatAnswer | None, seconds: float) -> None:
    if answer is not None:
        _count(TOKENS, answer.prompt_tokens + answer.completion_tokens)
    _count(ERRORS if answer is None else CALLS, 1)
    _count(SECONDS, seconds)


def _count(metric: Metric, value: float) -> None:
    """Count a value for the attempt, or the group, of the running code."""
    if (user := RUNNING.get()) is not None:
        user.measured += Measures([Tally.over(metric, [value])])


def _store(file: Path, reply: str) -> None:
    """Write a reply atomically; another task may do the same."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8", errors="replace") as new:
        new.write(reply)
    os.replace(new.name, file)
