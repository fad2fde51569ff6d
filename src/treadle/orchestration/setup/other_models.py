"""From `models` of a recipe to models beside the policy (`rollout.other_models`)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count

from treadle.core.engine import Completion, ComponentStatus, Engine
from treadle.core.errors import ConfigError
from treadle.core.registry import how_to_install
from treadle.core.types import Floats, Ids, Message, SamplingParams
from treadle.models.config import ModelConfig
from treadle.models.model_files import require_model
from treadle.orchestration.config import RunConfig
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import AUTO, ReplyParser, Tool, plain
from treadle.rollout.other_models import Chat, MakeModel, OtherModelConfig, PolicyCopy, UrlModel
from treadle.rollout.session import Address, CallOptions, OtherReply, Session, SessionSpec


def check_models(config: RunConfig) -> None:
    """Raise ConfigError for a model that is not there, a key that is not set, or packages that are not installed."""
    for name, model in config.models.items():
        if model.policy:
            if config.rewards.group is not None:
                raise ConfigError(
                    f"models.{name} is a copy of the policy, and rewards.group rewards one role alone; have the "
                    "environment reward both (Finish.rewards)"
                )
        elif model.path is not None:
            require_model(model.path, f"models.{name}.path")
            if config.placement.rollout.workers:
                raise ConfigError(
                    f"models.{name}.path is loaded by the run's own process, and placement.rollout.workers play "
                    "elsewhere; serve it (`treadle serve`, or vLLM), and give its url"
                )
        elif importlib.util.find_spec("httpx") is None:
            raise ConfigError(f"models.{name}.url needs httpx; {how_to_install('httpx')}")
        elif model.api_key_env is not None and not os.environ.get(model.api_key_env):
            raise ConfigError(f"models.{name}.api_key_env: the environment variable {model.api_key_env!r} is not set")


def make_models(models: Mapping[str, OtherModelConfig]) -> dict[str, MakeModel]:
    """Return what makes the models, by name."""
    kinds = {name: UrlModel if model.url else LocalModel for name, model in models.items()}
    return {name: PolicyCopy if model.policy else partial(kinds[name], model) for name, model in models.items()}


class LocalModel:
    """A model in this process. Each call is computed by itself, so that equal calls get the same bits."""

    renderer: ChatRenderer | None = None

    def __init__(self, config: OtherModelConfig) -> None:
        self._config = config
        self._engine: SingleCalls | None = None
        self._parse: ReplyParser = plain
        self._context = 0

    async def open(self) -> None:
        from treadle.engines.torch.options import TorchEngineOptions
        from treadle.engines.torch.pinned import make_engine  # torch
        from treadle.models.chat import load_chat
        from treadle.training.make import load_model

        if self._engine is None:
            config = ModelConfig(path=self._config.path)
            self.renderer = load_chat(config)[1]
            self._parse = self.renderer.parser(AUTO)
            options = TorchEngineOptions(self.renderer.stop_ids, max_batch=1, lock_step=False)
            engine = make_engine(load_model(config, 0), options, self.renderer.decode)
            self._engine, self._context = SingleCalls(engine), engine.limits.context

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    def chat(self, session: str, address: Address) -> Chat:
        opened: list[Session] = []

        async def chat(messages: Sequence[Message], tools: Sequence[Tool], options: CallOptions) -> OtherReply:
            if not opened:
                opened.append(await self._session(session, address))
            reply = await opened[0].chat(messages, tools, options)
            tokens = reply.prompt_tokens, reply.completion_tokens
            return OtherReply(reply.message, *tokens, reply.stop_reason, reply.step, reply.stop)

        return chat

    async def _session(self, name: str, address: Address) -> Session:
        await self.open()
        assert self._engine is not None and self.renderer is not None
        spec = SessionSpec(name, self._engine, self.renderer, self._config.sampling, self._context - 1, address)
        return Session(spec, self._parse, callers_sampling=True, context=self._context)


class SingleCalls:
    """An engine that computes one call at a time, each from nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._turn, self._numbers = engine, asyncio.Lock(), count()

    def open_session(self, session: str) -> None: ...

    def close_session(self, session: str) -> None: ...

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        async with self._turn:
            name = f"{session}#{next(self._numbers)}"
            self._engine.open_session(name)
            try:
                return await self._engine.generate(prompt_ids, sampling, session=name, cache_salt=cache_salt)
            finally:
                self._engine.close_session(name)

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        return await self._engine.score(ids, temperature=temperature)

    def status(self) -> Sequence[ComponentStatus]:
        return self._engine.status()

    async def close(self) -> None:
        await self._engine.close()
