"""Calls that workers make of vLLM servers without the run's process, while weights change and servers are lost."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.engines.vllm.conftest import TOKENIZER, python_with_vllm, sized
from tests.engines.vllm.test_vllm_publication import score
from tests.sources import FixedWeights, publish
from tests.until import until
from tests.worlds import Vowels, plain_renderer, vowel_tasks
from treadle.core.config import build
from treadle.core.draws import Stream
from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.types import Ids, SamplingParams, Task
from treadle.engines.config import EngineConfig
from treadle.engines.vllm import engine as vllm_engine
from treadle.engines.vllm import server as vllm_server
from treadle.engines.vllm.engine import VLLMEngine, open_engine
from treadle.engines.vllm.publication import Publication
from treadle.engines.vllm.server import ServerLost
from treadle.models.weights import unique_weights
from treadle.placement.engine_actors import PlacedServer
from treadle.placement.reserve import Reservation
from treadle.placement.rollout_actors import open_workers
from treadle.rollout.attempt import Players
from treadle.rollout.config import RolloutConfig
from treadle.rollout.rewards import RewardsConfig
from treadle.rollout.session import Address
from treadle.training.checkpoint import export_model
from treadle.workers.reaper import shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

LONG = 900


@asynccontextmanager
async def two_servers(reservation: Reservation, folder: Path, said: list[str]) -> AsyncIterator[VLLMEngine]:
    """Version 0 is that of seed 0."""
    export_model(folder / "model", sized("qwen3", 0), TOKENIZER)
    places = [reservation.options(bundle) for bundle in reservation.of("engine")]
    vllm = {"python": python_with_vllm(), "servers": 2}
    config = build(EngineConfig, {"kind": "vllm", "batch": 16, "options": vllm})

    def serve(number: int) -> PlacedServer:
        return PlacedServer(places[number], folder / "model", config, folder / f"{number}.log", [])

    source = FixedWeights(shapes={n: tuple(t.shape) for n, t in unique_weights(sized("qwen3", 0)).items()})
    engine, _ = await open_engine(config, source, serve=serve, stop_token_ids=[], notify=said.append)
    try:
        yield engine
    finally:
        await engine.close()


def prompt(number: int) -> Ids:
    return np.array([5, 6, 7, 8, 100 + number], np.int32)


def call(engine: VLLMEngine, number: int, tokens: int = LONG) -> "asyncio.Task[Completion]":
    name = f"s{number}"
    if name not in engine._sessions:
        engine.open_session(name)
    route = engine.route(name)

    async def called() -> Completion:
        sampling = SamplingParams(max_tokens=tokens, seed=number)
        answer: Completion = await route.call("generate", prompt(number), sampling, name, None)
        return answer

    return asyncio.get_running_loop().create_task(called())


def processes_of(engine: VLLMEngine, number: int) -> list[psutil.Process]:
    """The server, what it has started, and first of all the actor."""
    port = engine._servers[number].url.rpartition(":")[2]
    parents = [p.parent() for p in psutil.process_iter() if port in _command(p)]
    [launcher] = [p for p in parents if p is not None and "reaper.py" in str(_command(p))]
    actor = launcher.parent()
    assert actor is not None
    return [actor, launcher, *launcher.children(recursive=True)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return [*process.cmdline()]
    except psutil.Error:  # it has ended
        return []


async def test_no_token_is_of_weights_that_were_not_admitted(reservation: Reservation, tmp_path: Path) -> None:
    models = {version: sized("qwen3", version) for version in (0, 1)}
    async with two_servers(reservation, tmp_path, []) as engine:
        several = 0
        for _ in range(5):  # until some are interrupted, which a busy machine may need some attempts for
            await publish(engine, unique_weights(models[0]), 0)
            calls = [call(engine, number) for number in range(8)]
            assert {engine._sessions[f"s{number}"] for number in range(8)} == set(engine._servers)
            await asyncio.sleep(1)
            await publish(engine, unique_weights(models[1]), 1)
            late = [call(engine, number, 20) for number in range(8)]
            for number, answer in enumerate(await asyncio.gather(*calls)):
                versions = answer.versions_per_token().tolist()
                at = versions.count(0)
                assert versions == [0] * at + [1] * (LONG - at)
                several += 0 < at < LONG
                reference = score(models[0], np.concatenate([prompt(number), answer.token_ids]))[4:]
                np.testing.assert_allclose(answer.logprobs[:at], reference[:at], atol=1e-4)
            for number, answer in enumerate(await asyncio.gather(*late)):
                assert set(answer.versions_per_token()) == {1}
                reference = score(models[1], np.concatenate([prompt(number), answer.token_ids]))[4:]
                np.testing.assert_allclose(answer.logprobs, reference, atol=1e-4)
            if several:
                break
        else:
            pytest.fail("no completion was interrupted")

        # neither begins nor returns while it is held
        assert isinstance(engine._publication, Publication)
        for _ in range(5):  # until one runs when it is held: a fast machine ends some earlier
            running = call(engine, 1)
            await asyncio.sleep(0.3)
            async with engine._publication._closed():
                await asyncio.sleep(0.5)  # what returned earlier has arrived
                early, begun = running.done(), call(engine, 2, 5)
                await asyncio.wait({running, begun}, timeout=8)
                assert running.done() == early and not begun.done()
            assert set((await running).versions_per_token()) == set((await begun).versions_per_token()) == {1}
            if not early:
                break
        else:
            pytest.fail("no call was held")
        with pytest.raises(EngineError, match="exceeds the servers' context of 1024"):
            await call(engine, 3, 1020)


async def test_a_server_that_is_lost_is_told_to_workers_and_started_again(
    reservation: Reservation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "_HEALTH_PERIOD", 0.5)
    monkeypatch.setattr(vllm_server, "_TELLING", 3.0)
    said: list[str] = []
    model = sized("qwen3", 1)
    async with two_servers(reservation, tmp_path, said) as engine:
        first = call(engine, 0)
        await asyncio.sleep(0.5)
        number = engine._servers.index(engine._sessions["s0"])
        doomed = processes_of(engine, number)[1:]
        left = shared_memory(process.pid for process in doomed)
        for process in doomed:  # with its supervisor, which would remove that
            process.kill()
        with pytest.raises(ServerLost):
            await first
        sampling = SamplingParams(max_tokens=5)
        assert (await engine.generate(prompt(0), sampling, session="s0")).token_ids.size == 5  # on the other one
        for path in left:
            Path(path).unlink(missing_ok=True)
        await until(lambda: sum("was restarted" in line for line in said) == 1)
        actor, *_ = processes_of(engine, 1 - number)
        actor.send_signal(signal.SIGSTOP)  # it cannot be held, so its server is given up
        await publish(engine, unique_weights(model), 1)
        await until(lambda: sum("was restarted" in line for line in said) == 2)
        assert any("the process that makes rollout workers' calls to it: no answer for 3 s" in line for line in said)
        assert not actor.is_running()
        assert {engine._sessions[f"s{n}"] for n in [_open(engine, n) for n in range(2, 6)]} == set(engine._servers)
        for answer in await asyncio.gather(*(call(engine, n, 20) for n in range(2, 6))):
            assert set(answer.versions_per_token()) == {1}


def _open(engine: VLLMEngine, number: int) -> int:
    engine.open_session(f"s{number}")
    assert engine.route(f"s{number}") is not None
    return number


async def test_attempts_are_played_without_calls_of_the_runs_process(
    reservation: Reservation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_servers(reservation, tmp_path, []) as engine:
        asked: list[Any] = []
        generate = engine.generate

        async def noted(*arguments: Any, **options: Any) -> Completion:
            asked.append(arguments)
            return await generate(*arguments, **options)

        monkeypatch.setattr(engine, "generate", noted)
        [made] = vowel_tasks("train", 1, 0)
        task = Task("t", made.prompt, environment="vowels", extras=made.extras)
        addresses = [Address(1, Stream.TRAIN, 0, 0, attempt) for attempt in range(8)]
        config = RolloutConfig(max_completion_tokens=16)
        renderer, players = plain_renderer(), Players({"vowels": Vowels})
        async with open_workers(
            reservation, engine, renderer, players, config, RewardsConfig(), lambda line: None, None
        ) as pool:
            played = await asyncio.gather(*pool.start("g000000", task, addresses))
        assert not asked and not engine._sessions
        assert all(trajectory.failure is None and trajectory.steps for trajectory in played), os.linesep.join(
            str(trajectory.failure) for trajectory in played
        )
