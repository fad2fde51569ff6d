"""`EnvironmentDriver`: plays attempts at environments.

make -> reset -> (chat -> step)* -> finish -> close

Before a call with a prompt that would be too long, the policy is asked for a summary of the conversation, from which it
continues (`rollout.compaction`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np

from treadle.core.errors import Cause, ConfigError, ContextExceeded, StepsExceeded, TokensExceeded, TrajectoryFailure
from treadle.core.images import CHECKED, ImageLimits
from treadle.core.metrics import Measures, Metric, Tally
from treadle.core.outcomes import was_played
from treadle.core.rewards import NUMBER, Reward, is_finite, is_reward
from treadle.core.types import DropReason, Form, Message, Status, StopReason, Task, as_messages
from treadle.core.user_functions import described, name_of
from treadle.envs.base import Environment, EnvStep, Finish, Reply
from treadle.envs.tasks import REWARD_FUNCTION, SingleTurn, made_class
from treadle.rendering.replies import ReplyParser, plain
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.driver import AttemptDriver
from treadle.rollout.drivers.history import History
from treadle.rollout.drivers.outcome import ATTEMPT_ERRORS, LIMITS, AttemptError, Outcome, outcome_of
from treadle.rollout.isolation.user_code import UserCode, is_async
from treadle.rollout.session import CallOptions, Session
from treadle.rollout.session import Reply as SessionReply

T = TypeVar("T")
EnvironmentFactory = Callable[[], Environment]


class EnvironmentDriver(AttemptDriver[Session]):
    """Plays environments' tasks, each attempt with its own environment.

    parse: parser of summaries, and of replies for environments that take them parsed.
    """

    def __init__(
        self, environments: Mapping[str, EnvironmentFactory], config: RolloutConfig, parse: ReplyParser = plain
    ) -> None:
        self._environments, self._config, self._parse = environments, config, parse

    def replays(self, task: Task) -> bool:
        return bool(getattr(made_class(self._environments[task.environment]), "replayable", True))

    def may_start(self, task: Task) -> bool:
        return self.replays(task) or _is_restorable(self._environments[task.environment])

    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        """Play an attempt and close its environment. A failing `close` is a warning and leaves the reward unchanged."""
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
        if user.models is not None:
            ended_by = user.models.failure_of(ended_by)
        outcome = outcome_of(session.steps, ended_by, user.cause)
        return replace(
            outcome, warning=warning, metrics=Measures() if outcome.failure else environment.metrics.measured()
        )

    async def _play(
        self, environment: IsolatedEnvironment, task: Task, session: Session
    ) -> StepsExceeded | ContextExceeded | None:
        """Play an attempt from its first prompt to its last reward; return the limit that ended it, or None."""
        await environment.make()
        opening, snapshots = await self._begin(environment, task, session), self._takes_snapshots(task)
        history = History(opening, self._config.conversation == "single_message")
        session.parse = self._parse if environment.takes_reply else session.parse
        limit: StepsExceeded | ContextExceeded | None = None
        state = ""
        for _ in range(self._config.max_steps):
            try:
                reply = await self._reply(history, environment, session)
            except (ContextExceeded, TokensExceeded) as error:
                if not any(map(was_played, session.steps)):
                    raise
                limit = error
                break
            session.set_state(reply.number, state)
            if environment.is_restored and reply.step.dropped is DropReason.REPLAYED:
                answer = environment.answered(reply.step.answer)
            else:
                answer = await environment.step(reply.message, reply.text)
            if snapshots and not answer.done and not reply.step.answer:
                session.set_answer(reply.number, _as_json(answer, opening, await environment.snapshot()))
            if answer.rejected:
                session.reject(reply.number)
            else:
                session.reward_last(Reward.of(answer.reward))
            environment.reward_copies(answer.rewards)
            if answer.done:
                break
            history.add(reply.message, answer)
            state = answer.state
        else:
            limit = StepsExceeded(self._config.max_steps)
        if not environment.copies:
            # The engine may wait for this session, and `finish` may be slow.
            session.close()
        ended = Status.DONE if limit is None else LIMITS[type(limit)]
        finish = await environment.finish(ended)
        session.reward_last(Reward.of(finish.reward), add=True)
        environment.reward_copies(finish.rewards)
        return limit

    def _takes_snapshots(self, task: Task) -> bool:
        return self._config.goes_back and _is_restorable(self._environments[task.environment])

    async def _begin(self, environment: IsolatedEnvironment, task: Task, session: Session) -> Sequence[Message]:
        """Start the attempt: restore the state after its prefix, if there is a snapshot of it, or reset.

        Returns the first messages. An attempt whose prefix can neither be restored nor replayed begins anew without it.
        """
        if (prefix := session.prefix) is None or not self._takes_snapshots(task):
            return await environment.reset(task)
        if not (answer := prefix.steps[-1].answer):
            return await environment.reset(task) if self.replays(task) else await session.lose_start(_NO_SNAPSHOT)
        recorded = json.loads(answer)
        try:
            await environment.restore(task, recorded["snapshot"])
        except TrajectoryFailure as failure:
            await session.lose_start(f"could not be restored ({failure.message})")
        return as_messages(recorded["opening"], "recorded messages", CHECKED)

    async def _reply(self, history: History, environment: IsolatedEnvironment, session: Session) -> SessionReply:
        """Sample the next reply; if the history is too long, first replace it by a summary.

        Raises ContextExceeded if no summary is accepted: accepted ones are complete and have text besides a thought.
        """
        compaction, options = self._config.compaction, _options(history, environment)
        if compaction is None or (kept := history.kept(compaction.keep_last)) is None:
            return await session.chat(history.messages, environment.tools, options)
        mark = replace(options, max_input_tokens=self._config.compaction_mark)
        try:
            return await session.chat(history.messages, environment.tools, mark)
        except ContextExceeded as error:
            tokens = error.prompt_tokens
        request = [*history.messages, Message(role="user", content=compaction.prompt)]
        brief = replace(
            options,
            tool_calls=False,
            form=None,
            max_tokens=compaction.max_tokens,
            parse=self._parse,
            summary=True,
            # Parsed for every environment, to keep thoughts out of a summary.
        )
        for _ in range(compaction.attempts):
            reply = await session.chat(request, environment.tools, brief)
            summary = reply.message["content"].strip()
            if summary and reply.step.stop_reason is StopReason.STOP:
                history.compact(summary, kept)
                return await session.chat(history.messages, environment.tools, _options(history, environment))
            session.reject(reply.number)
        raise ContextExceeded(tokens, self._config.max_input_tokens)


_NO_SNAPSHOT = "has no snapshot of the step to begin with, and cannot be replayed"
_ANSWER = ("observations", "done", "state", "history", "rejected")  # fields of EnvStep that are plain data


def _is_restorable(factory: EnvironmentFactory) -> bool:
    return bool(getattr(made_class(factory), "restorable", False))


def _as_json(answer: EnvStep, opening: Sequence[Message], snapshot: str) -> str:
    """Return an environment's answer with what restores the state after it; the opening for every step is the same."""
    plain = {name: getattr(answer, name) for name in _ANSWER}
    given = Reward.of(answer.reward)
    reward = {"components": dict(given.components), "tokens": None if given.tokens is None else given.tokens.tolist()}
    return json.dumps({**plain, "info": dict(answer.info), "reward": reward, "opening": opening, "snapshot": snapshot})


