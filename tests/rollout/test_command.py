"""Programs as agents: what they leave behind, how much they print, and what they learn of the run and of each other."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.kit import TASK, overtime, play, played, program
from tests.until import CEILING, alive, until, wait_until
from tests.worlds import saying
from treadle.core.errors import Cause, ConfigError
from treadle.core.types import Status
from treadle.rollout.agents.command import Command
from treadle.workers.program import INHERITED, Program

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only process groups are killed")

# Each starts processes that write their ids into the folder $PIDS, one file each.
WRITES = "import os, sys, time; open(os.path.join(os.environ['PIDS'], str(os.getpid())), 'w'); "
SLEEPS = WRITES + "time.sleep(3600)"
ESCAPES = {
    "a child": f"subprocess.Popen([sys.executable, '-c', {SLEEPS!r}])",
    "setsid": f"subprocess.Popen([sys.executable, '-c', {SLEEPS!r}], start_new_session=True)",
    "deaf to SIGTERM": f"""
        deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + {SLEEPS!r}
        subprocess.Popen([sys.executable, '-c', deaf], start_new_session=True)""",
    "daemon": f"""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 3)
                os.execv(sys.executable, [sys.executable, '-c', {SLEEPS!r}])
            os._exit(0)""",
    "subreaper of its own": f"""
        import ctypes
        nested = ("import ctypes, subprocess, sys; ctypes.CDLL(None).prctl(36, 1);"
            "subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True);" + {SLEEPS!r})
        subprocess.Popen([sys.executable, '-c', nested, {SLEEPS!r}], start_new_session=True)""",
    "runner": """
        if os.fork() == 0:
            os.setsid()
            end = time.monotonic() + 3600
            while time.monotonic() < end:
                open(os.path.join(os.environ["PIDS"], "runner"), "w").write(str(os.getpid()))
                if os.fork():
                    os._exit(0)""",
}
WAIT = """
while len(os.listdir(os.environ["PIDS"])) < {count}:
    time.sleep(0.01)
"""


def escaping(kind: str) -> str:
    """A program's text: it starts processes, and goes on once they have written their ids."""
    starts = "import subprocess, time\n" + textwrap.dedent(ESCAPES[kind])
    return starts + WAIT.format(count=2 if kind.startswith("subreaper") else 1)


def started(folder: Path) -> list[int]:
    return [int(p.read_text() or 0) if p.name == "runner" else int(p.name) for p in folder.iterdir()]


def still_alive(folder: Path) -> list[int]:
    """After a moment in which nothing new may appear."""
    runner = folder / "runner"
    before = runner.read_text() if runner.exists() else ""
    time.sleep(0.2)
    assert not runner.exists() or runner.read_text() == before
    return [pid for pid in started(folder) if alive(pid)]


DONE = "print(json.dumps({'reward': 1}))"


@pytest.mark.quick(3)
@linux
@pytest.mark.parametrize("kind", list(ESCAPES))
@pytest.mark.parametrize("cause", [None, Cause.TIMEOUT], ids=["ends", "hangs"])
def test_nothing_outlives_the_attempt(kind: str, cause: Cause | None, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    then = DONE if cause is None else f"open({str(tmp_path / 'ready')!r}, 'w')\ntime.sleep(3600)"
    agent = program(escaping(kind) + then, environment={"PIDS": str(pids)})
    if cause is None:
        trajectory = play(agent)
    else:
        [trajectory] = overtime(played({"a": agent}, saying("a"), [TASK]), (tmp_path / "ready").exists)
    assert (trajectory.failure and trajectory.failure.cause) == cause, trajectory.failure
    assert started(pids)
    assert still_alive(pids) == []


RUN = """
import asyncio, sys
from treadle.workers.program import Program
kept = []
async def run():
    for text in sys.argv[2:]:
        words = [sys.executable, "-c", "import os, sys" + chr(10) + text + "time.sleep(3600)"]
        kept.append(Program(words, {"PIDS": sys.argv[1]}))
    await asyncio.Event().wait()
asyncio.run(run())
"""


@linux
def test_nothing_outlives_a_run_that_was_killed(tmp_path: Path) -> None:
    programs = [escaping("setsid"), escaping("daemon")]
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), *programs], cwd=ROOT)
    wait_until(lambda: len(started(tmp_path)) == len(programs))
    assert all(map(alive, started(tmp_path)))
    run.kill()
    run.wait()
    wait_until(lambda: not any(map(alive, started(tmp_path))))


async def test_a_program_that_has_printed_a_lot_can_be_ended(tmp_path: Path) -> None:
    """Its result is more than a pipe holds, and nobody has asked for it yet."""
    code = """
import pathlib, sys, time
for output in (sys.stdout, sys.stderr):
    output.write(chr(0) * 2**16)
    output.flush()
pathlib.Path(sys.argv[1]).touch()
time.sleep(3600)
"""
    running = Program([sys.executable, "-c", code, str(tmp_path / "printed")], {})
    await until((tmp_path / "printed").exists)
    await asyncio.wait_for(running.stop(), CEILING)
    result = await running.result()
    assert result is not None and len(result["stderr"]) == len(result["stdout"]) == 2**16


