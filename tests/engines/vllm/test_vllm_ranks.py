"""Real vLLM servers that get their weights from a model which is spread over two ranks."""

from pathlib import Path

import numpy as np
import pytest

from tests.engines.vllm.conftest import TOKENIZER, TRANSFERS, Connect, sized
from tests.models import random_groups
from tests.worlds import tiny
from treadle.engines.vllm.publication import Probe
from treadle.training.checkpoint import export_model
from treadle.training.start import make_trainer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]
IDS = np.random.default_rng(0).integers(0, 1024, 48).astype(np.int32)


@TRANSFERS
async def test_a_server_gets_the_weights_of_sharded_ranks(transfer: str, connect: Connect, tmp_path: Path) -> None:
    export_model(tmp_path / "model", sized("qwen3", 0), TOKENIZER)
    settings = (
        f"model={{path: {tmp_path / 'model'}, tokenizer: {TOKENIZER}}}",
        "training.threads=1",
        "training.optimizer.learning_rate=0.01",
        "placement.learner.ranks=2",
    )
    trainer = make_trainer(tiny(*settings).trainer)
    try:
        async with connect("tied", transfer=transfer, source=trainer, probe=Probe(IDS, 1e-4)) as engine:
            before = await trainer.score(IDS)
            for version in (1, 2):
                await trainer.train_batch(random_groups(version, groups=2, vocabulary=16))
                await engine._publication.publish(version)  # which proves the weights by the probe
                assert np.abs(await engine.score(IDS) - await trainer.score(IDS)).mean() <= 1e-4
            assert np.abs(await trainer.score(IDS) - before).mean() > 1e-3
    finally:
        trainer.close()