def _options(history: History, environment: IsolatedEnvironment) -> CallOptions:
    return CallOptions(
        tool_calls=environment.takes_reply,
        form=environment.form,
        continue_final_message=history.continues,
        break_cause=history.break_cause,
    )


class IsolatedEnvironment:
    """The environment of one attempt, with its answers checked. Raises all of its failures as TrajectoryFailure.

    `async` methods run on the event loop, others on the attempt's thread. An environment given as a class is also
    constructed there, unless its `step` is `async`.

    is_restored: whether it began with `restore`. longest_wait: set by `make`. tools, takes_reply (whether `step` takes
    a parsed `Reply`), required_steps: set by `reset` and `restore`. copies: roles of the policy beside the attempt's
    own.
    """

    def __init__(self, name: str, factory: EnvironmentFactory, user: UserCode, config: RolloutConfig) -> None:
        self._name, self._factory, self._user, self._config = name, factory, user, config
        self.copies = user.models.copies if user.models else []
        self._environment: Environment | None = None
        self.metrics: EnvMetrics
        self.longest_wait, self.required_steps, self.takes_reply, self.is_restored = 0.0, 0, False, False
        self.tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def form(self) -> Form | None:
        """What the next reply must look like."""
        form = getattr(self._environment, "form", None)
        if form is not None and not isinstance(form, Form):
            raise _failure(f"the environment's form is {form!r:.100}; it must be a treadle.Form, or None")
        return form

    async def make(self) -> None:
        made = made_class(self._factory)
        step = getattr(made, "step", None)
        in_thread = inspect.isclass(made) and step is not None and not is_async(step)
        await self._user.call(self._make, what="create", timeout=self._config.environment_timeout, in_thread=in_thread)

    async def reset(self, task: Task) -> list[Message]:
        """Start the attempt and return its first messages. Fails if it needs more than `rollout.max_steps` calls."""
        self._set_task(task)
        messages = await self._call("reset", task, check=self._checked_reset)
        if self.required_steps > self._config.max_steps:
            raise _failure(
                f"environment {self._name!r} needs {self.required_steps} calls of the model, and rollout.max_steps is "
                f"{self._config.max_steps}; set rollout.max_steps={self.required_steps}, or let it take fewer turns"
            )
        return messages

    def _set_task(self, task: Task) -> None:
        if Environment in type(self._environment).__mro__:
            self._environment.task = task  # type: ignore[union-attr]  # in case `reset` does not store it

    async def restore(self, task: Task, snapshot: str) -> None:
        """Start the attempt in a recorded state."""
        self._set_task(task)
        await self._call("restore", task, snapshot, check=lambda _: self._note_interface())
        self.is_restored = True

    async def snapshot(self) -> str:
        return await self._call("snapshot", check=_checked_snapshot)

    def answered(self, answer: str) -> EnvStep:
        """Return a recorded answer, and count its metrics."""
        fields = json.loads(answer)
        reward = Reward(fields["reward"]["components"], fields["reward"]["tokens"])
        plain = {name: fields[name] for name in (*_ANSWER, "info")}
        return self._checked_step(EnvStep(**plain, reward=reward))

    async def step(self, reply: Message, text: str) -> EnvStep:
        """Act on a reply. text: its content, with the stop string that ended it."""
        what = "the reward function" if isinstance(self._environment, SingleTurn) else "step"
        argument: str | Reply = text
        if self.takes_reply:
            thought, calls = reply.get("reasoning_content", ""), tuple(reply.get("tool_calls", ()))
            argument = Reply(text, thought, calls)
        return await self._call("step", argument, check=self._checked_step, what=what)

    async def finish(self, ended: Status) -> Finish:
        """Finish the attempt, count its metrics, and return the additions to the last rewards."""
        finish = getattr(self._environment, "finish", None)
        if finish is None or getattr(finish, "__func__", None) is Environment.finish:
            return Finish()
        return await self._call("finish", ended, check=self._checked_finish)

    def reward_copies(self, rewards: Mapping[str, float | Reward]) -> None:
        """Add rewards of the policy's other roles, checked before."""
        for role, reward in rewards.items():
            assert self._user.models is not None
            self._user.models.session_of(role).reward_last(Reward.of(reward), add=True)

    async def close(self) -> str:
        """Close the environment. Return any failure as a warning; the attempt is over and keeps its reward.

        If the attempt's thread is stuck, a plain `close` runs there once it is free, without being awaited.
        """
        thread = self._user.thread
        if thread is not None and thread.is_abandoned and not self._is_async("close"):
            thread.submit(self._close)
        elif self._environment is not None:
            try:
                await self._call("close", check=lambda _: None)
            except TrajectoryFailure as error:
                return error.message
        return ""

    async def _call(self, method: str, *arguments: Any, check: Callable[[Any], T], what: str = "") -> T:
        return await self._user.call(
            lambda: getattr(self._environment, method)(*arguments),
            what=what or method,
            timeout=self._config.environment_timeout,
            # Images are decoded off the event loop.
            check=lambda value: asyncio.to_thread(check, value) if _has_images(value) else check(value),
            in_thread=not self._is_async(method),
        )

    def _is_async(self, method: str) -> bool:
        return is_async(inspect.getattr_static(self._environment, method, None))

    def _make(self) -> None:
        self._environment = self._factory()
        if self._user.models:
            self._environment.models = self._user.models
        self.metrics = EnvMetrics(self._name, self._environment)
        self.longest_wait = float(getattr(self._environment, "longest_wait", 0.0))

    def _close(self) -> None:
        if self._environment is not None and not self._is_async("close"):
            self._environment.close()

    def _checked_reset(self, value: object) -> list[Message]:
        messages = _checked_messages(value, "reset", self._config.images.limits)
        self._note_interface()
        return list(messages)

    def _note_interface(self) -> None:
        environment: Any = self._environment
        self.tools = tuple(getattr(environment, "tool_schemas", ()))
        self.required_steps = int(getattr(environment, "required_steps", 0))
        annotations = [p.annotation for p in inspect.signature(environment.step).parameters.values()]
        self.takes_reply = any(kind is Reply or str(kind).rpartition(".")[2] == "Reply" for kind in annotations)

    def _checked_step(self, value: object) -> EnvStep:
        if not isinstance(value, tuple) or not 4 <= len(value) <= len(EnvStep._fields):
            raise _failure(f"step must return EnvStep({', '.join(EnvStep._fields)}), got {value!r:.100}")
        step = EnvStep(*value)
        reward = _checked_reward(step.reward, "step", self._environment)
        if not isinstance(step.done, bool | np.bool_):
            raise _failure(f"step gave done={step.done!r:.100}; it must be true or false")
        if not isinstance(step.state, str):
            raise _failure(f"step gave state={step.state!r:.100}; it must be a string")
        self._check_rewards(step.rewards, "step")
        self._check_history(step, reward)
        self.metrics.record(step.info, "step")
        if step.done:
            return step._replace(reward=reward, done=True, history=None)
        limits = self._config.images.limits
        history = None if step.history is None else _checked_messages(step.history, "step: history", limits)
        goes_on = history is not None or step.rejected  # allowed without observations
        observations = _checked_messages(step.observations, "step", limits, may_be_empty=goes_on)
        return step._replace(observations=observations, reward=reward, done=False, history=history)

    def _check_history(self, step: EnvStep, reward: Reward) -> None:
        if not isinstance(step.rejected, bool | np.bool_):
            raise _failure(f"step gave rejected={step.rejected!r:.100}; it must be true or false")
        if step.rejected and (reward or step.done):
            what = f"the reward {reward.total():g}" if reward else "done"
            raise _failure(f"step rejected a reply and gave {what}; an unused reply earns and ends nothing")
        if (step.rejected or step.history is not None) and self._config.conversation == "single_message":
            raise _failure("step gave history or rejected; set rollout.conversation to 'turns' for that")

    def _check_rewards(self, rewards: object, method: str) -> None:
        """Check the rewards of the policy's other roles."""
        if not isinstance(rewards, Mapping) or (unknown := [role for role in rewards if role not in self.copies]):
            what = f"rewards of {unknown[0]!r}" if isinstance(rewards, Mapping) else f"rewards={rewards!r:.100}"
            known = f"models has {', '.join(self.copies)}" if self.copies else "models has none"
            raise _failure(
                f"{method} gave {what}; they belong to copies of the policy, by name: {known} (policy: true)"
            )
        for reward in rewards.values():
            _checked_reward(reward, method, self._environment)

    def _checked_finish(self, value: object) -> Finish:
        if value is None:
            return Finish()
        if not isinstance(value, tuple) or not 1 <= len(value) <= len(Finish._fields):
            raise _failure(f"finish must return Finish({', '.join(Finish._fields)}) or None, got {value!r:.100}")
        finish = Finish(*value)
        self.metrics.record(finish.info, "finish")
        self._check_rewards(finish.rewards, "finish")
        return finish._replace(reward=_checked_reward(finish.reward, "finish", self._environment))


