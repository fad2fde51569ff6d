"""`WorkerDriver`: base of drivers for libraries that play an attempt with their own loop, in a worker process.

    run -> order -> WorkerPool.call -> the library's loop -> HTTP -> gateway -> session
                          |
                       answer -> Graded

Its handlers answer with

    {"reward": 0.5, "metrics": {"num_turns": 3}, "error": None}       or, if the library reports a failure,
    {"reward": None, "metrics": {}, "error": {"cause": "infrastructure", "message": "SandboxError: ..."}}
"""

from __future__ import annotations

import re
from abc import abstractmethod
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from types import TracebackType
from typing import Any, ClassVar, Self

from treadle.core.errors import Cause, ContextExceeded, StepsExceeded, TrajectoryFailure
from treadle.core.metrics import Metric, measured
from treadle.core.rewards import NUMBER, Reward, is_finite, is_reward
from treadle.core.types import Task
from treadle.rollout.drivers.driver import DriverSetup
from treadle.rollout.drivers.gateway import AgentSession, GatewayDriver, Graded
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.isolation.user_code import UserCode
from treadle.workers.foreign import WorkerConfig, WorkerPool, WorkerProgram


class WorkerDriver(GatewayDriver):
    """Plays attempts in worker processes, each of which calls the model at the address of its session.

    Subclass it and write `order`. family: the library's metrics are recorded as `<family>_<name>`. first: context
    entered before the processes start and left after they have ended, such as a server they talk to.
    """

    family: str
    may_wait: ClassVar[bool] = True  # for a slot in a process

    def __init__(
        self,
        setup: DriverSetup,
        program: WorkerProgram,
        config: WorkerConfig,
        first: AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        super().__init__(setup)
        self._program = program
        self._pool, self._first = WorkerPool(program, config), first or nullcontext()

    @abstractmethod
    def order(self, task: Task) -> dict[str, Any]:
        """Return the handler's payload for the task, without `base_url`. Raises TrajectoryFailure."""
        ...

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(self._first)
            await opened.enter_async_context(self._pool)
            await super().__aenter__()
            self._opened = opened.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._opened.aclose()

    async def run(self, task: Task, session: AgentSession, address: SessionAddress, user: UserCode) -> Graded:
        """Have the library play the task; return its reward and metrics.

        An error that it reports fails the attempt, unless its last call was refused for a limit: then the library's
        reward for the partial attempt counts.
        """
        order = {**self.order(task), "base_url": address.base_url, "seconds": self.config.agent_timeout}
        reward, metrics, error = await user.call(
            self._pool.call,
            order,
            what=self._program.name,
            timeout=self.config.agent_timeout,
            check=lambda value: (value["reward"], value["metrics"], value["error"]),
            grace=self._program.limits.cleanup,
        )
        warning = ""
        if error is not None:
            warning = error["message"]
            if not isinstance(session.last_error, StepsExceeded | ContextExceeded):
                refused = session.last_error is not None  # the engine's error then decides
                raise TrajectoryFailure(user.cause if refused else Cause(error["cause"]), warning)
        if not is_reward(reward):
            raise TrajectoryFailure(
                Cause.VERIFIER, f"{self._program.name} gave the reward {reward!r:.100}; it must be a {NUMBER}"
            )
        family = Metric(f"{self.family}_*", "trajectory", "mean", help=f"a metric of {self._program.name}'s")
        named = {family.of(re.sub(r"\W", "_", name)): value for name, value in metrics.items()}
        values = {metric: [float(value)] for metric, value in named.items() if is_finite(value)}
        return Graded(Reward.of(reward), measured("trajectory", values), warning)
