"""The gateway before the embedded engine: a model that samples anything, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.rollout.gateway.servers import Served, served
from tests.rollout.gateway.storms import storm
from tests.worlds import user
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.models.loading import load_tokenizer, make_model
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.config import load_recipe
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import hermes, plain


@asynccontextmanager
async def embedded(**settings: Any) -> AsyncIterator[Served]:
    """The demo's model, untrained."""
    recipe = load_recipe("demo")
    tokenizer = load_tokenizer(tokenizer_directory(recipe.model))
    end = int(tokenizer.eos_token_id)
    engine = TorchEngine(make_model(recipe.model, len(tokenizer), seed=0), TorchEngineOptions([end]))
    async with served(engine, ChatRenderer(tokenizer, [end]), **settings) as server:
        yield server
    await engine.close()


@pytest.mark.xdist_group("anthropic")
@pytest.mark.parametrize("stream", [False, True])
async def test_clients_are_told_what_was_sampled(stream: bool) -> None:
    async with embedded() as server:
        address = server.open(parse=hermes, max_tokens=12)
        chat, messages = server.openai(address), server.anthropic(address)
        conversation: list[Any] = [user("who plays chess?")]
        for _ in range(4):
            if stream:
                events = await chat.chat.completions.create(model="m", messages=conversation, stream=True)
                said = "".join([c.delta.content or "" async for event in events for c in event.choices])
            else:
                answer = await chat.chat.completions.create(model="m", messages=conversation)
                said = answer.choices[0].message.content or ""
            assert said == hermes(server.renderer.text(server.steps()[-1].completion_ids), [])["content"]
            conversation += [{"role": "assistant", "content": said}, user("and then?")]
            asked: Any = {"model": "m", "max_tokens": 5, "messages": conversation}
            if stream:
                async with messages.messages.stream(**asked) as told:
                    block: Any = (await told.get_final_message()).content[0]
            else:
                block = (await messages.messages.create(**asked)).content[0]
            assert block.text == hermes(server.renderer.text(server.steps()[-1].completion_ids), [])["content"]
        assert len(server.steps()) == 8
        server.sessions["s"].close()


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
async def test_eight_identical_requests_are_eight_samples(together: bool) -> None:
    async with embedded() as server, httpx.AsyncClient(timeout=30) as http:
        url = f"{server.open(parse=plain, max_tokens=12).base_url}/chat/completions"
        body = {"messages": [user("hi")], "return_token_ids": True}
        calls = [http.post(url, json=body) for _ in range(8)]
        answers = await asyncio.gather(*calls) if together else [await call for call in calls]
        told = [answer.json()["choices"][0]["token_ids"] for answer in answers]
        assert sorted(told) == sorted(step.completion_ids.tolist() for step in server.steps())
        assert len(told) == 8 and len(set(map(tuple, told))) > 1
        server.sessions["s"].close()


@pytest.mark.slow
async def test_no_step_is_lost_doubled_or_misplaced_in_a_storm_of_disconnects() -> None:
    async with embedded(grace=0.1) as server:
        found = await storm(server, sessions=64, seconds=20.0, seed=2)
    assert found["live"] == found["answers"] > 100
    assert found["dropped"] > 20
