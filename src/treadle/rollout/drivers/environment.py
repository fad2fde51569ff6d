"""`EnvironmentDriver`: the agent loop of an environment.

reset -> (chat -> step)* -> finish -> close          every call of the environment goes through `isolation.UserCode`
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace

from treadle.core.errors import Cause, DataError, StepsExceeded, TrajectoryFailure
from treadle.core.metrics import Measures
from treadle.core.rewards import Reward
from treadle.core.types import Message, Status, Task
from treadle.envs.base import Reply
from treadle.rendering.replies import ReplyParser, plain
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.driver import AttemptDriver
from treadle.rollout.drivers.outcome import ATTEMPT_ERRORS, AttemptError, Outcome, outcome_of
from treadle.rollout.isolation.isolated_environment import EnvironmentFactory, IsolatedEnvironment
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import CallOptions, Session
from treadle.rollout.session import Reply as SessionReply


class EnvironmentDriver(AttemptDriver[Session]):
    """Plays the tasks of environments, each attempt with an environment of its own.

    parse: reads replies for environments that take them parsed.
    """

    def __init__(
        self, environments: Mapping[str, EnvironmentFactory], config: RolloutConfig, parse: ReplyParser = plain
    ) -> None:
        self._environments, self._config, self._parse = environments, config, parse

    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        """Let model and environment answer each other; return how that ended.

        A `close` that fails is a warning, and takes no reward away.
        """
        factory = self._environments[task.environment]
        environment = IsolatedEnvironment(task.environment, factory, user, self._config.environment_timeout)
        try:
            outcome = await self._play_and_finish(environment, task, session, user.cause)
        finally:
            session.close()
            warning = await environment.close()
        return replace(outcome, warning=warning, metrics=Measures() if outcome.failure else environment.metrics())

    async def _play_and_finish(
        self, environment: IsolatedEnvironment, task: Task, session: Session, cause: Cause
    ) -> Outcome:
        ended_by = await _error_of(self._converse(environment, task, session))
        session.close()  # first: the engine waits for it, and the environment may take its time
        outcome = outcome_of(session.steps, ended_by, cause)
        if outcome.failure is not None:
            return outcome
        failure = await _error_of(self._finish(environment, session, outcome.status))
        return outcome_of(session.steps, failure or ended_by, cause)

    async def _finish(self, environment: IsolatedEnvironment, session: Session, ended: Status) -> None:
        reward = await environment.finish(ended, self._config.finish_timeout)
        try:
            session.add_to_last_reward(reward)
        except DataError as error:
            raise TrajectoryFailure(Cause.ENVIRONMENT, f"finish: {error}") from error

    async def _converse(self, environment: IsolatedEnvironment, task: Task, session: Session) -> None:
        """Make the environment and play until it is done.

        Raises StepsExceeded after `max_steps`, and what `Session.chat` does.
        """
        await environment.make()
        one_message = self._config.conversation == "single_message"
        conversation: list[Message] = list(await environment.reset(task))
        environment.check_steps(self._config.max_steps)
        tools, parsed, state = environment.tools(), environment.reads_replies, ""
        if parsed:
            session.parse = self._parse
        for _ in range(self._config.max_steps):
            begun = conversation[-1]["role"] == "assistant" and not session.steps  # a reply that the task begins
            going_on = begun or (one_message and conversation[-1]["role"] == "assistant")
            options = CallOptions(tool_calls=parsed, continue_final_message=going_on)
            reply = await session.chat(conversation, tools, options)
            if state:
                session.set_state(reply.number, state)
            answer = await environment.step(_parsed(reply) if parsed else reply.text)
            state = answer.state
            try:
                session.reward_last(Reward.of(answer.reward))
            except DataError as error:
                raise TrajectoryFailure(Cause.ENVIRONMENT, f"step: {error}") from error
            if answer.done:
                return
            said = reply.message
            if begun:
                said = {**said, "content": conversation.pop()["content"] + said["content"]}
            conversation += [said, *answer.observations]
            if one_message:
                conversation = _one_turn(conversation)
        raise StepsExceeded(self._config.max_steps)


def _parsed(reply: SessionReply) -> Reply:
    message = reply.message
    return Reply(reply.text, message.get("reasoning_content", ""), tuple(message.get("tool_calls", ())))


async def _error_of(playing: Awaitable[None]) -> AttemptError | None:
    """Return what ended the attempt; None if it came to its end."""
    try:
        await playing
    except ATTEMPT_ERRORS as error:
        return error
    return None


def _one_turn(conversation: Sequence[Message]) -> list[Message]:
    """Return the conversation with all from the first assistant message on as one assistant message."""
    begin = next(n for n, message in enumerate(conversation) if message["role"] == "assistant")
    text = "".join(message["content"] for message in conversation[begin:])
    return [*conversation[:begin], Message(role="assistant", content=text)]
