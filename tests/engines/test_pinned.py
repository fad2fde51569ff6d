"""Sessions that keep the version of their first call, on engines that share one base."""

import asyncio

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.engines.kit import PROMPT, plain_gap, step_of
from tests.models import tiny
from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.types import SamplingParams
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.engines.torch.pinned import PinnedEngine
from treadle.models.config import LoraConfig
from treadle.models.lora import add_adapters
from treadle.models.weights import adapter_weights, copy_by_name


def adapted() -> PreTrainedModel:
    model = tiny()
    add_adapters(model, LoraConfig(rank=2), 0)
    return model


def version(number: int) -> dict[str, Tensor]:
    """The adapter of a version; that of 0 changes nothing."""
    random = torch.Generator().manual_seed(number)
    return {
        name: torch.randn(tensor.shape, generator=random) * (number > 0)
        for name, tensor in adapter_weights(adapted()).items()
    }


def engine(model: PreTrainedModel, behind: int = 2) -> PinnedEngine:
    return PinnedEngine(lambda: TorchEngine(model, TorchEngineOptions([2], max_batch=8)), behind)


async def sampled(engine: PinnedEngine, session: str, tokens: int = 12) -> Completion:
    return await engine.generate(
        PROMPT, SamplingParams(max_tokens=tokens, seed=sum(map(ord, session))), session=session
    )


def check(completion: Completion, number: int) -> None:
    """Every token is of that version: its log-probability is what those weights give."""
    model = adapted()
    copy_by_name(adapter_weights(model), version(number))
    assert completion.pinned and set(completion.versions_per_token()) == {number}
    assert plain_gap(model, [step_of(PROMPT, completion)]) < 1e-4


async def test_a_session_keeps_the_version_of_its_first_call() -> None:
    model = adapted()
    pinned = engine(model)
    for number in range(3):
        pinned.open_session(f"s{number}")
        await pinned.update_weights(version(number), number)
        check(await sampled(pinned, f"s{number}"), number)
    pinned.open_session("late")  # opened before version 2's successor, called after it
    await pinned.update_weights(version(3), 3)
    together = await asyncio.gather(*(sampled(pinned, s) for s in ("s1", "s2", "late")))
    for completion, number in zip(together, (1, 2, 3), strict=True):
        check(completion, number)
    assert np.abs(await pinned.score(PROMPT) - await pinned._engines[1].score(PROMPT)).max() > 1e-2
    with pytest.raises(EngineError, match=r"'s0' began with version 0, and version 3 is more than .* ahead"):
        await sampled(pinned, "s0")
    assert [status.version for status in pinned.status()] == [1, 2, 3]
    pinned.close_session("s1")
    await pinned.update_weights(version(4), 4)
    assert sorted(pinned._engines) == [2, 3, 4]
    await pinned.close()


async def test_publications_under_load_change_no_token_of_a_session() -> None:
    pinned = engine(adapted(), behind=20)
    await pinned.update_weights(version(0), 0)
    for number in range(1, 8):
        for n in (2 * number, 2 * number + 1):
            pinned.open_session(str(n))
        playing = [asyncio.ensure_future(sampled(pinned, str(n))) for n in range(2, 2 * number + 2)]
        await asyncio.sleep(0)
        await pinned.update_weights(version(number), number)
        for n, completion in zip(range(2, 2 * number + 2), await asyncio.gather(*playing), strict=True):
            check(completion, n // 2 - 1)
    await pinned.close()


async def test_a_version_that_is_published_again_changes_nothing() -> None:
    """As in a process that was started with it."""
    pinned = engine(adapted())
    await pinned.update_weights(version(1), 1)
    pinned.open_session("s")
    amid = asyncio.ensure_future(sampled(pinned, "s"))
    await asyncio.sleep(0)
    await pinned.update_weights(version(1), 1)
    check(await amid, 1)
    check(await sampled(pinned, "s"), 1)
    await pinned.update_weights(version(2), 2)
    await pinned.update_weights(version(2), 2)
    check(await sampled(pinned, "s"), 1)
    assert [status.sessions for status in pinned.status()] == [1, 0]
    await pinned.close()


async def test_the_base_is_shared() -> None:
    model = adapted()
    pinned = engine(model)
    await pinned.update_weights(version(0), 0)
    await pinned.update_weights(version(1), 1)
    mine = {p.data_ptr() for name, p in model.named_parameters() if ".lora_" not in name}
    for each in pinned._engines.values():
        served = each._model.model.named_parameters()
        assert {p.data_ptr() for name, p in served if ".lora_" not in name} == mine
    with pytest.raises(EngineError, match="lacks"):
        await pinned.update_weights({}, 2)
    assert max(pinned._engines) == 1
    await pinned.close()