def _checked_messages(
    value: object, where: str, limits: ImageLimits, may_be_empty: bool = False
) -> tuple[Message, ...]:
    try:
        messages = as_messages(value, where, limits)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise _failure(f"{where} must give messages: {error}") from error
    if not messages and not may_be_empty:
        raise _failure(f"{where} gave no messages for the agent to read, and is not done")
    return messages


def _has_images(value: object) -> bool:
    """Return whether messages, or those of an EnvStep, may have images that are still to be read."""
    lists = [value, *(value if isinstance(value, tuple) else ())]
    messages = (message for each in lists if isinstance(each, list | tuple) for message in each)
    return any(
        isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple) for message in messages
    )


def _checked_snapshot(value: object) -> str:
    if not isinstance(value, str):
        raise _failure(f"snapshot must return text, got {value!r:.100}")
    return value


def _checked_reward(value: object, method: str, environment: object) -> Reward:
    if not isinstance(value, Reward) and not is_reward(value):
        if isinstance(environment, SingleTurn):
            raise _failure(REWARD_FUNCTION.refusal(environment.reward, value, line=True))
        raise _failure(
            f"{method} gave the reward {described(value)}, in {name_of(environment)}; it must be a {NUMBER}, or a "
            "Reward, as in treadle.EnvStep(reward=1.0, done=True)"
        )
    return Reward.of(value)


