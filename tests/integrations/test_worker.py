"""Worker processes: many attempts in a Python of their own, and everything that can go wrong there."""

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.until import CEILING, alive, until
from treadle.core.config import build
from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.workers.foreign import WorkerConfig, WorkerLimits, WorkerPool, WorkerProgram

ROOT = Path(__file__).parents[2]
HANDLER = Path(__file__).with_name("handler.py")
OTHER_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python"))
PYTHON = str(OTHER_PYTHONS[0]) if OTHER_PYTHONS else sys.executable
SLOW_MACHINE: dict[str, Any] = {"start": CEILING, "silence": CEILING, "cleanup": CEILING}
"""Limits that only a test of the limit may reach."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only process groups are killed")


def program(**changes: Any) -> WorkerProgram:
    return WorkerProgram(**{"name": "Test", "handler": HANDLER, "python": PYTHON, "remedy": "see docs", **changes})


@asynccontextmanager
async def opened(limits: Mapping[str, Any] | None = None, **config: Any) -> AsyncIterator[WorkerPool]:
    changes: dict[str, Any] = {
        key: config.pop(key) for key in ("python", "handler", "options", "cause", "lost_cause") if key in config
    }
    changes["limits"] = WorkerLimits(**{**SLOW_MACHINE, **(limits or {})})
    async with WorkerPool(program(**changes), build(WorkerConfig, config)) as pool:
        yield pool


async def failed(call: Any) -> TrajectoryFailure:
    with pytest.raises(TrajectoryFailure) as error:
        await call
    return error.value


class Held:
    """An attempt that goes on until it is let go."""

    def __init__(self, pool: WorkerPool) -> None:
        self.stop = asyncio.Event()
        self.call = asyncio.ensure_future(pool.call({"do": "wait_for_stop"}, self.stop))

    async def let_go(self) -> int:
        """Return the number of the process that played it."""
        self.stop.set()
        return int((await self.call)["pid"])


def playing(pool: WorkerPool) -> list[int | None]:
    """Attempts in progress at the last heartbeat of each process."""
    return [slot._process.playing if slot._process else None for slot in pool._slots]


def restarts(pool: WorkerPool) -> int:
    return sum(slot.starts - 1 for slot in pool._slots)


async def begun(pool: WorkerPool) -> None:
    """Wait until the attempts that the only process was given before have begun."""
    await asyncio.sleep(0)  # calls that were made tasks of just now come first
    await pool.call({"do": "echo"})


async def test_many_attempts_share_processes_that_import_once(tmp_path: Path) -> None:
    options = {"closed": str(tmp_path / "closed")}
    async with opened(processes=2, options=options) as pool:
        assert pool.ready.versions == {"handler": "1.0"} and pool.ready.info == {"given": options}
        results = await asyncio.gather(*(pool.call({"do": "echo", "value": n}) for n in range(60)))
        again = await pool.call({"do": "echo", "value": "ünï\ud800"})
        assert not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()
    assert [result["value"] for result in results] == list(range(60))
    assert len({result["pid"] for result in results}) == 2
    assert again["value"] == "ünï\ud800"
    assert again["imported"] in {result["imported"] for result in results}


async def test_attempts_beyond_the_limit_wait_their_turn() -> None:
    async with opened({"attempts": 2}) as pool:
        results = await asyncio.gather(*(pool.call({"do": "meet", "together": 2}) for _ in range(6)))
    assert max(result["together"] for result in results) == 2


async def test_what_the_handler_raises_fails_its_attempt_alone_and_the_others_are_asked_to_come_to_their_end() -> None:
    async with opened(cause=Cause.AGENT) as pool:
        other = Held(pool)
        for do, message in (
            ("raise", "LookupError: no such thing"),
            ("exit", "SystemExit: 3"),
            ("exit_in_a_task", "SystemExit: 3"),
            ("unknown", "KeyError: 'do_unknown'"),
        ):
            failure = await failed(pool.call({"do": do}))
            assert (failure.cause, failure.message) == (Cause.AGENT, message)
            assert "handler.py" in failure.traceback
        assert not other.call.done()
        assert await other.let_go() == pool.ready.pid
        assert (await pool.call({"do": "wait_for_stop"}, other.stop))["value"] == "stopped"  # before it begins
        assert await pool.call({"do": "print", "lines": 1000}) == {"value": ""}  # what is printed is no answer
        assert restarts(pool) == 0


async def test_results_that_cannot_be_sent_fail_their_attempt() -> None:
    async with opened({"output": 2000}) as pool:
        for what, message in (
            ("[1]", "TypeError: run must return a dict, got list"),
            ("{'a': {1}}", "TypeError: Object of type set is not JSON serializable"),
            ("{'a': 'x' * 2000}", "ValueError: run returned 2009 bytes of JSON, output_limit is 2000"),
        ):
            assert (await failed(pool.call({"do": "return", "what": what}))).message == message
            assert await pool.call({"do": "return", "what": "{'a': 'x' * 1900}"}) == {"a": "x" * 1900}


async def test_a_process_that_dies_fails_its_attempts_and_is_replaced() -> None:
    async with opened(processes=2, lost_cause=Cause.INFRASTRUCTURE) as pool:
        held = [Held(pool) for _ in range(4)]
        failure = await failed(pool.call({"do": "die"}))
        assert failure.cause is Cause.INFRASTRUCTURE
        assert failure.message == "the Test worker exited with status 7: the library gives up"
        ends = await asyncio.gather(*(each.let_go() for each in held), return_exceptions=True)
        assert sum(isinstance(end, TrajectoryFailure) for end in ends) == 2
        results = await asyncio.gather(*(pool.call({"do": "echo"}) for _ in range(4)))
        assert len({result["pid"] for result in results}) == 2
        assert restarts(pool) == 1


async def test_a_blocked_process_is_killed_and_its_place_named() -> None:
    for patience in (1.0, 4.0, 16.0, 64.0):  # a machine that is slower than one is not than all of them
        try:
            await _block(patience)
        except (AssertionError, TrajectoryFailure):
            if patience == 64.0:
                raise
        else:
            return


async def _block(patience: float) -> None:
    async with opened({"silence": patience, "heartbeat": 0.1, "cleanup": 0.5}) as pool:
        calls = [Held(pool).call, pool.call({"do": "block"})]
        for failure in await asyncio.gather(*map(failed, calls)):
            assert f"no sign of life for {patience:g} s, in do_block" in failure.message
            assert "handler.py:" in failure.message
        await begun(pool)
        assert restarts(pool) == 1


async def test_a_run_that_was_blocked_itself_kills_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as if it was blocked for longer than its patience: signs of life have come that it has not read."""
    loop = asyncio.get_running_loop()
    time, blocked = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: time() + blocked)
    async with opened({"heartbeat": 0.1}) as pool:
        process = pool._slots[0]._process
        assert process is not None
        for _ in range(2):
            await begun(pool)
            select.select([process._writer.get_extra_info("socket").fileno()], [], [])
            blocked += CEILING + 1
        await begun(pool)
        assert restarts(pool) == 0


