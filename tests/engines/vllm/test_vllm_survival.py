"""Several servers: sessions stay where their prefixes are, and outlive a killed server. Kills one: comes last."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engines.vllm.conftest import TRANSFERS, Connect, Servers, engine_core, metric, sized, under_way
from tests.sources import publish
from tests.until import CEILING
from treadle.core.errors import EngineError
from treadle.core.types import Ids, SamplingParams
from treadle.engines.vllm import collective
from treadle.engines.vllm import engine as vllm_engine
from treadle.engines.vllm.engine import VLLMEngine
from treadle.models.weights import unique_weights

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.slow]


def same_policy() -> dict[str, torch.Tensor]:
    """Weights that make the tied and the untied server the same policy."""
    weights = unique_weights(sized("qwen3", 0))
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}


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


async def test_a_session_stays_on_one_server_and_finds_its_prefix_there(connect: Connect) -> None:
    async with connect("tied", "untied", stop_token_ids=[]) as engine:
        await publish(engine, same_policy(), 1)

        async def counts() -> NDArray[np.float64]:
            names = ("request_success_total", "prefix_cache_hits_total")
            return np.array([[await metric(server, name) for name in names] for server in engine._servers])

        before = await counts()
        plays = await asyncio.gather(*(play(engine, number, 4) for number in range(6)))
        requests, hits = (await counts() - before).T
    assert requests.tolist() == [12, 12]  # three sessions of four turns each
    assert hits.min() >= 3 * 3 * 256  # two cache blocks of 128 tokens, of each turn but the first
    assert len(plays) == 6


@TRANSFERS
async def test_where_one_server_fails_all_go_back(transfer: str, connect: Connect) -> None:
    new = unique_weights(sized("qwen3", 1))
    async with connect("tied", "untied", transfer=transfer, stop_token_ids=[]) as engine:
        await publish(engine, same_policy(), 1)
        ids = np.arange(100, 140, dtype=np.int32)
        before = [await server.score(ids) for server in engine._servers]
        engine._publication._connected = []  # servers are to forget what they expect
        with pytest.raises(EngineError, match=r"lm_head.*version 1 serves on"):
            await publish(engine, new, 2)  # all that the tied server needs; the other one lacks its output layer
        for server, score in zip(engine._servers, before, strict=True):
            np.testing.assert_allclose(await server.score(ids), score, atol=1e-6)
        np.testing.assert_allclose(before[0], before[1], atol=1e-4)
        await play(engine, 0, 1)


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


@pytest.mark.parametrize("end", ["killed", "silent"])
async def test_a_server_that_ends_in_a_broadcast_is_left_behind(
    end: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (sized("qwen3", seed) for seed in (0, 1))
    ids = np.arange(100, 140, dtype=np.int32)
    monkeypatch.setattr(collective, "_BUCKET", 100_000)
    monkeypatch.setattr(collective, "_TIMEOUT", 15.0)
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
    async with connect("tied", "untied", stop_token_ids=[]) as engine:
        await publish(engine, same_policy(), 1)
        undisturbed = await asyncio.gather(*(play(engine, number, 8) for number in range(6)))
        plays = [asyncio.ensure_future(play(engine, number, 8)) for number in range(6)]
        await under_way(engine._servers[1], 60)  # of 480; more than the turns at hand is not sampled without this test
        assert not any(running.done() for running in plays)
        os.killpg(servers["untied"].process.group, signal.SIGKILL)
        disturbed = await asyncio.gather(*plays)
        for one, other in zip(undisturbed, disturbed, strict=True):
            assert [ids.tolist() for ids in one] == [ids.tolist() for ids in other]
        assert [server.is_lost for server in engine._servers] == [False, True]
        await publish(engine, same_policy(), 2)  # to the one that is left
        await play(engine, 0, 1)
        engine._servers[0].lose("played to be lost")
        with pytest.raises(EngineError, match=rf"no server is left: .*{servers['untied'].url} is lost: \w+Error"):
            await play(engine, 0, 1)


async def test_a_server_whose_engine_is_stopped_is_given_up(
    connect: Connect, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "_SILENCE", 10.0)
    async with connect("tied", stop_token_ids=[]) as engine:
        await publish(engine, same_policy(), 1)
        core = engine_core(servers["tied"])
        playing = asyncio.ensure_future(play(engine, 0, 8))
        await under_way(engine._servers[0], 40)  # of 160
        os.kill(core, signal.SIGSTOP)
        try:
            assert not playing.done() and await engine._servers[0].is_well()  # the process in front of it is
            with pytest.raises(EngineError, match="its engine did not answer for 20 s"):
                await asyncio.wait_for(playing, CEILING)
        finally:
            os.kill(core, signal.SIGCONT)
