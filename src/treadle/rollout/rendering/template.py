"""`ChatTemplate`: a Jinja chat template, rendered to text, and the facts about it that rendering needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.core.errors import DataError

Variables = Mapping[str, Any]
Plain = dict[str, Any]
"""A message as templates read it: plain data, `content` a string, tool arguments as the template wants them."""

# What templates fail with where they do not expect a conversation: they are programs of others.
_REFUSALS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
_PROBE = "zqz"  # stands for a reply
_QUESTION: Plain = {"role": "user", "content": "u"}


@dataclass(frozen=True, slots=True)
class Opening:
    """How a template opens the assistant's turn.

    prompt: what `add_generation_prompt` appends. kept: how much of it also stands before an earlier assistant message.
    For Qwen 3.5 they are `<|im_start|>assistant\\n<think>\\n` and `<|im_start|>assistant\\n`.
    """

    prompt: str
    kept: str


class ChatTemplate:
    """One template. variables: what it may read beside messages and tools (the names of special tokens)."""

    def __init__(self, source: str, variables: Variables) -> None:
        self._template = _environment().from_string(source)
        self._template.globals = dict(self._template.globals)  # every rendering copies them: slow from a ChainMap
        self._variables = dict(variables)
        self._opening = lru_cache(maxsize=64)(self._probe_opening)

    def render(
        self,
        messages: Sequence[Plain],
        tools: Sequence[Any] | None,
        options: Variables,
        *,
        generation_prompt: bool,
    ) -> str:
        """The conversation as text. Raises DataError if the template refuses it."""
        variables = {**self._variables, **options, "add_generation_prompt": generation_prompt}
        try:
            return self._template.render(messages=messages, tools=tools, documents=None, **variables)
        except _REFUSALS as error:  # many refuse roles that do not take turns
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(f"the chat template refuses a conversation of {roles}: {error}") from error

    @cached_property
    def arguments_as_text(self) -> bool:
        """Whether it wants a tool call's arguments as JSON text rather than as a mapping."""
        for as_text in (False, True):
            arguments: Any = {"q": _PROBE}
            function = {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}
            call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            text = self._try([_QUESTION, call])
            if _PROBE in text and '\\"' not in text:  # written twice as JSON, it has its quotes escaped
                return as_text
        return False

    @cached_property
    def after_reply(self) -> str:
        """What it writes after an assistant message with a user message behind it; "" if it writes no such message."""
        text = self._try([_QUESTION, {"role": "assistant", "content": _PROBE}, _QUESTION])
        return text.rpartition(_PROBE)[2] if _PROBE in text else ""

    def opening(self, options: Variables) -> Opening:
        """How it opens the assistant's turn under these options."""
        return self._opening(json.dumps(options, sort_keys=True, default=str))

    def _probe_opening(self, options: str) -> Opening:
        variables = json.loads(options)
        asked = self._try([_QUESTION], variables)
        prompted = self._try([_QUESTION], variables, generation_prompt=True)
        if not asked or not prompted.startswith(asked):
            return Opening("", "")
        past = self._try([_QUESTION, {"role": "assistant", "content": _PROBE}, _QUESTION], variables)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompted, past, strict=False)))
        return Opening(prompted[len(asked) :], prompted[len(asked) : same])

    def _try(self, messages: Sequence[Plain], options: Variables | None = None, generation_prompt: bool = False) -> str:
        try:
            return self.render(messages, None, options or {}, generation_prompt=generation_prompt)
        except DataError:
            return ""


class _Generation(Extension):
    """`{% generation %}` marks what a model writes, for training masks; in text it leaves no trace."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Hugging Face sets it up for chat templates; templates are foreign code, hence the sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
