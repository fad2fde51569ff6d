"""What a server says of its load, and what the engine makes of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.until import until
from treadle.engines.vllm import engine as vllm_engine
from treadle.engines.vllm.server import Server, ServerMetrics

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 5e-1
"""


def test_the_metrics_of_all_engines_of_a_server() -> None:
    assert ServerMetrics.parse(TEXT) == ServerMetrics(running=7, waiting=2, cache=0.5)
    assert ServerMetrics.parse("{}") is None
    assert ServerMetrics.parse(TEXT.replace("kv_cache_usage_perc", "another")) is None


@asynccontextmanager
async def serving(text: str) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n{text}".encode())
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def test_a_server_is_followed_until_it_is_lost() -> None:
    async with serving(TEXT) as url:
        server = Server(url)
        watch = asyncio.create_task(vllm_engine._watch_metrics(server))
        await until(lambda: server.metrics)
        assert server.metrics is not None and server.metrics.running == 7
        watch.cancel()
    await server.read_metrics()  # nobody answers any more
    assert server.metrics is None
    server.lose("it was killed")
    await vllm_engine._watch_metrics(server)
    await server.close()
