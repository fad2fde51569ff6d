"""`TeacherPrompts`: prompts for the teacher that differ from the policy's. Needs no torch.

step -context(task, trajectory, step, siblings, messages)-> messages -the policy's template-> prompt ids
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from treadle.core.errors import ConfigError, DataError
from treadle.core.registry import resolve
from treadle.core.types import Ids, as_messages
from treadle.packing.flat import FlatBatch
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rendering.transcript import Transcript

_SETTING = "algorithm.distillation.context"
_CALLED = "context(task, trajectory, step, siblings, messages)"


def load_context(name: str) -> Callable[..., Any]:
    """Return the function `module:function`. Raises ConfigError if it does not take the expected arguments."""
    function: Callable[..., Any] = resolve("teacher_contexts", name, _SETTING)
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{_SETTING}: {name!r} is of type {type(function).__name__}, it must be a function")
    try:
        inspect.signature(function).bind(None, None, None, None, None)
    except TypeError as error:
        raise ConfigError(f"{_SETTING}: {name!r} is called as {_CALLED}, but: {error}") from error
    return function


class TeacherPrompts:
    """Makes the teacher's prompts by the function `name`, which receives

        task        with its ground truth
        trajectory  the attempt: its rewards, and steps after this one
        step        the step of it with the completion to score
        siblings    the other attempts at the task, in order; reward None: not graded
        messages    messages(step, reply=False): messages of any of their steps' prompts, and its reply

    and returns messages, or None for a step that the teacher is not asked about.
    limit: maximum tokens of prompt and completion; the teacher is not asked about longer ones.
    """

    def __init__(self, name: str, renderer: ChatRenderer, limit: int) -> None:
        self._name, self._function = name, load_context(name)
        self._renderer, self._limit = renderer, limit
        self._messages = Transcript(renderer).messages

    def of(self, batch: FlatBatch) -> list[Ids | None]:
        """Return the teacher's prompt of each of the S steps, int32[P]. Raises ConfigError, naming the function."""
        numbers, made = batch.step_number, list[Ids | None]()
        for number, j in zip(numbers, batch.trajectory_of_step, strict=True):
            group, trajectory = batch.groups[batch.group_of_trajectory[j]], batch.trajectories[j]
            step = trajectory.steps[number]
            siblings = tuple(other for other in group.trajectories if other is not trajectory)
            where = f"{_SETTING}: {self._name!r}, for step {number} of {trajectory.trajectory_id},"
            try:
                asked = self._function(group.task, trajectory, step, siblings, self._messages)
            except Exception as error:
                raise ConfigError(f"{where} raised {type(error).__name__}: {error}") from error
            ids = None if asked is None else self._render(asked, where)
            fits = ids is not None and len(ids) + len(step.completion_ids) <= self._limit
            made.append(ids if fits else None)
        return made

    def _render(self, asked: Sequence[Any], where: str) -> Ids:
        try:
            messages = as_messages(asked, "its result") if isinstance(asked, Sequence) else ()
            if not messages:
                raise DataError(f"its result is {asked!r:.100}")
            return Conversation(self._renderer).render(messages).ids
        except DataError as error:
            raise ConfigError(
                f"{where} must return a list of messages for the teacher, or None to leave the step out: {error}"
            ) from error
