"""`Session`: messages in, text out, one exact `Step` recorded per call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.core.draws import Stream, call_seed
from treadle.core.engine import Engine
from treadle.core.errors import Cause, ContextExceeded, DataError, EngineError, TrajectoryFailure
from treadle.core.types import Ids, Message, SamplingParams, Step
from treadle.rollout.chat import ChatRenderer


@dataclass(frozen=True, slots=True)
class Address:
    """Where an attempt stands in the run; with the step number it keys every draw of it."""

    seed: int
    stream: Stream
    epoch: int
    position: int
    attempt: int


class Session:
    """Records one attempt at a task. Text goes out to the agent; ids stay here.

    Invariant: `steps[n].prompt_ids` is what the engine was sent, and begins with everything before it, id for id.
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
    ) -> None:
        self.name = name
        self.steps: list[Step] = []
        self._engine, self._renderer, self._sampling = engine, renderer, sampling
        self._max_input_tokens, self._address = max_input_tokens, address
        self._history: list[Message] = []  # every message up to and including the last reply
        engine.open_session(name)

    async def chat(self, messages: Sequence[Message]) -> str:
        """Sample the assistant's next reply to the whole conversation so far and record the call.

        Raises ContextExceeded if the prompt that would be sent is longer than `max_input_tokens`, TrajectoryFailure
        (agent) if the conversation does not continue the recorded one, DataError if the chat template refuses it,
        EngineError from the engine or for an answer that cannot be recorded.
        """
        prompt = self._prompt(messages)
        if len(prompt) > self._max_input_tokens:
            raise ContextExceeded(len(prompt), self._max_input_tokens)
        a = self._address
        seed = call_seed(a.seed, a.stream, a.epoch, a.position, a.attempt, len(self.steps))
        sampling = replace(self._sampling, seed=seed)
        started = time.perf_counter()
        completion = await self._engine.generate(prompt, sampling, session=self.name)
        try:
            if not 0 < len(completion.token_ids) <= sampling.max_tokens:
                raise DataError(f"it has {len(completion.token_ids)} tokens, 1 to {sampling.max_tokens} were asked for")
            step = Step(
                prompt_ids=prompt,
                completion_ids=completion.token_ids,
                logprobs=completion.logprobs,
                policy_versions=completion.versions_per_token(),
                sampling=sampling,
                stop_reason=completion.stop_reason,
                seconds=time.perf_counter() - started,
            )
        except DataError as error:
            raise EngineError(f"step {len(self.steps)}: the engine's answer cannot be recorded: {error}") from error
        self.steps.append(step)
        reply = self._renderer.text(step.completion_ids, sampling.stop)
        self._history = [*messages, Message(role="assistant", content=reply)]
        return reply

    def reward_last(self, reward: float) -> None:
        """Note what the environment gave for the last step."""
        if reward:
            self.steps[-1] = replace(self.steps[-1], reward=reward)

    def close(self) -> None:
        """No further calls: the engine may free its cache, and waits for this session no more."""
        self._engine.close_session(self.name)

    def _prompt(self, messages: Sequence[Message]) -> Ids:
        if not self.steps:
            return self._renderer.first(messages)
        known = len(self._history)
        if list(messages[:known]) != self._history or len(messages) == known:
            raise TrajectoryFailure(Cause.AGENT, f"session {self.name}: the conversation was edited, not continued")
        return self._renderer.next(self.steps[-1].full_ids, self._history[:-1], messages[known:])
