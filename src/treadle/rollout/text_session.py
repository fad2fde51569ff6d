"""Attempts with a model that answers as text: one behind a URL, or a person. Environments and agents play as usual.

TextSession.chat -> Chat (`EndpointPolicy`, a person) -> OtherReply -> Step.chat, a call without ids
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np

from treadle.core.engine import Completion, ComponentStatus
from treadle.core.errors import ConfigError, ContextExceeded, DataError, EngineError
from treadle.core.images import PromptImage
from treadle.core.types import (
    DropReason,
    Floats,
    Ids,
    Message,
    ModelCall,
    SamplingParams,
    Step,
    StopReason,
    ToolCall,
)
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.identity import Prompt
from treadle.rendering.replies import ReplyParser, Tool, plain
from treadle.rendering.structure import Structure
from treadle.rollout.attempt import Players, Rollouts, open_drivers
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.driver import AttemptDriver
from treadle.rollout.drivers.gateway import AgentDriver, AgentSession
from treadle.rollout.isolation.event_loop import watched_event_loop
from treadle.rollout.other_models import Chat, OtherModelConfig, call_fields, open_models
from treadle.rollout.rewards import RewardsConfig
from treadle.rollout.session import CallOptions, OtherReply, Reply, Session, SessionSpec

_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)
_DEFAULT = CallOptions()


class EndpointPolicy:
    """A model behind the URL of an API like OpenAI's, in the policy's place.

    config: its `options` are fields of each request and override the recipe's sampling; null omits one. concurrency:
    number of concurrent calls.
    """

    def __init__(self, config: OtherModelConfig, concurrency: int) -> None:
        from treadle.rollout.chat_endpoint import ChatEndpoint  # httpx

        assert config.url is not None and config.model is not None
        limits = {"timeout": config.timeout, "patience": config.timeout, "api_key_env": config.api_key_env}
        self._endpoint = ChatEndpoint(config.url, config.model, options={}, concurrency=concurrency, **limits)
        self._fixed = config.options

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool], options: CallOptions) -> OtherReply:
        request = {**options.sampling_overrides, **call_fields(tools, options), **self._fixed}
        request = {name: value for name, value in request.items() if value is not None}
        answer = await self._endpoint.ask(messages, **request)
        if answer.stop_reason is StopReason.ABORT:
            raise EngineError("its server cut off the answer (finish_reason says neither that it ended, nor length)")
        return OtherReply(answer.message, answer.prompt_tokens, answer.completion_tokens, answer.stop_reason)


def _request(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request. Fields unknown to OpenAI's API are omitted if they are neutral."""
    filters = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed % 2**31,
        **{name: getattr(sampling, name) for name, is_set in filters.items() if is_set},
    }


class NoEngine:
    """The engine of sessions that never call one."""

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
        raise EngineError("there is no engine, and so no token ids: the model answers as text")

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        raise EngineError("there is no engine, and so no log-probabilities: the model answers as text")

    def status(self) -> Sequence[ComponentStatus]:
        return []

    async def close(self) -> None: ...


class NoRenderer(ChatRenderer):
    """The renderer of sessions that never render."""

    def __init__(self) -> None:
        self.began, self.structure = None, cast(Structure, None)

    def parser(self, name: str, setting: str = "") -> ReplyParser:
        return plain


