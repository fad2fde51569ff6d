"""`Session`: messages in, a message out, one exact `Step` recorded per call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treadle.core.draws import Stream, call_seed
from treadle.core.engine import Completion, Engine
from treadle.core.errors import ContextExceeded, DataError, EngineError
from treadle.core.types import Message, SamplingParams, Step
from treadle.rollout.chat import ChatRenderer
from treadle.rollout.conversation import Conversation, Prompt

Tool = Mapping[str, Any]
"""A tool's JSON schema, as OpenAI's API has it: `{"type": "function", "function": {"name": ..., ...}}`."""

ReplyParser = Callable[[str, Sequence[Tool]], Message]
"""What the model wrote -> the assistant message that the agent gets."""


def plain(text: str, tools: Sequence[Tool] = ()) -> Message:
    """All of the text is the message's content."""
    return Message(role="assistant", content=text)


@dataclass(frozen=True, slots=True)
class Address:
    """Where an attempt stands in the run; with the step number it keys every draw of it."""

    seed: int
    stream: Stream
    epoch: int
    position: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one call: the message for the agent, and the step that was recorded, with its number."""

    message: Message
    step: Step
    number: int


class Session:
    """Records one attempt at a task. Messages go out to the agent; ids stay here.

    Invariant: `steps[n].prompt_ids` is what the engine was sent, `steps[n].completion_ids` what it sampled. Steps are
    in the order in which calls were made; several may be in flight.
    The engine session is opened on construction and must be closed.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        renderer: ChatRenderer,
        sampling: SamplingParams,
        max_input_tokens: int,
        address: Address,
        parse: ReplyParser = plain,
    ) -> None:
        self.name = name
        self._engine, self._renderer, self._sampling, self._parse = engine, renderer, sampling, parse
        self._max_input_tokens, self._address = max_input_tokens, address
        self._conversation = Conversation(renderer)
        self._calls = 0
        self._steps: dict[int, Step] = {}  # by the call's number
        engine.open_session(name)

    @property
    def steps(self) -> list[Step]:
        """What has been recorded so far, in the order of calls."""
        return [self._steps[number] for number in sorted(self._steps)]

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, continue_final_message: bool = False
    ) -> Reply:
        """Sample the assistant's next reply to the whole conversation so far and record the call.

        continue_final_message: the last message is the assistant's; the reply goes on with it, in the same turn.

        Raises ContextExceeded if the prompt that would be sent is longer than `max_input_tokens`, DataError if the
        chat template refuses the conversation, EngineError from the engine or for an answer that cannot be recorded.
        """
        prompt = self._conversation.render(messages, tools, continue_final_message=continue_final_message)
        if len(prompt.ids) > self._max_input_tokens:
            raise ContextExceeded(len(prompt.ids), self._max_input_tokens)
        number, self._calls = self._calls, self._calls + 1
        a = self._address
        sampling = replace(self._sampling, seed=call_seed(a.seed, a.stream, a.epoch, a.position, a.attempt, number))
        started = time.perf_counter()
        completion = await self._engine.generate(prompt.ids, sampling, session=self.name)
        step = _recorded(prompt, completion, sampling, time.perf_counter() - started, number)
        message = self._parse(self._renderer.text(step.completion_ids, sampling.stop), tools)
        self._steps[number] = step
        self._conversation.record(prompt, step.completion_ids, message)
        return Reply(message, step, number)

    def reward_last(self, reward: float) -> None:
        """Note what the environment gave for the last step."""
        if reward:
            last = max(self._steps)
            self._steps[last] = replace(self._steps[last], reward=reward)

    def close(self) -> None:
        """No further calls: the engine may free its cache, and waits for this session no more."""
        self._engine.close_session(self.name)


def _recorded(prompt: Prompt, completion: Completion, sampling: SamplingParams, seconds: float, number: int) -> Step:
    try:
        if not 0 < len(completion.token_ids) <= sampling.max_tokens:
            raise DataError(f"it has {len(completion.token_ids)} tokens, 1 to {sampling.max_tokens} were asked for")
        return Step(
            prompt_ids=prompt.ids,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            policy_versions=completion.versions_per_token(),
            sampling=sampling,
            stop_reason=completion.stop_reason,
            seconds=seconds,
            break_cause=prompt.break_cause,
        )
    except DataError as error:
        raise EngineError(f"step {number}: the engine's answer cannot be recorded: {error}") from error
