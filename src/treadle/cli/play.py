"""`treadle play`: a person acts as the model, in one attempt at a task."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from treadle.api.evaluate import endpoint_inputs, find_config
from treadle.cli.commands import INTERRUPTED
from treadle.cli.console import Console, indented
from treadle.core.draws import Stream
from treadle.core.errors import ConfigError
from treadle.core.outcomes import as_played
from treadle.core.types import FunctionCall, Message, StopReason, Task, ToolCall, Trajectory
from treadle.plan.config import RunConfig
from treadle.plan.inputs import Inputs, configured_players, load_split, make_held_out
from treadle.rendering.replies import Tool
from treadle.rollout.isolation.event_loop import run as run_event_loop
from treadle.rollout.rewards import RewardsConfig
from treadle.rollout.session import Address, CallOptions, OtherReply
from treadle.rollout.text_session import open_text_rollouts

_FOREVER = 1e9  # seconds: a person may take any time


class _Left(Exception):
    """Raised when the person leaves."""


def run_play(options: argparse.Namespace) -> int:
    if not os.isatty(0):
        raise ConfigError("treadle play needs a terminal: a person has to write the model's replies")
    config = find_config(options.recipe, options.overrides)
    inputs = _inputs(config)
    person = Person(Console())
    try:
        trajectory = run_event_loop(_play(config, inputs, _task(inputs, options.task), person), person.console.line)
    except _Left:
        person.console.line()
        person.console.line("left before the end; the environment is closed")
        return INTERRUPTED
    person.show_end(trajectory)
    return 0


def _inputs(config: RunConfig) -> Inputs:
    """Return the held-out tasks, or training tasks if there are none."""
    if config.data.held_out is not None:
        return endpoint_inputs(config)
    return make_held_out(load_split(config, "train"), configured_players(config))


def _task(inputs: Inputs, wanted: str) -> Task:
    tasks = inputs.held_out
    if wanted.isdecimal() and int(wanted) < len(tasks):
        return tasks[int(wanted)]
    found = next((task for task in tasks if task.task_id == wanted), None)
    if found is None:
        raise ConfigError(
            f"--task {wanted}: there is no such task; give 0 to {len(tasks) - 1}, or an id such as {tasks[0].task_id}"
        )
    return found


async def _play(config: RunConfig, inputs: Inputs, task: Task, person: Person) -> Trajectory:
    rollout = config.rollout.model_copy(update={"trajectory_timeout": _FOREVER, "agent_timeout": _FOREVER})
    rewards = RewardsConfig(weights=config.rewards.weights)
    address = Address(config.seed, Stream.EVALUATE, 0, 0, 0)
    person.show_task(task)
    async with open_text_rollouts(person.chat, "you", inputs.players, rollout, rewards, lambda line: None) as rollouts:
        return await rollouts.start("play", task, [address])[0]


class Person:
    """Answers in the model's place."""

    def __init__(self, console: Console) -> None:
        self.console, self._shown = console, list[Message]()

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool], options: CallOptions) -> OtherReply:
        """Show the model's input, and return the person's reply."""
        tools = tools if options.tool_calls else ()
        if not self._shown:
            self._show_tools(tools)
        pairs = enumerate(zip(self._shown, messages, strict=False))
        same = next((n for n, (before, now) in pairs if before != now), min(len(self._shown), len(messages)))
        if same < len(self._shown):
            self.console.line("the conversation was changed; it continues from here:", style="yellow")
        for message in messages[same:]:
            self._show(message)
        if options.form is not None:
            self.console.line("the reply must look like ", (options.form.text, "cyan"))
        while True:
            try:
                message = reply_of(_read_lines(), tools)
            except ValueError as error:
                self.console.line(str(error), style="yellow")
                continue
            self._shown = [*messages, message]
            return OtherReply(message, 0, 0, StopReason.STOP)

    def show_task(self, task: Task) -> None:
        kind, name = task.player
        self.console.line((f"task {task.task_id}", "bold"), f", played by the {kind} {name!r}; Ctrl-D leaves")

    def show_end(self, trajectory: Trajectory) -> None:
        failure = trajectory.failure
        self.console.line()
        if failure is not None:
            self.console.line(f"failed, without a reward: {failure.cause}: {failure.message}", style="red")
            if failure.traceback:
                self.console.text(indented(failure.traceback), style="red")
            return
        components = as_played(trajectory).components
        parts = ", ".join(f"{name} {value:g}" for name, value in components.items())
        made_of = f" ({parts})" if components.keys() - {"reward"} else ""
        replies = len(as_played(trajectory).steps)
        what = f"{trajectory.status} after {replies} {'reply' if replies == 1 else 'replies'}"
        self.console.line((f"reward {trajectory.reward:g}", "bold"), f"{made_of}, {what}")
        if trajectory.warning:
            self.console.line(f"warning: {trajectory.warning}", style="yellow")

    def _show_tools(self, tools: Sequence[Tool]) -> None:
        for tool in tools:
            function = tool["function"]
            arguments = " ".join(f"{n}={p.get('type', '...')}" for n, p in _parameters(tool).items())
            what = function.get("description", "")
            self.console.line((f"/{function['name']} {arguments}".strip(), "cyan"), f"   {what}" if what else "")

    def _show(self, message: Message) -> None:
        self.console.line(message["role"], style="bold")
        self.console.text(indented(message["content"]))


def reply_of(text: str, tools: Sequence[Tool]) -> Message:
    """Return the message that a person wrote: tool calls in lines that begin with /, or text.

    Raises ValueError for an unreadable call.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if not tools or not lines or not all(line.startswith("/") for line in lines):
        return Message(role="assistant", content=text)
    calls = [_call(line[1:], tools, number) for number, line in enumerate(lines)]
    return Message(role="assistant", content="", tool_calls=calls)


def _call(line: str, tools: Sequence[Tool], number: int) -> ToolCall:
    name, _, rest = line.partition(" ")
    by_name = {tool["function"]["name"]: tool for tool in tools}
    if name not in by_name:
        raise ValueError(f"there is no tool {name!r}, but {', '.join(by_name)}; begin with a blank to send it as text")
    if rest.lstrip().startswith("{"):
        try:
            arguments = json.loads(rest)
        except ValueError as error:
            raise ValueError(f"the arguments are not JSON: {error}") from error
    else:
        words = [word.partition("=") for word in shlex.split(rest)]
        if wrong := [key for key, equals, _ in words if not equals]:
            raise ValueError(f"{wrong[0]!r} is not an argument; write name=value, or all of them as JSON")
        kinds = _parameters(by_name[name])
        arguments = {key: _value(value, kinds.get(key, {})) for key, _, value in words}
    written = FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    return ToolCall(id=f"call-{number}", type="function", function=written)


def _parameters(tool: Tool) -> dict[str, Any]:
    properties: dict[str, Any] = (tool["function"].get("parameters") or {}).get("properties", {})
    return properties


def _value(text: str, schema: dict[str, Any]) -> Any:
    """Parse a value as JSON, unless it should be a string."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_lines() -> str:
    """Return the person's input, up to the first line that is not continued. Raises _Left."""
    lines, prompt = list[str](), "> "
    with _interruptible():
        try:
            while True:
                line = input(prompt)
                lines.append(line.removesuffix("\\"))
                if not line.endswith("\\"):
                    return "\n".join(lines)
                prompt = ". "
        except (EOFError, KeyboardInterrupt):
            raise _Left from None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the wait for a line, which an event loop's handler would not do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
