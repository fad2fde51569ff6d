"""`AgentDriver`: agent programs, each of which drives the conversation itself, through an SDK.

    AgentSession <- Gateway <- HTTP <- client <- agent(task, client) -> reward

An agent is written as for any model behind an API; here it calls the gateway of the run, which records its calls like
those of an environment's loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from treadle.core.errors import Cause, TrajectoryFailure
from treadle.core.rewards import NUMBER, Reward, is_reward
from treadle.core.types import Task
from treadle.rollout.agents.agent import Agent, Recovered
from treadle.rollout.agents.clients import async_client, sync_client
from treadle.rollout.drivers.driver import DriverSetup
from treadle.rollout.drivers.gateway import AgentSession, GatewayDriver, Graded
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.isolation.user_code import UserCode, is_async

_GRACE = 5.0  # seconds that an agent whose time is over has to clean up


class AgentDriver(GatewayDriver):
    """Plays the tasks of agent programs."""

    def __init__(self, agents: Mapping[str, Agent], setup: DriverSetup) -> None:
        super().__init__(setup)
        self._agents = agents

    async def run(self, task: Task, session: AgentSession, address: SessionAddress, user: UserCode) -> Graded:
        agent, timeout = self._agents[task.agent], self.config.agent_timeout
        open_client = async_client if is_async(agent) else sync_client
        async with open_client(address.base_url, address.secret, timeout) as client:
            return await user.call(agent, task, client, what="the agent", timeout=timeout, check=_graded, grace=_GRACE)


def _graded(value: object) -> Graded:
    if isinstance(value, Recovered):
        return replace(_graded(value.reward), recovered=True)
    if not isinstance(value, Reward) and not is_reward(value):
        raise TrajectoryFailure(
            Cause.AGENT,
            f"the agent returned {value!r:.100}; it must return its reward, a {NUMBER}, or a Reward, or raise",
        )
    return Graded(Reward.of(value))
