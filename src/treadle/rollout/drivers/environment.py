"""`EnvironmentDriver`: plays attempts at environments.

make -> reset -> (chat -> step)* -> finish -> close
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from treadle.core.errors import ContextExceeded, StepsExceeded
from treadle.core.metrics import Measures
from treadle.core.rewards import Reward
from treadle.core.types import Message, Status, Task
from treadle.rendering.replies import ReplyParser, plain
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.driver import AttemptDriver
from treadle.rollout.drivers.outcome import ATTEMPT_ERRORS, LIMITS, AttemptError, Outcome, outcome_of
from treadle.rollout.isolation.isolated_environment import EnvironmentFactory, IsolatedEnvironment
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import CallOptions, Session


class EnvironmentDriver(AttemptDriver[Session]):
    """Plays the tasks of environments, each attempt with an environment of its own.

    parse: reads replies for environments that take them parsed.
    """

    def __init__(
        self, environments: Mapping[str, EnvironmentFactory], config: RolloutConfig, parse: ReplyParser = plain
    ) -> None:
        self._environments, self._config, self._parse = environments, config, parse

    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        """Play an attempt and close its environment. A `close` that fails is a warning and takes no reward away."""
        factory = self._environments[task.environment]
        environment = IsolatedEnvironment(task.environment, factory, user, self._config)
        ended_by: AttemptError | None
        try:
            ended_by = await self._play(environment, task, session)
        except ATTEMPT_ERRORS as error:
            ended_by = error
        finally:
            session.close()
            warning = await environment.close()
        outcome = outcome_of(session.steps, ended_by, user.cause)
        return replace(outcome, warning=warning, metrics=Measures() if outcome.failure else environment.metrics())

    async def _play(
        self, environment: IsolatedEnvironment, task: Task, session: Session
    ) -> StepsExceeded | ContextExceeded | None:
        """Play an attempt from its first prompt to its last reward; return the limit that ended it, if one did."""
        await environment.make()
        conversation = await environment.reset(task)
        session.parse = self._parse if environment.takes_reply else session.parse
        limit: StepsExceeded | ContextExceeded | None = None
        state = ""
        for number in range(self._config.max_steps):
            options = CallOptions(
                tool_calls=environment.takes_reply, continue_final_message=self._continues(conversation, number)
            )
            try:
                reply = await session.chat(conversation, environment.tools, options)
            except ContextExceeded as error:
                if number == 0:
                    raise
                limit = error
                break
            session.set_state(reply.number, state)
            answer = await environment.step(reply)
            session.reward_last(Reward.of(answer.reward))
            if answer.done:
                break
            conversation, state = self._extended(conversation, reply.message, answer.observations, number), answer.state
        else:
            limit = StepsExceeded(self._config.max_steps)
        session.close()  # the engine waits for it, and `finish` may take its time
        ended = Status.DONE if limit is None else LIMITS[type(limit)]
        session.add_to_last_reward(await environment.finish(ended))
        return limit

    def _continues(self, conversation: Sequence[Message], number: int) -> bool:
        """Whether call `number` continues the last message: of a single message, or a reply that the task begins."""
        in_turn = number == 0 or self._config.conversation == "single_message"
        return in_turn and conversation[-1]["role"] == "assistant"

    def _extended(
        self, conversation: list[Message], reply: Message, observations: Sequence[Message], number: int
    ) -> list[Message]:
        if self._continues(conversation, number):
            *conversation, begun = conversation
            reply = {**reply, "content": begun["content"] + reply["content"]}
        if self._config.conversation == "single_message":
            text = "".join(message["content"] for message in (reply, *observations))
            reply, observations = Message(role="assistant", content=text), ()
        return [*conversation, reply, *observations]
