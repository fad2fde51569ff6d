"""Adapters on a real vLLM server: every token is of the adapter that its call was for."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engines.kit import plain_gap, step_of
from tests.engines.vllm.conftest import TOKENIZER, VLLM, python_with_vllm, shared_files, sized, started, under_way
from tests.runs import check_finished, recorded, start
from treadle.core.config import build
from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.types import SamplingParams
from treadle.engines.compute import Compute
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.adapters import AdapterPublication, Exported
from treadle.engines.vllm.engine import VLLMEngine, open_engine
from treadle.engines.vllm.launch import ServerProcess
from treadle.engines.vllm.publication import Probe
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.loading import make_model
from treadle.models.weights import adapter_weights, copy_by_name
from treadle.training.checkpoint import export_model
from treadle.training.trainer import EmbeddedSource
from treadle.workers.reaper import descendants

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]
PROMPT = np.random.default_rng(0).integers(3, 1024, 24).astype(np.int32)
PROBE = np.random.default_rng(1).integers(3, 1024, 64).astype(np.int32)


class Adapted:
    """A model whose adapter is that of any version; it publishes the one it has."""

    def __init__(self, base: Path) -> None:
        self.model = make_model(ModelConfig(path=str(base)), 1024, 0, lora=LoraConfig(rank=4))
        self.source = EmbeddedSource(self.model, TOKENIZER, Compute(None))

    def become(self, version: int) -> PreTrainedModel:
        """Version 0 changes nothing of the base."""
        random = torch.Generator().manual_seed(version)
        mine = adapter_weights(self.model)
        copy_by_name(mine, {n: torch.randn(t.shape, generator=random) * 0.4 * (version > 0) for n, t in mine.items()})
        return self.model

    def gap(self, completion: Completion, version: int) -> float:
        """How far the log-probabilities are from those of a version."""
        return plain_gap(self.become(version), [step_of(PROMPT, completion)])


@asynccontextmanager
async def serving(
    folder: Path, pinned: int | None = None, said: list[str] | None = None
) -> AsyncIterator[tuple[VLLMEngine, AdapterPublication, Adapted]]:
    export_model(folder / "base", sized("qwen3", 0), TOKENIZER)
    adapted = Adapted(folder / "base")
    await adapted.source.export(folder / "adapter")
    config = build(
        EngineConfig, {"kind": "vllm", "batch": 32, "options": {"python": python_with_vllm(), **VLLM["tied"]}}
    )
    exported = Exported.read(folder / "adapter", slots=(pinned or 0) + 2)
    config = exported.served_by(config)
    engine, publication = await open_engine(
        config,
        adapted.source,
        serve=lambda number: ServerProcess(folder / "base", config, folder / "log"),
        stop_token_ids=[],
        probe=Probe(PROBE, config.tolerance),
        adapters=exported,
        pinned=pinned,
        notify=(said if said is not None else []).append,
    )
    assert isinstance(publication, AdapterPublication)
    try:
        yield engine, publication, adapted
    finally:
        await engine.close()


async def published(publication: AdapterPublication, adapted: Adapted, version: int) -> None:
    adapted.become(version)
    await publication.publish(version)


def call(engine: VLLMEngine, session: str, tokens: int, seed: int = 0) -> asyncio.Task[Completion]:
    if session not in engine._sessions:
        engine.open_session(session)
    sampling = SamplingParams(max_tokens=tokens, seed=seed)
    return asyncio.ensure_future(engine.generate(PROMPT, sampling, session=session))


async def test_publications_under_load_and_after_a_loss(tmp_path: Path) -> None:
    """Twenty versions, two of them in flight beside the newest, and a server that is killed and started again."""
    said: list[str] = []
    async with serving(tmp_path, said=said) as (engine, publication, adapted):
        with pytest.raises(EngineError, match="no adapter was published yet"):
            await call(engine, "early", 1)
        flying: list[tuple[int, asyncio.Task[Completion]]] = []
        answers: list[tuple[int, Completion]] = []
        for version in range(21):
            await published(publication, adapted, version)
            assert np.abs(await engine.score(PROBE) - await adapted.source.score(PROBE)).mean() < 1e-3
            flying += [(version, call(engine, f"{version}.{n}", 60, n)) for n in range(2)]
            if len(flying) > 4:
                answers += [(v, await task) for v, task in flying[:-4]]
                flying = flying[-4:]
        answers += [(v, await task) for v, task in flying]
        for version, completion in answers:
            assert set(completion.versions_per_token().tolist()) == {version}
            assert adapted.gap(completion, version) < 1e-3 < adapted.gap(completion, version + 1)
        assert len(publication._alive) <= 3

        [server] = engine._servers
        process = server.process
        assert isinstance(process, ServerProcess)
        lost = call(engine, "lost", 900)
        await under_way(server, 10)
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        assert adapted.gap(await lost, 20) < 1e-3  # made again, on the server that took its place
        assert any("was restarted" in line for line in said)

        adapted.become(21)
        publication._probe = Probe(PROBE, 0.0)  # nothing passes
        with pytest.raises(EngineError, match=r"publication of version 21 failed: .* version 20 keeps serving"):
            await publication.publish(21)
        assert adapted.gap(await call(engine, "after", 30), 20) < 1e-3
        names = [model["id"] for model in (await engine._servers[0].get("/v1/models"))["data"]]
        assert [name for name in names if "-v21" in name] == []
    assert not shared_files()


async def test_versions_side_by_side_for_pinned_sessions(tmp_path: Path) -> None:
    """The bare base (version 0), v1 and v2 in one batch: each call has the log-probabilities of its own."""
    async with serving(tmp_path, pinned=2) as (engine, publication, adapted):
        for version in range(3):
            await published(publication, adapted, version)
            await call(engine, f"s{version}", 2)
        calls = [call(engine, f"s{v}", 80, seed) for seed in range(4) for v in range(3)]
        for number, completion in enumerate(await asyncio.gather(*calls)):
            assert completion.pinned and set(completion.versions_per_token().tolist()) == {number % 3}
            gaps = [adapted.gap(completion, version) for version in range(3)]
            assert gaps[number % 3] < 1e-3 < min(gap for v, gap in enumerate(gaps) if v != number % 3)
        await published(publication, adapted, 3)
        with pytest.raises(EngineError, match=r"'s0' began with version 0, and version 3 is more than"):
            await call(engine, "s0", 2)
        assert [adapter.version for adapter in publication._alive] == [1, 2, 3]
        engine.close_session("s1")
        await published(publication, adapted, 4)
        assert [adapter.version for adapter in publication._alive] == [2, 4]  # of 3 there was no session


def play(folder: Path, name: str, options: dict[str, Any], *more: str) -> None:
    start(
        folder / name,
        "model.build=null",
        "model.tokenizer=null",
        f"model.path={folder / 'base'}",
        "training.lora={rank: 4}",
        f"engine={{kind: vllm, batch: 16, options: {json.dumps(options)}}}",
        "orchestration.max_staleness=1",
        "orchestration.updates=8",
        "data.train.options.seconds=0.2",
        *more,
    )


def check_sampled(run: Path, pinned: bool) -> None:
    check_finished(run)  # what was sampled has the learner's log-probabilities
    versions = [{int(v) for s in steps for v in s.policy_versions} for _, steps in recorded(run)]
    assert max(max(each) for each in versions) >= 6
    assert not pinned or max(map(len, versions)) == 1


@pytest.mark.parametrize("pinned", [True, False])
def test_a_run_trains_adapters_that_servers_sample(tmp_path: Path, pinned: bool) -> None:
    export_model(tmp_path / "base", sized("qwen3", 0), TOKENIZER)
    options = {"python": python_with_vllm(), **VLLM["tied"]}
    play(tmp_path, "run", options, f"training.lora.pin_attempts={str(pinned).lower()}")
    check_sampled(tmp_path / "run", pinned)


ARGUMENTS = {
    "enable-lora": True,
    "max-loras": 3,
    "max-lora-rank": 8,
    "lora-target-modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def test_a_server_that_runs_samples_adapters(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """It finds their files in the run's directory, and has none left afterwards; what does not fit it is refused."""
    export_model(tmp_path / "base", sized("qwen3", 0), TOKENIZER)
    options = {
        "python": python_with_vllm(),
        "args": {**VLLM["tied"]["args"], **ARGUMENTS},
        "environment": {**VLLM["tied"]["environment"], "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
    }
    config = build(EngineConfig, {"kind": "vllm", "batch": 16, "options": options})
    process = ServerProcess(tmp_path / "base", config, tmp_path / "log")
    request.addfinalizer(lambda: asyncio.run(process.stop()))
    asyncio.run(started(process))
    running = {"servers": [process.url]}
    with pytest.raises(EngineError, match=r"start it with VLLM_ALLOW_.*=True .* --max-loras 3 --max-lora-rank 16"):
        play(tmp_path, "rank", running, "training.lora={rank: 9, pin_attempts: true}")
    with pytest.raises(EngineError, match="was started for adapters, which whole weights do not fit"):
        play(tmp_path, "whole", running, "training.lora=null")
    play(tmp_path, "run", running, "training.lora.pin_attempts=true")
    check_sampled(tmp_path / "run", pinned=True)
    assert len(httpx.get(f"{process.url}/v1/models", timeout=60).json()["data"]) == 1
    assert not list((tmp_path / "run").glob("treadle_weights*"))