@linux
async def test_memory_is_limited() -> None:
    async with opened(memory_limit=512 * 2**20) as pool:
        assert await pool.call({"do": "allocate", "bytes": 2**26}) == {"length": 2**26}
        other = Held(pool)
        failure = await failed(pool.call({"do": "allocate", "bytes": 2**30}))
        assert failure.message == "MemoryError"
        before = pool.ready.pid
        assert (await pool.call({"do": "echo"}))["pid"] != before
        assert await other.let_go() == before
        await until(lambda: not alive(before))


async def test_a_cancelled_call_cancels_its_attempt_which_may_clean_up(tmp_path: Path) -> None:
    async with opened() as pool:
        call = asyncio.create_task(pool.call({"do": "clean_up", "file": str(tmp_path / "left")}))
        await begun(pool)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled() and (tmp_path / "left").exists()
        await until(lambda: playing(pool) == [0])
        assert restarts(pool) == 0


async def test_an_attempt_that_cannot_be_cancelled_ends_with_its_process() -> None:
    async with opened({"cleanup": 0.3}) as pool:
        other = Held(pool)
        call = asyncio.create_task(pool.call({"do": "ignore_cancelling"}))
        await begun(pool)
        call.cancel()
        await asyncio.wait({call})
        first = pool.ready.pid
        assert (await pool.call({"do": "echo"}))["pid"] != first
        assert await other.let_go() == first
        await until(lambda: not alive(first))
    assert not alive(pool.ready.pid)


@linux
async def test_nothing_outlives_the_pool(tmp_path: Path) -> None:
    async with opened() as pool:
        call = asyncio.create_task(pool.call({"do": "start_process", "folder": str(tmp_path)}))
        cleaned = asyncio.create_task(pool.call({"do": "clean_up", "file": str(tmp_path / "0")}))
        await begun(pool)
    await asyncio.wait({call, cleaned})
    started = [int(path.name) for path in tmp_path.iterdir() if path.name != "0"]
    assert len(started) == 2 and not any(map(alive, started))
    assert (tmp_path / "0").exists()
    assert (await failed(call)).cause is Cause.ENVIRONMENT


RUN = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
from treadle.core.errors import TrajectoryFailure
from treadle.workers.foreign import WorkerPool, WorkerProgram
folder, handler, python = sys.argv[1:]
async def main():
    async with WorkerPool(WorkerProgram("Test", Path(handler), python, "see docs")) as pool:
        while True:
            with suppress(TrajectoryFailure):
                await pool.call({"do": "start_process", "folder": folder})
