"""Publication on real servers: which weights each token is of, and what happens when one fails."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from tests.engines.vllm.conftest import NAMES, TRANSFERS, Connect, Servers, shared_files, sized, under_way
from tests.sources import FixedWeights, publish
from tests.until import CEILING
from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.types import Ids, SamplingParams, StopReason
from treadle.engines.staging import StagedFile, WeightsFile
from treadle.engines.vllm import transfer
from treadle.engines.vllm.engine import VLLMEngine
from treadle.engines.vllm.publication import Probe, Publication
from treadle.models.weights import unique_weights

pytestmark = pytest.mark.xdist_group("vllm")

PROBE = np.random.default_rng(0).integers(0, 1024, 48).astype(np.int32)


def score(model: PreTrainedModel, ids: Ids, old: PreTrainedModel | None = None, cached: int = 0) -> NDArray[np.float64]:
    """Log-probability of ids[1:], the keys and values of the first `cached` positions computed by `old`."""
    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        if old is not None and cached:
            cache = DynamicCache(config=old.config)  # by position: its name changes in transformers 5
            before = old(tokens[:, :cached], None, None, cache, use_cache=True)
            logits = torch.cat([before.logits, model(tokens[:, cached:], None, None, cache).logits], 1)
        else:
            logits = model(tokens, use_cache=False).logits
    logprobs: NDArray[np.float64] = logits[0, :-1].double().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return logprobs


def shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in unique_weights(model).items()}


def assert_sampled_by(model: PreTrainedModel, version: int, number: int, answer: Completion) -> None:
    """All tokens of the answer to `prompt(number)` are of this version, whose weights the model has."""
    assert set(answer.versions_per_token()) == {version}
    reference = score(model, np.concatenate([prompt(number), answer.token_ids]))[4:]
    np.testing.assert_allclose(answer.logprobs, reference, atol=1e-4)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast is of several."""
    monkeypatch.setattr(transfer, "_BUCKET", 100_000)


LONG = 950  # tokens of a completion, most of the context: seconds, so that a publication comes in between


def prompt(number: int) -> Ids:
    return np.array([5, 6, 7, 8, 100 + number], np.int32)


def start(engine: VLLMEngine, count: int, tokens: int) -> list[asyncio.Task[Completion]]:
    async def sampled(number: int) -> Completion:
        engine.open_session(f"s{number}")
        sampling = SamplingParams(max_tokens=tokens, seed=number)
        try:
            return await engine.generate(prompt(number), sampling, session=f"s{number}")
        finally:
            engine.close_session(f"s{number}")

    return [asyncio.get_running_loop().create_task(sampled(number)) for number in range(count)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("transfer", "in_flight"), [("shared_memory", "keep"), ("shared_memory", "recompute"), ("collective", "keep")]
)
@pytest.mark.parametrize("name", NAMES)
async def test_each_token_is_of_the_version_that_is_reported_for_it(
    name: str, in_flight: str, transfer: str, servers: Servers, connect: Connect, small_buckets: None
) -> None:
    old, new = (sized(servers[name].family, seed) for seed in (0, 1))
    source = FixedWeights(shapes=shapes(old))
    options = {"in_flight": in_flight, "transfer": transfer, "stop_token_ids": [], "source": source}
    async with connect(name, **options) as engine:
        for _ in range(10):  # until most are interrupted, which a busy machine may need some attempts for
            await publish(engine, unique_weights(old), 3)
            early = start(engine, 16, LONG)
            await under_way(engine._servers[0], 16 * 20)
            await publish(engine, unique_weights(new), 4)
            early_answers = await asyncio.gather(*early)
            if sum(len(answer.policy_versions) > 1 for answer in early_answers) >= 10:
                break
        late_answers = await asyncio.gather(*start(engine, 8, 20))
        turn = np.concatenate([prompt(0), early_answers[0].token_ids])
        engine.open_session("second turn")
        second = await engine.generate(turn, SamplingParams(max_tokens=20), session="second turn")
        np.testing.assert_allclose(await engine.score(PROBE), score(new, PROBE), atol=1e-4)
    switched = 0
    for number, answer in enumerate(early_answers):
        versions = answer.versions_per_token().tolist()
        at = versions.count(3)  # all of them if it ended before the swap, none if it began after
        assert versions == [3] * at + [4] * (LONG - at)
        ids = np.concatenate([prompt(number), answer.token_ids])
        cached = len(prompt(number)) + at - 1 if in_flight == "keep" and at else 0
        before, after = score(old, ids)[4:], score(new, ids, old, cached)[4:]
        np.testing.assert_allclose(answer.logprobs[:at], before[:at], atol=1e-4)
        np.testing.assert_allclose(answer.logprobs[at:], after[at:], atol=1e-4)
        # a label one token late would go unseen if old and new weights agreed
        switched += 0 < at < LONG and abs(answer.logprobs[at] - before[at]) > 1e-3
    assert switched >= 10
    for number, answer in enumerate(late_answers):
        assert_sampled_by(new, 4, number, answer)
    reference = score(new, np.concatenate([turn, second.token_ids]))[len(turn) - 1 :]
    np.testing.assert_allclose(second.logprobs, reference, atol=1e-4)  # nothing cached of the old weights
    assert shared_files() == []


