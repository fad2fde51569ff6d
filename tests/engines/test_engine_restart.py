"""An engine's process that dies has a successor: the same sessions, the weights that were published last, no calls lost
but those that the dead one was told of."""

import asyncio
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.engines.test_engine_process import (
    PROMPT,
    bits,
    is_running,
    refused,
    sampling,
    started,
    ticks,
)
from tests.forks import running
from tests.models import tiny
from tests.sources import publish
from tests.until import CEILING, until
from treadle.core.engine import Engine, VersionSpan
from treadle.core.errors import EngineError
from treadle.engines.process.engine import ProcessEngine
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.models.weights import unique_weights

AGAIN = "the engine's process was started again"
IN_LOCK_STEP = pytest.mark.parametrize("mortal", [True], ids=["lock_step"], indirect=True, scope="module")
pytestmark = pytest.mark.asyncio(loop_scope="module")


def children() -> set[int]:
    """Return the processes of engines that this one has started and that run."""
    return running("treadle.engines.process.worker")


def staged() -> list[Path]:
    """What lies about for processes of engines, of this process."""
    folders = Path("/dev/shm"), Path(tempfile.gettempdir())
    return [path for folder in folders for path in folder.glob(f"treadle_weights-*-{os.getpid()}-*")]


@dataclass(frozen=True)
class Mortal:
    """An engine that can be killed, and what was said about that."""

    engine: ProcessEngine
    lock_step: bool
    log: Path
    said: list[str]

    async def kill(self, number: int = signal.SIGKILL) -> None:
        """Leaves when the death has been noticed."""
        said, pid = len(self.said), self.engine.pid
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: len(self.said) > said)
        assert not is_running(pid)

    async def started_again(self) -> None:
        await until(lambda: self.said and self.said[-1] == AGAIN)

    async def sampled(self, *sessions: str) -> list[tuple[Any, ...]]:
        return await sampled(self.engine, *sessions)


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param(True, id="lock_step"), pytest.param(False, id="continuous", marks=pytest.mark.slow)],
)
async def mortal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mortal]:
    """One for several tests, because each start takes seconds. They close their sessions; the last one ends it."""
    folder, said = tmp_path_factory.mktemp("engine"), list[str]()
    async with started(folder, lock_step=request.param, notify=said.append) as engine:
        yield Mortal(engine, request.param, folder / "engine.log", said)
    assert not children() and not staged()


async def sampled(engine: Engine, *sessions: str) -> list[tuple[Any, ...]]:
    """What a call of each session is answered, made at once."""
    calls = [engine.generate(PROMPT + n, sampling(n), session=name) for n, name in enumerate(sessions)]
    return bits(await asyncio.wait_for(asyncio.gather(*calls), CEILING))


async def expected(seed: int, version: int, *sessions: str) -> list[tuple[Any, ...]]:
    """The same from an engine that never did anything else."""
    engine = TorchEngine(tiny(seed=seed), TorchEngineOptions([0], lock_step=True), own_thread=False)
    await publish(engine, unique_weights(tiny(seed=seed)), version)
    for name in sessions:
        engine.open_session(name)
    answers = await sampled(engine, *sessions)
    await engine.close()
    return answers


@pytest.mark.slow
@IN_LOCK_STEP
async def test_killed_between_calls_it_goes_on_with_what_was_published_last(mortal: Mortal) -> None:
    engine = mortal.engine
    for name in "cab":
        engine.open_session(name)
    await mortal.sampled(*"cab")
    await publish(engine, unique_weights(tiny(seed=3)), 6)
    await publish(engine, unique_weights(tiny(seed=4)), 7)
    assert "weights" in await refused(publish(engine, {}, 8))
    assert len(staged()) == 1
    mortal.said.clear()
    await mortal.kill()
    assert mortal.said == [f"the engine's process ended with code -9 (Killed), see {mortal.log}; starting it again"]
    engine.close_session("a")
    engine.open_session("d")
    answers, right = await mortal.sampled(*"cbd"), await expected(4, 7, *"cbd")
    assert [spans for *_, spans in answers] == [(VersionSpan(7, 0, len(ids)),) for ids, *_ in answers]
    # called one by one, they may begin one by one
    assert answers == right if mortal.lock_step else [a[0] for a in answers] == [a[0] for a in right]
    assert mortal.said[1:] == [AGAIN] and all(line in mortal.log.read_text() for line in mortal.said)
    assert children() == {engine.pid}
    with pytest.raises(EngineError, match="'a' is not open"):
        await engine.generate(PROMPT, sampling(), session="a")
    for name in "cbd":
        engine.close_session(name)


