"""The one narrow interface to inference: `Engine`, and its result, `Completion`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from treadle.core.errors import EngineError
from treadle.core.images import PromptImage
from treadle.core.support import Probabilities, Support
from treadle.core.types import Floats, Ids, Routing, SamplingParams, StopReason


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a completion that one policy version sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Sampled tokens of one call.

    token_ids int32[C]; logprobs float32[C]: per token, under the sampling distribution (after temperature);
    policy_versions: spans that cover [0, C) without gap or overlap. routing int16[<= C, M, k]: experts chosen while
    predicting each token (see `Step`). waited: seconds in the engine's queue. None: not reported.
    pinned: whether one version is meant to sample the whole session (`training.lora.pin_attempts`).
    support: ids that could have been sampled at each token, where a filter left some out (see `Step`).
    probabilities: the sampler's, of its most probable ids at each token; none at greedy tokens.
    """

    token_ids: Ids
    logprobs: Floats
    stop_reason: StopReason
    policy_versions: tuple[VersionSpan, ...]
    routing: Routing | None = None
    waited: float | None = None
    pinned: bool = False
    support: Support | None = None
    probabilities: Probabilities | None = None

    def versions_per_token(self) -> Ids:
        """Return int32[C]. Raises EngineError unless the spans cover the completion exactly once."""
        position, parts = 0, [np.empty(0, np.int32)]
        for span in self.policy_versions:
            if span.start != position or span.end < span.start:
                raise EngineError(f"version spans {self.policy_versions} leave a gap or overlap at token {position}")
            parts.append(np.full(span.end - span.start, span.version, np.int32))
            position = span.end
        if position != len(self.token_ids):
            raise EngineError(f"version spans end at {position}, the completion has {len(self.token_ids)} tokens")
        return np.concatenate(parts)


class Engine(Protocol):
    """Takes token ids and returns sampled token ids, for many sessions at once.

    A session is opened before its first call and closed after its last. While open, the engine may keep its KV cache;
    an engine that decodes in lock-step waits for every open session, so close sessions promptly.
    Weights are loaded by `core.trainer.WeightSync`.
    """

    def open_session(self, session: str) -> None:
        """Announce a session. Sessions opened earlier come first in the canonical order."""

    def close_session(self, session: str) -> None:
        """End a session after its last call. Unknown or closed sessions are ignored."""

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Sample one completion; a session may make several calls at once. Cancelling the call aborts it.

        cache_salt: calls with different salts share no cached prefix. images: those of the prompt, whose placeholders
        are among its ids. Raises EngineError, also for images that the engine cannot show to its model.
        """

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        """Return log-probabilities of ids[1:], each given its prefix: int32[T] -> float32[T - 1].

        images: those of `generate`.
        """

    def status(self) -> Sequence[ComponentStatus]:
        """Return the current load, one entry per engine. Never blocks; thread-safe."""

    async def close(self) -> None:
        """Release everything. Idempotent."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process: `ProcessId("node-3", 4711)`."""

    host: str
    pid: int

    @classmethod
    def own(cls) -> ProcessId:
        return cls(socket.gethostname(), os.getpid())


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """Load of an engine, a rank or a worker: `ComponentStatus("engine", "0", running=64, waiting=3, cache=0.8)`.

    None: unknown or not applicable.

    process: None in the run's own process. running: calls (groups, attempts) in progress. waiting: queued calls.
    sessions: open sessions. cache: share of the KV cache in use. version: served policy version. error: why it stopped,
    "" while it works.
    """

    kind: str
    name: str
    process: ProcessId | None = None
    running: int | None = None
    waiting: int | None = None
    sessions: int | None = None
    cache: float | None = None
    version: int | None = None
    error: str = ""