class TextSession(Session):
    """Records an attempt with a model that answers as text.

    Stop strings are removed here, because most servers do not report which one ended a reply; prompts that the server
    counts as longer than `max_input_tokens` end the attempt as with an engine, but one answer later.

    answer, model: the answering function, and the model's name. keeps_stop: whether the message keeps the stop string,
    so that the next prompt has it too, as with an engine.
    """

    has_ids = False
    answer: Chat
    model: str
    keeps_stop = True

    def copy(self, role: str) -> Session:
        copy = TextSession(self._copied(role), calls=self._calls)
        copy.answer, copy.model = self.answer, self.model
        return copy

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: CallOptions = _DEFAULT
    ) -> Reply:
        if options.continue_final_message:
            raise DataError("a chat endpoint cannot continue an assistant message; let the prompt end before it")
        number = self._numbered(Prompt(_NO_IDS, tuple(messages)))
        sampling = self._sampling_of(number, options.sampling_overrides, 0)
        sampling = replace(sampling, max_tokens=options.max_tokens or sampling.max_tokens)
        started, clock = time.time(), time.perf_counter()
        reply = await self.answer(messages, tools, replace(options, sampling_overrides=_request(sampling)))
        message, stop = self._cut(reply.message, sampling.stop)
        if calls := message.get("tool_calls"):
            named = (ToolCall(**{**c, "id": c["id"] or f"c{number:05d}{i:03d}"}) for i, c in enumerate(calls))
            message["tool_calls"] = [*named][: None if options.parallel_tool_calls else 1]
        longest = self._spec.max_input_tokens
        limit = longest if options.max_input_tokens is None else min(options.max_input_tokens, longest)
        is_long = reply.prompt_tokens > limit
        tokens, seconds = (reply.prompt_tokens, reply.completion_tokens), time.perf_counter() - clock
        self._steps[number] = Step(
            prompt_ids=_NO_IDS,
            completion_ids=_NO_IDS,
            logprobs=_NO_LOGPROBS,
            policy_versions=_NO_IDS,
            sampling=sampling,
            stop_reason=reply.stop_reason if stop is None else StopReason.STOP,
            seconds=seconds,
            break_cause=options.break_cause,
            dropped=DropReason.REJECTED if is_long else None,
            started=started,
            summary=options.summary,
            withheld=len(calls or ()) - len(message.get("tool_calls", ())),
            chat=ModelCall(self.model, tuple(messages), message, *tokens, started, seconds, tuple(tools)),
        )
        if is_long:
            raise ContextExceeded(reply.prompt_tokens, limit)
        return Reply(message, self._steps[number], number, None if self.keeps_stop else stop, number)

    def _cut(self, message: Message, stops: Sequence[str]) -> tuple[Message, str | None]:
        """Return the message up to the first stop string, and that string."""
        text = message["content"]
        start, stop = min(((text.index(s), s) for s in stops if s in text), default=(len(text), None))
        end = start + len(stop) if stop and self.keeps_stop else start
        return {**message, "content": text[:end]}, stop

    async def complete(self, prompt: str | Sequence[int], options: CallOptions = _DEFAULT) -> Reply:
        raise DataError("the model is behind a chat endpoint, which does not take raw prompts; send messages")

    async def count(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), continue_final_message: bool = False
    ) -> int:
        raise DataError("the model is behind a chat endpoint, which cannot count tokens before a call")


class TextAgentSession(AgentSession, TextSession):
    """Records an attempt of an agent program with a model that answers as text."""

    keeps_stop = False  # like OpenAI's API


class TextRollouts(Rollouts):
    """Plays attempts with a model that answers as text. Drivers other than Treadle's own have sessions with ids."""

    answer: Chat
    model: str

    def _open_session(self, driver: AttemptDriver[Any], spec: SessionSpec) -> Session:
        session: TextSession
        if isinstance(driver, AgentDriver):
            session = TextAgentSession(spec, max_calls=self.config.max_steps)
        else:
            session = TextSession(spec)
        session.answer, session.model = self.answer, self.model
        return session


@asynccontextmanager
async def open_text_rollouts(
    answer: Chat,
    model: str,
    players: Players,
    config: RolloutConfig,
    rewards: RewardsConfig,
    log: Callable[[str], None],
) -> AsyncIterator[TextRollouts]:
    """Open rollouts as `open_rollouts` does. Raises ConfigError if they need ids, or must continue a message."""
    if players.drivers:
        raise ConfigError(
            f"driver {next(iter(players.drivers))!r} plays with the models of Treadle's engines alone; evaluate one of "
            "those (treadle eval --model DIR), or play an environment or an agent"
        )
    if config.conversation == "single_message":
        raise ConfigError(
            "rollout.conversation is 'single_message', and a chat endpoint cannot continue an assistant message; "
            "set rollout.conversation=turns"
        )
    renderer = NoRenderer()
    async with (
        open_drivers(renderer, players, config, log=log) as drivers,
        open_models(players.models, None) as models,
    ):
        with watched_event_loop(log):
            rollouts = TextRollouts(NoEngine(), renderer, drivers, config, rewards, models)
            rollouts.answer, rollouts.model = answer, model
            yield rollouts
