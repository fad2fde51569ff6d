"""Models beside the policy, which environments or agent programs call by name.

Environment.models["user"].chat --+
gateway, model="user" ------------+-> AttemptModel.ask -> Chat -> OtherReply
                                             '-> ModelCall, kept with the step before it, never trained
A `PolicyCopy` is called by a copy of the attempt's session instead (`AttemptModels.session_of`), in its own
trajectory, and trained.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field, model_validator

from treadle.core.config import Config
from treadle.core.draws import Stream
from treadle.core.errors import (
    Cause,
    ContextExceeded,
    DataError,
    EngineError,
    FormError,
    TokensExceeded,
    TrajectoryFailure,
)
from treadle.core.metrics import Measures, Metric, Tally
from treadle.core.types import Message, ModelCall, SamplingParams, Step, as_messages
from treadle.envs.base import Models
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import Tool
from treadle.rollout.drivers.outcome import AttemptError
from treadle.rollout.session import Address, CallOptions, OtherReply, Session

if TYPE_CHECKING:
    from treadle.rollout.chat_endpoint import ChatAnswer

POLICY = "policy"
CALLS = Metric("model_*_calls", "trajectory", "sum", "calls", "calls that a model beside the policy answered")
TOKENS = Metric("model_*_tokens", "trajectory", "sum", "tokens", "tokens that a model beside the policy read and wrote")
SECONDS = Metric("model_*_seconds", "trajectory", "sum", "seconds", "time until a model beside the policy had answered")

_SAMPLING = {f.name for f in fields(SamplingParams)}
_NOTHING = CallOptions()


class OtherModelConfig(Config):
    """Configures a model beside the policy: behind a URL, or from local files."""

    url: str | None = Field(None, description="base URL of an API like OpenAI's: http://127.0.0.1:8000/v1")
    model: str | None = Field(None, description="the model's name at the url")
    api_key_env: str | None = Field(None, description="environment variable with the key")
    path: str | None = Field(None, description="instead of url: a model directory, or a name as of model.path")
    policy: bool = Field(False, description="instead of url: the policy itself, in another role, trained (self-play)")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="sampling: {temperature: 0.7, max_tokens: 200}; url: any field of its requests",
    )
    adapter: str | None = Field(None, description="path: a LoRA adapter of it, a directory")
    timeout: float = Field(
        45.0,
        gt=0,
        description="url: seconds of retries before a call without an answer is given up",
    )
    try_timeout: float | None = Field(None, gt=0, description="url: seconds for each try of a call; default: timeout")
    concurrency: int = Field(64, ge=1, description="url: calls at a time")
    per_second: float | None = Field(None, gt=0, description="url: calls begun in a second, at most")

    @model_validator(mode="after")
    def _one_source(self) -> OtherModelConfig:
        if (self.url is not None) + (self.path is not None) + self.policy != 1:
            raise ValueError("give exactly one of url, path and policy")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} is not an address that begins with http:// or https://")
        if self.url is not None and self.model is None:
            raise ValueError(f"url {self.url!r} needs model, its name there")
        if self.path is not None:
            if self.model is not None or self.api_key_env is not None:
                raise ValueError("model and api_key_env belong to a url; leave them out")
            if unknown := sorted(self.options.keys() - (_SAMPLING - {"seed"})):
                raise ValueError(f"options: {unknown[0]!r} is none of {', '.join(sorted(_SAMPLING - {'seed'}))}")
            _ = self.sampling
        if self.adapter is not None and self.path is None:
            raise ValueError("adapter belongs to a path; leave it out")
        if self.policy and (more := [name for name in ("model", "api_key_env", "options") if getattr(self, name)]):
            raise ValueError(f"{more[0]} is for other models, and rollout sets the policy's sampling; leave it out")
        return self

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of a model in this process."""
        return SamplingParams(**{**self.options, "stop": tuple(self.options.get("stop", ()))})


Chat = Callable[[Sequence[Message], Sequence[Tool], CallOptions], Awaitable[OtherReply]]
"""Answers a conversation. Raises EngineError, DataError or ContextExceeded."""


OnTry = Callable[[OtherReply | None, float], None]
"""Gets the reply to each try of a call, None for an error, and its seconds."""


def _ignore(reply: OtherReply | None, seconds: float) -> None: ...


class OtherModel(Protocol):
    """A model beside the policy, shared by all attempts and judges of a run.

    renderer: set if its tokens are known. source: URL and name, which identify it in keys of caches and draws. options:
    of each call. has_draws: whether its draws are keyed by the address of a call.
    """

    renderer: ChatRenderer | None
    source: tuple[str, str]
    options: Mapping[str, Any]
    has_draws: bool

    async def open(self, began: datetime | None) -> None:
        """Load it, unless already loaded. began: the run's date, for templates. Raises ConfigError."""

    async def close(self) -> None: ...

    def chat(self, session: str, address: Address, on_try: OnTry = _ignore) -> Chat:
        """Return a function for calls of this model. address: key of the draws of these calls, in their order."""


