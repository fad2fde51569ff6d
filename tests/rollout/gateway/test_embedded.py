"""The gateway before the embedded engine: a model that samples anything, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.rollout.gateway.servers import Served, served
from tests.worlds import user
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.models.loading import load_tokenizer, make_model
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.config import load_recipe
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import hermes


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
