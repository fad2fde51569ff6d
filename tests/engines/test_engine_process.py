"""The embedded engine in a process of its own: the same bits as in this one, the same errors, and none left behind."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.engines.kit import PROMPT, sampling
from tests.forks import ForkedProcess
from tests.models import VOCABULARY, tiny
from tests.sources import publish
from tests.until import CEILING, alive, wait_until
from treadle.core.config import build
from treadle.core.engine import Completion, Engine, VersionSpan
from treadle.core.errors import ConfigError, EngineError, PlacementError
from treadle.core.types import Ids, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.engines.remote import RemoteEngine, start_engine
from treadle.engines.staging import StagedFile
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.models.weights import unique_weights
from treadle.training.checkpoint import export_model
from treadle.workers import child

pytestmark = pytest.mark.xdist_group("engines_engine_process")  # what its tests share is made once

T = TypeVar("T")
TOKENIZER = Path(str(files("treadle.recipes") / "tokenizer"))


def written(folder: Path, model: PreTrainedModel) -> Path:
    export_model(folder / "model", model, TOKENIZER)
    return folder / "model"


@asynccontextmanager
async def started(folder: Path, model: PreTrainedModel | None = None, **settings: Any) -> AsyncIterator[RemoteEngine]:
    """settings: of the process, and of `TorchEngineOptions`."""
    names = {field.name for field in fields(TorchEngineOptions)}
    options = {name: settings.pop(name) for name in names & settings.keys()}
    directory = written(folder, model or tiny())
    described = TorchEngineOptions(**{"stop_token_ids": [0], "lock_step": True, **options})
    engine = await start_engine(directory, described, log=folder / "engine.log", **settings)
    try:
        yield engine
    finally:
        await engine.close()


async def ticks(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def pid_of(engine: RemoteEngine) -> int:
    """The id of its process now."""
    [status] = engine.status()
    assert status.process is not None
    return status.process.pid


# The same bits. Both engines are played the same, from beginning to end, so that their caches have one history.


class Pair:
    """An engine in this process, and one in its own."""

    def __init__(self, runner: asyncio.Runner, here: TorchEngine, there: RemoteEngine) -> None:
        self.runner, self.here, self.there = runner, here, there

    def play(self, game: Callable[[Engine], Coroutine[Any, Any, T]]) -> tuple[T, T]:
        return self.runner.run(game(self.here)), self.runner.run(game(self.there))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, options = tmp_path_factory.mktemp("pair"), TorchEngineOptions([0], lock_step=True)
    with asyncio.Runner() as runner:
        model = tiny(max_position_embeddings=200_000)
        there = runner.run(start_engine(written(folder, model), options, log=folder / "engine.log"))
        here = TorchEngine(model, options, own_thread=False)
        yield Pair(runner, here, there)
        pid = pid_of(there)
        for engine in (here, there):
            runner.run(engine.close())
    assert not alive(pid)


def bits(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [(c.token_ids.tolist(), c.logprobs.tobytes(), c.stop_reason, c.policy_versions) for c in completions]


class Game:
    """Sessions of random turns. Some make two calls at once; some, when they have closed, open another one a few turns
    of the event loop later. What they do depends on nothing but the seed."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.seed = engine, seed
        self.shared = np.random.default_rng(seed).integers(0, VOCABULARY, 7).astype(np.int32)
        self.answers: list[tuple[str, list[tuple[Any, ...]]]] = []  # who was answered what, in order: waves show

    def open(self, name: str) -> Coroutine[Any, Any, None]:
        self.engine.open_session(name)
        return self.session(name)

    async def session(self, name: str) -> None:
        random = np.random.default_rng([self.seed, *name.encode()])
        prompt = self.shared if random.random() < 0.5 else self.ids(random)
        for turn in range(int(random.integers(1, 5))):
            await ticks(int(random.integers(0, 4)))
            params = SamplingParams(
                temperature=float(random.choice([0.5, 1.0, 1.7])),
                max_tokens=int(random.integers(1, 12)),
                seed=int(random.integers(1 << 40)),
            )
            calls = [self.engine.generate(prompt, params, session=name)]
            if random.random() < 0.2:
                calls.append(self.engine.generate(prompt[: turn + 2], params, session=name, cache_salt="other"))
            answers = await asyncio.gather(*calls)
            self.answers.append((name, bits(answers)))
            prompt = np.concatenate([prompt, answers[-1].token_ids, self.ids(random)])
        await ticks(int(random.integers(0, 7)))  # the others may be waiting for it already
        self.engine.close_session(name)
        if len(name) < 6 and random.random() < 0.7:
            await ticks(int(random.integers(0, 4)))
            await self.open(name + "+")

    def ids(self, random: np.random.Generator) -> Ids:
        return random.integers(0, VOCABULARY, random.integers(1, 6)).astype(np.int32)

    async def play(self) -> list[tuple[str, list[tuple[Any, ...]]]]:
        await asyncio.gather(*[self.open(f"s{number}") for number in range(5)])
        return self.answers


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(8))
def test_waves_have_the_same_bits_in_either_process(pair: Pair, seed: int) -> None:
    async def game(engine: Engine) -> Any:
        before = await Game(engine, seed).play()
        await publish(engine, unique_weights(tiny(seed=seed + 1)), seed)
        return before, await Game(engine, seed).play()

    here, there = pair.play(game)
    assert here == there
    assert {span.version for _, answers in there[1] for *_, spans in answers for span in spans} == {seed}


