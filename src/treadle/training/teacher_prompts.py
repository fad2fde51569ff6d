"""What the teacher reads in place of a recorded step. Needs no torch.

TeacherPrompts  step -context(task, trajectory, step, siblings, messages)-> messages -the policy's template-> prompt ids
Truths          task -target(task)-> text -> ids, after the recorded prompt of each played step
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treadle.core.errors import ConfigError, DataError
from treadle.core.images import PromptImage
from treadle.core.outcomes import as_played
from treadle.core.registry import resolve
from treadle.core.types import Group, Ids, SamplingParams, Step, StopReason, Task, as_messages
from treadle.packing.flat import FlatBatch
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rendering.transcript import Transcript

_SETTING = "algorithm.distillation.context"
_TARGET = "algorithm.distillation.target"


TeacherPrompt = tuple[Ids, tuple[PromptImage, ...]]
"""Ids int32[P], and the images among them."""


def asked_about(step: Step, prompt: TeacherPrompt | None) -> Step:
    """Return a step with another prompt; None: its own."""
    return step if prompt is None else replace(step, prompt_ids=prompt[0], images=prompt[1])


def load_context(name: str) -> Callable[..., Any]:
    """Return the function `module:function`. Raises ConfigError if it does not take the expected arguments."""
    return _load("teacher_contexts", name, _SETTING, "context(task, trajectory, step, siblings, messages)", 5)


def load_target(name: str) -> Callable[[Task], Any]:
    """Return the function `module:function`. Raises ConfigError if it does not take a task."""
    return _load("teacher_targets", name, _TARGET, "target(task)", 1)


def _load(kind: str, name: str, setting: str, called: str, arguments: int) -> Callable[..., Any]:
    function: Callable[..., Any] = resolve(kind, name, setting)
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{setting}: {name!r} is of type {type(function).__name__}, it must be a function")
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError as error:
        raise ConfigError(f"{setting}: {name!r} is called as {called}, but: {error}") from error
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

    def of(self, batch: FlatBatch) -> list[TeacherPrompt | None]:
        """Return the teacher's prompt of each of the S steps. Raises ConfigError, naming the function."""
        numbers, made = batch.step_number, list[TeacherPrompt | None]()
        for number, j in zip(numbers, batch.trajectory_of_step, strict=True):
            group, trajectory = batch.groups[batch.group_of_trajectory[j]], batch.trajectories[j]
            step = trajectory.steps[number]
            siblings = tuple(other for other in group.trajectories if other is not trajectory)
            where = f"{_SETTING}: {self._name!r}, for step {number} of {trajectory.trajectory_id},"
            try:
                asked = self._function(group.task, trajectory, step, siblings, self._messages)
            except Exception as error:
                raise ConfigError(f"{where} raised {type(error).__name__}: {error}") from error
            prompt = None if asked is None else self._render(asked, where)
            fits = prompt is not None and len(prompt[0]) + len(step.completion_ids) <= self._limit
            made.append(prompt if fits else None)
        return made

    def _render(self, asked: Sequence[Any], where: str) -> TeacherPrompt:
        try:
            messages = as_messages(asked, "its result") if isinstance(asked, Sequence) else ()
            if not messages:
                raise DataError(f"its result is {asked!r:.100}")
            prompt = Conversation(self._renderer).render(messages)
            return prompt.ids, prompt.images
        except DataError as error:
            raise ConfigError(
                f"{where} must return a list of messages for the teacher, or None to leave the step out: {error}"
            ) from error


class Truths:
    """The ground truths that `algorithm.distillation.form: turns` scores, as text by the function `name`.

    name: None: `Task.ground_truth`. limit: maximum tokens of prompt and text.
    """

    def __init__(self, name: str | None, renderer: ChatRenderer, limit: int) -> None:
        self._function = None if name is None else load_target(name)
        self._name, self._renderer, self._limit = name, renderer, limit

    def of(self, batch: FlatBatch) -> list[Ids]:
        """Return each group's ground truth as ids, int32[C]. Raises ConfigError unless it is text."""
        return [self._ids(group.task) for group in batch.groups]

    def asked(self, batch: FlatBatch, truths: Sequence[Ids]) -> list[Group]:
        """Return the batch's groups with the ground truth as the reply of each played step.

        Raises ConfigError for a prompt too long for it.
        """
        made = []
        for number, (group, truth) in enumerate(zip(batch.groups, truths, strict=True)):
            own = [t for t, g in zip(batch.trajectories, batch.group_of_trajectory, strict=True) if g == number]
            asked = (replace(t, steps=tuple(self._asked(s, truth) for s in as_played(t).steps)) for t in own)
            made.append(replace(group, trajectories=tuple(asked)))
        return made

    def _ids(self, task: Task) -> Ids:
        text = task.ground_truth if self._function is None else self._function(task)
        if not isinstance(text, str) or not text:
            source = f"the ground truth of task {task.task_id}" if self._name is None else f"{self._name}'s result"
            raise ConfigError(
                f"{_TARGET}: {source} is {text!r:.100}, and the teacher scores text; name a function from a task to "
                "what a reply with the right answer would be, such as f'<answer>{task.ground_truth}</answer>'"
            )
        return self._renderer.encode(text)

    def _asked(self, step: Step, truth: Ids) -> Step:
        if (length := len(step.prompt_ids) + len(truth)) > self._limit:
            raise ConfigError(
                f"{_TARGET}: prompt and ground truth have {length} tokens, the teacher's context is {self._limit}; "
                "lower rollout.max_input_tokens, or shorten the text"
            )
        nothing = np.zeros(len(truth), np.float32)
        versions = np.zeros(len(truth), np.int32)
        reply = truth, nothing, versions, SamplingParams(), StopReason.STOP
        return Step(step.prompt_ids, *reply, images=step.images)
