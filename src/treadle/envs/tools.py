"""`ToolEnvironment`: an environment whose tools are plain functions or methods.

class Shop(treadle.ToolEnvironment):
    def price(self, item: str) -> float:
        \"\"\"Look up what an item costs.\"\"\"
        return self.task.extras["prices"][item]

    def pay(self, amount: float) -> treadle.EnvStep:
        \"\"\"Pay the whole bill.\"\"\"
        return treadle.EnvStep(reward=float(amount == self.task.ground_truth), done=True)

    tools = (price, pay)
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, NamedTuple, get_type_hints

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import to_jsonable_python

from treadle.core.errors import Cause, ConfigError, TrajectoryFailure, failure_in
from treadle.core.metrics import Metric
from treadle.core.rewards import NUMBER, Reward, is_reward
from treadle.core.types import ToolCall, in_parts
from treadle.core.user_functions import described
from treadle.envs.base import Environment, EnvStep, Reply

_CALLS = Metric("tool_calls", "trajectory", "mean", "calls", "tool calls of a trajectory")
TOOL_ERRORS = "tool_errors"
_ERRORS = Metric(TOOL_ERRORS, "trajectory", "mean", "calls", "tool calls that were answered by an error")

Tool = Callable[..., Any]


class _Described(NamedTuple):
    """A tool's description for the model, and the validator of its arguments."""

    name: str
    schema: Mapping[str, Any]
    arguments: type[BaseModel]


class _Error(str):
    """Text for the model if a call fails."""


