"""Worker processes: many attempts in a Python of their own, and everything that can go wrong there."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.test_agents import alive
from treadle.core.config import build
from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.integrations.worker import WorkerConfig, WorkerPool, WorkerProgram

ROOT = Path(__file__).parents[2]
HANDLER = Path(__file__).with_name("handler.py")
OTHER_PYTHONS = sorted(Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python"))
PYTHON = str(OTHER_PYTHONS[0]) if OTHER_PYTHONS else sys.executable
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only process groups are killed")


def program(**changes: Any) -> WorkerProgram:
    return WorkerProgram(**{"name": "Test", "handler": HANDLER, "python": PYTHON, "remedy": "see docs", **changes})


@asynccontextmanager
async def opened(**config: Any) -> AsyncIterator[WorkerPool]:
    changes = {key: config.pop(key) for key in ("python", "handler", "options", "cause", "lost_cause") if key in config}
    async with WorkerPool(program(**changes), build(WorkerConfig, config)) as pool:
        yield pool


async def failed(call: Any) -> TrajectoryFailure:
    with pytest.raises(TrajectoryFailure) as error:
        await call
    return error.value


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_many_attempts_share_processes_that_import_once(tmp_path: Path) -> None:
    options = {"closed": str(tmp_path / "closed")}
    async with opened(processes=2, options=options) as pool:
        assert pool.ready.versions == {"handler": "1.0"} and pool.ready.info == {"given": options}
        assert pool.ready.seconds > 0.05
        results = await asyncio.gather(*(pool.call({"do": "echo", "value": n, "seconds": 0.2}) for n in range(60)))
        again = await pool.call({"do": "echo", "value": "ünï\ud800"})
        assert not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()
    assert [result["value"] for result in results] == list(range(60))
    assert len({result["pid"] for result in results}) == 2
    assert again["value"] == "ünï\ud800"
    assert again["imported"] in {result["imported"] for result in results}


async def test_attempts_beyond_the_limit_wait_their_turn() -> None:
    async with opened(attempts=2) as pool:
        begun = time.monotonic()
        await asyncio.gather(*(pool.call({"do": "echo", "seconds": 0.2}) for _ in range(6)))
    assert time.monotonic() - begun >= 0.6


async def test_an_attempt_is_asked_to_come_to_its_end() -> None:
    async with opened() as pool:
        stop = asyncio.Event()
        call = asyncio.create_task(pool.call({"do": "wait_for_stop"}, stop))
        await asyncio.sleep(0.1)
        assert not call.done()
        stop.set()
        assert await call == {"value": "stopped"}
        assert await pool.call({"do": "wait_for_stop"}, stop) == {"value": "stopped"}


async def test_what_the_handler_raises_fails_its_attempt_alone() -> None:
    async with opened(cause=Cause.AGENT) as pool:
        other = asyncio.create_task(pool.call({"do": "echo", "seconds": 1}))
        for do, message in (
            ("raise", "LookupError: no such thing"),
            ("exit", "SystemExit: 3"),
            ("exit_in_a_task", "SystemExit: 3"),
            ("unknown", "KeyError: 'do_unknown'"),
        ):
            failure = await failed(pool.call({"do": do}))
            assert (failure.cause, failure.message) == (Cause.AGENT, message)
            assert "handler.py" in failure.traceback
        assert (await other)["pid"] == pool.ready.pid
        assert pool.restarts == 0


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("[1]", "TypeError: run must return a dict, got list"),
        ("{'a': {1}}", "TypeError: Object of type set is not JSON serializable"),
        ("{'a': 'x' * 2000}", "ValueError: run returned 2009 bytes of JSON, output_limit is 2000"),
    ],
)
async def test_results_that_cannot_be_sent_fail_their_attempt(what: str, message: str) -> None:
    async with opened(output_limit=2000) as pool:
        assert (await failed(pool.call({"do": "return", "what": what}))).message == message
        assert await pool.call({"do": "return", "what": "{'a': 'x' * 1900}"}) == {"a": "x" * 1900}


async def test_what_is_printed_is_no_answer() -> None:
    async with opened() as pool:
        assert await pool.call({"do": "print", "lines": 1000}) == {"value": ""}


async def test_a_process_that_dies_fails_its_attempts_and_is_replaced() -> None:
    async with opened(processes=2, lost_cause=Cause.INFRASTRUCTURE) as pool:
        calls = [asyncio.create_task(pool.call({"do": "echo", "seconds": 1})) for _ in range(4)]
        failure = await failed(pool.call({"do": "die"}))
        assert failure.cause is Cause.INFRASTRUCTURE
        assert failure.message == "the Test worker exited with status 7: the library gives up"
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, TrajectoryFailure) for result in results) == 2
        results = await asyncio.gather(*(pool.call({"do": "echo"}) for _ in range(4)))
        assert len({result["pid"] for result in results}) == 2
        assert pool.restarts == 1


async def test_a_process_that_is_killed_fails_its_attempts_and_is_replaced() -> None:
    async with opened() as pool:
        call = asyncio.create_task(pool.call({"do": "echo", "seconds": 30}))
        await asyncio.sleep(0.1)
        os.kill(pool.ready.pid, signal.SIGKILL)
        failure = await failed(call)
        assert (failure.cause, failure.message) == (Cause.ENVIRONMENT, "the Test worker was killed by signal 9")
        assert (await pool.call({"do": "echo"}))["pid"] == pool.ready.pid


async def test_a_blocked_process_is_killed_and_its_place_named() -> None:
    async with opened(patience=5.0, heartbeat=0.1, cleanup_timeout=0.5) as pool:
        calls = [pool.call({"do": "echo", "seconds": 30}), pool.call({"do": "block", "seconds": 30})]
        for failure in await asyncio.gather(*map(failed, calls)):
            assert "no sign of life for 5 s (patience), in do_block" in failure.message
            assert "handler.py:" in failure.message
        assert await pool.call({"do": "block", "seconds": 0.3}) == {}
        assert pool.restarts == 1


async def test_a_run_that_was_blocked_itself_kills_no_process() -> None:
    async with opened(patience=3.0, heartbeat=0.1) as pool:
        for _ in range(2):
            await asyncio.sleep(0.05)
            time.sleep(4.0)
        assert await pool.call({"do": "echo", "value": 1}) and pool.restarts == 0


@linux
async def test_memory_is_limited() -> None:
    async with opened(memory_limit=512 * 2**20) as pool:
        assert await pool.call({"do": "allocate", "bytes": 2**26}) == {"length": 2**26}
        other = asyncio.create_task(pool.call({"do": "echo", "seconds": 0.5}))
        failure = await failed(pool.call({"do": "allocate", "bytes": 2**30}))
        assert failure.message == "MemoryError"
        before = pool.ready.pid
        assert (await pool.call({"do": "echo"}))["pid"] != before
        assert (await other)["pid"] == before
        await until(lambda: not alive(before))


async def test_a_cancelled_call_cancels_its_attempt_which_may_clean_up(tmp_path: Path) -> None:
    async with opened() as pool:
        call = asyncio.create_task(pool.call({"do": "clean_up", "seconds": 0.2, "file": str(tmp_path / "left")}))
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled() and (tmp_path / "left").exists()
        await until(lambda: pool.heartbeats[0].attempts == 0)
        assert pool.restarts == 0


async def test_an_attempt_that_cannot_be_cancelled_ends_with_its_process() -> None:
    async with opened(cleanup_timeout=0.3) as pool:
        other = asyncio.create_task(pool.call({"do": "echo", "seconds": 1.5}))
        call = asyncio.create_task(pool.call({"do": "ignore_cancelling"}))
        await asyncio.sleep(0.2)
        call.cancel()
        await asyncio.wait({call})
        first = pool.ready.pid
        assert (await pool.call({"do": "echo"}))["pid"] != first
        assert (await other)["pid"] == first
        await until(lambda: not alive(first))
    assert not alive(pool.ready.pid)


@linux
async def test_nothing_outlives_the_pool(tmp_path: Path) -> None:
    async with opened(cleanup_timeout=1.0) as pool:
        call = asyncio.create_task(pool.call({"do": "start_process", "folder": str(tmp_path)}))
        cleaned = asyncio.create_task(pool.call({"do": "clean_up", "seconds": 0.1, "file": str(tmp_path / "0")}))
        await until(lambda: len(list(tmp_path.iterdir())) == 2)
    await asyncio.wait({call, cleaned})
    started = [int(path.name) for path in tmp_path.iterdir() if path.name != "0"]
    assert len(started) == 2 and not any(map(alive, started))
    assert (tmp_path / "0").exists()
    assert (await failed(call)).cause is Cause.ENVIRONMENT


RUN = """
import asyncio, sys
from tests.integrations.test_worker import opened
async def main():
    async with opened(cleanup_timeout=1.0) as pool:
        await pool.call({"do": "start_process", "folder": sys.argv[1]})
