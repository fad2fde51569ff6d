"""Attempts at tasks, concurrent within a group: the part common to all drivers.

Rollouts.start -> driver of the task -> Session -> Outcome -> Trajectory -> RewardShaper
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from treadle.core.draws import Stream
from treadle.core.engine import ComponentStatus, Engine
from treadle.core.errors import Cause, TrajectoryFailure
from treadle.core.outcomes import without_summaries
from treadle.core.types import PLAYERS, SamplingParams, Step, Task, Trajectory, trajectory_id
from treadle.envs.tasks import made_class
from treadle.rendering.chat import ChatRenderer
from treadle.rollout.agents.agent import Agent
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.driver import AttemptDriver, DriverFactory, DriverSetup
from treadle.rollout.drivers.environment import EnvironmentDriver, EnvironmentFactory
from treadle.rollout.drivers.gateway import AgentDriver
from treadle.rollout.drivers.outcome import ATTEMPT_ERRORS, Outcome, outcome_of
from treadle.rollout.gateway.shared import SharedGateway
from treadle.rollout.isolation.event_loop import watched_event_loop
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.other_models import OPEN_MODELS, AttemptModels, MakeModel, OtherModel, PolicyCopy, open_models
from treadle.rollout.replay import CHANGED, AnsweredCall, Prefix, Replay
from treadle.rollout.rewards import RewardsConfig, RewardShaper, with_measured
from treadle.rollout.session import Address, Session, SessionSpec

_AS_GIVEN = RewardsConfig()
_CANCELLED = "the attempt was cancelled from within, by its driver"
NO_PREFIXES: Mapping[int, Prefix] = MappingProxyType({})
CHECK, _BRIEF = Address(0, Stream.EVALUATE, 0, 0, 0), 16  # address of drivers' checks, and token limit of their calls


@dataclass(frozen=True, slots=True)
class Players:
    """Players of tasks by name, and the models beside the policy that they may call."""

    environments: Mapping[str, EnvironmentFactory] = field(default_factory=dict)
    agents: Mapping[str, Agent] = field(default_factory=dict)
    drivers: Mapping[str, DriverFactory] = field(default_factory=dict)
    models: Mapping[str, MakeModel] = field(default_factory=dict)

    @classmethod
    def of(cls, by_task: Mapping[tuple[str, str], Any], models: Mapping[str, MakeModel]) -> Players:
        """Return the players by `Task.player`: `Players.of({("agent", "solve"): solve}, {})`."""
        environments, agents, drivers = (
            {name: made for (kind, name), made in by_task.items() if kind == wanted} for wanted in PLAYERS
        )
        return cls(environments, agents, drivers, models)

    @property
    def by_task(self) -> dict[tuple[str, str], Any]:
        """Return the players by `Task.player`."""
        kinds = zip(PLAYERS, (self.environments, self.agents, self.drivers), strict=True)
        return {(kind, name): made for kind, named in kinds for name, made in named.items()}

    def may_start(self, task: Task) -> bool:
        """Return whether attempts at the task may begin in the middle: its player can be replayed or restored, and the
        policy plays no other role.
        """
        copies, player = any(make is PolicyCopy for make in self.models.values()), made_class(self.by_task[task.player])
        return not copies and bool(getattr(player, "replayable", True) or getattr(player, "restorable", False))

    @property
    def may_wait(self) -> bool:
        """Whether some driver's attempts may wait for others to end (`AttemptDriver.may_wait`)."""
        return any(getattr(made_class(driver), "may_wait", False) for driver in self.drivers.values())


class CallLog(Protocol):
    """Keeps the answered calls of unfinished attempts, in case the run is killed."""

    def recorded(self, address: Address) -> Sequence[AnsweredCall]:
        """Take the recorded first calls of an attempt after its prefix, without a gap."""

    def add(self, address: Address, call: AnsweredCall) -> Awaitable[None]:
        """Make a call durable, whether or not it is waited for. Raises RunError."""

    def forget(self, address: Address) -> None:
        """Forget an attempt's calls: it restarts."""

    def restarted(self, address: Address, player: str, what: str) -> None:
        """Forget an attempt's calls after its replay diverged. player: `environment 'lookup'`."""


