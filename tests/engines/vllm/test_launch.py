"""Starting servers: their arguments, failures to start, and that none is left behind. Needs no vLLM."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.sources import FixedWeights
from tests.until import until, wait_until
from treadle.core.config import build
from treadle.core.errors import ConfigError, EngineError
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.engine import describe_servers, open_engine
from treadle.engines.vllm.launch import WORKER, ServerProcess, command, environment, find_python, flags
from treadle.orchestration.config import load_recipe
from treadle.orchestration.setup.chat_interface import load_chat_interface
from treadle.orchestration.setup.engines import EngineSpec, open_vllm
from treadle.training.make import load_source


def config(**vllm: Any) -> EngineConfig:
    return build(EngineConfig, {"kind": "vllm", "options": vllm})


def interpreter(folder: Path, script: str) -> str:
    """Something to run instead of a Python with vLLM."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_flags_are_written_as_vllm_reads_them() -> None:
    arguments = {"a": 1, "b": True, "c": False, "d": None, "e": {"k": 2}, "f": ["x", 3]}
    assert flags(arguments) == ["--a", "1", "--b", "--no-c", "--e", '{"k": 2}', "--f", "x", "3"]


def test_configured_arguments_have_the_last_word() -> None:
    args = {"tensor_parallel_size": 2, "dtype": "half", "generation-config": None}
    arguments = command("py", Path("m"), "127.0.0.1", 7, config(args=args))
    assert arguments[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    pairs = dict(pairwise(arguments))
    assert (pairs["--model"], pairs["--port"], pairs["--dtype"]) == ("m", "7", "half")
    assert pairs["--tensor-parallel-size"] == "2"
    assert "--generation-config" not in arguments
    assert "--no-trust-remote-code" in arguments
    assert json.loads(pairs["--weight-transfer-config"]) == {"backend": "treadle"}


def test_nothing_of_treadles_environment_reaches_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    seen = environment(config(environment={"CUDA_VISIBLE_DEVICES": "1"}))
    assert seen["PYTHONPATH"] == str(WORKER) and seen["CUDA_VISIBLE_DEVICES"] == "1"
    assert seen["OMP_NUM_THREADS"] != "77"
    assert not [path.name for path in WORKER.glob("*.py") if "treadle." in path.read_text().replace("treadle_", "")]


def test_the_interpreter_is_found_or_missed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TREADLE_VLLM_VENV", raising=False)
    with pytest.raises(
        ConfigError, match=r"'\.venv-vllm/bin/python' is not an interpreter; set engine\.options\.python to"
    ):
        find_python(None)
    with pytest.raises(ConfigError, match="'/nowhere/python' is not an interpreter"):
        find_python("/nowhere/python")
    for name in (".venv-vllm", "elsewhere"):
        (tmp_path / name / "bin").mkdir(parents=True)
        interpreter(tmp_path / name / "bin", "exit 0")
    assert find_python(None) == str(tmp_path / ".venv-vllm" / "bin" / "python")
    monkeypatch.setenv("TREADLE_VLLM_VENV", str(tmp_path / "elsewhere"))
    assert find_python(None) == str(tmp_path / "elsewhere" / "bin" / "python")


def test_running_servers_take_no_arguments() -> None:
    with pytest.raises(ConfigError, match=r"engine\.options\.args is for servers that Treadle starts"):
        config(servers=["http://localhost:1"], args={"seed": 1})


@pytest.mark.parametrize(
    ("script", "seconds", "message"),
    [
        ("echo out of luck; exit 3", 300.0, r"ended while it started:\nout of luck\nthe server ended with code 3"),
        ("echo thinking; sleep 1000", 0.5, r"did not start within 0\.5 s:\nthinking"),
    ],
)
async def test_a_server_that_does_not_start_is_told_with_its_log(
    script: str, seconds: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr("treadle.engines.vllm.engine.START_TIMEOUT", seconds)
    settings = config(python=interpreter(tmp_path, script), servers=2)

    def serve(number: int) -> ServerProcess:
        server = ServerProcess(tmp_path, settings, tmp_path / f"vllm-{number}.log")
        wait_until(server.log.read_text)  # its patience begins when the script has said something
        return server

    with pytest.raises(EngineError, match=message):
        await open_engine(
            settings, FixedWeights(), serve=serve, stop_token_ids=[], on_close=lambda: closed.append(True)
        )
    assert (tmp_path / "vllm-1.log").is_file() and closed


async def test_a_url_that_nobody_answers_is_refused() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9 does not answer /health"):
        await open_engine(config(servers=["http://127.0.0.1:9"]), FixedWeights(), serve=None, stop_token_ids=[])


async def test_a_server_is_asked_for_experts_where_they_are_replayed(tmp_path: Path) -> None:
    model = load_recipe("demo").model
    chat, source = load_chat_interface(model), load_source(model, seed=0)
    python = interpreter(tmp_path, 'echo "$@"; exit 3')
    with pytest.raises(EngineError, match=r"ended while it started:\n.* --enable-return-routed-experts"):
        await open_vllm(EngineSpec(config(python=python), chat, source, lambda: source.module, tmp_path, routing=True))


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("vllm 0.31 True", r"vLLM 0\.31 \(tested is 0\.32\.0\) of .*/python, 1 to be started, on the"),
        ("", "has no vLLM; set engine.opt"),
    ],
)
async def test_a_dry_run_names_the_version(printed: str, message: str, tmp_path: Path) -> None:
    with nullcontext() if printed else pytest.raises(ConfigError, match=message):
        assert re.match(message, await describe_servers(config(python=interpreter(tmp_path, f"echo {printed}")), 10))