MakeModel = Callable[[], OtherModel]

OPEN_MODELS: ContextVar[Mapping[str, OtherModel]] = ContextVar("treadle_open_models", default=MappingProxyType({}))
"""Models that judges ask for by name in this task of a run, the policy among them; empty outside a run."""

IN_PROCESS = "/chat/completions"  # in place of the URL of a server


@asynccontextmanager
async def open_models(make: Mapping[str, MakeModel], began: datetime | None) -> AsyncIterator[Mapping[str, OtherModel]]:
    """Open models, but those that are open in this task already."""
    async with AsyncExitStack() as opened:
        shared = OPEN_MODELS.get()
        models = {name: shared[name] if name in shared else one() for name, one in make.items()}
        for name in models.keys() - shared.keys():
            opened.push_async_callback(models[name].close)
            await models[name].open(began)
        yield models


def call_fields(tools: Sequence[Tool], options: CallOptions) -> dict[str, Any]:
    """Return what a call asks of its reply, as fields of chat completions.

    Raises FormError for a form that is not JSON.
    """
    fields: dict[str, Any] = {}
    if tools:
        fields["tools"] = list(tools)
        if not options.tool_calls:
            fields["tool_choice"] = "none"
        elif options.tool_choice == "required":
            fields["tool_choice"] = "required"
        elif options.tool_choice != "auto":
            fields["tool_choice"] = {"type": "function", "function": {"name": options.tool_choice}}
        if not options.parallel_tool_calls:
            fields["parallel_tool_calls"] = False
    if options.form is not None and options.form.kind != "json":
        raise FormError(options.form.where, "a model behind a URL is asked for a JSON schema only; use one")
    if options.form is not None:
        schema = {"name": "reply", "schema": json.loads(options.form.text), "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


class UrlModel:
    """A model behind a URL."""

    renderer: ChatRenderer | None = None
    has_draws = False

    def __init__(self, config: OtherModelConfig) -> None:
        from treadle.rollout.chat_endpoint import ChatEndpoint  # httpx

        assert config.url is not None and config.model is not None
        self._endpoint = ChatEndpoint(
            config.url,
            config.model,
            concurrency=config.concurrency,
            per_second=config.per_second or math.inf,
            timeout=config.try_timeout or config.timeout,
            patience=config.timeout,
            api_key_env=config.api_key_env,
            options=config.options,
        )
        self.options: Mapping[str, Any] = config.options
        self.source = self._endpoint.url, config.model

    async def open(self, began: datetime | None) -> None: ...

    async def close(self) -> None: ...

    def chat(self, session: str, address: Address, on_try: OnTry = _ignore) -> Chat:
        def tried(answer: ChatAnswer | None, seconds: float) -> None:
            on_try(None if answer is None else _as_reply(answer), seconds)

        async def chat(messages: Sequence[Message], tools: Sequence[Tool], options: CallOptions) -> OtherReply:
            asked = dict(options.sampling_overrides)
            if unknown := sorted(asked.keys() - _SAMPLING):
                raise DataError(
                    f"{unknown[0]} is {asked[unknown[0]]}; write it into the recipe's models, or leave it out"
                )
            return _as_reply(await self._endpoint.ask(messages, tried, **asked, **call_fields(tools, options)))

        return chat


def _as_reply(answer: ChatAnswer) -> OtherReply:
    return OtherReply(answer.message, answer.prompt_tokens, answer.completion_tokens, answer.stop_reason)


class PolicyCopy:
    """The policy itself in another role, named by the recipe; attempts call it by their own sessions."""

    renderer: ChatRenderer | None = None
    source, has_draws = ("", ""), True
    options: Mapping[str, Any] = MappingProxyType({})

    async def open(self, began: datetime | None) -> None: ...

    async def close(self) -> None: ...

    def chat(self, session: str, address: Address, on_try: OnTry = _ignore) -> Chat:
        raise AssertionError("called by an attempt's session")


def address_of(address: Address, model: str) -> Address:
    """Return the key of an attempt's draws for another model: `address` combined with the model's name."""
    name = blake2b(f"{int(address.stream)} {model}".encode(), digest_size=6).digest()
    return replace(address, seed=address.seed ^ int.from_bytes(name, "big"), stream=Stream.OTHER_MODEL)


class AttemptModels(Models):
    """One attempt's view of the models beside the policy, with the record of its calls.

    session: the attempt's; None in a check before there is an engine. copies: names of models that are the policy in
    another role; sessions: theirs, once called. failure: error of an unanswered call, which fails the attempt whatever
    its code does next. asked_early: whether a check has called a copy.
    """

    def __init__(self, models: Mapping[str, OtherModel], session: Session | None, address: Address) -> None:
        self.session, self.asked_early = session, False
        self.sessions: dict[str, Session] = {}
        self.copies = [name for name, model in models.items() if isinstance(model, PolicyCopy)]
        whose = session.name if session else "check"
        for name, model in models.items():
            is_copy = name in self.copies
            chat = partial(self._copy, name) if is_copy else model.chat(f"{whose}/{name}", address_of(address, name))
            self[name] = AttemptModel(self, name, chat, model.renderer)
        self.failure: TrajectoryFailure | None = None
        self.begun = 0
        self.calls: dict[int, tuple[int, ModelCall]] = {}  # order of request -> (number of steps before it, call)

    async def _copy(
        self, name: str, messages: Sequence[Message], tools: Sequence[Tool], options: CallOptions
    ) -> OtherReply:
        """Return the policy's reply in another role."""
        if asked := sorted(options.sampling_overrides):
            raise DataError(f"the model {name!r} is the policy, with sampling set by rollout; leave {asked[0]} out")
        if self.session is None:
            self.asked_early = True
            raise EngineError("it is the policy, and there is no engine yet")
        reply = await self.session_of(name).chat(messages, tools, options)
        return OtherReply(reply.message, reply.prompt_tokens, reply.completion_tokens, reply.stop_reason, reply.step)

    def session_of(self, name: str) -> Session:
        """Return the session of the policy in another role."""
        assert self.session is not None
        if name not in self.sessions:
            self.sessions[name] = self.session.copy(name)
        return self.sessions[name]

    def called(self, name: str) -> AttemptModel:
        model = self[name]
        assert isinstance(model, AttemptModel)
        return model

    def failure_of(self, ended_by: AttemptError | None) -> AttemptError | None:
        """Return the error that ended an attempt: the failed call's, unless its code raised the same."""
        if self.failure is None or (isinstance(ended_by, TrajectoryFailure) and ended_by.cause is self.failure.cause):
            return ended_by
        return self.failure

    def attach(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Attach to each step the calls made after it; those before the first step are attached to it, too."""
        calls: dict[int, list[ModelCall]] = {}
        for _, (before, call) in sorted(self.calls.items()):
            calls.setdefault(max(before, 1) - 1, []).append(call)
        return tuple(replace(s, calls=tuple(calls[n])) if n in calls else s for n, s in enumerate(steps))

    def measured(self) -> Measures:
        return Measures(
            Tally.over(metric.of(call.model), [value])
            for _, call in self.calls.values()
            for metric, value in (
                (CALLS, 1),
                (TOKENS, call.prompt_tokens + call.completion_tokens),
                (SECONDS, call.seconds),
            )
        )


class AttemptModel:
    """One attempt's view of a model beside the policy (a `treadle.envs.base.Model`)."""

    def __init__(self, models: AttemptModels, name: str, chat: Chat, renderer: ChatRenderer | None) -> None:
        self._models, self._name, self._chat, self.renderer = models, name, chat, renderer

    async def chat(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the reply to a conversation, for an environment.

        Raises TrajectoryFailure, of cause engine without an answer, or context if the conversation is too long: the
        attempt then fails, whatever its code does.
        """
        asked = as_messages(messages, f"models[{self._name!r}].chat")
        try:
            reply = await self.ask(asked, (), CallOptions(sampling_overrides=options))
        except EngineError as error:
            self._models.failure = TrajectoryFailure(Cause.ENGINE, str(error))
            raise self._models.failure from error
        except (ContextExceeded, TokensExceeded) as error:
            self._models.failure = TrajectoryFailure(Cause.CONTEXT, f"the model {self._name!r}: {error}")
            raise self._models.failure from error
        return reply.message["content"]

    async def ask(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: CallOptions = _NOTHING
    ) -> OtherReply:
        """Return the reply to a conversation, and record the call. Raises EngineError, DataError, ContextExceeded."""
        before = len(self._models.session.steps) if self._models.session else 0
        number, started, clock = self._models.begun, time.time(), time.perf_counter()
        self._models.begun += 1
        try:
            reply = await self._chat(messages, tools, options)
        except EngineError as error:
            raise EngineError(f"the model {self._name!r}: {error}") from error
        if self._name in self._models.copies:
            return reply  # recorded in its own trajectory
        tokens, seconds = (reply.prompt_tokens, reply.completion_tokens), time.perf_counter() - clock
        call = ModelCall(self._name, tuple(messages), reply.message, *tokens, started, seconds)
        self._models.calls[number] = before, call
        return reply
