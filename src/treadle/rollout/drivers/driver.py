"""`AttemptDriver`: what plays one attempt on a session. Environments and agent programs have one each.

Another one is a class, given to `treadle.train` or named in a recipe or a task (`driver: my_module:MyDriver`, or a name
that a package registers under `treadle.drivers`):

    class Greeter(AttemptDriver[Session]):
        async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
            reply = await session.chat(task.prompt)
            session.reward_last(Reward.of(float("hello" in reply.message["content"])))
            return outcome_of(session.steps, None, user.cause)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

from treadle.core import registry
from treadle.core.errors import ConfigError
from treadle.core.types import Task
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import ReplyParser
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.outcome import Outcome
from treadle.rollout.gateway.shared import SharedGateway
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import Session, SessionSpec

S = TypeVar("S", bound=Session)


@dataclass(frozen=True, slots=True)
class DriverSetup:
    """Holds what a driver may know of its run.

    parse: reads the replies of agent programs. gateway: where they reach the model; served once a driver opens it.
    """

    config: RolloutConfig
    renderer: ChatRenderer
    parse: ReplyParser
    gateway: SharedGateway


class AttemptDriver(Protocol[S]):
    """Plays attempts, many of them side by side, each on a session of its own.

    There is one of it in a run. It is made with a `DriverSetup` and entered as an async context before the first
    attempt, and left after the last one: what it holds for all attempts (a gateway, worker processes) lives as long.
    Subclass it and write `play`; everything else has a default.
    """

    def __init__(self, setup: DriverSetup) -> None: ...

    async def __aenter__(self) -> Self:
        """Open what all attempts share."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close what all attempts share."""
        return None

    def open_session(self, spec: SessionSpec) -> S:
        """Open the session that records one attempt. Must not wait: the engine relies on the session being there."""
        return cast(S, Session(spec))

    async def play(self, session: S, task: Task, user: UserCode) -> Outcome:
        """Play the task on the session; return how that ended (`outcome.outcome_of`).

        May raise what `outcome.ATTEMPT_ERRORS` lists, as `Session.chat` does: that ends this attempt, by the same
        table. Anything else that it raises ends the run; code that is not trusted is called through `user.call`. The
        caller closes the session, at the latest when this has returned, and keeps time limits by cancelling it.

        task: a copy, which may be changed. user: the boundary behind which the attempt's user code is called.
        """
        ...


DriverFactory = Callable[[DriverSetup], AttemptDriver[Any]]


def load_driver(name: str) -> DriverFactory:
    """Return the driver class `name` (registered under `treadle.drivers`, or `module:Class`).

    Raises ConfigError for an unknown name and for what is no such class.
    """
    return check_driver(registry.resolve("drivers", name), name)


def check_driver(found: object, name: str) -> DriverFactory:
    """Return the class, if it is a driver's. Raises ConfigError as `load_driver` does."""
    where = f"drivers: {name!r}"
    if not inspect.isclass(found):
        raise ConfigError(f"{where} is of type {type(found).__name__}, it must be a subclass of AttemptDriver")
    if not is_driver(found) or getattr(found, "play", None) is AttemptDriver.play:
        raise ConfigError(
            f"{where}: play is missing; subclass AttemptDriver and write 'async def play(self, session, task, user)'"
        )
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise ConfigError(f"{where} is made with one argument, a DriverSetup, but: {error}") from error
    return cast(DriverFactory, found)


def is_driver(found: object) -> bool:
    """Return whether it is a class that has what the runner calls: `open_session` and `play`."""
    return inspect.isclass(found) and all(callable(getattr(found, name, None)) for name in ("open_session", "play"))
