"""Admission of growing episodes to an engine's KV cache, by count and by KV budget, in virtual time.

    python -m benchmarks.kv

Simplified: an engine samples a few tokens of all its calls at a time, which takes longer the more there are; its cache
is counted in tokens, without blocks; a session's prefix is dropped whole, the least recently used one first; when not
even the running calls fit, the one started last is dropped and begins anew. Lengths and environments' seconds are
drawn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.measure import Row, Table, make_parser, show
from treadle.core.engine import Completion, ComponentStatus, Engine, VersionSpan
from treadle.core.types import Floats, Ids, SamplingParams, StopReason
from treadle.engines.kv_budget import BudgetedEngine
from treadle.testing import VirtualLoop

_CHUNK = 16  # tokens of each call that are sampled between two looks at the queue
COUNTS = (8, 16, 24, 32, 48, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class World:
    """Engine and episodes. Tokens: the cache; prompt, completions and observations, on average.

    prefill: tokens a second. decode, decode_each: seconds of a step, and of each sequence in it. batch: most sequences.
    turns: from a quarter to nearly twice as many. environment: seconds of a turn, on average.
    """

    cache: int = 200_000
    batch: int = 256
    prefill: float = 20_000.0
    decode: float = 0.012
    decode_each: float = 0.0001
    episodes: int = 512
    prompt: int = 1_000
    completion: int = 300
    observation: int = 500
    turns: int = 10
    environment: float = 4.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """Sampled tokens of a turn, then seconds of the environment, and tokens of its observation."""

    completion: int
    seconds: float
    observation: int


def episodes(world: World) -> list[list[Turn]]:
    """Return the turns of all episodes, lognormal in length and seconds."""
    rng = np.random.default_rng(world.seed)

    def drawn(mean: float) -> float:
        return float(rng.lognormal(np.log(mean) - 0.5**2 / 2, 0.5))

    return [
        [
            Turn(max(1, round(drawn(world.completion))), drawn(world.environment), round(drawn(world.observation)))
            for _ in range(int(rng.integers(max(1, world.turns // 4), 2 * world.turns)))
        ]
        for _ in range(world.episodes)
    ]


@dataclass(slots=True, eq=False)
class _Call:
    session: str
    prompt: int
    wanted: int
    answer: asyncio.Future[None]
    sampled: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.sampled


@dataclass(slots=True)
class SimulatedEngine:
    """An `Engine` that takes the time of one with a KV cache of `world.cache` tokens.

    prefilled, recomputed: tokens of prompts that were computed, and those of them that had been computed before.
    preempted: calls that lost their place. held: token-seconds in the cache.
    """

    world: World
    prefilled: int = 0
    recomputed: int = 0
    preempted: int = 0
    held: float = 0.0
    _cached: dict[str, int] = field(default_factory=dict)  # session -> tokens, the least recently used first
    _computed: dict[str, int] = field(default_factory=dict)  # session -> the most tokens that were there
    _waiting: deque[_Call] = field(default_factory=deque)
    _running: list[_Call] = field(default_factory=list)
    _driver: asyncio.Task[None] | None = None

    def open_session(self, session: str) -> None:
        self._computed[session] = 0

    def close_session(self, session: str) -> None:
        self._cached.pop(session, None)

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        """Return `max_tokens` tokens, after the time that sampling them takes."""
        call = _Call(session, len(prompt_ids), sampling.max_tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._driver is None:
            self._driver = asyncio.ensure_future(self._drive())
        await call.answer
        ids, spans = np.zeros(call.wanted, np.int32), (VersionSpan(0, 0, call.wanted),)
        return Completion(ids, np.zeros(call.wanted, np.float32), StopReason.STOP, spans)

    async def score(self, ids: Ids, **more: Any) -> Floats:
        return np.zeros(len(ids) - 1, np.float32)

    def status(self) -> list[ComponentStatus]:
        return []

    async def close(self) -> None:
        return None

    async def _drive(self) -> None:
        while self._waiting or self._running:
            computed = self._admit()
            steps = min([_CHUNK, *(call.wanted - call.sampled for call in self._running)])
            self._make_room(steps)
            world, calls = self.world, len(self._running)
            seconds = computed / world.prefill + steps * (world.decode + world.decode_each * calls)
            self.held += sum(self._cached.values()) * seconds
            await asyncio.sleep(seconds)
            for call in self._running:
                call.sampled += steps
                self._keep(call)
            for call in [call for call in self._running if call.sampled == call.wanted]:
                self._running.remove(call)
                call.answer.set_result(None)
            await asyncio.sleep(0)  # whoever was answered may call again at once
        self._driver = None

    def _admit(self) -> int:
        """Start calls in order, as many as there is room for; return the tokens that are computed for them."""
        computed = 0
        while self._waiting and len(self._running) < self.world.batch:
            call = self._waiting[0]
            there = self._cached.get(call.session, 0)
            if not self._free(call.tokens - there, keep=call.session) and self._running:
                break
            self._running.append(self._waiting.popleft())
            self.prefilled += call.tokens - there
            self.recomputed += max(0, min(self._computed[call.session], call.tokens) - there)
            computed += call.tokens - there
            self._keep(call)
        return computed

    def _keep(self, call: _Call) -> None:
        self._cached.pop(call.session, None)
        self._cached[call.session] = call.tokens
        self._computed[call.session] = max(self._computed[call.session], call.tokens)

    def _make_room(self, steps: int) -> None:
        """Drop idle prefixes, then the calls that were started last, until all can sample so many tokens."""
        while not self._free(steps * len(self._running)) and len(self._running) > 1:
            call = self._running.pop()
            del self._cached[call.session]
            self._waiting.appendleft(call)
            self.preempted += 1

    def _free(self, tokens: int, keep: str = "") -> bool:
        """Drop idle prefixes until there is room for so many tokens; return whether there is."""
        busy = {keep, *(call.session for call in self._running)}
        used = sum(self._cached.values())
        for session in [name for name in self._cached if name not in busy]:
            if used + tokens <= self.world.cache:
                break
            used -= self._cached.pop(session)
        return used + tokens <= self.world.cache


def simulate(world: World, count: int | None) -> Row:
    """Play all episodes; `count` at a time, or None: as many as the KV budget admits. Returns the figures."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_simulate(world, count))