def recorded_calls(log: CallLog, address: Address, prefix: Prefix | None) -> Sequence[AnsweredCall]:
    """Take the recorded calls of an attempt; none if it had another prefix."""
    recorded, first = log.recorded(address), 0 if prefix is None else len(prefix.steps)
    if recorded and recorded[0].number != first:
        log.forget(address)
        return ()
    return recorded


class RolloutRunner(Protocol):
    """Plays attempts at tasks.

    sampling: as used in training. log: for attempts continued by a resumed run. prefixes: recorded steps with which
    attempts begin, by number of the attempt.
    """

    sampling: SamplingParams

    def start(
        self,
        group_id: str,
        task: Task,
        addresses: list[Address],
        sampling: SamplingParams | None = None,
        log: CallLog | None = None,
        prefixes: Mapping[int, Prefix] = NO_PREFIXES,
    ) -> list[asyncio.Future[Trajectory]]: ...


class _Attempt:
    """An attempt with an open session. models: models beside the policy. limit: seconds that it may take."""

    def __init__(
        self,
        driver: AttemptDriver[Any],
        task: Task,
        spec: SessionSpec,
        session: Session,
        models: Mapping[str, OtherModel],
        limit: float,
    ) -> None:
        self.driver, self.task, self.spec, self.session, self._limit = driver, task, spec, session, limit
        self.user = user_code(task, session.name)
        self.user.models = AttemptModels(models, session, spec.address) if models else None

    async def replay(self) -> Trajectory | None:
        """Play it as `play` does; return None if it diverges from its recorded calls, or ends within its prefix."""
        playing, replay = self.play(), self.spec.replay
        if replay is None or not replay.count:
            return await playing
        task = asyncio.ensure_future(playing)
        replay.on_divergence = task.cancel
        try:
            played = await task
            if replay.first and played.failure is None and len(played.steps) <= replay.first:
                replay.diverged_at, replay.lost_start = (
                    len(played.steps),
                    f"ended before the step to begin with{CHANGED}",
                )
                return None
            return played
        except asyncio.CancelledError:
            if replay.diverged_at is None or ((current := asyncio.current_task()) and current.cancelling()):
                raise
            return None

    @property
    def divergence(self) -> str:
        """What to record of an attempt that could not begin with its prefix; "" for any other."""
        why = "" if self.spec.replay is None else self.spec.replay.lost_start
        return f"{self.user.name} {why}; the attempt began at step 0" if why else ""

    async def play(self) -> Trajectory:
        started = time.perf_counter()
        outcome = await self._outcome()
        seconds = time.perf_counter() - started
        steps, copies = tuple(self.session.steps), list[Session]()
        if self.user.models is not None:
            steps, copies = self.user.models.attach(steps), [*self.user.models.sessions.values()]
            self.user.measured += self.user.models.measured()
        return replace(
            self._trajectory(self.session.name, steps, outcome, seconds),
            warning=outcome.warning,
            metrics=outcome.metrics,
            blocked_seconds=self.user.blocked_seconds,
            copies=tuple(self._copy(copy, outcome, seconds) for copy in copies if copy.steps),
        )

    async def _outcome(self) -> Outcome:
        """Return the driver's outcome, or the outcome of an error or of the attempt's time limit."""
        try:
            async with asyncio.timeout(self._limit):
                return await self.driver.play(self.session, self.task.copy(), self.user)
        except ATTEMPT_ERRORS as error:
            return outcome_of(self.session.steps, error, self.user.cause)
        except TimeoutError:
            what = f"the attempt took longer than {self._limit:g} s (rollout.trajectory_timeout)"
            return outcome_of(self.session.steps, TrajectoryFailure(Cause.TIMEOUT, what), self.user.cause)
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is None or current.cancelling():
                raise
            failure = TrajectoryFailure(Cause.INFRASTRUCTURE, _CANCELLED)
            return outcome_of(self.session.steps, failure, self.user.cause)

    def _copy(self, session: Session, whole: Outcome, seconds: float) -> Trajectory:
        """Return the trajectory of the policy in another role, which fails with its attempt."""
        own = whole if whole.failure else outcome_of(session.steps, None, Cause.ENVIRONMENT)
        return self._trajectory(session.name, tuple(session.steps), own, seconds)

    def _trajectory(self, name: str, steps: tuple[Step, ...], outcome: Outcome, seconds: float) -> Trajectory:
        ended, number = (outcome.reward, outcome.status, outcome.failure), self.spec.address.attempt
        prefix = self.spec.replay.prefix if self.spec.replay else None
        start = prefix.start if prefix else None
        return Trajectory(name, self.task.task_id, number, steps, *ended, seconds=seconds, start=start)