def test_scores_have_the_same_bits_in_either_process(pair: Pair) -> None:
    here, there = pair.play(lambda engine: engine.score(PROMPT, temperature=0.7))
    assert there.dtype == np.float32 and here.tobytes() == there.tobytes()


def test_a_publication_waits_for_the_wave_and_the_next_wave_for_it(pair: Pair) -> None:
    async def game(engine: Engine) -> list[tuple[Any, ...]]:
        engine.open_session("a")
        first = asyncio.create_task(engine.generate(PROMPT, sampling(max_tokens=40), session="a"))
        await ticks(4)
        publication = asyncio.create_task(publish(engine, unique_weights(tiny(seed=5)), 100))
        second = asyncio.create_task(engine.generate(PROMPT, sampling(max_tokens=40), session="a"))
        answers = [await first, await second]
        await publication
        engine.close_session("a")
        return bits(answers)

    here, there = pair.play(game)
    assert here == there
    assert there[1][3] == (VersionSpan(100, 0, len(there[1][0])),)


# Errors


async def refused(work: Awaitable[Any]) -> str:
    with pytest.raises(EngineError) as caught:
        await work
    return str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda engine: engine.generate(PROMPT, sampling(), session="nobody"),
        lambda engine: engine.generate(PROMPT + VOCABULARY, sampling(), session="a"),
        lambda engine: engine.generate(PROMPT[:0], sampling(), session="a"),
        lambda engine: engine.generate(PROMPT, sampling(max_tokens=200_000), session="a"),
        lambda engine: engine.score(PROMPT, temperature=0.0),
        lambda engine: engine.score(PROMPT[:0]),
        lambda engine: publish(engine, {}, 7),
    ],
)
def test_errors_are_those_of_the_engine(pair: Pair, wrong: Callable[[Engine], Awaitable[Any]]) -> None:
    async def game(engine: Engine) -> str:
        engine.open_session("a")
        try:
            with pytest.raises(EngineError, match="'a' is open already"):
                engine.open_session("a")
            return await refused(wrong(engine))
        finally:
            engine.close_session("a")

    here, there = pair.play(game)
    assert here == there


def test_a_failure_that_nobody_foresaw_is_told_and_logged(pair: Pair) -> None:
    worker = pair.there._supervised.worker
    assert worker is not None

    async def broken() -> None:
        with pytest.raises(PlacementError, match=r"^the engine failed with FileNotFoundError: "):
            await worker.call("publish", StagedFile(Path("/nowhere"), {}), 1, PROMPT)

    pair.runner.run(broken())
    assert "FileNotFoundError" in worker.tail()


# Calls as they come


@pytest.mark.slow
async def test_cancelling_a_call_frees_its_row_and_closing_the_engine_ends_its_process(tmp_path: Path) -> None:
    model = tiny(max_position_embeddings=200_000)
    endless = sampling(max_tokens=150_000)
    async with started(tmp_path, model, max_batch=1, lock_step=False, stop_token_ids=[]) as engine:
        pid = pid_of(engine)
        assert os.getsid(pid) == pid  # a terminal's Ctrl-C does not reach it
        engine.open_session("a")
        first = asyncio.create_task(engine.generate(PROMPT, endless, session="a"))
        await engine.score(PROMPT)  # between two of its tokens
        second = asyncio.create_task(engine.generate(PROMPT, sampling(), session="a"))
        for _ in range(3):
            await engine.score(PROMPT)
        assert not first.done() and not second.done()
        first.cancel()
        assert len((await asyncio.wait_for(second, CEILING)).token_ids) == 6
        assert first.cancelled()
        running = asyncio.create_task(engine.generate(PROMPT, endless, session="a"))
        await ticks(5)
        await engine.close()
        await engine.close()
        assert not alive(pid)
        for call in (running, engine.generate(PROMPT, sampling(), session="a"), engine.score(PROMPT)):
            assert await refused(call) == "the engine was closed"


# How it begins and ends


@pytest.mark.slow
async def test_a_model_that_cannot_be_served_is_refused_as_in_this_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no experts to replay"):
        async with started(tmp_path, tiny("qwen3"), routing=True):
            pass


async def test_a_process_that_does_not_start_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_MODULE", "treadle.no_such_module")
    told = (
        r"ended with code 1\nIts log .*engine\.log ends:\n[\s\S]*No module named [\s\S]*3 attempts to start it failed"
    )
    with pytest.raises(EngineError, match=told):
        await start_engine(tmp_path, TorchEngineOptions([]), log=tmp_path / "engine.log")


PARENT = """
import asyncio, sys
import numpy as np
from pathlib import Path
from treadle.core.types import SamplingParams
from treadle.engines.remote import start_engine
from treadle.engines.torch.options import TorchEngineOptions

async def main(folder):
    engine = await start_engine(folder / "model", TorchEngineOptions([], lock_step=True), log=folder / "engine.log")
    engine.open_session("a")
    call = asyncio.create_task(engine.generate(np.zeros(1, np.int32), SamplingParams(max_tokens=150_000), session="a"))
    await asyncio.sleep(0.2)
    print(engine.status()[0].process.pid, flush=True)
    await call

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_the_process_ends_with_one_that_is_killed_in_the_middle_of_a_wave(tmp_path: Path) -> None:
    written(tmp_path, tiny(max_position_embeddings=200_000))
    with ForkedProcess([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_until(lambda: not alive(pid))


def test_vllm_has_processes_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"engine\.own_process is for engine\.kind=torch"):
        build(EngineConfig, {"kind": "vllm", "own_process": True})