class ToolEnvironment(Environment):
    """Lets the model call tools: functions, or methods of the class, `async` or not.

    Schemas are derived from signatures and docstrings: types must be supported by pydantic, and a docstring line
    `name: text` describes the parameter of that name. The return value, text or JSON, is the answer, as is an image: a
    Pillow image, or a list of parts with one (`as_messages`). For an `EnvStep`, its observations are, its reward, info
    and state count, and `done` ends the episode. Exceptions are reported to the model as text, as are
    unknown tools and invalid arguments, and counted by `env/tool_errors`. A reply without a call is the last one:
    `answered` grades it.

    A tool with a server that is down raises `treadle.InfrastructureError`: the model sees nothing of it, and the
    attempt fails without a reward.

    tools: tools for the model. max_calls: limit per reply; further calls get an error. max_answer: maximum length of an
    answer, or of each text beside images, in characters; longer ones are shortened.

    If no tool is `async`, all run on the attempt's own thread; otherwise plain ones run in separate threads.
    """

    tools: ClassVar[Sequence[Tool]] = ()
    max_calls: ClassVar[int] = 16
    max_answer: ClassVar[int] = 20_000
    metrics: ClassVar[Sequence[Metric]] = (_CALLS, _ERRORS)

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if not isinstance(cls.tools, Sequence) or isinstance(cls.tools, str):
            name = getattr(cls.tools, "__name__", "mine")
            raise ConfigError(f"tools of {cls.__name__} is one {type(cls.tools).__name__}; write tools = ({name},)")
        if cls.step in (ToolEnvironment.step, _plain_step):
            some_async = any(map(inspect.iscoroutinefunction, (*(_of(cls, tool) for tool in cls.tools), cls.answered)))
            cls.step = ToolEnvironment.step if some_async else _plain_step  # type: ignore[assignment, method-assign]

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        """Return the tools as JSON schemas. Raises ConfigError for one that cannot be described, or called by name."""
        described = [_described(_of(type(self), tool)) for tool in self.tools]
        names = [tool.name for tool in described]
        if name := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"{names.count(name)} tools have the name {name!r}; rename all but one")
        return [tool.schema for tool in described]

    def answered(self, text: str) -> float | Reward | EnvStep:
        """Grade a reply without tool calls, which ends the episode unless this returns an EnvStep; `async` or not.

        Default: no reward.
        """
        return 0.0

    async def step(self, reply: Reply) -> EnvStep:  # type: ignore[override]
        """Play the calls of a reply, and answer them."""
        if not reply.tool_calls:
            return _last(await _called(partial(self.answered, reply.text)))
        return await self._turn(reply, awaits=True)

    async def _turn(self, reply: Reply, awaits: bool) -> EnvStep:
        """Play the calls of a reply. awaits: whether tools may be `async`; if not, nothing is awaited here."""
        answers: list[Mapping[str, Any]] = []
        reward, done, errors = Reward(), False, 0
        info: dict[str, Any] = {}
        rewards: dict[str, float | Reward] = {}
        state = ""
        for number, call in enumerate(reply.tool_calls):
            bound = self._bound(call) if number < self.max_calls else _Error(f"at most {self.max_calls} calls a turn")
            try:
                result = bound if isinstance(bound, _Error) else await _called(bound) if awaits else bound()
            # Any other error of a tool is reported to the model.
            except Exception as error:
                if failure_in(error):
                    raise
                result = _Error(f"{type(error).__name__}: {error}"[:2000])
            errors += isinstance(result, _Error)
            if isinstance(result, EnvStep):
                if result.history is not None or result.rejected:
                    what = f"tool {call['function']['name']!r} gave history or rejected, which are of whole turns"
                    raise TrajectoryFailure(Cause.ENVIRONMENT, f"{what}; give them in `step`")
                reward, done = reward.plus(Reward.of(result.reward)), result.done
                info, state = _merged(info, result.info), result.state or state
                for role, paid in result.rewards.items():
                    rewards[role] = Reward.of(rewards.get(role, 0.0)).plus(Reward.of(paid))
            answers.append(self._answer(call, result))
            if done:
                break
        info |= {"tool_calls": len(answers), TOOL_ERRORS: errors}
        return EnvStep(answers, reward, done, info, state, rewards=rewards)

    def _bound(self, call: ToolCall) -> Callable[[], Any] | _Error:
        name = call["function"]["name"]
        tools = {_described(tool).name: tool for tool in (_of(type(self), tool) for tool in self.tools)}
        if name not in tools:
            return _Error(f"there is no tool {name!r:.100}; there are {', '.join(tools)}")
        tool = tools[name]
        try:
            arguments = _described(tool).arguments.model_validate_json(call["function"]["arguments"])
        except ValidationError as error:
            return _Error("; ".join(f"{'.'.join(map(str, e['loc'])) or name}: {e['msg']}" for e in error.errors()))
        named = {str(field.alias): getattr(arguments, key) for key, field in type(arguments).model_fields.items()}
        return partial(tool, *([self] if _is_method(tool) else []), **named)

    def _answer(self, call: ToolCall, result: Any) -> dict[str, Any]:
        name = call["function"]["name"]
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError(f"tool {name!r} gave a coroutine; define it by 'async def'")
        contents = (
            [in_parts(message)["content"] for message in result.observations] if isinstance(result, EnvStep) else []
        )
        if _is_image(result):
            contents = [[{"type": "image", "image": result}]]
        elif _is_parts(result):
            contents = [result]
        elif not isinstance(result, EnvStep):
            contents = [_text(result)]
        content: Any = self._shortened("\n".join(text for text in contents if isinstance(text, str))) or "done"
        if not all(isinstance(each, str) for each in contents):
            parts = (part for each in contents for part in ([_part(each)] if isinstance(each, str) else each))
            content = [_part(self._shortened(part["text"])) if "text" in part else part for part in parts]
        return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": name}

    def _shortened(self, text: str) -> str:
        if len(text) > self.max_answer:
            text = f"{text[: self.max_answer]}... ({len(text) - self.max_answer} more characters are left out)"
        # escapes lone surrogates
        return text.encode(errors="backslashreplace").decode()


def _text(result: Any) -> str:
    if isinstance(result, _Error):
        return f"error: {result}"
    if result is None:
        return "done"
    return result if isinstance(result, str) else _json(result)


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_IMAGES = ("image", "image_url")


