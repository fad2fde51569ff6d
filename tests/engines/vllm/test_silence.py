"""Health checks of a vLLM server: it is given up if its engine is stopped while the process in front of it is well."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from tests.sources import FixedWeights
from tests.until import CEILING, until
from treadle.core.errors import EngineError
from treadle.engines.vllm import engine as vllm_engine
from treadle.engines.vllm.engine import VLLMEngine
from treadle.engines.vllm.publication import Publication
from treadle.engines.vllm.server import Server, parse_metrics

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
        return started[len([line for line in said if line.endswith("starting it again")])]

    engine = VLLMEngine(servers, publication, stop_token_ids=[], restart=restart, notify=said.append)
    for number in range(2):
        listening[number][0].close()  # which the health checks find
        await until(lambda: servers[0] is started[number + 1])  # noqa: B023
        assert engine._least_busy() is started[number + 1]
    assert [line.rpartition(" ")[2] for line in said] == ["again"] * 4
    publication._give_up("made up")
    with pytest.raises(EngineError, match=r"no server is left: .* is lost: made up"):
        async with asyncio.timeout(CEILING):
            await engine.score(np.arange(2, dtype=np.int32))
    await engine.close()
    listening[2][0].close()
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
