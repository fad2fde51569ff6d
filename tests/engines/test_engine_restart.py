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
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_engine_process import (
    PROMPT,
    bits,
    is_running,
    refused,
    sampling,
    started,
    ticks,
)
from tests.models import tiny
from treadle.core.engine import Engine, VersionSpan
from treadle.core.errors import EngineError
from treadle.engines.engine_process import ProcessEngine
from treadle.engines.torch_engine import TorchEngine
from treadle.engines.weights import unique_weights

MODES = pytest.mark.parametrize("lock_step", [True, False])


def children() -> list[int]:
    """Processes of engines that this one has started and that run."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if is_running(pid) and b"engine_child" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def staged() -> list[Path]:
    folders = Path("/dev/shm"), Path(tempfile.gettempdir())
    return [path for folder in folders for path in folder.glob(f"treadle_weights-*-{os.getpid()}-*")]


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    before = children()
    yield
    assert children() == before and not staged()


async def sampled(engine: Engine, *sessions: str) -> list[tuple[Any, ...]]:
    """What a call of each session is answered, made at once."""
    calls = [engine.generate(PROMPT + n, sampling(n), session=name) for n, name in enumerate(sessions)]
    return bits(await asyncio.wait_for(asyncio.gather(*calls), 60))


async def expected(seed: int, version: int, *sessions: str) -> list[tuple[Any, ...]]:
    """The same from an engine that never did anything else."""
    engine = TorchEngine(tiny(seed=seed), stop_token_ids=[0], lock_step=True, own_thread=False)
    await engine.publish(unique_weights(tiny(seed=seed)), version)
    for name in sessions:
        engine.open_session(name)
    answers = await sampled(engine, *sessions)
    await engine.close()
    return answers


async def gone(pid: int) -> None:
    while is_running(pid):
        await asyncio.sleep(0.01)


@MODES
async def test_killed_between_calls_it_goes_on_with_what_was_published_last(lock_step: bool, tmp_path: Path) -> None:
    said: list[str] = []
    async with started(tmp_path, lock_step=lock_step, say=said.append) as engine:
        for name in "cab":
            engine.open_session(name)
        await sampled(engine, *"cab")
        await engine.publish(unique_weights(tiny(seed=3)), 6)
        await engine.publish(unique_weights(tiny(seed=4)), 7)
        assert len(staged()) == 1
        first = engine.pid
        os.kill(first, signal.SIGKILL)
        await gone(first)
        while not said:
            await asyncio.sleep(0.01)
        engine.close_session("a")
        engine.open_session("d")
        sessions = "cbd"
        answers = await sampled(engine, *sessions)
        assert [spans for *_, spans in answers] == [(VersionSpan(7, 0, len(ids)),) for ids, *_ in answers]
        if lock_step:
            assert answers == await expected(4, 7, *sessions)
        else:
            assert [ids for ids, *_ in answers] == [ids for ids, *_ in await expected(4, 7, *sessions)]
        assert engine.pid != first and children() == [engine.pid]
        await engine.publish(unique_weights(tiny(seed=5)), 8)
        assert {spans for *_, spans in await sampled(engine, *sessions)} >= {(VersionSpan(8, 0, 6),)}
        with pytest.raises(EngineError, match="'a' is not open"):
            await engine.generate(PROMPT, sampling(), session="a")
    log = tmp_path / "engine.log"
    told = [f"the engine's process ended with code -9 (Killed), see {log}; starting it again"]
    assert said == [*told, "the engine's process was started again"]
    assert all(line in log.read_text() for line in said)


@MODES
async def test_killed_amid_calls_it_fails_those_and_no_others(lock_step: bool, tmp_path: Path) -> None:
    async with started(tmp_path, lock_step=lock_step) as engine:
        for name in "ab":
            engine.open_session(name)
        await engine.publish(unique_weights(tiny(seed=3)), 7)
        os.kill(engine.pid, signal.SIGSTOP)
        amid = [asyncio.create_task(engine.generate(PROMPT, sampling(), session=name)) for name in "ab"]
        await ticks(5)
        if not lock_step:
            amid.append(asyncio.create_task(engine.score(PROMPT)))  # type: ignore[arg-type]
            await ticks(5)
        with (tmp_path / "engine.log").open("a") as log:
            log.write("the last words\n")
        os.kill(engine.pid, signal.SIGKILL)
        told = re.escape(f"ended with code -9 (Killed); its log {log.name} ends:\n") + "(.*\n)*the last words"
        for call in amid:
            with pytest.raises(EngineError, match=told):
                await asyncio.wait_for(call, 30)
        answers = await sampled(engine, *"ab")
        assert [ids for ids, *_ in answers] == [ids for ids, *_ in await expected(3, 7, *"ab")]
        assert {span.version for *_, spans in answers for span in spans} == {7}


async def test_calls_that_no_wave_had_begun_with_wait_for_the_next_process(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        for name in "ab":
            engine.open_session(name)
        waits = asyncio.create_task(sampled(engine, "a"))
        await ticks(5)
        os.kill(engine.pid, signal.SIGKILL)
        await gone(engine.pid)
        await asyncio.sleep(0.1)
        engine.close_session("b")
        assert await waits == await expected(0, 0, "a")


@MODES
async def test_killed_amid_a_publication_the_next_process_has_it(lock_step: bool, tmp_path: Path) -> None:
    async with started(tmp_path, lock_step=lock_step) as engine:
        engine.open_session("a")
        await engine.publish(unique_weights(tiny(seed=3)), 7)
        os.kill(engine.pid, signal.SIGSTOP)
        publication = asyncio.create_task(engine.publish(unique_weights(tiny(seed=4)), 8))
        while len(staged()) < 2 or not list(staged()[1].glob("weights.safetensors")):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.wait_for(publication, 30)
        assert len(staged()) == 1
        assert await sampled(engine, "a") == await expected(4, 8, "a")
        os.kill(engine.pid, signal.SIGKILL)
        await gone(engine.pid)
        await asyncio.sleep(0.1)
        await asyncio.wait_for(engine.publish(unique_weights(tiny(seed=5)), 9), 30)  # after version 8
        assert await sampled(engine, "a") == await expected(5, 9, "a")


async def test_a_publication_that_is_refused_leaves_the_one_before(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        engine.open_session("a")
        await engine.publish(unique_weights(tiny(seed=3)), 7)
        assert "weights" in await refused(engine.publish({}, 8))
        os.kill(engine.pid, signal.SIGKILL)
        await gone(engine.pid)
        await asyncio.sleep(0.1)
        assert await sampled(engine, "a") == await expected(3, 7, "a")


async def given_up(engine: ProcessEngine, told: str) -> None:
    """Whatever is asked for fails with that."""
    engine.open_session("later")
    for call in (
        engine.generate(PROMPT, sampling(), session="a"),
        engine.score(PROMPT),
        engine.publish(unique_weights(tiny()), 2),
    ):
        with pytest.raises(EngineError, match=told):
            await asyncio.wait_for(call, 30)
    assert children() == []


@MODES
async def test_a_process_that_ends_again_before_it_answers_has_no_successor(lock_step: bool, tmp_path: Path) -> None:
    said: list[str] = []
    async with started(tmp_path, lock_step=lock_step, say=said.append) as engine:
        for name in "ab":
            engine.open_session(name)
        await engine.publish(unique_weights(tiny(seed=3)), 1)
        os.kill(engine.pid, signal.SIGKILL)
        while len(said) < 2:
            await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGSTOP)
        waits = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        publication = asyncio.create_task(engine.publish(unique_weights(tiny()), 2))
        await asyncio.sleep(0.1)
        os.kill(engine.pid, signal.SIGSEGV)
        os.kill(engine.pid, signal.SIGCONT)
        told = r"ended with code -11 \(Segmentation fault\); its log .*engine\.log ends:\n"
        for call in (waits, publication):
            with pytest.raises(EngineError, match=told):
                await asyncio.wait_for(call, 30)
        await given_up(engine, "was started again in vain: the engine's process " + told)
    assert len(said) == 2


async def test_a_process_that_cannot_be_started_again_fails_every_call(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        for name in "ab":
            engine.open_session(name)
        waits = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        shutil.rmtree(tmp_path / "model")
        os.kill(engine.pid, signal.SIGKILL)
        told = r"was started again in vain: the engine's process ended with code 1; its log .*\n(.*\n)*.*model"
        with pytest.raises(EngineError, match=told):
            await asyncio.wait_for(waits, 30)
        await given_up(engine, told)


@pytest.mark.parametrize("seconds", [0, 0.3, 1])
async def test_closing_it_while_its_process_is_started_again(seconds: float, tmp_path: Path) -> None:
    said: list[str] = []
    closed: list[float] = []
    async with started(tmp_path, say=said.append, on_close=lambda: closed.append(time.monotonic())) as engine:
        engine.open_session("a")
        await engine.publish(unique_weights(tiny(seed=3)), 1)
        os.kill(engine.pid, signal.SIGKILL)
        while not said:
            await asyncio.sleep(0.01)
        waits = [
            asyncio.create_task(call)
            for call in (
                engine.generate(PROMPT, sampling(), session="a"),
                engine.score(PROMPT),
                engine.publish(unique_weights(tiny()), 2),
            )
        ]
        await asyncio.sleep(seconds)
        assert children() or seconds < 1
        await engine.close()
        assert [await refused(call) for call in waits] == ["the engine was closed"] * 3
        assert children() == [] and closed