class Rollouts:
    """Plays each attempt with its task's driver.

    drivers: driver of each `Task.player`, `{("environment", "lookup"): EnvironmentDriver(...)}`. rewards: applied to
    each attempt as it ends; shaping only to training attempts (`Address.stream`), and not before a group reward.
    models: opened models that attempts may call beside the engine.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        drivers: Mapping[tuple[str, str], AttemptDriver[Any]],
        config: RolloutConfig,
        rewards: RewardsConfig = _AS_GIVEN,
        models: Mapping[str, OtherModel] = MappingProxyType({}),
    ) -> None:
        self.engine, self.renderer, self.config, self._models = engine, renderer, config, models
        self._drivers, self.sampling = drivers, config.sampling
        self._shaper = RewardShaper(rewards, config.environment_timeout)

    def start(
        self,
        group_id: str,
        task: Task,
        addresses: list[Address],
        sampling: SamplingParams | None = None,
        log: CallLog | None = None,
        prefixes: Mapping[int, Prefix] = NO_PREFIXES,
    ) -> list[asyncio.Future[Trajectory]]:
        """Open one session per address, now and in order, and start the attempts; return their futures.

        sampling: default: as used in training. An attempt whose player is not replayable begins without its prefix, and
        so does one whose player does not repeat the recorded requests (`Trajectory.warning`). Opening is immediate so
        that a lock-step engine knows of every attempt before the first one calls it.
        """
        driver = self._drivers[task.player]
        log = log if log is not None and driver.replays(task) else None
        prefixes = prefixes if prefixes and driver.may_start(task) else NO_PREFIXES
        specs = [self._spec(group_id, a, sampling or self.sampling, log, prefixes.get(a.attempt)) for a in addresses]
        futures: list[asyncio.Future[Trajectory]] = []
        for attempt in [self._open(driver, task, spec) for spec in specs]:
            future = asyncio.ensure_future(self._play(attempt, log))
            # Also covers attempts cancelled before they begin.
            future.add_done_callback(lambda _, session=attempt.session: session.close())  # type: ignore[misc]
            futures.append(future)
        return futures

    async def check(self, tasks: Sequence[Task]) -> None:
        """Have each driver check that it can play its first task. Raises ConfigError or EngineError."""
        unchecked = {p for p, driver in self._drivers.items() if type(driver).check is not AttemptDriver.check}
        brief = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, _BRIEF))
        for task in tasks:
            if not unchecked:
                return
            if task.player not in unchecked:
                continue
            unchecked.discard(task.player)
            driver = self._drivers[task.player]
            session = self._open_session(driver, self._spec("check", CHECK, brief))
            try:
                await driver.check(session, task.copy())
            finally:
                session.close()

    def status(self) -> list[ComponentStatus]:
        return []

    def _spec(
        self,
        group_id: str,
        address: Address,
        sampling: SamplingParams,
        log: CallLog | None = None,
        prefix: Prefix | None = None,
    ) -> SessionSpec:
        name = trajectory_id(group_id, address.attempt)
        prompt, whole = self.config.max_input_tokens, self.config.max_total_tokens
        replay = None if prefix is None else Replay(prefix=prefix)
        if log is not None:
            replay = Replay(recorded_calls(log, address, prefix), partial(log.add, address), prefix)
        return SessionSpec(name, self.engine, self.renderer, sampling, prompt, address, whole, replay)

    def _open_session(self, driver: AttemptDriver[Any], spec: SessionSpec) -> Session:
        session: Session = driver.open_session(spec)
        return session

    def _open(self, driver: AttemptDriver[Any], task: Task, spec: SessionSpec) -> _Attempt:
        session = self._open_session(driver, spec)
        return _Attempt(driver, task, spec, session, self._models, self.config.trajectory_timeout)

    async def _play(self, attempt: _Attempt, log: CallLog | None) -> Trajectory:
        """Play an attempt, weight its rewards, and shape them if it is for training.

        If it diverges from its recorded calls (`Replay.diverged_at`), it is played again without them.
        """
        OPEN_MODELS.set({**OPEN_MODELS.get(), **self._models})  # in this attempt's task
        warning = ""
        try:
            async with attempt.driver.place():
                try:
                    while (played := await attempt.replay()) is None:
                        warning = warning or attempt.divergence
                        attempt = self._restart(attempt, log)
                finally:
                    attempt.session.close()
            if warning:
                played = replace(played, warning="; ".join(filter(None, (played.warning, warning))))
            return await self._shaped(attempt, self._shaper.apply_weights(played))
        finally:
            attempt.user.release()

    def _restart(self, diverged: _Attempt, log: CallLog | None) -> _Attempt:
        """Open it again without the recorded calls from which it diverged: its prefix's, or its own."""
        spec, user, replay = diverged.spec, diverged.user, diverged.spec.replay
        assert replay is not None
        if log is not None and (replay.is_outdated or replay.lost_start):
            log.forget(spec.address)
        elif log is not None:
            log.restarted(spec.address, user.name, f"{user.attempt}, call {replay.diverged_at}")
        diverged.session.close()
        user.release()
        keep = None if log is None else partial(log.add, spec.address)
        fresh = replace(spec, replay=Replay((), keep, None if replay.lost_start else replay.prefix))
        attempt = self._open(diverged.driver, diverged.task, fresh)
        attempt.user.measured = user.measured
        return attempt

    async def _shaped(self, attempt: _Attempt, trajectory: Trajectory) -> Trajectory:
        """Shape the rewards of an attempt for training, unless its group is rewarded first."""
        if attempt.spec.address.stream is Stream.TRAIN:
            if self._shaper.group is None:
                trajectory = await self._shaper.shape(attempt.task.copy(), trajectory, attempt.user)
            if self.config.compaction is not None and not self.config.compaction.trained:
                trajectory = without_summaries(trajectory)
        return with_measured(trajectory, attempt.user)


