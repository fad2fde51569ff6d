"""An engine in a process of its own that ends: the next process goes on where it was."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.kit import PROMPT, sampling
from tests.engines.test_engine_process import bits, pid_of, refused, started, ticks
from tests.forks import running
from tests.models import tiny
from tests.sources import publish
from tests.until import CEILING, alive, until
from tests.worlds import addresses, plain_renderer
from treadle.core.engine import Engine
from treadle.core.errors import EngineError
from treadle.engines.remote import RemoteEngine
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.models.weights import unique_weights
from treadle.rollout.session import Session, SessionSpec

LOCK_STEP = pytest.mark.parametrize(
    "lock_step", [pytest.param(True, id="lock_step"), pytest.param(False, id="continuous", marks=pytest.mark.slow)]
)


def children() -> set[int]:
    """Return the processes of engines that this one has started and that run."""
    return running("treadle.workers.child")


def staged() -> list[Path]:
    """What lies about for processes of engines, of this process."""
    folders = Path("/dev/shm"), Path(tempfile.gettempdir())
    return [path for folder in folders for path in folder.glob(f"treadle_weights-*-{os.getpid()}-*")]


async def killed(engine: RemoteEngine) -> None:
    """Kill its process; leaves when that has been noticed."""
    pid = pid_of(engine)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: engine.is_down)
    await until(lambda: not alive(pid))


async def stopped(engine: RemoteEngine) -> None:
    """Stop its next process before a call reaches it: whoever waits for it is told one turn of the event loop later."""
    worker = engine._supervised._worker
    worker.add_done_callback(lambda _: os.kill(pid_of(engine), signal.SIGSTOP))
    await asyncio.wait([worker])


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


async def test_a_pinned_session_does_not_go_over_to_the_next_process(tmp_path: Path) -> None:
    """Which has the version published last alone; sessions that have no answer yet begin with that."""
    async with started(tmp_path, lock_step=False, pinned=2) as engine:
        await publish(engine, unique_weights(tiny(seed=3)), 6)
        spec = SessionSpec("", engine, plain_renderer(), sampling(), 64, addresses()[0])
        pinned, waiting = (Session(replace(spec, name=name)) for name in "ab")
        await pinned.complete([3, 1, 4])
        await publish(engine, unique_weights(tiny(seed=4)), 7)
        await pinned.complete([3, 1, 5])
        os.kill(pid_of(engine), signal.SIGKILL)  # the next process makes the calls
        lost = "step 2 was sampled by version 7 and earlier steps by version 6, which the engine lost"
        with pytest.raises(EngineError, match=lost):
            await pinned.complete([3, 1, 6])
        await waiting.complete([3, 1, 5])
        versions = [{int(v) for step in session.steps for v in step.policy_versions} for session in (pinned, waiting)]
        assert versions == [{6}, {7}]


@LOCK_STEP
async def test_the_next_process_goes_on_with_what_was_published_last(lock_step: bool, tmp_path: Path) -> None:
    """Killed between calls, amid calls, and amid a publication."""
    said: list[str] = []
    before = staged()
    async with started(tmp_path, lock_step=lock_step, notify=said.append) as engine:
        for name in "cab":
            engine.open_session(name)
        await sampled(engine, *"cab")
        await publish(engine, unique_weights(tiny(seed=3)), 6)
        await publish(engine, unique_weights(tiny(seed=4)), 7)
        assert "weights" in await refused(publish(engine, {}, 8))
        assert len(staged()) == len(before) + 1
        await killed(engine)
        engine.close_session("a")
        engine.open_session("d")
        answers, right = await sampled(engine, *"cbd"), await expected(4, 7, *"cbd")
        # called one by one, they may begin one by one
        assert answers == right if lock_step else [a[0] for a in answers] == [a[0] for a in right]
        assert said == ["the engine ended with code -9 (Killed); restarting it"]
        with pytest.raises(EngineError, match="'a' is not open"):
            await engine.generate(PROMPT, sampling(), session="a")
        for name in "bd":
            engine.close_session(name)

        os.kill(pid_of(engine), signal.SIGSTOP)
        amid = asyncio.create_task(engine.generate(PROMPT, sampling(), session="c"))
        await ticks(5)
        await killed(engine)  # the next process makes the call
        assert bits([await asyncio.wait_for(amid, CEILING)]) == await expected(4, 7, "c")

        os.kill(pid_of(engine), signal.SIGSTOP)
        amid = asyncio.create_task(engine.generate(PROMPT, sampling(), session="c"))
        await ticks(5)
        await killed(engine)
        await stopped(engine)
        await ticks(5)
        with (tmp_path / "engine.log").open("a") as log:
            log.write("the last words\n")
        await killed(engine)
        with pytest.raises(
            EngineError, match=r"ended with code -9 \(Killed\)\nIts log .* ends:\n(.*\n)*the last words"
        ):
            await amid
        assert await sampled(engine, "c") == await expected(4, 7, "c")

        os.kill(pid_of(engine), signal.SIGSTOP)
        publication = asyncio.create_task(publish(engine, unique_weights(tiny(seed=5)), 8))
        await until(lambda: sum((path / "weights.safetensors").exists() for path in staged()) == len(before) + 2)
        await ticks(5)
        assert not publication.done()
        await killed(engine)
        await asyncio.wait_for(publication, CEILING)
        assert len(staged()) == len(before) + 1
        assert await sampled(engine, "c") == await expected(5, 8, "c")
    assert not children() and staged() == before


async def nothing_works(engine: RemoteEngine, told: str) -> None:
    engine.open_session("later")
    calls: list[Awaitable[Any]] = [
        engine.generate(PROMPT, sampling(), session="later"),
        engine.score(PROMPT),
        publish(engine, unique_weights(tiny()), 2),
    ]
    for call in calls:
        with pytest.raises(EngineError, match=told):
            await asyncio.wait_for(call, CEILING)


@pytest.mark.slow
async def test_a_process_that_cannot_be_started_again_fails_every_call(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        for name in "ab":
            engine.open_session(name)
        waits = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        await ticks(5)
        shutil.rmtree(tmp_path / "model")
        os.kill(pid_of(engine), signal.SIGKILL)
        await until(lambda: engine.failure)
        told = r"model.path: .* cannot be loaded"
        engine.close_session("b")
        with pytest.raises(EngineError, match=told):
            await asyncio.wait_for(waits, CEILING)
        await nothing_works(engine, told)
        assert not children()


@pytest.mark.slow
async def test_closing_it_while_its_process_is_started_again(tmp_path: Path) -> None:
    said, closed, before = list[str](), list[bool](), staged()
    async with started(tmp_path, notify=said.append, on_close=lambda: closed.append(True)) as engine:
        engine.open_session("a")
        await publish(engine, unique_weights(tiny(seed=3)), 1)
        await killed(engine)
        await until(lambda: said and children())
        waits = [
            asyncio.create_task(engine.generate(PROMPT, sampling(), session="a")),
            asyncio.create_task(engine.score(PROMPT)),
            asyncio.create_task(publish(engine, unique_weights(tiny()), 2)),
        ]
        await ticks(5)
        await engine.close()
        assert [await refused(call) for call in waits] == ["the engine was closed"] * 3
        assert not children() and staged() == before and closed


@pytest.mark.slow
async def test_a_process_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    async with started(tmp_path, notify=said.append, silence=4.0) as engine:
        engine.open_session("a")
        await sampled(engine, "a")
        stopped = pid_of(engine)
        os.kill(stopped, signal.SIGSTOP)
        call = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        assert len((await asyncio.wait_for(call, CEILING)).token_ids)
        assert len((await asyncio.wait_for(sampled(engine, "a"), CEILING))[0][0])
        assert not alive(stopped) and "did not answer for 4 s" in said[0]


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