async def _simulate(world: World, count: int | None) -> Row:
    simulated, turns = SimulatedEngine(world), episodes(world)
    longest = world.prompt + max(sum(t.completion + t.observation for t in episode) for episode in turns)
    engine = BudgetedEngine(simulated, world.cache, longest) if count is None else simulated
    places = nullcontext() if count is None else asyncio.Semaphore(count)

    async def play(name: str, episode: Sequence[Turn]) -> None:
        async with places:
            await _play(engine, name, world.prompt, episode)

    await asyncio.gather(*(play(str(number), episode) for number, episode in enumerate(turns)))
    seconds, sampled = asyncio.get_running_loop().time(), sum(turn.completion for episode in turns for turn in episode)
    return {
        "admission": "KV budget" if count is None else f"{count} episodes",
        "hours": seconds / 3600,
        "sampled tokens/s": sampled / seconds,
        "prompt tokens computed": simulated.prefilled,
        "of these again": simulated.recomputed / simulated.prefilled,
        "preempted calls": simulated.preempted,
        "cache use": simulated.held / seconds / world.cache,
    }


async def _play(engine: Engine, name: str, prompt: int, turns: Sequence[Turn]) -> None:
    engine.open_session(name)
    for turn in turns:
        await engine.generate(np.zeros(prompt, np.int32), SamplingParams(max_tokens=turn.completion), session=name)
        await asyncio.sleep(turn.seconds)
        prompt += turn.completion + turn.observation
    engine.close_session(name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate admission by several counts and by the budget; print a table."""
    options = make_parser(__doc__).parse_args(arguments)
    world = World(episodes=32, turns=4) if options.small else World()
    rows = [simulate(world, count) for count in (*(COUNTS[:2] if options.small else COUNTS), None)]
    show(options.json, Table("kv", _note(world), rows))


def _note(world: World) -> str:
    w = world
    return (
        f"virtual time; a KV cache of {w.cache:,} tokens, {w.episodes} episodes: a prompt of {w.prompt:,}, "
        f"{w.turns // 4} to {2 * w.turns - 1} turns of about {w.completion} sampled and {w.observation} observed "
        f"tokens, and {w.environment:g} s of the environment; assumed, of a model of 7 billion parameters on one GPU: "
        f"{w.prefill:,.0f} prompt tokens a second, {1e3 * w.decode:g} ms a step and {1e3 * w.decode_each:g} ms for "
        "each sequence in it"
    )


if __name__ == "__main__":
    main()
