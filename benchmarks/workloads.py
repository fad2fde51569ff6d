"""Groups as agents record them. What later prompts keep of earlier turns decides what can be shared.

A turn is thinking, action, observation; the model samples the first two. Random ids, equal for equal sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from treadle.core.types import Group, Ids, SamplingParams, Status, Step, StopReason, Task, Trajectory, group_id
from treadle.core.types import trajectory_id as name_of

VOCABULARY = 1024
_FIRST = 3  # the smallest id used
_WINDOW = 3  # turns that a sliding context keeps
_DRIFT = 5  # every fifth turn of a group, which meets every place in a conversation equally often


@dataclass(frozen=True, slots=True)
class Size:
    """Counts, and lengths in tokens.

    Thinking, action and observation vary uniformly between half and one and a half times their length.
    """

    tasks: int = 1
    attempts: int = 8
    turns: int = 6
    system: int = 192
    task: int = 64
    thinking: int = 80
    action: int = 40
    observation: int = 80


class Draws:
    """Random tokens from one seed. turns: played so far."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.turns = 0

    def ids(self, count: int) -> Ids:
        """Return exactly `count` random ids."""
        return self.rng.integers(_FIRST, VOCABULARY, count).astype(np.int32)

    def about(self, count: int) -> Ids:
        """Return random ids, half to one and a half times `count`, at least one."""
        return self.ids(int(self.rng.integers(max(1, count // 2), count + count // 2 + 1)))

    def others(self, ids: Ids) -> Ids:
        """Return as many random ids, each different from the one in its place."""
        span = VOCABULARY - _FIRST
        return (_FIRST + (ids - _FIRST + self.rng.integers(1, span, len(ids))) % span).astype(np.int32)


Keep = Callable[[Draws, Ids, Ids], Ids]
"""(draws, thinking, action) -> what later prompts hold of a completion."""


def _all(draws: Draws, thinking: Ids, action: Ids) -> Ids:
    return np.concatenate([thinking, action])


def _action(draws: Draws, thinking: Ids, action: Ids) -> Ids:
    return action


def _drifted(draws: Draws, thinking: Ids, action: Ids) -> Ids:
    """Change the last two to five tokens of every fifth turn, as decoding and tokenizing again would."""
    ids = _all(draws, thinking, action)
    draws.turns += 1
    if draws.turns % _DRIFT == 0:
        tail = int(draws.rng.integers(2, 6))
        ids[-tail:] = draws.others(ids[-tail:])
    return ids


def _step(prompt: Ids, completion: Ids) -> Step:
    logprobs, versions = np.full(len(completion), -1.0, np.float32), np.zeros(len(completion), np.int32)
    return Step(prompt, completion, logprobs, versions, SamplingParams(max_tokens=len(completion)), StopReason.STOP)


def _conversation(draws: Draws, prompt: Ids, size: Size, keep: Keep, window: int) -> list[Step]:
    """Play one agent, each of whose prompts holds the last `window` turns."""
    steps: list[Step] = []
    turns: list[Ids] = []
    for _ in range(size.turns):
        thinking, action = draws.about(size.thinking), draws.about(size.action)
        steps.append(_step(np.concatenate([prompt, *turns[-window:]]), _all(draws, thinking, action)))
        turns.append(np.concatenate([keep(draws, thinking, action), draws.about(size.observation)]))
    return steps


def _forking(draws: Draws, prompt: Ids, size: Size) -> list[Step]:
    """Play an agent that asks a sub-agent in every other turn; the observation is the sub-agent's last completion.

    The sub-agent has the same system prompt, a task of its own and half as many turns.
    """
    steps: list[Step] = []
    history = prompt
    for turn in range(size.turns):
        called = _step(history, np.concatenate([draws.about(size.thinking), draws.about(size.action)]))
        steps.append(called)
        if turn % 2:
            asked = np.concatenate([prompt[: size.system], draws.ids(size.task)])
            steps += _conversation(draws, asked, replace(size, turns=max(1, size.turns // 2)), _all, size.turns)
            observation = steps[-1].completion_ids
        else:
            observation = draws.about(size.observation)
        history = np.concatenate([called.full_ids, observation])
    return steps


Play = Callable[[Draws, Ids, Size], list[Step]]
"""(draws, first prompt, size) -> the steps of one attempt."""


def _groups(play: Play, size: Size) -> list[Group]:
    """Return a group for each task; all share one system prompt, and a group's attempts their first prompt."""
    draws = Draws(seed=0)
    system = draws.ids(size.system)
    groups = []
    for index in range(size.tasks):
        prompt, name = np.concatenate([system, draws.ids(size.task)]), group_id(index)
        attempts = tuple(
            Trajectory(name_of(name, i), str(index), i, tuple(play(draws, prompt, size)), float(i % 2), Status.DONE)
            for i in range(size.attempts)
        )
        groups.append(Group(name, index, 0, index, Task(str(index)), attempts))
    return groups


def _keeping(keep: Keep, window: int | None = None) -> Play:
    def play(draws: Draws, prompt: Ids, size: Size) -> list[Step]:
        return _conversation(draws, prompt, size, keep, window or size.turns)

    return play


def _long_system(size: Size) -> list[Group]:
    """Return tasks under a system prompt eight times as long; fewer and shorter attempts."""
    half = replace(size, system=8 * size.system, attempts=max(2, size.attempts // 2), turns=max(1, size.turns // 2))
    return _groups(_keeping(_all), replace(half, tasks=2 * size.tasks))


def _sub_agents(size: Size) -> list[Group]:
    """Return half as many attempts, of about twice as many calls."""
    return _groups(_forking, replace(size, attempts=max(2, size.attempts // 2)))


WORKLOADS: Mapping[str, Callable[[Size], list[Group]]] = MappingProxyType(
    {
        "append-only": partial(_groups, _keeping(_all)),
        "20% drift": partial(_groups, _keeping(_drifted)),
        "thinking stripped": partial(_groups, _keeping(_action)),
        "sliding context": partial(_groups, _keeping(_all, _WINDOW)),
        "long system prompt": _long_system,
        "sub-agent forks": _sub_agents,
    }
)
