"""`FakeEngine`: a scripted engine, public, for tests of environments and agents. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import EngineError
from treadle.core.types import Floats, Ids, SamplingParams, StopReason


class FakeEngine:
    """Answers each call with `reply(prompt_ids, sampling)`, cut to `max_tokens`, every token at logprob `logprob`.

    A completion counts as stopped if it was not cut. `reply` may raise to play a failing engine.
    `calls` keeps every prompt it was sent.
    """

    def __init__(self, reply: Callable[[Ids, SamplingParams], Sequence[int]], *, logprob: float = -0.5) -> None:
        self.reply, self.logprob = reply, logprob
        self.version = 0
        self.calls: list[Ids] = []
        self.open: list[str] = []

    def open_session(self, session: str) -> None:
        """Announce a session."""
        if session in self.open:
            raise EngineError(f"session {session!r} is open already")
        self.open.append(session)

    def close_session(self, session: str) -> None:
        """Forget a session."""
        if session in self.open:
            self.open.remove(session)

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        """The scripted completion. Raises EngineError for a session that is not open."""
        if session not in self.open:
            raise EngineError(f"session {session!r} is not open")
        self.calls.append(np.asarray(prompt_ids))
        wanted = list(self.reply(prompt_ids, sampling))
        ids = wanted[: sampling.max_tokens]
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), self.logprob, np.float32),
            stop_reason=StopReason.STOP if ids == wanted else StopReason.LENGTH,
            policy_versions=(VersionSpan(self.version, 0, len(ids)),),
        )

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        """`logprob` for every token but the first."""
        return np.full(len(ids) - 1, self.logprob, np.float32)

    async def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """Note the version; later completions report it."""
        self.version = version

    async def close(self) -> None:
        """Nothing to release."""
