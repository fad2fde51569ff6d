"""Models with towers on real servers: they score what the learner scores, before and after a publication."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.vllm.conftest import python_with_vllm
from tests.sources import FixedWeights, publish
from tests.towers import TOWERS, write
from treadle.core.config import build
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.adapters import Exported
from treadle.engines.vllm.engine import open_engine
from treadle.engines.vllm.launch import ServerProcess
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.loading import make_model
from treadle.models.weights import published
from treadle.training.checkpoint import export_model
from treadle.training.forward import Forward

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.filterwarnings("ignore:.*cannot share prefixes"),
]

# As small as vLLM's kernels allow.
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MORE: dict[str, dict[str, Any]] = {
    "gemma4": {"vocab_size_per_layer_input": 1024, "global_head_dim": 64},
    "qwen3_5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
IDS = np.random.default_rng(0).integers(5, 700, 40).astype(np.int32)


@pytest.fixture
def python() -> str:
    found = python_with_vllm()
    if subprocess.run([found, "-c", "import torchvision"], capture_output=True).returncode:
        pytest.skip("vLLM's classes of models with towers need torchvision beside it")
    return found


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "adapters"])
@pytest.mark.parametrize("family", TOWERS)
async def test_a_server_scores_as_the_learner(
    python: str, family: str, lora: LoraConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = family == "qwen3_5"  # as vLLM's CPU build wants gated delta nets
    fields = TOWERS[family]
    monkeypatch.setitem(fields, "text_config", {**fields["text_config"], **SIZES, **MORE.get(family, {})})
    if "out_hidden_size" in fields["vision_config"]:
        monkeypatch.setitem(fields, "vision_config", {**fields["vision_config"], "out_hidden_size": 64})
    base = write(tmp_path / "base", family)
    model = make_model(ModelConfig(path=str(base)), 0, 0, lora=lora)
    forward = Forward(model, len(IDS))
    options = {"python": python, "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
    config = build(
        EngineConfig, {"kind": "vllm", "batch": 8, "options": options, **({"dtype": "bfloat16"} if half else {})}
    )
    adapters = None
    if lora is not None:
        export_model(tmp_path / "adapters" / "first", model, base)
        adapters = Exported.read(tmp_path / "adapters" / "first")
        config = adapters.served_by(config)
    engine, _ = await open_engine(
        config,
        FixedWeights(),
        serve=lambda number: ServerProcess(base, config, tmp_path / "log"),
        stop_token_ids=[2],
        adapters=adapters,
    )
    try:
        before = forward.exact_logprobs(IDS)
        with torch.no_grad(), torch.random.fork_rng([]):
            torch.manual_seed(0)
            for _, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
        await publish(engine, dict(published(model)), 1)
        wanted = forward.exact_logprobs(IDS)
        moved, gap = (float(np.abs(each - wanted).mean()) for each in (before, await engine.score(IDS)))
        assert gap < (moved / 3 if half else 1e-4) and moved > 0.01
    finally:
        await engine.close()
