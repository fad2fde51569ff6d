"""Several servers: sessions stay where their prefixes are, and outlive a killed server. All but one are stand-ins."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.engines.vllm.conftest import TRANSFERS, Connect, Servers, engine_core, metric, sized, under_way
from tests.engines.vllm.relay import Relay
from tests.sources import publish
from tests.until import CEILING
from treadle.core.errors import EngineError
from treadle.core.types import Ids, SamplingParams
from treadle.engines.vllm import engine as vllm_engine
from treadle.engines.vllm import transfer
from treadle.engines.vllm.engine import VLLMEngine
from treadle.models.weights import unique_weights

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.slow]


async def play(engine: VLLMEngine, number: int, turns: int) -> list[Ids]:
    """A conversation; each turn's prompt carries on all of the one before."""
    name, ids = f"s{number}", np.array([5, 6, 7, 100 + number, *range(200, 500)], np.int32)
    engine.open_session(name)
    completions = []
    for turn in range(turns):
        sampling = SamplingParams(max_tokens=20, temperature=0.0, seed=turn)
        answer = await engine.generate(ids, sampling, session=name)
        completions.append(answer.token_ids)
        ids = np.concatenate([ids, answer.token_ids, [9]]).astype(np.int32)
    engine.close_session(name)
    return completions


@asynccontextmanager
async def relayed(servers: Servers) -> AsyncIterator[tuple[str, Relay]]:
    """The URL of what stands in for a second server, and what serves it."""
    relay = Relay(httpx.URL(servers["tied"].url).port or 0)
    try:
        yield await relay.listen(), relay
    finally:
        relay.kill()


async def test_a_session_stays_on_one_server_and_finds_its_prefix_there(servers: Servers, connect: Connect) -> None:
    async with relayed(servers) as (url, relay), connect("tied", urls=[url], stop_token_ids=[]) as engine:
        before, first = await metric(engine._servers[0], "prefix_cache_hits_total"), len(relay.requests)
        plays = await asyncio.gather(*(play(engine, number, 4) for number in range(6)))
        hits = await metric(engine._servers[0], "prefix_cache_hits_total") - before
    calls = [request for request in relay.requests[first:] if request.startswith(b"POST /inference/v1/generate")]
    prompts = [json.loads(call.partition(b"\r\n\r\n")[2])["token_ids"] for call in calls]
    assert list(Counter(ids[3] for ids in prompts).values()) == [4, 4, 4]  # three of the sessions, each whole
    assert hits >= 6 * 3 * 256  # two cache blocks of 128 tokens, of each turn but the first
    assert len(plays) == 6


@contextmanager
def doomed(end: str) -> Iterator[str]:
    """The URL of what answers like a vLLM server until weights are half broadcast, and then ends like that."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("doomed_server.py")), end], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@TRANSFERS
async def test_where_one_server_fails_all_go_back(transfer: str, connect: Connect) -> None:
    old, new = (unique_weights(sized("qwen3", seed)) for seed in (0, 1))
    with doomed("refused") as url:
        async with connect("tied", urls=[url], transfer=transfer, stop_token_ids=[]) as engine:
            await publish(engine, old, 1)
            ids = np.arange(100, 140, dtype=np.int32)
            before = await engine._servers[0].score(ids)
            with pytest.raises(EngineError, match=r"update_weights answered 400.*version 1 keeps serving"):
                await publish(engine, new, 2)
            np.testing.assert_allclose(await engine._servers[0].score(ids), before, atol=1e-6)
            assert not any(server.is_lost for server in engine._servers)
            await publish(engine, new, 3)
            assert np.abs(await engine._servers[0].score(ids) - before).max() > 0.01


@pytest.mark.parametrize("end", ["killed", "silent"])
async def test_a_server_that_ends_in_a_broadcast_is_left_behind(
    end: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (sized("qwen3", seed) for seed in (0, 1))
    ids = np.arange(100, 140, dtype=np.int32)
    monkeypatch.setattr(transfer, "_BUCKET", 100_000)
    monkeypatch.setattr(transfer, "_TIMEOUT", 15.0)
    with doomed(end) as url:
        async with connect("tied", urls=[url], transfer="collective", stop_token_ids=[]) as engine:
            await publish(engine, unique_weights(old), 1)
            before = await engine._servers[0].score(ids)
            await publish(engine, unique_weights(new), 2)
            assert [server.is_lost for server in engine._servers] == [False, True]
            assert np.abs(await engine.score(ids) - before).max() > 0.01
            await publish(engine, unique_weights(old), 3)
            np.testing.assert_allclose(await engine.score(ids), before, atol=1e-6)


async def test_what_a_killed_server_was_doing_is_done_by_another(connect: Connect, servers: Servers) -> None:
    async with relayed(servers) as (url, relay), connect("tied", urls=[url], stop_token_ids=[]) as engine:
        undisturbed = await asyncio.gather(*(play(engine, number, 8) for number in range(6)))
        plays = [asyncio.ensure_future(play(engine, number, 8)) for number in range(6)]
        await under_way(engine._servers[0], 120)  # of 960
        assert not any(running.done() for running in plays)
        relay.kill()
        disturbed = await asyncio.gather(*plays)
        for one, other in zip(undisturbed, disturbed, strict=True):
            assert [ids.tolist() for ids in one] == [ids.tolist() for ids in other]
        assert [server.is_lost for server in engine._servers] == [False, True]
        await publish(engine, unique_weights(sized("qwen3", 0)), 2)  # to the one that is left
        await play(engine, 0, 1)
        engine._servers[0].lose("played to be lost")
        with pytest.raises(EngineError, match=rf"no server is left: .*{url} is lost: \w+Error"):
            await play(engine, 0, 1)


async def test_a_server_whose_engine_is_stopped_is_given_up(
    connect: Connect, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "_SILENCE", 10.0)
    monkeypatch.setattr(vllm_engine, "_HEALTH_PERIOD", 1.0)
    async with connect("tied", stop_token_ids=[]) as engine:
        await publish(engine, unique_weights(sized("qwen3", 0)), 1)
        core = engine_core(servers["tied"])
        playing = asyncio.ensure_future(play(engine, 0, 8))
        await under_way(engine._servers[0], 40)  # of 160
        os.kill(core, signal.SIGSTOP)
        try:
            assert not playing.done() and await engine._servers[0].is_well()  # the process in front of it is
            with pytest.raises(EngineError, match="it failed 3 health checks in a row"):
                await asyncio.wait_for(playing, CEILING)
        finally:
            os.kill(core, signal.SIGCONT)
