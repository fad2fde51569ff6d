"""Makes models beside the policy from a recipe's `models` (`rollout.other_models`)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from treadle.core.engine import Completion, ComponentStatus, Engine
from treadle.core.errors import ConfigError, EngineError
from treadle.core.images import PromptImage
from treadle.core.registry import how_to_install
from treadle.core.types import Floats, Ids, Message, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.models.config import ModelConfig
from treadle.models.model_files import require_model
from treadle.plan.config import RunConfig
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import AUTO, ReplyParser, Tool, plain
from treadle.rollout.other_models import (
    IN_PROCESS,
    OPEN_MODELS,
    POLICY,
    Chat,
    MakeModel,
    OnTry,
    OtherModelConfig,
    PolicyCopy,
    UrlModel,
    open_models,
)
from treadle.rollout.session import Address, CallOptions, OtherReply, Session, SessionSpec

_ANY_LENGTH = 2**31  # no limit of prompts here: the engine knows its context


def check_models(config: RunConfig) -> None:
    """Raise ConfigError for a missing model, key or package, of models that are called."""
    for name, model in config.called_models.items():
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
        else:
            check_url(name, model)


def check_url(name: str, model: OtherModelConfig) -> None:
    """Raise ConfigError for a missing key or package of a model behind a URL."""
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError(f"models.{name}.url needs httpx; {how_to_install('httpx')}")
    if model.api_key_env is not None and not os.environ.get(model.api_key_env):
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
    has_draws = True

    def __init__(self, config: OtherModelConfig) -> None:
        assert config.path is not None
        self._config = config
        self.options: Mapping[str, Any] = config.options
        path = str(Path(config.path).absolute()) if Path(config.path).is_dir() else config.path
        self.source = IN_PROCESS, path if config.adapter is None else f"{path} with {config.adapter}"
        self._engine: Alone | None = None
        self._parse: ReplyParser = plain
        self._context = 0

    async def open(self, began: datetime | None = None) -> None:
        from treadle.engines.torch.engine import TorchEngine  # torch
        from treadle.engines.torch.options import TorchEngineOptions
        from treadle.models.chat import load_chat
        from treadle.models.towers import tower_of
        from treadle.training.make import load_model

        if self._engine is None:
            self._loop = asyncio.get_running_loop()
            config = ModelConfig(path=self._config.path, adapter=self._config.adapter)
            self.renderer = load_chat(config, began)[1]
            self._parse = self.renderer.parser(AUTO)
            options = TorchEngineOptions(self.renderer.stop_ids, max_batch=1, lock_step=False)
            engine = TorchEngine(
                load_model(config, 0),
                options,
                decode=self.renderer.decode,
                grammars=self.renderer.grammars,
                vision=lambda _: tower_of(config, "cpu"),
            )
            self._engine, self._context = Alone(engine), engine.limits.context

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    def chat(self, session: str, address: Address, on_try: OnTry = lambda reply, seconds: None) -> Chat:
        return _chat(partial(self._open_session, session, address), on_try, close=False)

    async def _open_session(self, name: str, address: Address) -> Session:
        await self.open()
        _check_loop(self._loop)
        assert self._engine is not None and self.renderer is not None
        spec = SessionSpec(name, self._engine, self.renderer, self._config.sampling, self._context - 1, address)
        return Session(spec, self._parse, callers_sampling=True, context=self._context)


@runtime_checkable
class ComputesAlone(Engine, Protocol):
    """An engine that can compute a call separately: `TorchEngine`."""

    async def alone(
        self, prompt_ids: Ids, sampling: SamplingParams, images: Sequence[PromptImage] = ()
    ) -> Completion: ...


class Alone:
    """An engine that computes each call separately, so that equal calls get the same bits."""

    def __init__(self, engine: ComputesAlone) -> None:
        self._engine = engine

    def open_session(self, session: str) -> None: ...

    def close_session(self, session: str) -> None: ...

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        return await self._engine.alone(prompt_ids, sampling, images)

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        return await self._engine.score(ids, temperature=temperature, images=images)

    def status(self) -> Sequence[ComponentStatus]:
        return self._engine.status()

    async def close(self) -> None:
        await self._engine.close()


class PolicyModel:
    """The policy, with the weights of the moment, for judges: its calls are in no trajectory.

    engine: serves the policy. lock_step: whether it waits for all open sessions; a judge then cannot open one.
    """

    renderer: ChatRenderer | None = None
    source, has_draws = (IN_PROCESS, POLICY), True
    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, engine: Engine, renderer: ChatRenderer, lock_step: bool) -> None:
        self._engine, self._renderer, self._lock_step = engine, renderer, lock_step
        self._loop = asyncio.get_running_loop()

    async def open(self, began: datetime | None) -> None: ...

    async def close(self) -> None: ...

    def chat(self, session: str, address: Address, on_try: OnTry = lambda reply, seconds: None) -> Chat:
        return _chat(partial(self._open_session, session, address), on_try, close=True)

    async def _open_session(self, name: str, address: Address) -> Session:
        _check_loop(self._loop)
        engine = self._engine
        if self._lock_step:
            if not isinstance(engine, ComputesAlone):
                raise EngineError(
                    "engines in processes of their own, in lock-step, would wait for all open sessions before they "
                    "answer a judge; set engine.lock_step=false"
                )
            engine = Alone(engine)
        spec = SessionSpec(name, engine, self._renderer, SamplingParams(), _ANY_LENGTH, address)
        return Session(spec, self._renderer.parser(AUTO), callers_sampling=True)


def _check_loop(loop: asyncio.AbstractEventLoop) -> None:
    if asyncio.get_running_loop() is not loop:
        raise EngineError("it is of the run's event loop; await it in an async function")


def _chat(open_session: Callable[[], Awaitable[Session]], on_try: OnTry, close: bool) -> Chat:
    """Return calls of a session, which the first one opens. close: the first one closes it, too."""
    opened: list[Session] = []

    async def chat(messages: Sequence[Message], tools: Sequence[Tool], options: CallOptions) -> OtherReply:
        began, answer = time.monotonic(), None
        try:
            session = opened[0] if opened else await open_session()
            opened[:] = [session]
            try:
                reply = await session.chat(messages, tools, options)
            finally:
                if close:
                    session.close()
            tokens = reply.prompt_tokens, reply.completion_tokens
            answer = OtherReply(reply.message, *tokens, reply.stop_reason, reply.step, reply.stop)
            return answer
        finally:
            on_try(answer, time.monotonic() - began)

    return chat


@asynccontextmanager
async def judging_models(
    make: Mapping[str, MakeModel], engine: Engine, renderer: ChatRenderer, config: EngineConfig
) -> AsyncIterator[None]:
    """Let judges ask the models that `make` makes, and the policy. engine: serves the policy; config: of the engine."""
    lock_step = config.kind != "vllm" and config.lock_step is not False
    async with open_models(make, renderer.began) as models:
        before = OPEN_MODELS.set({**models, POLICY: PolicyModel(engine, renderer, lock_step)})
        try:
            yield
        finally:
            OPEN_MODELS.reset(before)
