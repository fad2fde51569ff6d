"""Admission by KV budget: an episode starts when its expected tokens fit beside the others'.

first call of a session -> KVBudget (by ExpectedTokens) -> admitted: its calls go to the engine -> closed: room
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treadle.core.engine import Completion, ComponentStatus, Engine
from treadle.core.errors import ConfigError
from treadle.core.images import PromptImage
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.config import EngineConfig

_MEMORY, _FEW = 200, 8  # episodes


@dataclass(frozen=True, slots=True)
class Episode:
    """Tokens of an episode: `held` in the cache now, and `final`, the expected number at its end."""

    held: int
    final: int

    @property
    def remaining(self) -> int:
        return self.final - self.held


def peak_tokens(episodes: Iterable[Episode]) -> int:
    """Return the peak number of tokens of these episodes together, if all grow at one pace and leave at their end.

    The peak is reached just before one of them ends, `remaining` tokens from now, together with those that remain
    longer. Source: Gong et al. 2025, "Past-Future Scheduler for LLM Serving under SLA Guarantees", for single calls.
    """
    ending = sorted(episodes, key=lambda episode: episode.remaining)
    peak, held = 0, sum(episode.held for episode in ending)
    for ended, episode in enumerate(ending):
        peak = max(peak, held + (len(ending) - ended) * episode.remaining)
        held -= episode.held
    return peak


class KVBudget:
    """Decides which episodes may call an engine, by their future tokens in its cache.

    An episode grows with every call. If it started as soon as its first prompt fits, it would later evict the prefixes
    of others, which would have to be recomputed. So it starts only if the `peak_tokens` of all episodes fit.

    Invariants: no admission makes the peak exceed `capacity`, except of an episode too large for it, which starts
    alone. Episodes start in order of arrival: a small one never overtakes a large one, so that none starves.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.admitted: dict[str, Episode] = {}
        self.waiting: dict[str, Episode] = {}  # in order of arrival

    def request(self, name: str, episode: Episode) -> list[str]:
        """Queue an episode; return the names admitted now, in order."""
        self.waiting[name] = episode
        return self._admit()

    def update(self, name: str, episode: Episode) -> list[str]:
        """Update an admitted episode, which continues in any case; return the names admitted now."""
        self.admitted[name] = episode
        return self._admit()

    def release(self, name: str) -> list[str]:
        """End an episode, admitted or waiting; return the names admitted in its place. Unknown ones are ignored."""
        self.admitted.pop(name, None)
        self.waiting.pop(name, None)
        return self._admit()

    def _admit(self) -> list[str]:
        names: list[str] = []
        for name, episode in self.waiting.items():
            if self.admitted and peak_tokens([*self.admitted.values(), episode]) > self.capacity:
                break
            self.admitted[name] = episode
            names.append(name)
        for name in names:
            del self.waiting[name]
        return names


class ExpectedTokens:
    """Predicts an episode's final number of tokens from the latest completed episodes.

    longest: maximum of an episode, assumed until the first few have ended, so that a run's first episodes do not
    overfill the cache.
    """

    def __init__(self, longest: int) -> None:
        self._ended = deque([longest] * _FEW, maxlen=_MEMORY)
        self._missing = _FEW

    def final(self, held: int) -> int:
        """Return the expected final tokens of an episode that has `held`: the mean of those that held more."""
        longer = [tokens for tokens in self._ended if tokens > held]
        return math.ceil(sum(longer) / len(longer)) if longer else held

    def note(self, tokens: int) -> None:
        if self._missing:
            self._missing -= 1
            self._ended.popleft()
        self._ended.append(tokens)


def budgeted(engine: Engine, config: EngineConfig, longest: int, engines: int = 1) -> Engine:
    """Return the engine, behind a `BudgetedEngine` if `engine.kv_budget` is set.

    longest: maximum tokens of an episode. engines: number of engines with this configuration. Raises ConfigError for an
    engine in lock-step.
    """
    if config.kv_budget is None:
        return engine
    if config.kind == "torch" and config.lock_step is not False:
        raise ConfigError(
            f"engine.kv_budget={config.kv_budget} makes episodes wait, and an engine in lock-step would wait for them "
            "forever; set engine.lock_step=false, or leave the budget out"
        )
    return BudgetedEngine(engine, config.kv_budget * config.count * engines, longest)


class BudgetedEngine:
    """Passes calls on to an engine, but delays the first call of a session until its episode fits (`KVBudget`).

    longest: maximum tokens of an episode. Only for engines that start each call at once: one in lock-step would wait
    for all open sessions, including those that wait here.
    """

    def __init__(self, engine: Engine, capacity: int, longest: int) -> None:
        self._engine, self._budget, self._expected = engine, KVBudget(capacity), ExpectedTokens(longest)
        self._held: dict[str, int] = {}  # admitted session -> tokens of its longest call so far
        self._admission: dict[str, asyncio.Event] = {}  # for sessions that have made a call

    def open_session(self, session: str) -> None:
        """Open the session; it occupies no budget before its first call."""
        self._engine.open_session(session)

    def close_session(self, session: str) -> None:
        if (admission := self._admission.pop(session, None)) is not None:
            # Waiting calls proceed to the engine, which refuses them.
            admission.set()
            if tokens := self._held.pop(session, 0):
                self._expected.note(tokens)
            self._admit(self._budget.release(session))
        self._engine.close_session(session)

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        """Sample one completion, once the session's episode is admitted. Raises EngineError."""
        episode = self._episode(session, len(prompt_ids), sampling.max_tokens)
        if session not in self._admission:
            self._admission[session] = asyncio.Event()
            self._admit(self._budget.request(session, episode))
        await self._admission[session].wait()
        if session in self._admission:  # not closed meanwhile
            self._held[session] = episode.held
            self._admit(self._budget.update(session, episode))
        completion = await self._engine.generate(
            prompt_ids, sampling, session=session, cache_salt=cache_salt, images=images
        )
        if session in self._admission:
            self._held[session] = max(self._held[session], len(prompt_ids) + len(completion.token_ids))
        return completion

    def _episode(self, session: str, prompt: int, completion: int) -> Episode:
        held = max(prompt, self._held.get(session, 0))
        return Episode(held, max(prompt + completion, self._expected.final(held)))

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        return await self._engine.score(ids, temperature=temperature, images=images)

    def status(self) -> list[ComponentStatus]:
        admitted, waiting = self._budget.admitted, self._budget.waiting
        share = peak_tokens(admitted.values()) / self._budget.capacity
        status = ComponentStatus("budget", "episodes", running=len(admitted), waiting=len(waiting), cache=share)
        return [*self._engine.status(), status]

    async def close(self) -> None:
        await self._engine.close()

    def _admit(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self._admission[session].set()
