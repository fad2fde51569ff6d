"""What is exported ends under vLLM, with vLLM's own defaults, where it ends here and under transformers."""

import httpx
import pytest
import torch

from tests.engines.vllm.conftest import ENDS, Connect, Servers, sized
from tests.sources import publish
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.models.weights import unique_weights

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]


async def test_all_end_tokens_of_an_export_end_a_reply(servers: Servers, connect: Connect) -> None:
    server = servers["mixture"]
    model = sized(server.family, 0)
    _, renderer = load_chat(ModelConfig(path=str(server.model)), None)
    assert set(renderer.stop_ids) == set(ENDS)
    async with connect("mixture") as engine, httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        await publish(engine, unique_weights(model), 0)
        for first in range(10, 26):
            prompt = [first, first + 1, first + 2]
            asked = {"model": "policy", "prompt": prompt, "max_tokens": 40, "temperature": 0}
            body = {**asked, "return_token_ids": True}
            [choice] = (await client.post("/v1/completions", json=body)).json()["choices"]
            generated = model.generate(  # type: ignore[operator]
                torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=list(renderer.stop_ids)
            )
            theirs = generated[0, len(prompt) :].tolist()
            assert choice["token_ids"] == theirs
            assert choice["finish_reason"] == ("stop" if theirs[-1] in ENDS else "length")
