"""User code that does its worst: it fails its own attempt, and nothing else."""

import asyncio
import ctypes
import gc
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clocks import StuckLoop
from tests.rollout.kit import played
from tests.until import CEILING, wait_until
from tests.worlds import DONE, MORE, Told, ToldPlain, play, saying, tool
from treadle.core.errors import Cause, RunError, TrajectoryFailure
from treadle.core.types import Message, Status, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.rollout.isolation import event_loop, interrupts, user_code
from treadle.rollout.isolation.event_loop import run
from treadle.rollout.isolation.user_code import DaemonThreads, abandoned_threads
from treadle.testing import VirtualLoop


class Weird(BaseException):
    """Somebody derives from BaseException."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even its text")


class Unshowable:
    """As a value it makes trouble wherever it is looked at."""

    def __repr__(self) -> str:
        raise Weird("no text")

    def __iter__(self) -> Iterator[Any]:
        raise KeyboardInterrupt

    def __len__(self) -> int:
        raise SystemExit(4)


def tampered() -> TrajectoryFailure:
    failure = TrajectoryFailure(Cause.VERIFIER, "well")
    failure.cause = "nonsense"  # type: ignore[assignment]
    failure.message = Unshowable()  # type: ignore[assignment]
    return failure


RAISED: list[Callable[[], BaseException]] = [
    *(KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopAsyncIteration, RecursionError, MemoryError),
    *(partial(SystemExit, 3), partial(Weird, "x"), partial(StopIteration, "over"), Unprintable),
    partial(ValueError, "a lone \ud800 surrogate"),
    partial(ExceptionGroup, "several", [ValueError("one")]),
    partial(BaseExceptionGroup, "several", [SystemExit(1)]),
    partial(TrajectoryFailure, Cause.VERIFIER, "a lone \ud800 surrogate"),
    tampered,
]
UNSHOWABLE: Any = Unshowable()
RETURNED: list[Any] = [
    *(UNSHOWABLE, EnvStep(UNSHOWABLE), EnvStep(reward=UNSHOWABLE), EnvStep(done=UNSHOWABLE), EnvStep(state=UNSHOWABLE))
]


class Making:
    """Its constructor, or one of its methods, is told what to do."""

    def __init__(self, kind: type[Told], where: str, answer: Any) -> None:
        self.kind, self.where, self.answer = kind, where, answer

    def __call__(self) -> Environment:
        if self.where == "create":
            raise self.answer
        named = {"reset": "opening", "close": "closing"}.get(self.where)
        return self.kind(DONE, **{named: self.answer}) if named else self.kind(self.answer, DONE)


def check_isolated(trajectories: Sequence[Trajectory], where: str) -> Trajectory:
    """The one in the middle has failed, in words that a ledger can hold; the others are as if it were not there."""
    before, failed, after = trajectories
    for healthy in (before, after):
        assert (healthy.status, healthy.reward, healthy.failure) == (Status.DONE, 1.25, None)
    if where == "close":
        assert failed.status is Status.DONE and failed.warning
    else:
        assert failed.status is Status.FAILED and failed.failure is not None
        assert failed.failure.message.encode() and failed.failure.traceback is not None
        assert isinstance(failed.failure.cause, Cause)
    failed.warning.encode()
    return failed


def played_between_healthy_ones(make: Callable[[], Environment], **settings: Any) -> list[Trajectory]:
    healthy = lambda: Told(MORE, DONE)  # noqa: E731
    return play([healthy, make, healthy], saying("a"), **settings)


@pytest.mark.parametrize("kind", [Told, ToldPlain])
@given(where=st.sampled_from(["create", "reset", "step", "close"]), make=st.sampled_from(RAISED))
def test_whatever_it_raises_fails_its_attempt_alone(
    kind: type[Told], where: str, make: Callable[[], BaseException]
) -> None:
    failed = check_isolated(played_between_healthy_ones(Making(kind, where, make())), where)
    if failed.failure is not None and isinstance(make(), TrajectoryFailure):
        assert failed.failure.cause in (Cause.VERIFIER, Cause.ENVIRONMENT)


@pytest.mark.parametrize("kind", [Told, ToldPlain])
@given(where=st.sampled_from(["reset", "step"]), value=st.sampled_from(RETURNED))
def test_whatever_it_returns_fails_its_attempt_alone(kind: type[Told], where: str, value: Any) -> None:
    check_isolated(played_between_healthy_ones(Making(kind, where, value)), where)


class InATask(Told):
    """A task of its own does what it is told to; the step waits for that, or for something else."""

    def __init__(self, act: Callable[[], Any], waits: bool) -> None:
        super().__init__(DONE)
        self.act, self.waits = act, waits

    async def step(self, text: str) -> EnvStep:
        task = asyncio.ensure_future(self._act())
        await (task if self.waits else asyncio.sleep(0.05))
        return DONE

    async def _act(self) -> None:
        await asyncio.sleep(0)
        self.act()


def raising(error: type[BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_that_exits_fails_the_attempt_that_awaits_it_alone(error: type[BaseException]) -> None:
    failed = check_isolated(played_between_healthy_ones(lambda: InATask(raising(error), True)), "step")
    assert failed.failure is not None and failed.failure.cause is Cause.ENVIRONMENT
    assert f"tried to exit the process ({error.__name__})" in failed.failure.message
    assert "test_user_code.py" in failed.failure.traceback and "in act" in failed.failure.traceback


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_task_that_exits_and_that_nobody_awaits_is_logged_and_harms_nobody() -> None:
    said: list[str] = []
    trajectories = play([lambda: InATask(raising(SystemExit), False), lambda: Told(DONE)], saying("a"), said=said)
    gc.collect()  # asyncio reports the task's exception when the task goes: now, not in another test
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 1.0]
    [line] = said
    assert line.startswith("a task or callback tried to exit the process (SystemExit()), at ")
    assert "test_user_code.py:" in line and "in act" in line


# The event loop


def test_stopping_the_loop_ends_the_run_with_an_error_that_says_so() -> None:
    async def stopping() -> EnvStep:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return DONE

    with pytest.raises(RunError, match="stopped the event loop"):
        play([lambda: Told(MORE, DONE), lambda: Told(stopping)], saying("a"))


async def resisting() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


def test_what_resists_its_cancellation_is_named_and_left_behind() -> None:
    said: list[str] = []
    trajectories = play(
        [lambda: Told(MORE, DONE), lambda: Told(resisting), lambda: Told(resisting)],
        saying("a"),
        said=said,
        loop=VirtualLoop(),
        environment_timeout=0.5,
    )
    assert [trajectory.reward for trajectory in trajectories] == [1.25, None, None]
    [line] = said
    assert line.startswith("cancelled, but does not end, and is left behind: ")
    for stuck, number in zip(trajectories[1:], (1, 2), strict=True):
        assert stuck.failure is not None and stuck.failure.traceback.startswith("at ")
        assert "test_user_code.py:" in stuck.failure.traceback and stuck.failure.traceback.endswith("in resisting")
        assert f"environment 'world' (task t, trajectory g000000.{number}), step" in line


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As a shell starts what it does not start in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_told_from_a_keyboard_interrupt_of_user_code() -> None:
    """A second Ctrl-C passes through whatever is being played."""

    def twice() -> EnvStep:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)  # returns when it was handled
        return DONE

    async def step() -> EnvStep:
        return twice()

    with pytest.raises(KeyboardInterrupt):
        play(lambda: Told(step), saying("a"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_after_a_second_ctrl_c_no_task_is_waited_for_without_end() -> None:
    """It may have broken what the others wait for."""
    said: list[str] = []

    async def main() -> None:
        for _ in range(2):
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await resisting()

    loop = VirtualLoop()
    with pytest.raises(KeyboardInterrupt):
        run(main(), said.append, new_event_loop=lambda: loop)
    assert (said, loop.time()) == ([], event_loop._TO_END_INTERRUPTED)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("signals", [2, 3, 5])
@pytest.mark.parametrize("when", ["asked", "ending", "over"])
def test_a_second_ctrl_c_is_a_keyboard_interrupt_whenever_it_comes(when: str, signals: int) -> None:
    """Also while the first one ends the run; nobody is blamed, and the others change nothing."""
    said: list[str] = []
    loop = VirtualLoop()

    def interrupt(times: int) -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        loop.create_task(resisting())
        with interrupts.handled(lambda: None, signal.SIGINT):
            interrupt(signals if when == "asked" else 1)
        if when == "over":
            loop.call_soon(interrupt, signals - 1)
        elif when == "ending":
            loop.call_later(5, interrupt, signals - 1)

    with pytest.raises(KeyboardInterrupt):
        run(main(), said.append, new_event_loop=lambda: loop)
    assert said == [] and loop.time() == (5 if when == "ending" else 0) + event_loop._TO_END_INTERRUPTED


@pytest.mark.usefixtures("interruptible")
def test_two_within_one_call_of_c_are_two() -> None:
    asked: list[int] = []
    again: list[int] = []
    with interrupts.handled(lambda: asked.append(1), signal.SIGINT, again=lambda: again.append(1)):
        list(map(getattr(ctypes.PyDLL(None), "raise"), [signal.SIGINT] * 2))  # Python runs no handler in between
        pass
    assert (asked, again) == ([1], [1])


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_is_not_swallowed_where_it_arrives() -> None:
    """An exception in a finalizer is ignored."""

    class Dying:
        def __del__(self) -> None:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        with interrupts.handled(lambda: None, signal.SIGINT):
            Dying()
            await asyncio.sleep(3600)

    with pytest.raises(KeyboardInterrupt):
        run(main(), print, new_event_loop=VirtualLoop)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_interrupts_a_loop_that_is_blocked_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_TO_REACT", 0.02)
    swallowed = 0

    async def main() -> None:
        nonlocal swallowed
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        for _ in range(2):
            try:
                time.sleep(CEILING)
            except KeyboardInterrupt:
                swallowed += 1
        time.sleep(CEILING)

    with pytest.raises(KeyboardInterrupt):
        run(main(), print)
    assert swallowed == 2


@pytest.mark.usefixtures("interruptible")
def test_after_a_second_ctrl_c_nothing_else_gets_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_TO_REACT", 0.02)
    began = 0

    async def blocking() -> None:
        nonlocal began
        began += 1
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        time.sleep(CEILING)

    async def main() -> None:
        await asyncio.gather(*(blocking() for _ in range(3)))

    with pytest.raises(KeyboardInterrupt):
        run(main(), print)
    assert began == 1


# What blocks


def test_who_blocks_the_loop_is_named_while_it_does_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "BLOCKED", 0.02)
    monkeypatch.setattr(event_loop, "_PERIOD", 0.005)
    said: list[str] = []

    async def later() -> None:
        while not any("in later" in line for line in said):
            time.sleep(0.005)

    async def step() -> EnvStep:
        while not any("in step" in line for line in said):
            time.sleep(0.005)
        await asyncio.ensure_future(later())  # a task of its own
        return DONE

    async def slow() -> EnvStep:
        await asyncio.sleep(0.02)
        return DONE

    blocking, waiting = play([lambda: Told(step), lambda: Told(slow)], saying("a"), said=said)
    assert (blocking.reward, waiting.reward) == (1.0, 1.0)
    assert blocking.blocked_seconds >= 0.04 and waiting.blocked_seconds == 0
    for name in ("step", "later"):
        [line] = [line for line in said if "test_user_code.py" in line and f"in {name}" in line]
        assert line.startswith("environment 'world' blocks the event loop, at ")
        assert "(task t, trajectory g000000.0)" in line


def test_a_library_that_is_awaited_is_not_user_code_that_blocks() -> None:
    library: dict[str, Any] = {}
    source = "async def create(ask): ask()\ndef get(ask): ask()\n"
    exec(compile(source, f"{sysconfig.get_path('purelib')}/sdk.py", "exec"), library)
    frames: list[FrameType] = []

    def ask() -> None:
        frames[:] = list(user_code.thread_frames(threading.get_ident()))[2:]  # without this function's

    async def waits() -> None:
        await library["create"](ask)

    async def blocks() -> None:
        library["get"](ask)

    asyncio.run(waits())
    assert user_code.blocking_place(frames) == ""
    asyncio.run(blocks())
    assert user_code.blocking_place(frames).endswith(" in blocks")


# Plain methods


class Threaded(Environment):
    """Notes the threads that it is called on, and keeps an SQLite connection, which is bound to one."""

    made: ClassVar[list["Threaded"]] = []

    def __init__(self) -> None:
        self.threads = [threading.get_ident()]
        self.database = sqlite3.connect(":memory:")
        self.made.append(self)

    def reset(self, task: Task) -> Sequence[Message]:
        self.threads.append(threading.get_ident())
        self.database.execute("CREATE TABLE replies (text)")
        return task.prompt

    def step(self, text: str) -> EnvStep:
        self.threads.append(threading.get_ident())
        time.sleep(0.02)
        self.database.execute("INSERT INTO replies VALUES (?)", (text,))
        [(count,)] = self.database.execute("SELECT count(*) FROM replies")
        return EnvStep([tool("more")], reward=1.0, done=count == 3)

    def close(self) -> None:
        self.threads.append(threading.get_ident())
        self.database.close()


def test_plain_methods_share_one_thread_for_each_attempt() -> None:
    Threaded.made.clear()
    threads = threading.active_count()
    task = Task("t", Told().opening, "world")
    trajectories = play([Threaded] * 4, saying("a"), task)  # made by a function: on the event loop
    assert all("SQLite objects created in a thread" in str(t.failure) for t in trajectories)

    Threaded.made.clear()
    attempts = played({}, saying("a"), [task] * 4, {"world": Threaded})
    assert [trajectory.reward for trajectory in asyncio.run(attempts)] == [3.0] * 4
    used = [set(environment.threads) for environment in Threaded.made]
    assert all(len(each) == 1 for each in used) and len(set.union(*used)) == 4
    assert threading.get_ident() not in set.union(*used)
    wait_until(lambda: threading.active_count() <= threads)


class Mixed(Told):
    """An asynchronous step beside a plain reset and close."""

    def reset(self, task: Task) -> Sequence[Message]:  # type: ignore[override]
        self.calls.append("reset" if threading.current_thread() is not threading.main_thread() else "on the loop")
        return task.prompt

    def close(self) -> None:  # type: ignore[override]
        self.calls.append("close" if threading.current_thread() is not threading.main_thread() else "on the loop")


def test_methods_may_be_mixed() -> None:
    mixed = Mixed(MORE, DONE)
    [trajectory] = play(lambda: mixed, saying("a"), Task("t", Told().opening, "world"))
    assert trajectory.reward == 1.25
    assert mixed.calls == ["reset", "step", "step", "close"]


@pytest.fixture
def loop() -> Iterator[StuckLoop]:
    """For threads to be stuck in; they have ended when the test has."""
    made = StuckLoop()
    yield made
    made.released.set()
    wait_until(lambda: not abandoned_threads())


def test_a_stuck_thread_is_abandoned_and_closes_its_environment_when_it_is_free(loop: StuckLoop) -> None:
    world = ToldPlain(loop.stuck)
    said: list[str] = []
    worlds = [lambda: world, lambda: ToldPlain(MORE, DONE)]
    stuck, healthy = play(worlds, saying("a"), said=said, loop=loop)
    assert stuck.failure is not None and stuck.failure.cause is Cause.TIMEOUT
    assert (stuck.warning, healthy.reward) == ("", 1.25)
    assert [thread.name for thread in abandoned_threads()] == ["environment 'world' (task t, trajectory g000000.0)"]
    assert world.calls == ["reset", "step"]
    [line] = said
    assert line.startswith("has not returned, and its thread is left behind: ")
    assert line.endswith("environment 'world' (task t, trajectory g000000.0)")
    assert "in stuck" in stuck.failure.traceback
    loop.released.set()
    wait_until(lambda: "close" in world.calls)
    assert world.calls == ["reset", "step", "close"]


def test_no_more_threads_are_started_once_too_many_are_stuck(loop: StuckLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "MAX_ABANDONED", 2)
    stuck = play([lambda: ToldPlain(opening=loop.stuck)] * 2, saying("a"), loop=loop)
    assert [t.failure.cause for t in stuck if t.failure] == [Cause.TIMEOUT] * 2
    refused, healthy = play([lambda: ToldPlain(DONE), lambda: Told(DONE)], saying("a"))
    assert refused.failure is not None and refused.failure.cause is Cause.INFRASTRUCTURE
    assert "2 threads are stuck in calls that took too long and never returned" in refused.failure.message
    assert "one is of environment 'world' (task t, trajectory g000000." in refused.failure.message
    assert healthy.reward == 1.0
    loop.released.set()
    wait_until(lambda: not abandoned_threads())
    assert [t.reward for t in play([lambda: ToldPlain(DONE)] * 2, saying("a"))] == [1.0, 1.0]


def test_calls_that_never_return_take_no_place_in_the_loops_own_threads(loop: StuckLoop) -> None:
    """`asyncio.to_thread` is what environments that block are told to use, and what Treadle uses itself."""

    async def stuck() -> EnvStep:
        await asyncio.to_thread(loop.stuck)
        return DONE

    async def quick() -> EnvStep:
        return await asyncio.to_thread(lambda: DONE)

    *_, last = play([*[lambda: Told(stuck)] * 40, lambda: Told(quick)], saying("a"), loop=loop)
    assert last.reward == 1.0


async def test_a_thread_that_raises_stop_iteration_keeps_nobody_waiting() -> None:
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    with pytest.raises(RuntimeError, match="StopIteration: none is left"):
        async with asyncio.timeout(CEILING):
            await asyncio.to_thread(_stop)


def _stop() -> None:
    raise StopIteration("none is left")


@pytest.mark.slow
def test_a_process_exits_though_user_code_does_not_end(tmp_path: Path) -> None:
    script = """
        import asyncio, threading
        from tests.rollout.test_user_code import resisting
        from tests.worlds import Told, ToldPlain, play, saying

        async def to_thread():
            await asyncio.to_thread(threading.Event().wait)

        worlds = [Told(resisting), ToldPlain(threading.Event().wait), Told(to_thread)]
        played = play([lambda world=world: world for world in worlds], saying("a"), environment_timeout=0.3)
        print([t.failure.cause.value for t in played])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=CEILING, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['timeout', 'timeout', 'timeout']\n", "")


