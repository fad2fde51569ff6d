"""Starting servers, that none is left behind, and health checks. Needs no vLLM."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models import FAMILIES, HYBRIDS, MORE_FAMILIES, config_of
from tests.sources import FixedWeights
from tests.until import CEILING, until, wait_until
from tests.until import alive as is_alive
from treadle.core.config import build
from treadle.core.errors import ConfigError, EngineError
from treadle.engines.config import EngineConfig
from treadle.engines.vllm import engine as vllm_engine
from treadle.engines.vllm import launch
from treadle.engines.vllm.engine import VLLMEngine, describe_servers, open_engine
from treadle.engines.vllm.launch import WORKER, ServerProcess, command, environment, find_python, flags
from treadle.engines.vllm.publication import Publication
from treadle.engines.vllm.server import Server, parse_metrics
from treadle.loop.engines import EngineSpec, open_vllm
from treadle.models.chat import load_chat
from treadle.plan.config import load_recipe
from treadle.training.make import load_source
from treadle.workers.reaper import descendants


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


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES, *HYBRIDS])
def test_a_server_on_a_cpu_keeps_no_prefixes_of_a_model_with_states(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_of(family).save_pretrained(tmp_path)
    expected = ["--no-enable-prefix-caching"] if family in HYBRIDS else []
    assert told(tmp_path, monkeypatch) == expected
    monkeypatch.setattr(launch, "on_gpu", lambda: True)
    assert not [a for a in command("py", tmp_path, "127.0.0.1", 7, config()) if "prefix" in a]


def test_a_server_leaves_out_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention"], "num_hidden_layers": 1}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert told(tmp_path, monkeypatch) == ["--language-model-only", "--no-enable-prefix-caching"]


def told(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a server on a CPU is told of its model."""
    monkeypatch.setattr(launch, "on_gpu", lambda: False)
    return [a for a in command("py", model, "127.0.0.1", 7, config()) if "language" in a or "prefix" in a]


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
        ("echo out of luck; exit 3", 300.0, r"ended while it started:\nout of luck\nthe program ended with code 3"),
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


async def test_a_server_that_is_started_while_another_one_fails_is_ended(tmp_path: Path) -> None:
    settings, failed = config(python=interpreter(tmp_path, "exit 3"), servers=2), threading.Event()
    made = list[ServerProcess]()

    class Watched(ServerProcess):
        async def stop(self) -> None:
            await super().stop()
            failed.set()

    def serve(number: int) -> ServerProcess:
        if number:
            assert failed.wait(CEILING)
        made.append(Watched(tmp_path, settings, tmp_path / f"vllm-{number}.log"))
        return made[-1]

    with pytest.raises(EngineError, match="ended while it started"):
        await open_engine(settings, FixedWeights(), serve=serve, stop_token_ids=[])
    assert len(made) == 2 and not any(server.running for server in made)
    assert all(server._process.stdin.closed for server in made if server._process.stdin)


async def test_a_url_that_nobody_answers_is_refused() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9 does not answer /health"):
        await open_engine(config(servers=["http://127.0.0.1:9"]), FixedWeights(), serve=None, stop_token_ids=[])


async def test_a_server_is_asked_for_experts_where_they_are_replayed(tmp_path: Path) -> None:
    model = load_recipe("demo").model
    renderer, source = load_chat(model, None)[1], load_source(model, seed=0)
    python = interpreter(tmp_path, 'echo "$@"; exit 3')
    with pytest.raises(EngineError, match=r"ended while it started:\n.* --enable-return-routed-experts"):
        await open_vllm(
            EngineSpec(config(python=python), renderer, source, lambda: source.module, tmp_path, routing=True)
        )


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