def _failure(message: str) -> TrajectoryFailure:
    return TrajectoryFailure(Cause.ENVIRONMENT, message)


_LARGEST = 1e300  # keeps sums of such values finite


def check_metrics(environments: Mapping[str, object]) -> None:
    """Raise ConfigError if environments declare a metric that cannot be counted, or one name in two ways.

    environments: name -> class or factory; a factory without an attribute `metrics` declares none yet.
    """
    declared: list[tuple[str, Metric]] = []
    for name, environment in environments.items():
        where = f"environment {name!r}: metrics"
        metrics = getattr(made_class(environment), "metrics", ())
        if not isinstance(metrics, tuple | list) or not all(isinstance(metric, Metric) for metric in metrics):
            raise ConfigError(
                f"{where} must be a tuple of treadle.Metric, got {metrics!r:.100}; write metrics = "
                '(treadle.Metric("pages", level="step", aggregation="mean"),), and in step EnvStep(info={"pages": 1})'
            )
        for metric in metrics:
            if metric.level not in ("step", "trajectory"):
                raise ConfigError(f"{where}: {metric.name!r} is of level {metric.level}; make it step or trajectory")
            if metric.view != "played":
                raise ConfigError(f"{where}: {metric.name!r} has the view {metric.view}; leave view out")
            if not metric.name.removesuffix("*").isidentifier():
                raise ConfigError(f"{where}: {metric.name!r} must be a name of letters, digits and underscores")
            for other, earlier in declared:
                # Either may be a family, such as `skyrl_*`.
                names = fnmatchcase(metric.name, earlier.name) or fnmatchcase(earlier.name, metric.name)
                if metric != earlier and names:
                    raise ConfigError(f"{where}: {metric.name!r} is declared differently by {other!r}; rename one")
            declared.append((name, metric))