async def test_killed_amid_calls_it_fails_those_and_no_others(mortal: Mortal) -> None:
    engine = mortal.engine
    for name in "ab":
        engine.open_session(name)
    await publish(engine, unique_weights(tiny(seed=3)), 7)
    os.kill(engine.pid, signal.SIGSTOP)
    amid = [asyncio.create_task(engine.generate(PROMPT, sampling(), session=name)) for name in "ab"]
    await ticks(5)
    with mortal.log.open("a") as log:
        log.write("the last words\n")
    later = asyncio.create_task(mortal.sampled("a")) if mortal.lock_step else None
    await mortal.kill()
    told = re.escape(f"ended with code -9 (Killed); its log {mortal.log} ends:\n") + "(.*\n)*the last words"
    for call in amid:
        with pytest.raises(EngineError, match=told):
            await call
    engine.close_session("b")
    if later is None:  # without waves, it would have been told of this one too
        later = asyncio.create_task(mortal.sampled("a"))
    assert await later == await expected(3, 7, "a")
    engine.close_session("a")


@pytest.mark.slow
async def test_killed_amid_a_publication_the_next_process_has_it(mortal: Mortal) -> None:
    engine = mortal.engine
    engine.open_session("a")
    await publish(engine, unique_weights(tiny(seed=3)), 7)
    os.kill(engine.pid, signal.SIGSTOP)
    publication = asyncio.create_task(publish(engine, unique_weights(tiny(seed=4)), 8))
    await until(lambda: sum((path / "weights.safetensors").exists() for path in staged()) == 2)
    await ticks(5)
    assert not publication.done()
    await mortal.kill()
    waits = asyncio.create_task(mortal.sampled("a"))
    await asyncio.wait_for(publication, CEILING)
    assert len(staged()) == 1
    # in lock-step no wave starts before the publication; without, this one may have been quicker
    version = 8 if mortal.lock_step else (await waits)[0][3][0].version
    assert await waits == await expected(4 if version == 8 else 3, version, "a")
    await mortal.kill()
    await asyncio.wait_for(publish(engine, unique_weights(tiny(seed=5)), 9), CEILING)  # after version 8 was told again
    assert len(staged()) == 1
    assert await mortal.sampled("a") == await expected(5, 9, "a")
    engine.close_session("a")


@pytest.mark.slow
@IN_LOCK_STEP
async def test_a_process_that_ends_again_before_it_answers_has_no_successor(mortal: Mortal) -> None:
    engine = mortal.engine
    for name in "ab":
        engine.open_session(name)
    mortal.said.clear()
    await mortal.kill()
    await mortal.started_again()
    os.kill(engine.pid, signal.SIGSTOP)
    waits = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
    publication = asyncio.create_task(publish(engine, unique_weights(tiny()), 2))
    await ticks(5)
    os.kill(engine.pid, signal.SIGSEGV)
    os.kill(engine.pid, signal.SIGCONT)
    told = r"ended with code -11 \(Segmentation fault\); its log .*engine\.log ends:\n"
    for call in (waits, publication):
        with pytest.raises(EngineError, match=told):
            await asyncio.wait_for(call, CEILING)
    await nothing_works(engine, "was started again in vain: the engine's process " + told)
    assert len(mortal.said) == 2


async def nothing_works(engine: ProcessEngine, told: str) -> None:
    engine.open_session("later")
    for call in (
        engine.generate(PROMPT, sampling(), session="a"),
        engine.score(PROMPT),
        publish(engine, unique_weights(tiny()), 2),
    ):
        with pytest.raises(EngineError, match=told):
            await asyncio.wait_for(call, CEILING)
    assert not is_running(engine.pid)