asyncio.run(main())
"""


@linux
async def test_nothing_outlives_a_kill(tmp_path: Path) -> None:
    """First of the worker, which the run starts again, then of the run."""
    command = [sys.executable, "-c", RUN, str(tmp_path), str(HANDLER), PYTHON]
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        for who in ("worker", "run"):
            await until(lambda: run.poll() is not None or len(_pids(tmp_path)) == 2)
            started = _pids(tmp_path)
            [worker] = {_parent(pid) for pid in started} & started
            os.kill(run.pid if who == "run" else worker, signal.SIGKILL)
            await until(partial(lambda pids: not any(map(alive, pids)), started))
    finally:
        run.kill()
        run.wait()


def _pids(folder: Path) -> set[int]:
    """Those of the processes that noted themselves here which are alive."""
    return {pid for path in folder.iterdir() if alive(pid := int(path.name))}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"python": "/no/such/python"}, "Test: '/no/such/python' is not an interpreter; see docs"),
        ({"python": "/bin/false"}, "Test in /bin/false: exited with status 1; see docs"),
        ({"handler": Path("/no/handler.py")}, "FileNotFoundError: .*'/no/handler.py'; see docs"),
        ({"options": {"raise": "no such task"}}, "RuntimeError: no such task; see docs"),
    ],
)
async def test_what_cannot_start_is_one_line_with_its_remedy(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        async with opened(processes=2, **changes):
            pass
    assert "\n" not in str(error.value)


async def test_modules_of_the_directory_of_the_run_can_be_imported_unless_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "h.py").write_text("from mine import start\nrun = None\n")
    (tmp_path / "mine.py").write_text("async def start(options):\n    return {'of': 'mine'}\n")
    monkeypatch.chdir(tmp_path)
    async with opened(handler=tmp_path / "below" / "h.py") as pool:
        assert pool.ready.info == {"of": "mine"}
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(ConfigError, match=r"not ready after 0\.1 s; see docs"):
        async with opened({"start": 0.1, "cleanup": 0.1}, handler=tmp_path / "below" / "h.py"):
            pass


async def test_a_process_that_cannot_be_started_again_fails_the_call(tmp_path: Path) -> None:
    handler = tmp_path / "h.py"
    handler.write_text(HANDLER.read_text())
    async with opened(handler=handler) as pool:
        handler.write_text("1/0")
        await failed(pool.call({"do": "die"}))
        failure = await failed(pool.call({"do": "echo"}))
        assert failure.cause is Cause.INFRASTRUCTURE and "ZeroDivisionError" in failure.message
        handler.write_text(HANDLER.read_text())
        assert (await pool.call({"do": "echo", "value": 1}))["value"] == 1


async def test_secrets_and_paths_of_the_run_stay_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "SECRET_KEY", "SHARED_KEY"):
        monkeypatch.setenv(name, "/there")
    async with opened(inherit=["SHARED_*"], environment={"MINE": "1"}) as pool:
        names = set((await pool.call({"do": "environment"}))["names"])
    assert names & {"PYTHONPATH", "SECRET_KEY", "SHARED_KEY", "MINE"} == {"SHARED_KEY", "MINE"}


OPERATIONS = st.lists(
    st.sampled_from(["echo", "echo", "raise", "cancel", "cancel late", "stop", "exit", "die", "kill", "print"]),
    min_size=1,
    max_size=12,
)


@settings(max_examples=3, deadline=None)
@given(operations=OPERATIONS, seed=st.integers(0, 2**16))
def test_whatever_happens_every_call_ends_and_the_pool_goes_on(operations: list[str], seed: int) -> None:
    asyncio.run(_play_through(operations, random.Random(seed)))


async def _play_through(operations: list[str], draws: random.Random) -> None:
    async with opened({"cleanup": 2.0, "attempts": 4}, processes=2) as pool:
        async with asyncio.timeout(CEILING):
            await asyncio.gather(*(_operate(pool, op, n, draws) for n, op in enumerate(operations)))
        for _ in range(2):  # the first ones may go to a process that was killed just now
            calls = (pool.call({"do": "echo", "value": n}) for n in range(8))
            results = await asyncio.gather(*calls, return_exceptions=True)
        values = [result["value"] for result in results if isinstance(result, dict)]
        assert values == list(range(8)), results
        await until(lambda: playing(pool) == [0, 0])
        assert pool._places._value == 8 and all(slot.calls == 0 for slot in pool._slots)


async def _operate(pool: WorkerPool, operation: str, number: int, draws: random.Random) -> None:
    """A call gives its own result or a TrajectoryFailure; CancelledError only if it was cancelled."""
    await asyncio.sleep(draws.random() / 10)
    match operation:
        case "cancel" | "cancel late":
            call = asyncio.create_task(pool.call({"do": "echo", "seconds": 0.05}))
            await asyncio.sleep(0 if operation == "cancel" else 0.05)
            call.cancel()
            await asyncio.wait({call})
        case "kill":
            with suppress(ProcessLookupError):
                os.kill(pool.ready.pid, signal.SIGKILL)
        case "stop":
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(0.02, stop.set)
            await _settled(pool.call({"do": "wait_for_stop"}, stop), "stopped")
        case "echo":
            await _settled(pool.call({"do": "echo", "value": number, "seconds": 0.03}), number)
        case _:
            await _settled(pool.call({"do": operation, "lines": 10}), "")


async def _settled(call: Any, value: object) -> None:
    with suppress(TrajectoryFailure):
        assert (await call)["value"] == value