@pytest.mark.parametrize("recipe", ["demo", "look-small"])
async def test_nothing_is_written_for_servers_that_have_a_model(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, source = load_chat(load_recipe(recipe).model, None)[1], load_source(load_recipe("demo").model, seed=0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(EngineError, match="does not answer /health"):
        await open_vllm(
            EngineSpec(
                *(config(servers=["http://127.0.0.1:9"]), renderer, source, lambda: source.module, tmp_path),
                routing=recipe == "demo",
                sees=recipe == "look-small",
            )
        )


def alive(*pids: int) -> list[int]:
    """Those that have not ended, and what they have started."""
    return [each for pid in pids if is_alive(pid) for each in (pid, *descendants(pid))]


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
print(server.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reaper = int(process.stdout.readline())
        wait_until(lambda: (tmp_path / "server").is_file() and (tmp_path / "server").read_text())
        members = alive(reaper)
        assert len(members) >= 3  # reaper, server, its child
        victim = process.pid if how == "parent killed" else int((tmp_path / "server").read_text())
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not alive(*members))
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
    assert not any(file.exists() for file in files) and not alive(server.pid)


async def test_stopping_leaves_nothing_running(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, config(python=interpreter(tmp_path, "sleep 1000")), tmp_path / "log")
    assert server.running
    await asyncio.gather(server.stop(), server.stop())
    assert not server.running and not alive(server.pid)


METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 5e-1
"""


def test_the_metrics_of_all_engines_of_a_server() -> None:
    assert parse_metrics(METRICS) == {"running": 7, "waiting": 2, "cache": 0.5}
    assert parse_metrics("{}") == parse_metrics(METRICS.replace("kv_cache_usage_perc", "another")) == {}


async def serve(silent: set[str], answered: list[str] | None = None) -> tuple[asyncio.Server, str]:
    """Answers everything but requests for the silent paths; notes which it answered."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        if path not in silent:
            if answered is not None:
                answered.append(path)
            text = METRICS if path == "/metrics" else "{}"
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode())
        else:
            await reader.read()  # until the other end gives up
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    return listening, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("silent", [True, False])
async def test_a_server_is_given_up_when_its_engine_falls_silent(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_HEALTH_PERIOD", 0.01)
    monkeypatch.setattr(vllm_engine, "_SILENCE", 0.2 if silent else 300.0)
    paths, answered = set[str](), list[str]()
    listening, url = await serve(paths, answered)
    server = Server(url)
    assert await server.post("/inference/v1/generate") == {}
    if silent:
        paths |= {"/is_paused", "/inference/v1/generate"}
    stuck = asyncio.create_task(server.post("/inference/v1/generate"))
    watch = asyncio.create_task(vllm_engine._watch(server))
    await until(lambda: watch.done() or answered.count("/is_paused") >= 20)
    assert await server.is_well() and server.metrics["running"] == 7
    assert server.is_lost == watch.done() == silent
    if silent:
        with pytest.raises(EngineError, match="is lost: it failed 3 health checks in a row; its engine may be stopped"):
            await asyncio.wait_for(stuck, CEILING)
    watch.cancel()
    stuck.cancel()
    await asyncio.wait({watch, stuck})
    listening.close()
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    assert not await server.check(1.0) and server.metrics == {}
    await server.close()


class NoTransfer:
    """Is never used: nothing is published."""

    towers = False

    def close(self) -> None:
        pass


async def test_a_server_that_took_the_place_of_a_lost_one_is_watched_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_engine, "_HEALTH_PERIOD", 0.01)
    listening = [await serve(set()) for _ in range(3)]
    started, said = [Server(url) for _, url in listening], list[str]()
    servers = started[:1]
    publication = Publication(servers, NoTransfer(), FixedWeights(), in_flight="keep")  # type: ignore[arg-type]
    await publication.begin(version=0)

    async def restart(number: int) -> Server:
        if publication.is_refused:
            raise AssertionError("nothing is started for an engine that is refused")
        return started[len([line for line in said if line.endswith("restarting it")])]

    engine = VLLMEngine(servers, publication, stop_token_ids=[], restart=restart, notify=said.append)
    for number in range(2):
        listening[number][0].close()  # which the health checks find
        await until(lambda: servers[0] is started[number + 1])  # noqa: B023
        assert engine._least_busy() is started[number + 1]
    assert [line.rpartition(" ")[2] for line in said] == ["it", "restarted"] * 2
    publication._give_up("made up")
    with pytest.raises(EngineError, match=r"no server is left: .* is lost: made up"):
        async with asyncio.timeout(CEILING):
            await engine.score(np.arange(2, dtype=np.int32))
    await engine.close()
    listening[2][0].close()
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
