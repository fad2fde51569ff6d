"""What is exported ends under vLLM, with vLLM's own defaults, where it ends here and under transformers."""

import json
from pathlib import Path

import httpx
import pytest
import torch

from tests.engines.vllm.conftest import TOKENIZER, python_with_vllm, sized, started
from treadle.core.config import build
from treadle.engines.config import EngineConfig
from treadle.engines.vllm.launch import ServerProcess
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.training.checkpoint import export_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]


async def test_all_end_tokens_of_an_export_end_a_reply(tmp_path: Path) -> None:
    """A third of the vocabulary ends a reply, so that one of a random model does soon."""
    model, place, ends = sized("qwen3", 0), tmp_path / "model", sorted({2, *range(6, 700, 3)})
    export_model(place, model, TOKENIZER, {"generation_config.json": json.dumps({"eos_token_id": ends}).encode()})
    _, renderer = load_chat(ModelConfig(path=str(place)))
    assert set(renderer.stop_ids) == set(ends)
    vllm = {"python": python_with_vllm(), "args": {"generation-config": "auto"}}
    process = ServerProcess(place, build(EngineConfig, {"batch": 4, "vllm": vllm}), tmp_path / "vllm.log")
    try:
        await started(process)
        async with httpx.AsyncClient(base_url=process.url, timeout=300) as client:
            for first in range(10, 26):
                prompt = [first, first + 1, first + 2]
                asked = {"model": "policy", "prompt": prompt, "max_tokens": 40, "temperature": 0}
                body = {**asked, "return_token_ids": True}
                [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
                made = model.generate(  # type: ignore[operator]
                    torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=list(renderer.stop_ids)
                )
                theirs = made[0, len(prompt) :].tolist()
                assert choice["token_ids"] == theirs
                assert choice["finish_reason"] == ("stop" if theirs[-1] in ends else "length")
    finally:
        await process.stop()