asyncio.run(main())
"""


@linux
@pytest.mark.parametrize("who", ["run", "worker"])
async def test_nothing_outlives_a_kill(who: str, tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        await until(lambda: len(list(tmp_path.iterdir())) == 2)
        started = sorted(
            (int(path.name) for path in tmp_path.iterdir()), key=lambda pid: _parent(pid) in _pids(tmp_path)
        )
        os.kill(run.pid if who == "run" else started[0], signal.SIGKILL)
        await until(lambda: not any(map(alive, started)))
    finally:
        run.kill()
        run.wait()


def _pids(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"python": "/no/such/python"}, "Test: '/no/such/python' is no interpreter; see docs"),
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


async def test_a_library_that_is_missing_is_one_line_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "h.py").write_text("import library_that_is_not_there\n")
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'library_that_is_not_there'; see docs"):
        async with opened(handler=tmp_path / "h.py"):
            pass


async def test_a_start_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "h.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ConfigError, match=r"not ready after 0\.5 s \(start_timeout\); raise it, or see docs"):
        async with opened(handler=tmp_path / "h.py", start_timeout=0.5, cleanup_timeout=0.1):
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


@settings(max_examples=5, deadline=None)
@given(operations=OPERATIONS, seed=st.integers(0, 2**16))
def test_whatever_happens_every_call_ends_and_the_pool_goes_on(operations: list[str], seed: int) -> None:
    asyncio.run(_play_through(operations, random.Random(seed)))


async def _play_through(operations: list[str], draws: random.Random) -> None:
    async with opened(processes=2, attempts=4, cleanup_timeout=2.0) as pool:
        await asyncio.wait_for(asyncio.gather(*(_operate(pool, op, n, draws) for n, op in enumerate(operations))), 60)
        for _ in range(2):  # the first ones may go to a process that was killed just now
            calls = (pool.call({"do": "echo", "value": n}) for n in range(8))
            results = await asyncio.gather(*calls, return_exceptions=True)
        values = [result["value"] for result in results if isinstance(result, dict)]
        assert values == list(range(8)), results
        await until(lambda: all(beat.attempts == 0 for beat in pool.heartbeats))
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


async def test_256_attempts_at_once_share_a_process() -> None:
    lags = []
    async with opened(heartbeat=0.2) as pool:
        calls = [asyncio.create_task(pool.call({"do": "echo", "seconds": 1.0})) for _ in range(256)]
        while not all(call.done() for call in calls):
            due = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - due)
        await until(lambda: pool.heartbeats[0].attempts == 0)
        theirs = pool.heartbeats[0].lag_p99
    assert len({(await call)["pid"] for call in calls}) == 1
    ours = sorted(lags)[int(0.99 * (len(lags) - 1))]
    print(f"lag at p99: run {1000 * ours:.1f} ms, worker {1000 * theirs:.1f} ms")
