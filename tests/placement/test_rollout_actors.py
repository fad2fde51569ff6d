"""Attempts that are played in other processes are those that would have been played here."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest

from tests.placement.conftest import actors
from tests.rollout.test_replay import Log, Pinning, versions
from tests.until import until
from tests.worlds import END, Vowels, addresses, plain_ids, plain_renderer, user, vowel_tasks
from treadle.core.draws import Stream
from treadle.core.engine import Completion
from treadle.core.errors import Cause, ConfigError, EngineError
from treadle.core.types import Ids, Message, SamplingParams, Task, Trajectory, trajectory_id
from treadle.placement import rollout_actors
from treadle.placement.actors import Actor, Placed
from treadle.placement.reserve import Reservation
from treadle.placement.rollout_actors import RolloutPool, open_workers
from treadle.rollout.attempt import Players, RolloutRunner, open_rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.rewards import RewardsConfig
from treadle.rollout.session import Address
from treadle.testing import FakeEngine
from treadle.workers.supervised import Supervised

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


class Fickle(Vowels):
    """Begins with the number of its process."""

    async def reset(self, task: Task) -> Sequence[Message]:
        return [*await super().reset(task), user(f"{os.getpid()}")]


PLAYERS = Players({"vowels": Vowels, "fickle": Fickle})
CONFIG = RolloutConfig(max_completion_tokens=16)


def saying(delay: float = 0.0) -> FakeEngine:
    return FakeEngine(lambda prompt, sampling: [*plain_ids("aeb"), END], delay=lambda: delay)


def task(number: int, seconds: float = 0.0) -> Task:
    [found] = vowel_tasks("train", 1, seconds)
    return Task(f"t{number}", found.prompt, environment="vowels", extras=found.extras)


@asynccontextmanager
async def workers(
    reservation: Reservation, engine: FakeEngine, config: RolloutConfig = CONFIG, said: list[str] | None = None
) -> AsyncIterator[RolloutPool]:
    log = (said if said is not None else list[str]()).append
    renderer = plain_renderer()
    async with open_workers(reservation, engine, renderer, PLAYERS, config, RewardsConfig(), log, None) as pool:
        yield pool


def start(runner: RolloutRunner, groups: int, seconds: float = 0.0, first: int = 0) -> list[asyncio.Future[Trajectory]]:
    """Two attempts each of so many groups, by number: names of sessions are not used twice."""
    addresses = [Address(1, Stream.TRAIN, 0, 0, attempt) for attempt in range(2)]
    numbers = range(first, first + groups)
    return [a for n in numbers for a in runner.start(f"g{n:06d}", task(n, seconds), addresses)]


def facts(played: list[Trajectory]) -> list[tuple[object, ...]]:
    return [
        (t.trajectory_id, t.reward, t.status, [(s.prompt_ids.tolist(), s.completion_ids.tolist()) for s in t.steps])
        for t in played
    ]


def processes() -> list[psutil.Process]:
    return actors("RolloutActor")


async def gone() -> None:
    await until(lambda: not processes())


async def test_attempts_are_those_that_are_played_here(reservation: Reservation) -> None:
    engine = saying()
    async with workers(reservation, engine) as pool:
        await pool.check([task(0)])
        running = start(pool, 3)
        assert engine.open == [trajectory_id(f"g{n:06d}", attempt) for n in range(3) for attempt in range(2)]
        assert [worker.playing for worker in pool._workers] == [3, 3]
        played = await asyncio.gather(*running)
        assert pool.sampling == SamplingParams(max_tokens=16)
    assert engine.open == []
    here = saying()
    async with open_rollouts(here, plain_renderer(), PLAYERS, CONFIG) as rollouts:
        assert facts(played) == facts(await asyncio.gather(*start(rollouts, 3)))
    await gone()


async def test_a_worker_has_its_calls_recorded_and_replays_them(reservation: Reservation) -> None:
    engine, log, [address] = saying(), Log(side_by_side=2), addresses()
    async with workers(reservation, engine) as pool:
        [played] = await asyncio.gather(*pool.start("g000000", task(0, 0.5), [address], log=log))
        assert len(log.calls) in (1, 2)  # the last one may come after its attempt, which is on record by then
        [again] = await asyncio.gather(*pool.start("g000001", task(0), [address], log=Log(log.calls, 2)))
        assert len(engine.calls) == 4 - len(log.calls)
    assert facts([played])[0][1:] == facts([again])[0][1:]
    await gone()


async def test_a_pinned_attempt_begins_anew_where_the_engine_has_another_version(reservation: Reservation) -> None:
    engine, log, [address] = Pinning(), Log(side_by_side=2), addresses()
    async with workers(reservation, engine) as pool:
        await asyncio.gather(*pool.start("g000000", task(0, 0.5), [address], log=log))
        await engine.publish(1)
        anew = Log(log.calls[:1], 2)
        [again] = await asyncio.gather(*pool.start("g000001", task(0, 0.5), [address], log=anew))
    assert (versions(again), len(again.steps), anew.said) == ({1}, 2, [])
    assert [call.number for call in anew.calls] in ([0], [0, 1])
    assert {span.version for call in anew.calls for span in call.completion.policy_versions} == {1}
    await gone()


async def test_what_the_engine_raises_fails_the_attempt(reservation: Reservation) -> None:
    def fail(prompt: object, sampling: object) -> list[int]:
        raise EngineError("made up")

    async with workers(reservation, FakeEngine(fail)) as pool:
        for trajectory in await asyncio.gather(*start(pool, 1)):
            assert trajectory.failure is not None
            assert (trajectory.failure.cause, trajectory.failure.message) == (Cause.ENGINE, "made up")


async def test_a_cancelled_attempt_frees_its_row_and_its_session(reservation: Reservation) -> None:
    engine = saying(delay=1000)
    async with workers(reservation, engine) as pool:
        running = start(pool, 1)
        await until(lambda: engine.running == 2)
        running[0].cancel()
        await until(lambda: engine.running < 2)
        assert (engine.aborted, len(engine.open)) == (1, 1)
        running[1].cancel()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_is_lost_is_replaced_and_its_attempts_fail(
    reservation: Reservation, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how is signal.SIGSTOP:
        monkeypatch.setattr(rollout_actors, "Supervised", partial(Supervised, silence=8.0))
    engine, said = saying(), list[str]()
    async with workers(reservation, engine, said=said) as pool:
        await asyncio.gather(*start(pool, 1))
        running = start(pool, 1, seconds=15, first=1)
        await until(lambda: len(engine.calls) >= 4 + 2)
        processes()[0].send_signal(how)
        played = await asyncio.gather(*running)
        [lost] = [t for t in played if t.failure is not None]
        assert lost.failure is not None and lost.failure.cause is Cause.INFRASTRUCTURE
        assert lost.failure.message.startswith("rollout worker ") and engine.open == []
        again = await asyncio.gather(*start(pool, 2, first=2))
        assert all(t.failure is None for t in again) and len(processes()) == 2
    [line] = said
    assert line.startswith("rollout worker ") and line.endswith("; restarting it")
    assert ("did not answer for 8 s" in line) == (how is signal.SIGSTOP)
    await gone()


@pytest.mark.parametrize("player", ["vowels", "fickle"])
async def test_an_attempt_goes_on_when_its_worker_is_lost(reservation: Reservation, player: str) -> None:
    """With its recorded call; anew, in a session that is open, if the environment says something else then."""
    engine, log, [address] = saying(), Log(side_by_side=2), addresses()
    async with workers(reservation, engine) as pool:
        one = replace(task(0, 10.0), environment=player)
        [attempt] = pool.start("g000000", one, [address], log=log)
        await until(lambda: log.calls)
        ended = pool._workers[0].place.process
        assert ended is not None
        [playing] = [process for process in processes() if process.pid == ended.pid]
        playing.kill()
        played = await attempt
        [expected] = await asyncio.gather(*pool.start("g000001", replace(one, extras={}), [address]))
    assert played.failure is None and engine.open == []
    assert bool(log.said) == (player == "fickle")
    assert len(engine.calls) == (4 if player == "vowels" else 5)
    if player == "vowels":
        assert facts([played])[0][1:] == facts([expected])[0][1:]
    await gone()


class Elsewhere(Placed):
    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, session: str, *more: Any) -> Completion:
        engine = saying()
        engine.open_session(session)
        return await engine.generate(prompt_ids, sampling, session=session)


class Routed(FakeEngine):
    def __init__(self, actor: Any) -> None:
        super().__init__(saying().reply)
        self._actor = actor

    def route(self, session: str) -> Any:
        assert session in self.open
        return self._actor


async def test_workers_call_the_engine_themselves_until_its_process_ends(reservation: Reservation) -> None:
    actor = Actor("the engine", Elsewhere, {"num_cpus": 0})
    engine = Routed(actor)
    async with workers(reservation, engine) as pool:
        direct = await asyncio.gather(*start(pool, 2))
        assert not engine.calls and not engine.open
        actor.kill()
        passed_on = await asyncio.gather(*start(pool, 2, first=2))
        assert engine.calls
    without_id = [fact[1:] for fact in facts(direct)]
    assert without_id == [fact[1:] for fact in facts(passed_on)]


async def test_what_cannot_be_opened_is_told(reservation: Reservation) -> None:
    with pytest.raises(ConfigError, match="no_such_parser"):
        async with workers(reservation, saying(), RolloutConfig(reply_parser="no_such_parser")):
            pass
    await gone()


LIGHT = """
import pickle, sys
import treadle.placement.rollout_actors
renderer = pickle.load(sys.stdin.buffer)
print(renderer.encode("ab").tolist(), [name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_a_worker_loads_neither_torch_nor_transformers() -> None:
    renderer = pickle.dumps(plain_renderer())
    found = subprocess.run([sys.executable, "-c", LIGHT], input=renderer, capture_output=True, check=True)
    assert found.stdout.decode().split("\n")[0] == "[3] []"