class EnvMetrics:
    """Counts one attempt's values of the metrics that its environment declares."""

    def __init__(self, name: str, environment: object) -> None:
        try:
            check_metrics({name: environment})
        except ConfigError as error:
            # Checked only now, as a factory need not declare them.
            raise _failure(str(error)) from error
        self._class, self._declared = name_of(environment), tuple[Metric, ...](getattr(environment, "metrics", ()))
        self._values: dict[Metric, list[float]] = {metric: [] for metric in self._declared if "*" not in metric.name}

    def record(self, info: object, method: str) -> None:
        """Count the declared metrics in a method's `info`."""
        if not self._declared:
            return
        if not isinstance(info, Mapping):
            raise _failure(
                f"{method} gave info {described(info)}, in {self._class}; it must be a mapping: info={{'pages': 1}}"
            )
        for metric in self._declared:
            for member in _members(metric, info):
                if (value := info.get(member.name)) is None:
                    continue
                if not is_finite(value) or abs(value) > _LARGEST:
                    raise _failure(
                        f"{method} gave info[{member.name!r}] = {described(value)}, in {self._class}; a declared "
                        f"metric must be a finite number, at most {_LARGEST:g} in size: info={{{member.name!r}: 1.0}}"
                    )
                self._values.setdefault(member, []).append(float(value))

    def measured(self) -> Measures:
        """Return the metrics with a value: all values at level step, their sum at level trajectory."""
        return Measures(
            Tally.over(metric, values if metric.level == "step" else [math.fsum(values)])
            for metric, values in self._values.items()
            if values
        )


def _members(metric: Metric, info: Mapping[Any, Any]) -> list[Metric]:
    """Return the metric; for a family, one member for each of its names in `info`."""
    prefix = metric.name.removesuffix("*")
    if prefix == metric.name:
        return [metric]
    return [metric.of(name[len(prefix) :]) for name in info if isinstance(name, str) and name.startswith(prefix)]