async def test_nothing_is_written_for_servers_that_have_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_recipe("demo").model
    chat, source = load_chat_interface(model), load_source(model, seed=0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(EngineError, match="does not answer /health"):
        await open_vllm(
            EngineSpec(config(servers=["http://127.0.0.1:9"]), chat, source, lambda: source.module, tmp_path)
        )


def group_members(group: int) -> list[int]:
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            members.append(int(stat.parent.name))
    return members


@pytest.mark.quick(1)
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="reads /proc")
@pytest.mark.parametrize("how", ["parent killed", "server killed"])
def test_whoever_dies_the_whole_group_does(how: str, tmp_path: Path) -> None:
    """A server with a child of its own that ignores a polite request."""
    stubborn = "trap '' TERM; sleep 1000 & echo $$ > server; wait"
    parent = f"""
import asyncio, time
from pathlib import Path
from treadle.core.config import build
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.launch import ServerProcess
import treadle.engines.vllm.launch
treadle.engines.vllm.launch.on_gpu = lambda: False  # which would load torch
python = {interpreter(tmp_path, stubborn)!r}
server = ServerProcess(Path("m"), build(EngineConfig, {{"kind": "vllm", "options": {{"python": python}}}}), Path("log"))
print(server.group, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        group = int(process.stdout.readline())
        wait_until(lambda: (tmp_path / "server").is_file() and (tmp_path / "server").read_text())
        assert len(group_members(group)) >= 3  # launcher, server, its child
        victim = process.pid if how == "parent killed" else int((tmp_path / "server").read_text())
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not group_members(group))
        process.kill()


SHARING = """
import os, signal, time
from multiprocessing import get_context, resource_tracker
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory, semaphore = SharedMemory(create=True, size=10), get_context("spawn").Semaphore()
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
print(memory.name, "sem." + semaphore._semlock.name.removeprefix("/"), flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no files")
async def test_shared_memory_goes_with_the_server(tmp_path: Path) -> None:
    (tmp_path / "sharing.py").write_text(SHARING)
    python = interpreter(tmp_path, f"exec {sys.executable} {tmp_path / 'sharing.py'}")
    server = ServerProcess(tmp_path, config(python=python), tmp_path / "log")
    await until(lambda: len(server.log.read_text().split()) == 2)
    files = [Path("/dev/shm") / name for name in server.log.read_text().split()]
    assert all(file.is_file() for file in files)
    await server.stop()  # which has to kill it, and so keeps Python from removing them
    assert not any(file.exists() for file in files) and not group_members(server.group)


async def test_stopping_leaves_nothing_running(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, config(python=interpreter(tmp_path, "sleep 1000")), tmp_path / "log")
    assert server.running
    await asyncio.gather(server.stop(), server.stop())
    assert not server.running and not group_members(server.group)