@pytest.mark.slow
async def test_a_process_that_cannot_be_started_again_fails_every_call(tmp_path: Path) -> None:
    before = children()
    async with started(tmp_path) as engine:
        for name in "ab":
            engine.open_session(name)
        waits = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        await ticks(5)
        shutil.rmtree(tmp_path / "model")
        os.kill(engine.pid, signal.SIGKILL)
        told = r"was started again in vain: the engine's process ended with code 1; its log .*\n(.*\n)*.*model"
        with pytest.raises(EngineError, match=told):
            await asyncio.wait_for(waits, CEILING)
        await nothing_works(engine, told)
        assert children() == before


@pytest.mark.slow
async def test_closing_it_while_its_process_is_started_again(tmp_path: Path) -> None:
    said, closed, before = list[str](), list[bool](), (children(), staged())
    async with started(tmp_path, notify=said.append, on_close=lambda: closed.append(True)) as engine:
        engine.open_session("a")
        await publish(engine, unique_weights(tiny(seed=3)), 1)
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: said and children() != before[0])
        waits = [
            asyncio.create_task(engine.generate(PROMPT, sampling(), session="a")),
            asyncio.create_task(engine.score(PROMPT)),
            asyncio.create_task(publish(engine, unique_weights(tiny()), 2)),
        ]
        await ticks(5)
        await engine.close()
        assert [await refused(call) for call in waits] == ["the engine was closed"] * 3
        assert (children(), staged()) == before and closed
    assert len(said) == 1


@pytest.mark.slow
async def test_a_process_that_hangs_does_not_keep_a_publication_waiting(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        engine._timeout = 2.0  # from now on: it may take longer to start
        os.kill(engine.pid, signal.SIGSTOP)
        told = r"the engine's process did not take new weights within 2 s; its log .*engine\.log ends:\n"
        with pytest.raises(EngineError, match=told):
            await asyncio.wait_for(publish(engine, unique_weights(tiny()), 1), CEILING)
        os.kill(engine.pid, signal.SIGCONT)
        engine.open_session("a")
        answer = await asyncio.wait_for(engine.generate(PROMPT, sampling(), session="a"), CEILING)
        assert len(answer.token_ids)


@pytest.mark.slow
async def test_a_process_that_is_stopped_is_killed_and_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    async with started(tmp_path, notify=said.append, silence=8.0) as engine:
        engine.open_session("a")
        await sampled(engine, "a")
        answers = [engine._link.said]

        def answered(pings: int) -> bool:
            if answers[-1] is not engine._link.said:
                answers.append(engine._link.said)
            return len(answers) > pings

        await until(lambda: answered(6))  # a ping takes 2 s: longer than that silence, with answers to pings alone
        assert not said
        [status] = engine.status()
        assert status.running == status.waiting == 0 and status.cache is not None and status.cache > 0
        stopped = engine.pid
        os.kill(stopped, signal.SIGSTOP)
        call = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        told = r"ended with code -9 \(Killed\) after 8 s without an answer; its log .*engine\.log ends:\n"
        with pytest.raises(EngineError, match=told):
            await asyncio.wait_for(call, CEILING)
        assert not is_running(stopped)
        assert len((await asyncio.wait_for(sampled(engine, "a"), CEILING))[0][0])
        assert "after 8 s without an answer" in said[0] and said[-1] == AGAIN


@pytest.mark.slow
async def test_an_event_loop_that_was_blocked_takes_no_process_for_silent(tmp_path: Path) -> None:
    """As synchronous training does: it computes where the loop runs."""
    said: list[str] = []
    async with started(tmp_path, notify=said.append, silence=6.0) as engine:
        engine.open_session("a")
        time.sleep(7)
        await sampled(engine, "a")
        await asyncio.sleep(2)  # for the next ping
        assert not said


@pytest.mark.slow
async def test_a_process_that_scores_otherwise_does_not_serve(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        engine.open_session("a")
        await publish(engine, unique_weights(tiny(seed=3)), 7)
        assert list(engine._scores) == (await engine.score(np.array(engine._probe, np.int32))).tolist()
        engine._scores = [0.0] * len(engine._scores)  # as if the one before had other weights
        os.kill(engine.pid, signal.SIGKILL)
        await nothing_works(engine, r"was started again in vain: its log-probabilities differ by .* on average")
