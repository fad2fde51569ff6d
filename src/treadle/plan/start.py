"""Checks of a new run with its tokenizer, before anything is trained; a dry run does the same, one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

from treadle.core.errors import ConfigError, DataError, TrajectoryFailure
from treadle.core.types import Ids, Message, Task
from treadle.loop.starts import load_demonstrated
from treadle.models.model_files import base_directory
from treadle.models.unused import unused_parts
from treadle.plan.config import RunConfig
from treadle.plan.demonstrations import check_demonstrations
from treadle.plan.inputs import Inputs
from treadle.plan.validation import check_context
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation, check_turns
from treadle.rendering.replies import Tool
from treadle.rollout.attempt import CHECK, Players, open_drivers, user_code
from treadle.rollout.drivers.driver import AttemptDriver
from treadle.rollout.drivers.environment import IsolatedEnvironment
from treadle.rollout.isolation.event_loop import run, watched_event_loop
from treadle.rollout.other_models import AttemptModels


@dataclass(frozen=True, slots=True)
class FirstPrompt:
    """The prompt of a task's first call, int32[T], as the model will see it."""

    task_id: str
    ids: Ids


def check_first_prompts(
    inputs: Inputs, renderer: ChatRenderer, config: RunConfig, context: int, log: Callable[[str], None]
) -> None:
    """Raise ConfigError if prompts and completions exceed the model's context, or as `first_prompt` does."""
    check_context(config, context)
    first_prompt(inputs, renderer, config, log)


def check_drivers(inputs: Inputs, renderer: ChatRenderer, config: RunConfig, log: Callable[[str], None]) -> list[str]:
    """Open the attempt drivers, have each describe the player of its first task, and close them again."""
    only = Players(drivers=inputs.players.drivers)
    if not only.drivers:
        return []

    async def opened() -> list[str]:
        async with open_drivers(renderer, only, config.rollout) as drivers:
            return [await _described(name, drivers["driver", name], inputs) for name in only.drivers]

    return run(opened(), log)


async def _described(name: str, driver: AttemptDriver[Any], inputs: Inputs) -> str:
    played = next((task for task in chain(inputs.train, inputs.held_out) if task.player == ("driver", name)), None)
    # A driver need not inherit the method.
    describe = getattr(driver, "describe", None)
    return (played and describe and await describe(played)) or f"{name} can be started"


def first_prompt(
    inputs: Inputs, renderer: ChatRenderer, config: RunConfig, log: Callable[[str], None]
) -> FirstPrompt | None:
    """Return the prompt of the first task with an environment that resets; None if an agent, a driver or another role
    of the policy makes it.

    log: receives lines about environments that block the event loop, or do not end. Raises ConfigError if none of up to
    three can be reset, if one refuses its options, may wait longer than `rollout.environment_timeout` or needs more
    calls than `rollout.max_steps`, or if the prompt is longer than `rollout.max_input_tokens` or the mark of
    `rollout.compaction`. Agents are not started: their first prompt is unknown.
    """
    problems = []
    tasks = (task for task in inputs.train if task.environment) if inputs.players.environments else ()
    for task in islice(tasks, 3):
        try:
            first = run(_first(inputs.players, task, config, log), log)
        except TrajectoryFailure as failure:
            problems.append(f"task {task.task_id}: {failure}")
            continue
        if first is None:
            return None
        messages, tools, parsed = first
        if tools:
            name, parse = task.environment, renderer.parser(config.rollout.reply_parser) if parsed else None
            if problem := renderer.tools_problem(tools, parse):
                raise ConfigError(f"environment {name!r} has tools, but {problem}")
            for line in renderer.tools_notes(tools):
                log(line)
            if config.rollout.conversation == "single_message":
                raise ConfigError(
                    f"environment {name!r} has tools, with answers as separate messages, but "
                    "rollout.conversation is 'single_message'; leave it out"
                )
        try:
            ids = Conversation(renderer).render(messages, tools).ids
        except DataError as error:
            if not tools:
                raise
            raise ConfigError(
                f"environment {task.environment!r} has tools, but {error}; use a model that supports tools: with "
                "model.chat_template=qwen3_keep_thoughts any of ChatML, or the recipe tools-small, a small one from "
                "scratch"
            ) from error
        if len(ids) > config.rollout.max_input_tokens:
            raise ConfigError(
                f"the first prompt of task {task.task_id} has {len(ids)} tokens, rollout.max_input_tokens is "
                f"{config.rollout.max_input_tokens}; raise it or shorten the prompt"
            )
        if config.rollout.compaction is not None and len(ids) > (mark := config.rollout.compaction_mark):
            raise ConfigError(
                f"the first prompt of task {task.task_id} has {len(ids)} tokens, and rollout.compaction.at is {mark}: "
                "every turn would be summarized; raise it"
            )
        check_turns(renderer, messages, several=config.rollout.max_steps > 1 and config.rollout.conversation == "turns")
        return FirstPrompt(task.task_id, ids)
    if problems:
        raise ConfigError("no environment could be started; " + "; ".join(problems))
    return None


