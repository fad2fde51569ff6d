"""The interface of environments. Subclass `Environment` and write `step`; everything else has a default."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, ParamSpec, Protocol

from treadle.core.errors import ConfigError
from treadle.core.metrics import Metric
from treadle.core.rewards import Reward
from treadle.core.types import Form, Message, Status, Task, ToolCall

P = ParamSpec("P")

INTRODUCTION = "This is your summary of the conversation so far:\n\n"
"""Text before the summary in the `user` message that replaces the summarized conversation."""


class EnvStep(NamedTuple):
    """The environment's answer to one reply of the agent.

    observations: messages the agent reads next (role `user` or `tool`); empty when done. Content is text, or a list of
    parts, texts and images (a Pillow image, the bytes of a file, a `Path` or a data URL).
    reward: reward of this step; a trajectory's reward is their sum. A `Reward` names its components, and may reward
    single tokens of the reply. done: whether the episode is over.
    info: values of the environment's `metrics`; other values are for direct callers (tests, notebooks), and neither
    shown to the agent nor recorded.
    state: key of the state at the next step, for advantages that compare steps of one state (`gigpo`).
    history: replaces the conversation, including the reply; observations follow it. None: keep the conversation.
    rejected: whether the reply was discarded and the agent is asked again. The conversation continues without the
    reply, which is not trained and gets no reward.
    rewards: rewards of copies of the policy (self-play), by name, each added to the copy's last call.

    >>> EnvStep([{"role": "tool", "content": "page Anna, hobby chess"}])
    >>> EnvStep([{"role": "user", "content": [{"type": "image", "image": screenshot}]}])
    >>> EnvStep(reward=1.0, done=True)
    >>> EnvStep(reward=Reward({"answer": 1.0, "brevity": 0.1}), done=True)
    >>> EnvStep([{"role": "user", "content": "That was no JSON. Again:"}], rejected=True)
    >>> EnvStep(reward=1.0, done=True, rewards={"opponent": -1.0})
    """

    observations: Sequence[Mapping[str, Any]] = ()
    reward: float | Reward = 0.0
    done: bool = False
    info: Mapping[str, Any] = {}
    state: str = ""
    history: Sequence[Mapping[str, Any]] | None = None
    rejected: bool = False
    rewards: Mapping[str, float | Reward] = {}


class Reply(NamedTuple):
    """A reply as the model's reply parser reads it (`rollout.reply_parser`).

    text: text for the user, with the stop string that ended it. thoughts: text of its reasoning; "" without any.
    tool_calls: calls with id, function name and arguments (JSON text).
    """

    text: str
    thoughts: str = ""
    tool_calls: Sequence[ToolCall] = ()


class Model(Protocol):
    """A model beside the policy."""

    async def chat(self, messages: Sequence[Message], **options: Any) -> str:
        """Return the reply to a conversation. options: sampling options, `temperature=0.2`, `max_tokens=100`."""
        ...


class Models(dict[str, Model]):
    """Models beside the policy, by their names in the recipe. Raises ConfigError for another name."""

    def __missing__(self, name: str) -> NoReturn:
        known = f"models names {', '.join(self)}" if self else "the recipe names none (models)"
        scoring = "a teacher and a reference only score, and need another name to be called"
        raise ConfigError(f"there is no model {name!r} beside the policy; {known}; {scoring}")


def _or_plain(method: Callable[P, Coroutine[Any, Any, Any]]) -> Callable[P, Any]:
    """Type a method so that a plain `def` may override it, and `await super()...` type-checks."""
    return method


class Finish(NamedTuple):
    """Result of `Environment.finish`, for a whole attempt.

    reward: added to the reward of the last step. info: values of the environment's `metrics`, as in `EnvStep.info`.
    rewards: rewards of copies of the policy, as in `EnvStep.rewards`.

    >>> Finish(reward=1.0)
    >>> Finish(reward=Reward({"tests": 0.75}), info={"files_changed": 3})
    """

    reward: float | Reward = 0.0
    info: Mapping[str, Any] = {}
    rewards: Mapping[str, float | Reward] = {}


class Environment(Protocol):
    """Plays one attempt per instance: `reset` once, `step` until done, `finish` once, `close` always.

    Any method may raise or hang: that fails only this attempt. If a server it needs is down, raise
    `treadle.InfrastructureError` to have the attempt retried. A single-turn task needs only `step`:

        class Arithmetic(Environment):
            async def step(self, text: str) -> EnvStep:
                return EnvStep(reward=float(text.strip() == self.task.ground_truth), done=True)

    Each method may be `async` or not. Asynchronous ones share one event loop and must not block it; plain ones run in a
    thread, the same for all calls of an attempt.

    metrics: measured values, each under its name in a step's `info`; recorded as `env/<name>`. At level `step`, each
    value counts separately; at level `trajectory`, a trajectory's values are added up first. Missing values are not
    counted: give 0 as 0. A name that ends in `*` declares all names with that prefix.
    longest_wait: seconds that one of its calls may wait for a server before it fails the attempt with its own cause.
    `rollout.environment_timeout` must be longer.
    required_steps: model calls needed for a grade, known after `reset`. `rollout.max_steps` must not be lower.
    replayable: whether an interrupted attempt may be continued by resetting a new instance and replaying the recorded
    replies. False if `step` has external side effects that a replay would repeat.
    restorable: whether `snapshot` and `restore` are written. With `rollout.starts` or `rollout.forks`, attempts then
    begin in the middle by restoring a snapshot rather than by replaying replies, so that the environment need not be
    replayable.
    models: the recipe's models beside the policy, for `async` methods: `await self.models["user"].chat(...)`.
    tool_schemas: tools that the chat template describes to the model, known after `reset`; JSON schemas as in OpenAI's
    API. `ToolEnvironment` derives them from functions.
    form: what the content of the next reply must look like, if anything; may change with every step.
    """

    task: Task
    metrics: ClassVar[Sequence[Metric]] = ()
    longest_wait: float = 0.0
    required_steps: int = 0
    replayable: ClassVar[bool] = True
    restorable: ClassVar[bool] = False
    models: Mapping[str, Model] = Models()
    tool_schemas: Sequence[Mapping[str, Any]] = ()
    form: Form | None = None

    @_or_plain
    async def reset(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """Start the attempt; return the agent's first messages (default: the task's prompt).

        In a run, `self.task` is already set.
        """
        self.task = task
        return task.prompt

    @_or_plain
    async def step(self, text: str) -> EnvStep:
        """Act on the agent's reply: the decoded completion, with the stop string but without the end-of-turn token.

        `def step(self, reply: Reply)` receives it parsed: text, thoughts and tool calls.
        """
        ...

    @_or_plain
    async def finish(self, ended: Status) -> Finish | None:
        """Grade the whole attempt: metrics, and a last reward for the last step. Optional.

        Called once, after the last step and before `close`, within `rollout.environment_timeout`, also if a limit ended
        the attempt; not if it failed. If `finish` raises, hangs or returns another type, the attempt fails.

        ended: `done` (reported by `step`), `max_steps` (`rollout.max_steps` calls were made) or `context` (the next
        prompt would not have fitted). The reward is treated like a step's: `rewards.weights` apply, evaluations count
        it, and shaping and `rewards.overlong` follow it.
        """
        return None

    @_or_plain
    async def snapshot(self) -> str:
        """Return the state after the last `step`, as text for `restore`: data, or the name of a sandbox's snapshot.

        Only for `restorable` environments, and only called with `rollout.starts`. The text is part of the attempt's
        record, and what it names must outlive the environment.
        """
        return ""

    @_or_plain
    async def restore(self, task: Task, snapshot: str) -> None:
        """Start a new attempt in this state, in place of `reset` and the steps before it. If it raises, the attempt
        begins at the beginning, with a new environment.
        """
        return None

    @_or_plain
    async def close(self) -> None:
        """Release resources of `reset`. Called once, also after a failure."""
        return None