async def test_a_program_may_clean_up(tmp_path: Path) -> None:
    """As `docker run` must, which passes SIGTERM on to its container."""
    code = """
import signal, sys, time
def leave(number, frame):
    open("left", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open("ready", "w").close()
time.sleep(3600)
"""
    running = Program([sys.executable, "-c", code], {}, directory=tmp_path, grace=CEILING)
    await until((tmp_path / "ready").exists)
    await running.stop()
    assert (tmp_path / "left").exists()


def test_a_program_that_kills_its_supervisor_fails_and_ends(tmp_path: Path) -> None:
    agent = program(
        "open('pid', 'w').write(str(os.getpid()))\nos.kill(os.getppid(), 9)\nimport time; time.sleep(3600)",
        directory=tmp_path,
    )
    trajectory = play(agent)
    assert trajectory.failure is not None and "was killed" in trajectory.failure.message
    if sys.platform == "linux":
        wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))


# Outputs


def test_of_what_it_prints_the_end_is_kept_and_no_file_is_written(tmp_path: Path) -> None:
    """128 MiB on each output, by a program that may write no file longer than 1 MiB."""
    agent = program(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        for _ in range(128):
            os.write(1, b"x" * 2**20)
            os.write(2, b"y" * 2**20)
        if sys.platform == "linux":
            supervisor = open(f"/proc/{os.getppid()}/status").read()
            open("peak", "w").write(supervisor.partition("VmHWM:")[2].split()[0])
        print()
        print(json.dumps({"reward": 1, "note": "z" * 50_000}))
        """,
        directory=tmp_path,
    )
    trajectory = play(agent)
    assert (trajectory.status, trajectory.reward) == (Status.DONE, 1.0), trajectory.failure
    if sys.platform == "linux":
        assert int((tmp_path / "peak").read_text()) < 64 * 1024  # KiB


def test_a_program_that_closes_its_outputs_goes_on(tmp_path: Path) -> None:
    agent = program(
        "os.close(2)\nimport time\ntime.sleep(0.3)\nprint('{\"reward\": 1}', flush=True)\nos.close(1)\ntime.sleep(0.3)"
    )
    assert play(agent).reward == 1.0


# What it learns


def variables_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, str]:
    agent = program("json.dump(dict(os.environ), open('seen', 'w'))\n" + DONE, directory=folder, **options)
    assert play(agent).reward == 1.0
    seen: dict[str, str] = json.loads((folder / "seen").read_text())
    return seen


def test_the_environment_is_an_allow_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_PASSWORD", "LC_TIME", "PYTHONSTARTUP"):
        monkeypatch.setenv(name, f"the run's {name}")
    seen = variables_of(tmp_path, monkeypatch)
    given = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "NO_PROXY", "no_proxy"}
    assert seen["LC_TIME"] == "the run's LC_TIME" and seen["PATH"] == os.environ["PATH"]
    assert given <= seen.keys()
    others = seen.keys() - given - {"LC_CTYPE"}  # which Python sets by itself
    assert all(any(fnmatchcase(name, pattern) for pattern in INHERITED) for name in others), others


LOOKS = """
import glob, time
open(os.path.join("ready", str(os.getpid())), "w").close()
while len(os.listdir("ready")) < 2:
    time.sleep(0.01)
found = {}
for file in glob.glob("/proc/[0-9]*/environ"):
    try:
        found[int(file.split("/")[2])] = open(file, "rb").read().decode(errors="replace")
    except OSError:
        pass
readable = found.pop(os.getpid())
keys = [v for text in found.values() for v in text.split(chr(0)) if v.startswith("OPENAI_API_KEY=")]
others = [key for key in keys if key not in readable.split(chr(0))]
open(os.path.join("seen", str(os.getpid())), "w").write(json.dumps([others, int(os.environ["RUN"]) in found]))
while len(os.listdir("seen")) < 2:
    time.sleep(0.01)
"""


def test_in_user_namespaces_programs_see_neither_each_other_nor_the_run(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-current-user"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("no user namespaces")
    variables = {"RUN": str(os.getpid())}
    agent = program(LOOKS + DONE, directory=tmp_path, environment=variables)
    agent = replace(agent, words=[*alone, *agent.words])
    for name in ("ready", "seen"):
        (tmp_path / name).mkdir()
    for trajectory in asyncio.run(played({"a": agent}, saying("a"), [TASK, TASK])):
        assert trajectory.reward == 1.0, trajectory.failure
    assert [json.loads(file.read_text()) for file in (tmp_path / "seen").iterdir()] == 2 * [[[], False]]


def test_words_that_are_one_text_are_refused_with_the_words_that_are_meant() -> None:
    """They would be letters."""
    with pytest.raises(ConfigError, match=r"'echo \"a b\"' is one text; give words: \['echo', 'a b'\]"):
        Command('echo "a b"')
