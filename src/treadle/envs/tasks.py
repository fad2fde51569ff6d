"""Environments and reward functions by name, and helpers shared by generated worlds."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import floor
from types import MappingProxyType
from typing import Any, cast

from treadle.core import registry
from treadle.core.errors import ConfigError, DataError
from treadle.core.rewards import NUMBER, Reward, is_finite
from treadle.core.types import Message, Task
from treadle.core.user_functions import Expected, check_function
from treadle.envs.base import Environment, EnvStep

SPLITS = ("train", "held_out")
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

_METHODS = {"reset": "self, task", "step": "self, text", "close": "self"}


def load_environment(name: str, options: Mapping[str, Any] = NO_OPTIONS) -> Callable[[], Environment]:
    """Return a factory of environments of class `name` (registered, or `module:attribute`) with the options.

    Raises ConfigError for an unknown name, a non-class, a constructor that does not take the options or needs more, or
    a missing `reset`, `step` or `close`.
    """
    environment = check_environment(registry.resolve("environments", name), name, options)
    return partial(environment, **options) if options else environment


def check_environment(candidate: object, name: str, options: Mapping[str, Any] = NO_OPTIONS) -> type[Environment]:
    """Return the class if it is an environment. Raises ConfigError as `load_environment` does."""
    if not inspect.isclass(candidate):
        others = f"; a reward function is named by reward={name}, an agent by agent={name}" * callable(candidate)
        raise ConfigError(f"environments: {name!r} is of type {type(candidate).__name__}, it must be a class{others}")
    for method, arguments in _METHODS.items():
        written = getattr(candidate, method, None)
        if not callable(written) or written is Environment.step:
            raise ConfigError(
                f"environments: {name!r}: {method} is missing; write 'def {method}({arguments})', async or not"
            )
    signature = inspect.signature(candidate)
    try:
        signature.bind(**options)
    except TypeError as error:
        takes, got = ", ".join(signature.parameters) or "none", ", ".join(options) or "none"
        where = f"environment_options of {name!r}"
        raise ConfigError(f"{where}: {error}; its options are {takes}, given: {got}") from error
    return cast(type[Environment], candidate)


def made_class(factory: object) -> object:
    """Return the class of environments made with options; anything else unchanged."""
    while isinstance(factory, partial):
        factory = factory.func
    return factory


def split_key(split: str, count: int, seed: int = 0) -> str:
    """Return the key of a split's draws, the same for all seeds if held out: `train/3`, `held_out`.

    Raises DataError for a split other than `train` and `held_out`, ConfigError if `count` is not a whole number >= 0.
    """
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}; write {' or '.join(map(repr, SPLITS))}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(f"count must be a whole number >= 0, got {count!r}")
    return split if split == "held_out" else f"{split}/{seed}"


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text, for lists of names."""
    return tuple(text.split())


def opening(system: str, question: str) -> tuple[Message, Message]:
    return Message(role="system", content=system), Message(role="user", content=question)


def exchange(question: str, answer: str) -> tuple[Message, Message]:
    return Message(role="user", content=question), Message(role="assistant", content=answer)


def contents(conversations: Iterable[Sequence[Message]]) -> Iterator[str]:
    return (message["content"] for messages in conversations for message in messages)


def is_drill(index: int, share: float) -> bool:
    """Return whether conversation `index` of a warm start is a drill. Any n in a row contain n * share drills, +-1.

    Raises ConfigError unless `share` lies in [0, 1].
    """
    check_share("drill", share)
    return floor((index + 1) * share) > floor(index * share)


def check_hops(hops: Sequence[int], largest: int) -> tuple[int, ...]:
    """Return the hops. Raises ConfigError unless they are a list of numbers from 1 to `largest`."""
    allowed = range(1, largest + 1)
    if not isinstance(hops, Sequence) or not hops or any(count not in allowed for count in hops):
        raise ConfigError(f"hops must be a list out of {', '.join(map(str, allowed))}; got {hops!r}")
    return tuple(hops)


def check_positive(name: str, value: float, whole: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number above 0, or a whole one."""
    if isinstance(value, bool) or not is_finite(value) or value <= 0 or (whole and not isinstance(value, int)):
        raise ConfigError(f"{name} must be a {'whole ' if whole else ''}number above 0, got {value!r}")


def check_share(name: str, value: float) -> None:
    """Raise ConfigError unless `value` lies in [0, 1]."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is a share and must lie between 0 and 1, got {value!r}")


Grade = float | Reward
RewardFunction = Callable[[Task, str], Grade | Awaitable[Grade]]
"""`def reward(task, text)`, async or not: reward of a reply to the task's prompt."""

REWARD_FUNCTION = Expected(
    "    def reward(task, text):\n        return float(text.strip() == task.ground_truth)", f"a {NUMBER}, or a Reward"
)


class SingleTurn(Environment):
    """Plays one reply of the agent to the task's prompt; `reward`, called in the attempt's thread, grades it."""

    def __init__(self, reward: RewardFunction) -> None:
        self.reward = reward

    def step(self, text: str) -> EnvStep | Awaitable[EnvStep]:
        grade = self.reward(self.task, text)
        return _awaited(grade) if inspect.isawaitable(grade) else EnvStep(reward=grade, done=True)


async def _awaited(grade: Awaitable[Grade]) -> EnvStep:
    return EnvStep(reward=await grade, done=True)


_OTHERS = {"completions": "TRL's", "solution_str": "verl's"}  # parameters of other libraries' reward functions


def check_reward_function(candidate: object, where: str) -> None:
    """Raise ConfigError, prefixed by `where`, unless it is callable with a task and a text."""
    try:
        parameters = inspect.signature(candidate).parameters if callable(candidate) else {}
    except ValueError:  # a builtin without a signature
        parameters = {}
    if library := next((_OTHERS[name] for name in parameters if name in _OTHERS), None):
        signature = ", ".join(str(each.replace(annotation=inspect.Parameter.empty)) for each in parameters.values())
        raise ConfigError(
            f"{where}: ({signature}) is {library} signature; here a function grades one reply, as in\n"
            f"{REWARD_FUNCTION.example}"
        )
    check_function(candidate, where, REWARD_FUNCTION)


def is_reward_function(candidate: object) -> bool:
    """Return whether it is a function of (task, text), or another library's; an agent takes (task, client)."""
    if inspect.isclass(candidate) or not callable(candidate):
        return False
    try:
        parameters = list(inspect.signature(candidate).parameters)
    except ValueError:  # a builtin without a signature
        return False
    return parameters[1:2] == ["text"] or not _OTHERS.keys().isdisjoint(parameters)


def load_reward(name: str) -> Callable[[], Environment]:
    """Return a factory of environments for the reward function `name` (`module:function`, or a registered name).

    Raises ConfigError for an unknown name, or an object not callable with a task and a text.
    """
    candidate = registry.resolve("rewards", name, "reward")
    check_reward_function(candidate, f"reward: {name!r}")
    return partial(SingleTurn, candidate)
