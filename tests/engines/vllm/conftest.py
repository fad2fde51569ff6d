"""Real vLLM servers on the CPU, shared by all tests here; each test connects an engine of its own."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.models import tiny
from tests.sources import FixedWeights
from tests.until import CEILING
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.trainer import WeightSource
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.engine import VLLMEngine, open_engine, wait_for
from treadle.engines.vllm.launch import ServerProcess, find_python
from treadle.engines.vllm.server import Server
from treadle.training.checkpoint import export_model
from treadle.workers.reaper import descendants

ROOT = Path(__file__).parents[3]
TOKENIZER = Path(str(files("treadle.recipes") / "tokenizer"))
END = 2
TRANSFERS = pytest.mark.parametrize("transfer", ["shared_memory", "collective"])
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}


def sized(family: str, seed: int) -> PreTrainedModel:
    """As small as vLLM's kernels allow."""
    experts = {"moe_intermediate_size": 64} if family == "qwen3-moe" else {}
    return tiny(family, seed, **SIZES, **experts)


def python_with_vllm() -> str:
    os.environ.setdefault("TREADLE_VLLM_VENV", str(ROOT / ".venv-vllm"))
    try:
        return find_python(None)
    except ConfigError as error:
        if os.environ.get("CI"):
            pytest.fail(f"no vLLM, which continuous integration must have: {error}")
        pytest.skip(str(error))


@dataclass
class Served:
    """A server and the model it was started with."""

    process: ServerProcess
    model: Path
    family: str

    @property
    def url(self) -> str:
        return self.process.url


async def started(process: ServerProcess) -> None:
    """Servers start side by side, and while tests that need none are running."""
    server = Server(process.url, process)
    await wait_for(server, CEILING)
    await server._http.aclose()  # the process stays


# "tied" computes in the engine's process, as on one GPU; "mixture" (of experts, untied) in two tensor-parallel workers.
FAMILIES = {"tied": "qwen3", "mixture": "qwen3-moe"}
VLLM: dict[str, dict[str, Any]] = {
    "tied": {
        "args": {"distributed-executor-backend": "uni"},
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},  # else vLLM starts a worker on a CPU
    },
    "mixture": {"args": {"tensor-parallel-size": 2, "generation-config": "auto"}},
}
# A third of the vocabulary ends a reply of the model's own configuration, so that one of a random model does soon.
ENDS = sorted({END, *range(6, 700, 3)})


class Servers(dict[str, Served]):
    """Starts the server "tied" or "mixture" when it is wanted first."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._python = folder, python_with_vllm()

    def __missing__(self, name: str) -> Served:
        family, generation = FAMILIES[name], json.dumps({"eos_token_id": ENDS}).encode()
        export_model(self._folder / name, sized(family, 0), TOKENIZER, {"generation_config.json": generation})
        config = build(EngineConfig, {"kind": "vllm", "batch": 64, "options": {"python": self._python, **VLLM[name]}})
        process = ServerProcess(self._folder / name, config, self._folder / f"{name}.log")
        self[name] = Served(process, self._folder / name, family)
        return self[name]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("vllm"))
    yield servers
    for served in servers.values():
        asyncio.run(served.process.stop())


# a server takes 15 s of CPU to start, one with two workers 40 s
NAMES = ["tied", pytest.param("mixture", marks=pytest.mark.slow)]


Connect = Callable[..., AbstractAsyncContextManager[VLLMEngine]]


@pytest.fixture
def connect(servers: Servers, tmp_path: Path) -> Connect:
    """`async with connect("tied", ...) as engine`: over those servers and `urls`, with `open_engine`'s options.

    `tests.sources.publish` gives it weights.
    """

    @asynccontextmanager
    async def connected(
        *names: str,
        in_flight: str = "keep",
        transfer: str = "shared_memory",
        urls: Sequence[str] = (),
        source: WeightSource | None = None,
        **options: Any,
    ) -> AsyncIterator[VLLMEngine]:
        processes = [servers[name].process for name in names]
        for process in processes:
            await started(process)
        vllm = {"servers": [*(servers[n].url for n in names), *urls], "transfer": transfer}
        config = build(EngineConfig, {"kind": "vllm", "in_flight": in_flight, "options": vllm})
        options = {"stop_token_ids": [END], **options}
        engine, _ = await open_engine(config, source or FixedWeights(), serve=None, **options)
        try:
            yield engine
        finally:
            await engine.close()

    return connected


async def metric(server: Server, name: str) -> float:
    """One of vLLM's own metrics, summed over its labels."""
    lines = (await server._http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


async def under_way(server: Server, tokens: int) -> None:
    """Until the server has sampled that many more tokens."""
    before = await metric(server, "generation_tokens_total")
    async with asyncio.timeout(CEILING):
        while await metric(server, "generation_tokens_total") < before + tokens:
            await asyncio.sleep(0.005)


def engine_core(server: Served) -> int:
    """The process of a running server that samples."""
    every = descendants(server.process.pid)
    [found] = [pid for pid in every if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    return found


def shared_files() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"treadle_weights-*-{os.getpid()}-*")]