# Tracebacks


def test_a_traceback_begins_with_user_code_and_shows_causes() -> None:
    def load() -> None:
        raise KeyError("page")

    async def step() -> EnvStep:
        try:
            load()
        except KeyError as error:
            raise LookupError("no such page") from error
        return DONE

    [trajectory] = play(lambda: Told(step), saying("a"))
    assert trajectory.failure is not None
    assert trajectory.failure.message == "step raised LookupError: no such page"
    text = trajectory.failure.traceback
    assert "in load" in text and 'raise KeyError("page")' in text and "direct cause" in text
    assert text.endswith("LookupError: no such page")
    assert "treadle/rollout" not in text and "asyncio" not in text


# Tasks


class Vandal(Told):
    """Changes everything about its task."""

    async def reset(self, task: Task) -> Sequence[Message]:
        seen.append((task.prompt[0]["content"], task.ground_truth["rows"][0], dict(task.extras)))
        task.prompt[0]["content"] = "vandalised"
        task.ground_truth["rows"][0] = 9
        task.extras["new"] = True  # type: ignore[index]
        return [tool("x")]


seen: list[Any] = []


def test_each_attempt_has_its_own_task() -> None:
    seen.clear()
    task = Task("t", [{"role": "user", "content": "hello"}], "world", ground_truth={"rows": [1]}, extras={"a": [1]})
    play([lambda: Vandal(DONE)] * 3, saying("a"), task)
    assert seen == [("hello", 1, {"a": [1]})] * 3
    assert (task.prompt[0]["content"], task.ground_truth, task.extras) == ("hello", {"rows": [1]}, {"a": [1]})