def _is_image(result: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(result, pillow.Image)


def _is_parts(result: Any) -> bool:
    """Return whether a list is content of a message with an image."""
    if not isinstance(result, list):
        return False
    kinds = {part.get("type") if isinstance(part, Mapping) else None for part in result}
    return kinds <= {"text", *_IMAGES} and not kinds.isdisjoint(_IMAGES)


def _plain_step(self: ToolEnvironment, reply: Reply) -> EnvStep:
    """Play the calls of a reply, and answer them."""
    if not reply.tool_calls:
        return _last(self.answered(reply.text))
    try:
        self._turn(reply, awaits=False).send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("a turn without `async` tools awaited something")


def _called(call: Callable[[], Any]) -> Awaitable[Any]:
    """Call a function that may be `async`; in a thread if it is not."""
    return call() if inspect.iscoroutinefunction(call) else asyncio.to_thread(call)


def _last(graded: float | Reward | EnvStep) -> EnvStep:
    if not isinstance(graded, EnvStep | Reward) and not is_reward(graded):
        raise TypeError(f"`answered` gave {described(graded)}; it must give a {NUMBER}, a Reward or an EnvStep")
    step = graded if isinstance(graded, EnvStep) else EnvStep(reward=graded, done=True)
    return step._replace(info={**step.info, "tool_calls": 0, TOOL_ERRORS: 0})


@lru_cache(maxsize=1024)
def _described(tool: Tool) -> _Described:
    """Describe a tool. Raises ConfigError for parameters without a type, or of a type without a JSON schema."""
    name = getattr(tool, "__name__", "")
    if not name.isidentifier():
        raise ConfigError(f"tool {tool!r:.100} has no name; define it by 'def'")
    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise ConfigError(f"tool {name!r} is a generator; return a list, or a text for the model")
    text = inspect.getdoc(tool) or ""
    try:
        hints, signature = get_type_hints(tool, include_extras=True), inspect.signature(tool)
    except (TypeError, ValueError, NameError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"tool {name!r}: its signature cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for number, (key, parameter) in enumerate(signature.parameters.items()):
        if number == 0 and key == "self":
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name!r}: parameter {key!r} has no name that a model could give; name each")
        if key not in hints:
            raise ConfigError(f"tool {name!r}: parameter {key!r} has no type; write '{key}: str', or what it is")
        default = ... if parameter.default is parameter.empty else parameter.default
        line = re.search(rf"^\s*{re.escape(key)}\s*(?:\([^)]*\))?:\s*(.+)$", text, re.MULTILINE)
        about = Field(alias=key, description=line[1]) if line else Field(alias=key)
        # Own names, because pydantic reserves some.
        fields[f"p{number}"] = Annotated[hints[key], about], default
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = _without_titles(model.model_json_schema())
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        raise ConfigError(f"tool {name!r} cannot be described in JSON: {error}".split("\n")[0]) from error
    parameters.setdefault("properties", {})
    described = {"name": name, "description": text.split("\n\n")[0].replace("\n", " "), "parameters": parameters}
    return _Described(name, {"type": "function", "function": described}, model)


def _without_titles(schema: Any) -> Any:
    """Remove the titles that pydantic derives from names from a JSON schema."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(part) for name, part in item.items()}
        if key in ("properties", "$defs")
        else _without_titles(item)
        for key, item in schema.items()
        if not (key == "title" and isinstance(item, str))
    }


def _json(value: Any) -> str:
    def other(value: Any) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        # A memory address in the text of an object without its own `__str__`.
        if re.search(r" at 0x[0-9a-f]+>", text := str(value)):
            raise TypeError(f"a tool gave a {type(value).__name__}; return text, or JSON data")
        return text

    # Its order differs between processes.
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    return json.dumps(to_jsonable_python(value, fallback=other), ensure_ascii=False)


def _merged(info: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the info of two calls of one reply by adding up numbers."""
    numbers = {key for key in info.keys() & more.keys() if isinstance(info[key], int | float)}
    sums = {key: info[key] + more[key] for key in numbers if isinstance(more[key], int | float)}
    return {**info, **more, **sums}


def _is_method(tool: Tool) -> bool:
    try:
        return next(iter(inspect.signature(tool).parameters), "") == "self"
    except (TypeError, ValueError):  # `_described` reports it
        return False


def _of(owner: type, tool: Tool) -> Tool:
    """Return the tool, or a subclass's override of it."""
    return getattr(owner, getattr(tool, "__name__", ""), tool) if _is_method(tool) else tool
