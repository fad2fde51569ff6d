"""`EnvironmentDriver`: the agent loop of an environment.

reset -> (chat -> step)* -> close          every call of the environment goes through `isolation.UserCode`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from treadle.core.errors import Cause, DataError, StepsExceeded, TrajectoryFailure
from treadle.core.metrics import Measures
from treadle.core.rewards import Reward
from treadle.core.types import Message, Task
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.driver import AttemptDriver
from treadle.rollout.drivers.outcome import ATTEMPT_ERRORS, AttemptError, Outcome, outcome_of
from treadle.rollout.isolation.isolated_environment import EnvironmentFactory, IsolatedEnvironment
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import CallOptions, Session

_NEW, _CONTINUED = CallOptions(), CallOptions(continue_final_message=True)


class EnvironmentDriver(AttemptDriver[Session]):
    """Plays the tasks of environments, each attempt with an environment of its own."""

    def __init__(self, environments: Mapping[str, EnvironmentFactory], config: RolloutConfig) -> None:
        self._environments, self._config = environments, config

    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        """Let model and environment answer each other; return how that ended.

        A `close` that fails is a warning, and takes no reward away.
        """
        factory = self._environments[task.environment]
        environment = IsolatedEnvironment(task.environment, factory, user, self._config.environment_timeout)
        ended_by: AttemptError | None = None
        try:
            await environment.make()
            await self._converse(environment, task, session)
        except ATTEMPT_ERRORS as error:
            ended_by = error
        finally:
            session.close()  # first: the engine waits for it, and the environment may take its time
            warning = await environment.close()
        outcome = outcome_of(session.steps, ended_by, user.cause)
        return replace(outcome, warning=warning, metrics=Measures() if outcome.failure else environment.metrics())

    async def _converse(self, environment: IsolatedEnvironment, task: Task, session: Session) -> None:
        """Play until the environment is done. Raises StepsExceeded after `max_steps`, and what `Session.chat` does."""
        one_message = self._config.conversation == "single_message"
        conversation: list[Message] = list(await environment.reset(task))
        state = ""
        for _ in range(self._config.max_steps):
            going_on = one_message and conversation[-1]["role"] == "assistant"
            reply = await session.chat(conversation, options=_CONTINUED if going_on else _NEW)
            if state:
                session.set_state(reply.number, state)
            answer = await environment.step(reply.message["content"])
            state = answer.state
            try:
                session.reward_last(Reward.of(answer.reward))
            except DataError as error:
                raise TrajectoryFailure(Cause.ENVIRONMENT, f"step: {error}") from error
            if answer.done:
                return
            conversation += [reply.message, *answer.observations]
            if one_message:
                conversation = _one_turn(conversation)
        raise StepsExceeded(self._config.max_steps)


def _one_turn(conversation: Sequence[Message]) -> list[Message]:
    """Return the conversation with all from the first assistant message on as one assistant message."""
    begin = next(n for n, message in enumerate(conversation) if message["role"] == "assistant")
    text = "".join(message["content"] for message in conversation[begin:])
    return [*conversation[:begin], Message(role="assistant", content=text)]