@asynccontextmanager
async def open_rollouts(
    engine: Engine,
    renderer: ChatRenderer,
    players: Players,
    config: RolloutConfig,
    rewards: RewardsConfig = _AS_GIVEN,
    log: Callable[[str], None] = lambda line: None,
    directory: Path | None = None,
) -> AsyncIterator[Rollouts]:
    """Open `Rollouts` with a driver for each player; those that call over HTTP share one gateway.

    log: receives warnings about unsupported requests of agents and, from another thread, about user code that blocks
    the event loop. directory: the run's, for files of drivers. Raises ConfigError for an unknown shaping hook or reply
    parser, and passes on errors of opening drivers and models.
    """
    async with (
        open_drivers(renderer, players, config, directory, log) as drivers,
        open_models(players.models, renderer.began) as models,
    ):
        with watched_event_loop(log):
            yield Rollouts(engine, renderer, drivers, config, rewards, models)


@asynccontextmanager
async def open_drivers(
    renderer: ChatRenderer,
    players: Players,
    config: RolloutConfig,
    directory: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Mapping[tuple[str, str], AttemptDriver[Any]]]:
    """Open a driver for each player, by kind and name. Raises ConfigError as `open_rollouts` does."""
    async with AsyncExitStack() as opened:
        gateway = await opened.enter_async_context(SharedGateway(config.gateway, config.images, log))
        setup = DriverSetup(config, renderer, renderer.parser(config.reply_parser), gateway, directory)
        drivers: dict[tuple[str, str], AttemptDriver[Any]] = {}
        if players.environments:
            environments = await opened.enter_async_context(
                EnvironmentDriver(players.environments, config, setup.parse)
            )
            drivers |= {("environment", name): environments for name in players.environments}
        if players.agents:
            agents = await opened.enter_async_context(AgentDriver(players.agents, setup))
            drivers |= {("agent", name): agents for name in players.agents}
        for name, make in players.drivers.items():
            drivers["driver", name] = await opened.enter_async_context(make(setup))
        yield drivers


def user_code(task: Task, attempt: str) -> UserCode:
    """Return the caller of the user code that plays an attempt at the task. attempt: the trajectory's id."""
    kind, name = task.player
    cause = Cause.ENVIRONMENT if kind == "environment" else Cause.AGENT
    return UserCode(f"{kind} {name!r}", cause, f"task {task.task_id}, trajectory {attempt}")
