"""Publication between GPUs, for a machine that has them:

TREADLE_VLLM_VENV=/opt/vllm python -m pytest tests/engines/vllm/test_vllm_gpu.py

With two GPUs or more the broadcast is NCCL's; trainer and server on a single one broadcast by gloo.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engines.vllm.conftest import TOKENIZER, TRANSFERS, python_with_vllm, sized
from tests.engines.vllm.test_vllm_publication import score
from tests.sources import FixedWeights, publish
from treadle.core.config import build
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.engine import open_engine
from treadle.engines.vllm.launch import ServerProcess
from treadle.engines.vllm.publication import Publication
from treadle.engines.vllm.transfer import Collective
from treadle.models.weights import unique_weights
from treadle.training.checkpoint import export_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

IDS = np.random.default_rng(0).integers(0, 1024, 48).astype(np.int32)


@TRANSFERS
async def test_a_server_gets_the_weights_of_another_gpu(transfer: str, tmp_path: Path) -> None:
    export_model(tmp_path / "model", sized("qwen3", 0), TOKENIZER)
    gpus = torch.cuda.device_count()
    vllm = {
        "python": python_with_vllm(),
        "transfer": transfer,
        "args": {"gpu-memory-utilization": 0.3},
        "environment": {"CUDA_VISIBLE_DEVICES": str(gpus - 1)},
    }
    config = build(EngineConfig, {"kind": "vllm", "dtype": "bfloat16", "batch": 16, "options": vllm})
    engine, _ = await open_engine(
        config,
        FixedWeights(),
        serve=lambda n: ServerProcess(tmp_path / "model", config, tmp_path / "log"),
        stop_token_ids=[],
    )
    try:
        for version, seed in ((1, 1), (2, 2), (3, 1)):
            weights = {name: tensor.to("cuda:0") for name, tensor in unique_weights(sized("qwen3", seed)).items()}
            await publish(engine, weights, version)
            expected, other = (score(sized("qwen3", number), IDS) for number in (seed, 3 - seed))
            gap = np.abs(await engine.score(IDS) - expected).mean()
            assert gap <= config.tolerance < np.abs(expected - other).mean()
        assert isinstance(engine._publication, Publication)
        way = engine._publication._transfer
        if isinstance(way, Collective):
            assert way._group is not None
            assert way._group.device.type == ("cuda" if gpus > 1 else "cpu")
    finally:
        await engine.close()