async def _first(
    players: Players, task: Task, config: RunConfig, log: Callable[[str], None]
) -> tuple[list[Message], Sequence[Tool], bool] | None:
    """Return the first messages of an attempt at the task, its tools, and whether it takes parsed replies.

    None if they depend on the policy in another role.
    """
    user = user_code(task, "as a check")
    factory, models = players.environments[task.environment], {name: make() for name, make in players.models.items()}
    called = user.models = AttemptModels(models, None, CHECK)
    environment = IsolatedEnvironment(task.environment, factory, user, config.rollout)
    with watched_event_loop(log):
        try:
            await _make(environment, task.environment, config)
            messages = await environment.reset(task.copy())
            return messages, environment.tools, environment.takes_reply
        except TrajectoryFailure:
            if called.asked_early:
                return None
            raise
        finally:
            # Its errors are only warnings, as in an attempt.
            await environment.close()
            user.release()
            for model in models.values():
                await model.close()


async def _make(environment: IsolatedEnvironment, name: str, config: RunConfig) -> None:
    """Construct it. Raises ConfigError for options refused by its constructor, and a time limit too short."""
    try:
        await environment.make()
    except TrajectoryFailure as failure:
        if not isinstance(failure.__cause__, ConfigError):
            raise
        has_options = config.environment_options and name == config.environment
        where = f"{'environment_options of' if has_options else 'environment'} {name!r}"
        raise ConfigError(f"{where}: {failure.__cause__}") from failure
    waits, limit = environment.longest_wait, config.rollout.environment_timeout
    if waits >= limit:
        raise ConfigError(
            f"rollout.environment_timeout is {limit:g} s, but environment {name!r} itself waits up to {waits:g} s: an "
            "outage would end as a time-out; raise it above that, or have it wait for less (environment_options)"
        )


def note_unused(inputs: Inputs, renderer: ChatRenderer, config: RunConfig, log: Callable[[str], None]) -> None:
    """Log unused parts of the model's directory."""
    for part in unused_parts(config.model, config.rollout.model_dump()):
        log(f"not used of {base_directory(config.model)}: {part}")


def note_tools(inputs: Inputs, renderer: ChatRenderer, config: RunConfig, log: Callable[[str], None]) -> None:
    """Log that agents cannot call tools, if the chat template or the reply parser is unsuitable."""
    parser = config.rollout.reply_parser
    if inputs.players.agents and (problem := renderer.tools_problem(parse=renderer.parser(parser))):
        log(f"agents' calls with tools will be refused: {problem}")


def note_probabilities(inputs: Inputs, renderer: ChatRenderer, config: RunConfig, log: Callable[[str], None]) -> None:
    """Log the size of the sampler's recorded probabilities, which are of up to the whole vocabulary."""
    if count := config.algorithm.recorded_probabilities:
        size = 8 * min(count, renderer.vocabulary)
        log(
            f"algorithm.centered_scores={config.algorithm.centered_scores} records up to {size:,} bytes a sampled token"
        )


def check_starts(inputs: Inputs, renderer: ChatRenderer, config: RunConfig, log: Callable[[str], None]) -> None:
    """Load the demonstrations of `rollout.starts`, and log the players that cannot be replayed, as forks need, too.

    Raises ConfigError if none can, and for an unknown or empty source.
    """
    setting = "rollout.starts" if config.rollout.starts is not None else "rollout.forks"
    if not config.rollout.goes_back:
        return
    tasks = {task.player: task for task in reversed(inputs.train)}
    fixed = [f"{kind} {name!r}" for (kind, name), task in sorted(tasks.items()) if not inputs.players.may_start(task)]
    if len(fixed) == len(tasks):
        raise ConfigError(
            f"{setting} is set, but {fixed[0]} cannot be replayed (replayable is False on it, or the policy plays "
            "several roles); leave it out"
        )
    for player in fixed:
        log(f"{setting}: tasks of {player} begin at step 0, because it cannot be replayed (replayable = False)")
    if config.rollout.starts is None:
        return
    if (demonstrated := load_demonstrated(config.rollout.starts.source, renderer)) is not None:
        demonstrated(next(task for task in inputs.train if inputs.players.may_start(task)))


StartCheck = Callable[[Inputs, ChatRenderer, RunConfig, Callable[[str], None]], object]

START: Mapping[str, StartCheck] = MappingProxyType(
    {
        "driver": check_drivers,
        "first prompt": first_prompt,
        "warm start": check_demonstrations,
        "starts": check_starts,
        "model": note_unused,
        "settings": note_tools,
        "record": note_probabilities,
    }
)
"""In order, by the part that they are about. They raise errors that would otherwise occur after the warm start or in
every attempt."""
