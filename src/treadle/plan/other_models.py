"""Makes models beside the policy from a recipe's `models` (`rollout.other_models`)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any, Protocol, runtime_checkable

from treadle.core.draws import Stream
from treadle.core.engine import Completion, ComponentStatus, Engine
from treadle.core.errors import ConfigError, EngineError
from treadle.core.registry import how_to_install
from treadle.core.types import Floats, Ids, Message, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.models.config import ModelConfig
from treadle.models.model_files import require_model
from treadle.plan.config import RunConfig
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import AUTO, ReplyParser, Tool, plain
from treadle.rollout.other_models import POLICY, RUN_MODELS, Chat, MakeModel, OtherModelConfig, PolicyCopy, UrlModel
from treadle.rollout.session import Address, CallOptions, OtherReply, Session, SessionSpec

_ANY_LENGTH = 2**31  # no limit of prompts here: the engine knows its context


def check_models(config: RunConfig) -> None:
    """Raise ConfigError for a missing model, key or package."""
    for name, model in config.models.items():
        if model.policy:
            if config.rewards.group is not None:
                raise ConfigError(
                    f"models.{name} is a copy of the policy, but rewards.group rewards only one role; have the "
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
    """Return factories of the models, by name."""
    return {name: _maker(model) for name, model in models.items()}


def _maker(model: OtherModelConfig) -> MakeModel:
    if model.policy:
        return PolicyCopy
    return partial(UrlModel, model) if model.url else partial(LocalModel, model)


class LocalModel:
    """A model in this process. Each call is computed separately, so that equal calls get the same bits."""

    renderer: ChatRenderer | None = None

    def __init__(self, config: OtherModelConfig) -> None:
        self._config = config
        self._engine: Alone | None = None
        self._parse: ReplyParser = plain
        self._context = 0

    async def open(self, began: datetime | None = None) -> None:
        from treadle.engines.torch.engine import TorchEngine  # torch
        from treadle.engines.torch.options import TorchEngineOptions
        from treadle.models.chat import load_chat
        from treadle.training.make import load_model

        if self._engine is None:
            config = ModelConfig(path=self._config.path)
            self.renderer = load_chat(config, began)[1]
            self._parse = self.renderer.parser(AUTO)
            options = TorchEngineOptions(self.renderer.stop_ids, max_batch=1, lock_step=False)
            engine = TorchEngine(load_model(config, 0), options, decode=self.renderer.decode)
            self._engine, self._context = Alone(engine), engine.limits.context

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    def chat(self, session: str, address: Address) -> Chat:
        opened: list[Session] = []

        async def chat(messages: Sequence[Message], tools: Sequence[Tool], options: CallOptions) -> OtherReply:
            if not opened:
                opened.append(await self.open_session(session, address))
            reply = await opened[0].chat(messages, tools, options)
            tokens = reply.prompt_tokens, reply.completion_tokens
            return OtherReply(reply.message, *tokens, reply.stop_reason, reply.step, reply.stop)

        return chat

    async def open_session(self, name: str, address: Address) -> Session:
        await self.open()
        assert self._engine is not None and self.renderer is not None
        spec = SessionSpec(name, self._engine, self.renderer, self._config.sampling, self._context - 1, address)
        return Session(spec, self._parse, callers_sampling=True, context=self._context)


@runtime_checkable
class ComputesAlone(Engine, Protocol):
    """An engine that can compute a call separately: `TorchEngine`."""

    async def alone(self, prompt_ids: Ids, sampling: SamplingParams) -> Completion: ...


class Alone:
    """An engine that computes each call separately, so that equal calls get the same bits."""

    def __init__(self, engine: ComputesAlone) -> None:
        self._engine = engine

    def open_session(self, session: str) -> None: ...

    def close_session(self, session: str) -> None: ...

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        return await self._engine.alone(prompt_ids, sampling)

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        return await self._engine.score(ids, temperature=temperature)

    def status(self) -> Sequence[ComponentStatus]:
        return self._engine.status()

    async def close(self) -> None:
        await self._engine.close()


class JudgingModels:
    """Answers judges without a URL (`rollout.other_models.RunModels`).

    engine: serves the policy. lock_step: whether it waits for all open sessions, so that a judge may not open one.
    """

    def __init__(self, engine: Engine, renderer: ChatRenderer, lock_step: bool) -> None:
        self._engine, self._renderer, self._lock_step = engine, renderer, lock_step
        self._local: dict[str, LocalModel] = {}
        self._loop, self._numbers = asyncio.get_running_loop(), count()

    async def chat(self, model: str, messages: Sequence[Message], options: Mapping[str, Any], seed: int) -> OtherReply:
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError("it belongs to the run's event loop; await it in an async function")
        name, address = f"judge#{next(self._numbers)}", Address(seed, Stream.OTHER_MODEL, 0, 0, 0)
        if model == POLICY:
            session = self._policy_session(name, address)
        else:
            if model not in self._local:
                self._local[model] = LocalModel(OtherModelConfig(path=model))
            await self._local[model].open(self._renderer.began)
            session = await self._local[model].open_session(name, address)
        try:
            reply = await session.chat(messages, (), CallOptions(sampling_overrides=options))
        finally:
            session.close()
        return OtherReply(reply.message, reply.prompt_tokens, reply.completion_tokens, reply.stop_reason)

    def _policy_session(self, name: str, address: Address) -> Session:
        engine = self._engine
        if self._lock_step:
            if not isinstance(engine, ComputesAlone):
                raise EngineError(
                    "engines in separate processes, in lock-step, would wait for all open sessions before they "
                    "answer a judge; set engine.lock_step=false"
                )
            engine = Alone(engine)
        spec = SessionSpec(name, engine, self._renderer, SamplingParams(), _ANY_LENGTH, address)
        return Session(spec, self._renderer.parser(AUTO), callers_sampling=True)

    async def close(self) -> None:
        for model in self._local.values():
            await model.close()


@asynccontextmanager
async def judging_models(engine: Engine, renderer: ChatRenderer, config: EngineConfig) -> AsyncIterator[None]:
    """Let judges call model directories, and the policy served by the engine. config: configuration of the engine."""
    models = JudgingModels(engine, renderer, config.kind != "vllm" and config.lock_step is not False)
    before = RUN_MODELS.set(models)
    try:
        yield
    finally:
        RUN_MODELS.reset(before)
        await models.close()