def damaged(how: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on weights are damaged on their way."""
    write = WeightsFile.write

    def writing(*arguments: Any) -> StagedFile:
        file = write(*arguments)
        how(file.path)
        return file

    monkeypatch.setattr(WeightsFile, "write", writing)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", [cut_short, emptied, Path.unlink])
async def test_a_file_that_cannot_be_read_leaves_the_old_version_serving(
    how: Callable[[Path], None], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (sized("qwen3", seed) for seed in (0, 1))
    async with connect("tied", stop_token_ids=[]) as engine:
        await publish(engine, unique_weights(old), 3)
        with monkeypatch.context() as patch:
            damaged(how, patch)
            calls = start(engine, 4, 200)
            await under_way(engine._servers[0], 40)
            with pytest.raises(EngineError, match=r"publication of version 4 failed: .*; version 3 keeps serving"):
                await publish(engine, unique_weights(new), 4)
        for number, answer in enumerate(await asyncio.gather(*calls)):  # they never noticed
            assert_sampled_by(old, 3, number, answer)
        np.testing.assert_allclose(await engine.score(PROBE), score(old, PROBE), atol=1e-4)
        await publish(engine, unique_weights(new), 4)
        np.testing.assert_allclose(await engine.score(PROBE), score(new, PROBE), atol=1e-4)
    assert shared_files() == []


@pytest.mark.quick(1)
@TRANSFERS
@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: {**w, "model.layers.1.mlp.down_proj.weight": torch.zeros(64, 64)},
        lambda w: {**w, "model.layers.1.self_attn.v_proj.weight": torch.zeros(32, 64)},
        lambda w: {**w, "model.layers.1.nothing.weight": torch.zeros(1)},
        lambda w: {name: t for name, t in w.items() if name != "model.layers.1.self_attn.v_proj.weight"},
    ],
    ids=["shape", "shape of a part", "unknown", "missing"],
)
async def test_weights_that_fail_halfway_leave_the_old_version_serving(
    spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    transfer: str,
    connect: Connect,
    small_buckets: None,
) -> None:
    old, new = (sized("qwen3", seed) for seed in (0, 1))
    source = FixedWeights(shapes=shapes(old))
    async with connect("tied", transfer=transfer, stop_token_ids=[], source=source) as engine:
        await publish(engine, unique_weights(old), 3)
        with pytest.raises(EngineError, match=r"1 weights do not fit the engine's, for example model\.layers\.1\."):
            await publish(engine, spoil(unique_weights(new)), 4)
        source.shapes = None  # what follows shows that the servers would notice, too
        assert isinstance(engine._publication, Publication)
        engine._publication._connected = []  # the server is to forget what it expects
        calls = start(engine, 4, 200)
        await under_way(engine._servers[0], 40)
        with pytest.raises(EngineError, match=r"publication of version 4 failed: .*; version 3 keeps serving"):
            async with asyncio.timeout(CEILING):  # a server that refuses weights keeps nobody waiting in the broadcast
                await publish(engine, spoil(unique_weights(new)), 4)
        for number, answer in enumerate(await asyncio.gather(*calls)):
            assert_sampled_by(old, 3, number, answer)
        await publish(engine, unique_weights(new), 4)
        np.testing.assert_allclose(await engine.score(PROBE), score(new, PROBE), atol=1e-4)


async def unadmitted_or_old(calls: list[asyncio.Task[Completion]], model: PreTrainedModel) -> int:
    """Check that no answer holds a token of refused weights; how many of them had ended before the pause."""
    ended = 0
    for number, call in enumerate(calls):
        try:
            answer = await call
        except EngineError as error:
            assert "never admitted" in str(error)
            continue
        ended += answer.stop_reason is not StopReason.ABORT
        assert_sampled_by(model, 3, number, answer)
    return ended


@pytest.mark.quick(1)
@TRANSFERS
async def test_weights_that_are_not_proven_are_never_admitted(transfer: str, connect: Connect) -> None:
    models = [sized("qwen3", seed) for seed in range(3)]
    expected = {"of": models[0]}

    source = FixedWeights(scores=lambda ids: score(expected["of"], ids).astype(np.float32))
    probe = Probe(PROBE, 1e-4)
    async with connect("tied", transfer=transfer, stop_token_ids=[], source=source, probe=probe) as engine:
        await publish(engine, unique_weights(models[0]), 3)
        for _ in range(10):  # until some are interrupted, which a busy machine may need some attempts for
            calls = start(engine, 8, LONG)
            await under_way(engine._servers[0], 8)
            with pytest.raises(
                EngineError, match=r"scores the new weights differently from the learner, by .*version 3 keeps serving"
            ):
                await publish(engine, unique_weights(models[1]), 4)
            if await unadmitted_or_old(calls, models[0]) < len(calls):
                break
        else:
            pytest.fail("every completion ended before the server was paused")
        np.testing.assert_allclose(await engine.score(PROBE), score(models[0], PROBE), atol=1e-4)
        expected["of"] = models[2]
        await publish(engine, unique_weights(models[2]), 4)
        [answer] = await asyncio.gather(*start(engine, 1, 20))
        assert set(answer.versions_per_token()) == {4}


async def test_a_first_publication_that_fails_refuses_the_engine(connect: Connect) -> None:
    model = sized("qwen3", 0)

    async with connect("tied", probe=Probe(PROBE, 1e-4)) as engine:
        with pytest.raises(EngineError, match=r"version 0 failed, and the engine is refused: .*differently"):
            await publish(engine, unique_weights(model), 0)
        with pytest.raises(EngineError, match=r"no server is left: .*there is no earlier publication to fall back to"):
            await start(engine, 1, 4)[0]


async def test_weights_that_somebody_else_published_are_noticed(connect: Connect) -> None:
    async with connect("tied") as mine, connect("tied") as theirs:
        await publish(theirs, unique_weights(sized("qwen3", 1)), 1)
        with pytest.raises(EngineError, match="sampled tokens but were never admitted"):
            await start(mine, 1, 4)[0]
