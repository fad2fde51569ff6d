"""`AttemptDriver`: plays one attempt on a session. Environments and agent programs have one each.

To add one, write a class and pass it to `treadle.train`, or name it in a recipe or a task (`driver:
my_module:MyDriver`, or a name that a package registers under `treadle.drivers`); docs/agents.md has an example.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, TypeGuard, TypeVar, cast

from treadle.core import registry
from treadle.core.config import Config
from treadle.core.errors import ConfigError
from treadle.core.registry import NoOptions
from treadle.core.types import Task
from treadle.envs.tasks import NO_OPTIONS
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
    """A driver's view of its run.

    parse: parser of agent programs' replies. gateway: gateway to the model; served once a driver opens it.
    directory: the run's, below which a driver may write; None in an evaluation.
    """

    config: RolloutConfig
    renderer: ChatRenderer
    parse: ReplyParser
    gateway: SharedGateway
    directory: Path | None = None


class AttemptDriver(Protocol[S]):
    """Plays attempts, many concurrently, each on its own session.

    A run has one instance, created with a `DriverSetup` and entered as an async context around all attempts; resources
    shared by attempts (a gateway, worker processes) live as long. Subclass it and write `play`; everything else has a
    default.

    may_wait: whether an attempt may wait for others to end before it calls the model. By default the engine then does
    not wait for all of them in a synchronous run either (`engine.lock_step`).
    replayable: whether an interrupted attempt may be played again with the recorded answers (`rollout.replay`); false
    if it has external side effects that a replay would repeat.
    options_type: type of a recipe's `driver_options`; a driver with options is created with `(setup, options)`.
    """

    may_wait: ClassVar[bool] = False
    replayable: ClassVar[bool] = True
    options_type: ClassVar[type[Config]] = NoOptions

    def __init__(self, setup: DriverSetup) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def open_session(self, spec: SessionSpec) -> S:
        """Open the session that records one attempt. Must not wait: the engine relies on the session being open."""
        return cast(S, Session(spec))

    def replays(self, task: Task) -> bool:
        """Return whether attempts at the task are `replayable`."""
        return self.replayable

    def may_start(self, task: Task) -> bool:
        """Return whether attempts at the task may begin with recorded steps (`rollout.starts`)."""
        return self.replays(task)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait until one more attempt may begin, and hold its slot. Time limits count from then on."""
        yield

    async def describe(self, task: Task) -> str:
        """Describe the player of tasks such as this one, for a dry run. Raises ConfigError if they cannot be played."""
        return ""

    async def check(self, session: S, task: Task) -> None:
        """Raise ConfigError or EngineError if attempts at tasks such as this one cannot work.

        Called once, before the first attempt. session: a disposable session that may be called.
        """
        return None

    async def play(self, session: S, task: Task, user: UserCode) -> Outcome:
        """Play the task on the session; return how it ended (`outcome.outcome_of`).

        May raise `outcome.ATTEMPT_ERRORS`, as `Session.chat` does: that ends this attempt, by the same table. Any other
        error ends the run; call untrusted code through `user.call`. The caller closes the session, at the latest when
        this returns, and enforces time limits by cancelling it.

        task: a copy, which may be changed. user: the boundary for calling the attempt's user code.
        """
        ...


DriverFactory = Callable[[DriverSetup], AttemptDriver[Any]]


def load_driver(name: str, options: Mapping[str, Any] = NO_OPTIONS) -> DriverFactory:
    """Return a factory of drivers of class `name` (registered, or `module:Class`) with the options.

    Raises ConfigError for an unknown name, a class that is not a driver, and options it does not take.
    """
    return check_driver(registry.resolve("drivers", name), name, options)


def check_driver(candidate: object, name: str, options: Mapping[str, Any] = NO_OPTIONS) -> DriverFactory:
    """Return a factory of drivers if the class is one. Raises ConfigError as `load_driver` does."""
    where = f"drivers: {name!r}"
    if not is_driver(candidate):
        is_class = inspect.isclass(candidate)
        what = "is not a subclass" if is_class else f"is of type {type(candidate).__name__}, it must be a subclass"
        raise ConfigError(f"{where} {what} of AttemptDriver")
    if candidate.play is AttemptDriver.play:
        raise ConfigError(f"{where}: play is missing; write 'async def play(self, session, task, user)'")
    built = registry.build_options(candidate.options_type, options, "driver_options", name)
    arguments: dict[str, Any] = {"options": built} if candidate.options_type.model_fields else {}
    try:
        inspect.signature(candidate).bind(None, **arguments)
    except TypeError as error:
        raise ConfigError(f"{where} is made with a DriverSetup and, if any, its options_type, but: {error}") from error
    return cast(DriverFactory, partial(candidate, **arguments) if arguments else candidate)


def is_driver(candidate: object) -> TypeGuard[type[AttemptDriver[Any]]]:
    return inspect.isclass(candidate) and AttemptDriver in inspect.getmro(candidate)
