"""`FakeEngine`: a scripted engine, public, for tests of environments and agents. Needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from treadle.core.engine import Completion, ComponentStatus, VersionSpan
from treadle.core.errors import EngineError
from treadle.core.types import Floats, Ids, SamplingParams, StopReason


class FakeEngine:
    """Answers each call with `reply(prompt_ids, sampling)`, cut to `max_tokens`, every token at logprob `logprob`.

    A completion counts as stopped if it was not cut. `reply` may raise to play a failing engine. Where sampling leaves
    no choice (temperature 0, top_k 1) tokens have logprob 0.
    delay: called once a call, returns the seconds that it takes; its tokens come evenly over that time, each of the
    version published last. A call that is cancelled meanwhile ends at once.
    `calls` keeps every prompt it was sent, `running` counts calls in flight, `aborted` those that were cancelled.
    """

    def __init__(
        self,
        reply: Callable[[Ids, SamplingParams], Sequence[int]],
        *,
        logprob: float = -0.5,
        delay: Callable[[], float] | None = None,
    ) -> None:
        self.reply, self.logprob, self.delay = reply, logprob, delay
        self.version = 0
        self.calls: list[Ids] = []
        self.open: list[str] = []
        self.running = self.aborted = 0

    def open_session(self, session: str) -> None:
        if session in self.open:
            raise EngineError(f"session {session!r} is open already")
        self.open.append(session)

    def close_session(self, session: str) -> None:
        if session in self.open:
            self.open.remove(session)

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        """Return the scripted completion. Raises EngineError for a session that is not open."""
        if session not in self.open:
            raise EngineError(f"session {session!r} is not open")
        self.calls.append(np.asarray(prompt_ids))
        wanted = list(self.reply(prompt_ids, sampling))
        ids = wanted[: sampling.max_tokens]
        certain = sampling.temperature == 0 or sampling.top_k == 1
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), 0.0 if certain else self.logprob, np.float32),
            stop_reason=StopReason.STOP if ids == wanted else StopReason.LENGTH,
            policy_versions=_spans(await self._versions(len(ids))),
        )

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        """Return `logprob` for every token but the first."""
        return np.full(len(ids) - 1, self.logprob, np.float32)

    async def publish(self, version: int) -> None:
        """Report this version for the tokens that come later: an engine without weights is its own `WeightSync`."""
        self.version = version

    def status(self) -> list[ComponentStatus]:
        """Return its calls in flight, its sessions and its version."""
        return [ComponentStatus("engine", "fake", running=self.running, sessions=len(self.open), version=self.version)]

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    async def _versions(self, tokens: int) -> list[int]:
        """Wait for the tokens; returns the version of each."""
        if self.delay is None:
            return [self.version] * tokens
        pause = self.delay() / max(tokens, 1)
        versions = []
        self.running += 1
        try:
            for _ in range(tokens):
                await asyncio.sleep(pause)
                versions.append(self.version)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        return versions


def _spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    spans, start = [], 0
    for version, tokens in groupby(versions):
        end = start + len(list(tokens))
        spans.append(VersionSpan(version, start, end))
        start = end
    return tuple(spans)
