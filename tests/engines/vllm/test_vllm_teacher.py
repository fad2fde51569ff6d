"""A teacher behind a real vLLM server teaches what its weights would teach in process."""

import asyncio
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.engines.vllm.conftest import TOKENIZER, Connect, Servers, sized
from tests.models import random_groups
from tests.sources import publish
from tests.training.reference import make_learner
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig
from treadle.core.errors import ConfigError
from treadle.models.weights import unique_weights
from treadle.packing.flat import flatten
from treadle.training.teacher_server import TeacherServer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]

TOLERANCE = 1e-4  # of the probe and of publications, on average


@pytest.mark.parametrize("form", ["advantage", "reverse_top_k"])
async def test_it_teaches_what_it_would_in_process(form: Any, servers: Servers, connect: Connect) -> None:
    teacher, policy = sized("qwen3", 0), sized("qwen3", 1)
    groups = [*random_groups(3, vocabulary=1000)]
    async with connect("tied") as engine:
        await publish(engine, unique_weights(teacher), 0)
        server = TeacherServer(servers["tied"].url)
        tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
        await asyncio.to_thread(server.check, tokenizer, 1000, 8)
        assert server.context == 1023
        tokenizer.add_tokens(["<extra>"])
        with pytest.raises(ConfigError, match="token 726 is '<extra>' for the trained model"):
            await asyncio.to_thread(server.check, tokenizer, 1000, 8)

        fields: dict[str, Any] = {"form": form, "top_k": 8 if form.endswith("k") else 32}
        results = []
        for given in ({"teacher": teacher}, {"server": server}):
            algorithm = AlgorithmConfig(distillation=DistillationConfig(teacher="T", **fields))
            learner = make_learner(policy, algorithm, **given)
            scores = await asyncio.to_thread(learner.teacher_scores, flatten(groups))
            (result,) = await asyncio.to_thread(learner.train_batch, groups)
            results.append((scores, result))
    (mine, one), (theirs, other) = results
    mask = flatten(groups).mask
    assert mine is not None and theirs is not None
    assert (mine.logp - theirs.logp)[mask].abs().mean() < TOLERANCE
    if mine.top is not None and theirs.top is not None:
        assert (mine.top - theirs.top)[mask].abs().mean() < TOLERANCE
    gaps = [abs(one.advantage[name] - other.advantage[name]) for name in one.advantage]
    assert np.mean(gaps) < TOLERANCE
    assert other.metrics["teacher_kl"] == pytest.approx(one.metrics["teacher_kl"], abs=TOLERANCE)
