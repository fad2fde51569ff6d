"""Generated demonstrations: attempts of a player that calls an environment's tools at random.

    user       What does Anna pay?
    assistant  <tool_call>{"name": "bought", "arguments": {"customer": "Anna"}}</tool_call>
    tool       tea
    assistant  Anna

It picks a tool, gives it numbers and one to three consecutive words that it has read, and answers with such words or
with a tool's output. Failing calls are left out. A small model from scratch learns the syntax of calls from this; it is
occasionally right, which gives RL a start.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from treadle.core.config import Config
from treadle.core.errors import ConfigError, DataError, TrajectoryFailure
from treadle.core.images import CHECKED
from treadle.core.types import FunctionCall, Message, Task, ToolCall, as_messages
from treadle.envs.tools import TOOL_ERRORS
from treadle.rollout.attempt import user_code
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.environment import EnvironmentFactory, IsolatedEnvironment

RANDOM_CALLS = "random_calls"
"""`warm_start.demonstrations` of a run that begins with random calls."""


class RandomCallsConfig(Config):
    """Options of random calls, `warm_start.options`."""

    attempts: int = Field(1000, ge=1, description="number of attempts, task after task")
    environment: str | None = Field(
        None, description="environment with the tools; default: the task's own, which an agent's tasks lack"
    )


_WORD = re.compile(r"\w+(?:[-.]\w+)*")
_LENGTHS = (1, 1, 1, 2, 3)  # phrase lengths in words, drawn uniformly
_SHORT = 40  # maximum length of a tool's answer used as the reply, in characters
_NUMBER = re.compile(r"(?<![\w.])\d{1,9}(?:\.\d{1,9})?(?![\w.])")
_MAX_DEPTH = 4  # nesting depth of values
_TRIES, _AT_ONCE = 30, 64
_NEVER = 50  # consecutive failing calls of a tool before giving up on it


class FailedCall(NamedTuple):
    """A failed call. text: its arguments and the answer."""

    tool: str
    text: str


class RandomAttempt(NamedTuple):
    """A random attempt. failed: its failed calls."""

    messages: list[Message]
    tools: Sequence[Mapping[str, Any]]
    failed: list[FailedCall]


def calls_of_tools(attempts: Sequence[RandomAttempt]) -> Counter[str]:
    """Count the successful calls per tool, in the order of the tools."""
    counts = Counter({tool["function"]["name"]: 0 for attempt in attempts for tool in attempt.tools})
    messages = (message for attempt in attempts for message in attempt.messages)
    counts.update(call["function"]["name"] for message in messages for call in message.get("tool_calls", ()))
    return counts


async def play_at_random(factory: EnvironmentFactory, task: Task, config: RolloutConfig, key: str) -> RandomAttempt:
    """Play one attempt. key: key of the draws.

    Raises ConfigError for an environment without tools, TrajectoryFailure if it fails.
    """
    player, user = _Player(random.Random(key), []), user_code(task, "as a demonstration")
    environment, failed = IsolatedEnvironment(task.environment, factory, user, config), list[FailedCall]()
    try:
        await environment.make()
        player.messages.extend(await environment.reset(task.copy()))
        if not (environment.tools and environment.takes_reply):
            raise ConfigError(
                f"warm_start.demonstrations is {RANDOM_CALLS}, but environment {task.environment!r} has no tools to "
                "call; name those of a treadle.ToolEnvironment, tools = (price,), or else a generator of demonstrations"
            )
        for _ in range(config.max_steps - 1):
            if player.draw.random() < 0.5:
                break
            for _ in range(_TRIES):
                call = player.call(environment.tools)
                answer = await environment.step(call, "")
                if not answer.info.get(TOOL_ERRORS):
                    break
                function = call["tool_calls"][0]["function"]
                text = f"{function['arguments']}: {answer.observations[0]['content']}"
                failed.append(FailedCall(function["name"], text))
            else:
                break
            player.messages.append(call)
            if answer.done:
                return RandomAttempt(player.messages, environment.tools, failed)
            player.messages.extend(as_messages(answer.observations, "step", CHECKED))
        player.messages.append(Message(role="assistant", content=player.answer()))
        return RandomAttempt(player.messages, environment.tools, failed)
    finally:
        await environment.close()
        user.release()


async def play_all_at_random(
    tasks: Sequence[Task], environments: Mapping[str, EnvironmentFactory], config: RolloutConfig, seed: int, count: int
) -> list[RandomAttempt]:
    """Play `count` attempts, at the tasks in turn; return the successful ones.

    Raises ConfigError as `play_at_random` does, DataError if no call succeeded, or none of a frequently called tool.
    """

    async def play(number: int) -> RandomAttempt | TrajectoryFailure:
        task, key = tasks[number % len(tasks)], f"{seed}/{RANDOM_CALLS}/{number}"
        try:
            return await play_at_random(environments[task.environment], task, config, key)
        except TrajectoryFailure as failure:
            return failure

    played: list[RandomAttempt | TrajectoryFailure] = []
    for first in range(0, count, _AT_ONCE):
        played += await asyncio.gather(*map(play, range(first, min(first + _AT_ONCE, count))))
    attempts = [each for each in played if isinstance(each, RandomAttempt)]
    worked = calls_of_tools(attempts)
    if not attempts or (config.max_steps > 1 and not worked.total()):
        tried = [failed.text for attempt in attempts for failed in attempt.failed[:4]] or [str(each) for each in played]
        raise DataError(
            f"warm_start.demonstrations: {RANDOM_CALLS}: in {count} attempts no call of a tool worked; arguments are "
            f"numbers and one to three words of the conversation, such as {'; '.join(dict.fromkeys(tried[:4]))[:400]}. "
            "Name a generator of demonstrations that calls the tools as they need it"
        )
    failed = [call for attempt in attempts for call in attempt.failed]
    for tool, number in Counter(call.tool for call in failed).items():
        if not worked[tool] and number >= _NEVER:
            last = next(call.text for call in reversed(failed) if call.tool == tool)
            raise DataError(
                f"warm_start.demonstrations: {RANDOM_CALLS}: none of {number} calls of tool {tool!r} worked, the last: "
                f"{last[:300]}. Mend the tool, or name a generator of demonstrations that calls it as it needs"
            )
    return attempts


class _Player(NamedTuple):
    """Draws its messages from text it has read. messages: conversation so far."""

    draw: random.Random
    messages: list[Message]

    def call(self, tools: Sequence[Mapping[str, Any]]) -> Message:
        function = self.draw.choice(tools)["function"]
        schema = function.get("parameters") or {"type": "object"}
        arguments = json.dumps(self.value(schema, schema.get("$defs", {})), ensure_ascii=False)
        written = FunctionCall(name=function["name"], arguments=arguments)
        call = ToolCall(id=f"call-{len(self.messages)}", type="function", function=written)
        return Message(role="assistant", content="", tool_calls=[call])

    def value(self, schema: Mapping[str, Any], named: Mapping[str, Any], depth: int = 0) -> Any:
        """Draw a value of a JSON schema as written by pydantic; optional ones are given half of the time."""
        schema = named[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if choices := [schema["const"]] if "const" in schema else schema.get("enum"):
            return self.draw.choice(choices)
        if kinds := schema.get("anyOf"):
            return self.value(self.draw.choice(kinds), named, depth + 1)
        match schema.get("type"):
            case "object":
                needed, parts = schema.get("required", ()), schema.get("properties", {}).items()
                given = [(name, part) for name, part in parts if name in needed or self.draw.random() < 0.5]
                return {name: self.value(part, named, depth + 1) for name, part in given}
            case "array":
                length = self.draw.randint(1, 2) if depth < _MAX_DEPTH else 0
                return [self.value(schema.get("items", {}), named, depth + 1) for _ in range(length)]
            case "boolean":
                return self.draw.random() < 0.5
            case "integer" | "number" as kind:
                number = float(self.draw.choice(_NUMBER.findall(self.read())) if _NUMBER.search(self.read()) else 1)
                return int(number) if kind == "integer" or number.is_integer() else number
            case "null":
                return None
        return self.phrase()

    def answer(self) -> str:
        last = self.messages[-1]
        said = last["content"] if last["role"] == "tool" else ""
        return said if said and len(said) <= _SHORT and self.draw.random() < 0.5 else self.phrase()

    def phrase(self) -> str:
        """Draw consecutive words, half of the time from the last message."""
        text = self.read(last=self.draw.random() < 0.5)
        words = list(_WORD.finditer(text))
        if not words:
            return "1"
        first = self.draw.randrange(len(words))
        after = min(first + self.draw.choice(_LENGTHS), len(words))
        return text[words[first].start() : words[after - 1].end()]

    def read(self, last: bool = False) -> str:
        texts = [message["content"] for message in self.messages if message["role"] in ("user", "tool")]
        return " ".join(texts[-1:] if last else texts)
