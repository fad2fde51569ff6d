"""`Judge`: asks a model, and turns its answers into a reward.

Judge.grade -criterion, vote-> OPEN_MODELS[name].chat -> reply -Criterion.read-> mean of the votes -> Reward
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from treadle.core.config import build
from treadle.core.draws import Stream
from treadle.core.errors import Cause, ConfigError, ContextExceeded, DataError, EngineError, TrajectoryFailure
from treadle.core.metrics import Measures, Metric, Tally
from treadle.core.rewards import Reward
from treadle.core.text import redacted
from treadle.core.types import Message, StopReason
from treadle.judge.prompt import TEMPLATE, Criterion, messages
from treadle.rollout.isolation.user_code import RUNNING
from treadle.rollout.other_models import OPEN_MODELS, POLICY, OtherModel, OtherModelConfig, PolicyCopy
from treadle.rollout.session import Address, CallOptions, OtherReply

CALLS = Metric("judge_calls", "trajectory", "sum", "calls", "calls that judges answered")
ERRORS = Metric("judge_errors", "trajectory", "sum", "calls", "calls that judges did not answer, or with an error")
VERDICTS = Metric("judge_verdicts", "trajectory", "sum", "votes", "votes that were counted, from the cache or not")
TOKENS = Metric("judge_tokens", "trajectory", "sum", "tokens", "tokens that judges read and wrote, as they report")
_NUMBERS = itertools.count()  # of sessions
SECONDS = Metric("judge_seconds", "trajectory", "sum", "seconds", "time that calls of judges took")


class Judge:
    """A model that judges by a rubric. Create it once; all attempts may share it.

        judge = Judge("grader", [Criterion("polite", "Is the agent polite?")])
        reward = await judge.grade(transcript)

    model: name of one of the recipe's `models`, or "policy", the policy itself with its current weights, without a
    cache; in a script of your own a model, `UrlModel(OtherModelConfig(url=..., model=...))`.
    votes: replies per question. tries: replies requested until one can be read. cache: directory for readable replies,
    which are never requested again. options: sampling, in place of the model's: `{"max_tokens": 500}`.

    Raises ConfigError.
    """

    def __init__(
        self,
        model: str | OtherModel,
        rubric: Sequence[Criterion],
        *,
        votes: int = 1,
        tries: int = 3,
        cache: str | Path | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if isinstance(model, str) and "/" in model:
            raise ConfigError(
                f"a judge asks a model by its name under models of the recipe, and {model!r} is none; write models: "
                "{judge: {url: ..., model: ...}} or {judge: {path: ...}}, and Judge('judge', ...)"
            )
        if model == POLICY and cache is not None:
            raise ConfigError("a judge that is the policy changes with every update; leave out its cache")
        names = [criterion.name for criterion in rubric]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a rubric needs criteria of different names, got {names}")
        if min(votes, tries) < 1:
            raise ConfigError(f"votes is {votes} and tries {tries}; they must be at least 1")
        build(OtherModelConfig, {"path": ".", "options": dict(options)}, "options of a judge")
        self._model, self._rubric, self._options = model, tuple(rubric), options
        self._votes, self._tries, self._cache = votes, tries, cache and Path(cache)

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
        model = self._open_model()
        asked = [*model.source, {**model.options, **self._options}, TEMPLATE, criterion.prompt, criterion.form]
        content = json.dumps([*asked, number, transcript, task, reference], sort_keys=True)
        file = self._cache and self._cache / f"{hashlib.sha256(content.encode()).hexdigest()}.txt"
        cached = [file.read_text("utf-8", "replace")] if file and file.is_file() else []
        for tried in range(len(cached) + self._tries):
            known = bool(cached)
            seed = _seed(f"{tried} {content}")
            drawn = seed if model.has_draws else None
            request = messages(criterion, transcript, task, reference, drawn)
            answer = None if known else await self._ask(model, request, seed)
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

    async def _ask(self, model: OtherModel, request: Sequence[Message], seed: int) -> OtherReply:
        try:
            chat = model.chat(f"judge#{next(_NUMBERS)}", Address(seed, Stream.OTHER_MODEL, 0, 0, 0), _count_try)
            return await chat(request, (), CallOptions(sampling_overrides=self._options))
        except (EngineError, ConfigError, DataError, ContextExceeded) as error:
            raise self._failure(str(error)) from error

    def _open_model(self) -> OtherModel:
        if not isinstance(self._model, str):
            return self._model
        model = OPEN_MODELS.get().get(self._model)
        if model is None or isinstance(model, PolicyCopy):
            known = ", ".join(sorted({POLICY, *OPEN_MODELS.get()}))
            raise self._failure(
                f"no such model is open here; name it under models in the recipe ({known}), await the judge in an "
                "async function of a run or an evaluation, and give it a UrlModel in a script of your own"
            )
        return model

    def _failure(self, problem: str) -> TrajectoryFailure:
        name = self._model if isinstance(self._model, str) else self._model.source[1]
        return TrajectoryFailure(Cause.VERIFIER, redacted(f"the judge {name!r}: {problem}"))


def _seed(content: str) -> int:
    return int.from_bytes(hashlib.sha256(content.encode(errors="surrogatepass")).digest()[:7], "big")


def _count_try(answer: OtherReply | None, seconds: float) -> None:
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
