"""`ChatTemplate`: a Jinja chat template that renders to text, and properties needed for rendering.

When a template is compiled, structural strings in its own constants are replaced by private names (`Structure.claim`),
which no message contains. Some templates build these strings from roles: `Composed`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, NoReturn

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from treadle.core.errors import ConfigError, DataError
from treadle.rendering.structure import Structure, any_of, secret_text

Variables = Mapping[str, Any]
Plain = dict[str, Any]
"""A message as templates read it: plain data, `content` a string, tool arguments as text or mapping."""

# Errors of templates, which are third-party programs, for unexpected conversations.
_REFUSALS = (
    *(jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError),
)
_PROBE = "zqz"  # stands for a reply
_QUESTION: Plain = {"role": "user", "content": "u"}
_REPLY: Plain = {"role": "assistant", "content": _PROBE}


@dataclass(frozen=True, slots=True)
class Opening:
    """A template's opening of the assistant's turn.

    prompt: text added by `add_generation_prompt`. kept: the part of it also written before an earlier assistant
    message. For Qwen 3.5 they are `<|im_start|>assistant\\n<think>\\n` and `<|im_start|>assistant\\n`.
    """

    prompt: str
    kept: str


class ChatTemplate:
    """Renders one template. variables: its inputs beside messages and tools (the names of special tokens).

    Raises ConfigError if it cannot be compiled, or builds structural strings from pieces indistinguishable from a
    message's text.
    """

    def __init__(self, source: str, variables: Variables, structure: Structure) -> None:
        self._structure = structure
        self._variables = {name: _claimed(value, structure) for name, value in variables.items()}
        self._opening = lru_cache(maxsize=64)(self._probe_opening)
        self._composed: Composed | None = None
        self._template = self._compile(source)
        if self._unclaimed():
            self._composed = Composed(structure)
            self._template = self._compile(source)
        if pieces := self._unclaimed():
            raise ConfigError(
                f"the chat template builds {pieces[0]} from pieces, so that it cannot be told from the text of a "
                "message; write it in one piece (model.chat_template)"
            )

    def render(
        self, messages: Sequence[Plain], tools: Sequence[Any] | None, options: Variables, *, generation_prompt: bool
    ) -> str:
        """Return the conversation as text, structural tokens by private names.

        Raises DataError if the template refuses it, or fails.
        """
        variables = {**self._variables, **options, "add_generation_prompt": generation_prompt}
        shown = [{**m, "role": Role.of(m["role"])} for m in messages] if self._composed else messages
        try:
            text = self._template.render(messages=shown, tools=tools, documents=None, **variables)
        except _REFUSALS as error:
            # Many refuse roles that do not alternate.
            roles = ", ".join(str(message["role"]) for message in messages[:8]) + (", ..." if len(messages) > 8 else "")
            why = str(error) or type(error).__name__
            raise DataError(f"the chat template refuses a conversation of {roles}: {why}") from error
        return self._composed.read(text) if self._composed else text

    def _compile(self, source: str) -> jinja2.Template:
        environment = sandbox()
        try:
            parsed = environment.parse(source)
            for node in parsed.find_all((nodes.TemplateData, nodes.Const)):
                name = "data" if isinstance(node, nodes.TemplateData) else "value"
                constant = _claimed(getattr(node, name), self._structure)
                if self._composed and isinstance(constant, str):
                    constant = self._composed.constant(constant)
                setattr(node, name, constant)
            template = environment.from_string(_ConstantRoles().visit(parsed))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError) as error:
            raise ConfigError(f"the chat template cannot be compiled: {type(error).__name__}") from error
        # Every rendering copies them, which is slow from a ChainMap.
        template.globals = dict(template.globals)
        return template

    def _unclaimed(self) -> list[str]:
        """List structural strings in harmless conversations that are not attributed to the template."""
        system: Plain = {"role": "system", "content": _PROBE}
        result: Plain = {"role": "tool", "content": _PROBE}
        talks = [_QUESTION], [_QUESTION, _REPLY, _QUESTION], [system, _QUESTION, _REPLY], [_QUESTION, _REPLY, result]
        texts = (self._try(talk, generation_prompt=asked) for talk in talks for asked in (False, True))
        return [name for text in texts for name in self._structure.unclaimed(text)]

    @cached_property
    def arguments_as_text(self) -> bool:
        """Whether the template takes a tool call's arguments as JSON text rather than as a mapping."""
        for as_text in (False, True):
            arguments: Any = {"q": _PROBE}
            function = {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}
            call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            text = self._try([_QUESTION, call])
            # Quotes are escaped if text is encoded as JSON again.
            if _PROBE in text and '\\"' not in text:
                return as_text
        return False

    @cached_property
    def after_reply(self) -> tuple[str, str]:
        """Text after a reply: before the next question, and at the end; "" if the template leaves the reply out."""
        texts = self._try([_QUESTION, _REPLY, _QUESTION]), self._try([_QUESTION, _REPLY])
        earlier, last = (text.rpartition(_PROBE)[2] if _PROBE in text else "" for text in texts)
        return earlier, last

    def opening(self, options: Variables) -> Opening:
        return self._opening(json.dumps(options, sort_keys=True, default=str))

    def _probe_opening(self, options: str) -> Opening:
        variables = json.loads(options)
        asked = self._try([_QUESTION], variables)
        prompted = self._try([_QUESTION], variables, generation_prompt=True)
        if not asked or not prompted.startswith(asked):
            return Opening("", "")
        past = self._try([_QUESTION, _REPLY, _QUESTION], variables)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompted, past, strict=False)))
        return Opening(prompted[len(asked) :], prompted[len(asked) : same])

    def _try(self, messages: Sequence[Plain], options: Variables | None = None, generation_prompt: bool = False) -> str:
        try:
            return self.render(messages, None, options or {}, generation_prompt=generation_prompt)
        except DataError:
            return ""


class _ConstantRoles(NodeTransformer):
    """Turns constants of type `Role` into calls that make one; compiled constants would be plain strings."""

    def visit_Const(self, node: nodes.Const) -> nodes.Expr:
        if not isinstance(node.value, Role):
            return node
        return nodes.Call(nodes.EnvironmentAttribute("role"), [nodes.Const(node.value[:])], [], None, None)


def _claimed(value: Any, structure: Structure) -> Any:
    """Replace structural strings by private names in a constant, or in a list of constants."""
    if isinstance(value, str):
        return structure.claim(value)
    return [_claimed(item, structure) for item in value] if isinstance(value, list | tuple) else value


_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
_SECRET = secret_text()


class Role(str):
    """A role that marks itself when written out; comparisons and lookups see the plain word."""

    __slots__ = ()

    @classmethod
    def of(cls, role: str) -> str:
        """Make a Role of the word if it is one."""
        return cls(role) if role in _ROLES else role

    def __str__(self) -> str:
        return f"{_SECRET}{str.__str__(self)}{_SECRET}"

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


class Composed:
    """Finds structural strings that a template builds from roles: `'<|' + message['role'] + '|>'` is `<|user|>`.

    A role is a word expected by the template, and the only text of a message that may be part of structure. It is
    passed to such templates as a `Role`. A structural string is the template's if it consists of a role between two
    halves that are constants of the template:

        <|        user        |>         marked:  <|M  MuserM  M|>  -->  the private name of `<|user|>`
        a constant's end   a constant's beginning
    """

    def __init__(self, structure: Structure) -> None:
        split = [(name, *usual.partition(role)) for usual, name in structure.names.items() for role in _ROLES]
        parts = [(name, before, role, after) for name, before, role, after in split if before and role and after]
        self._names = {f"{a}{_SECRET * 2}{role}{_SECRET * 2}{b}": name for name, a, role, b in parts}
        self._pattern = any_of(self._names)
        before, after = any_of({a for _, a, _, _ in parts}), any_of({b for *_, b in parts})
        self._halves = re.compile(rf"(?P<before>(?:{before.pattern})\Z)|(?P<after>\A(?:{after.pattern}))")

    def constant(self, text: str) -> str:
        """Turn a template's constant into a Role, or mark an end of it that may adjoin one."""
        if text in _ROLES:
            return Role(text)
        return self._halves.sub(lambda m: m[0] + _SECRET if m.lastgroup == "before" else _SECRET + m[0], text)

    def read(self, text: str) -> str:
        """Return rendered text with private names and without marks."""
        return self._pattern.sub(lambda match: self._names[match[0]], text).replace(_SECRET, "")


@lru_cache(maxsize=1)
def sandbox() -> ImmutableSandboxedEnvironment:
    """Return a Jinja environment set up for chat templates as in `transformers.utils.chat_template_utils`.

    A template comes with a model and is trusted like the model's directory: the sandbox keeps it from Python's
    internals, but nothing bounds the time or memory of a rendering.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.extend(role=Role)  # for `_ConstantRoles`
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what a model writes, for training masks; in text it leaves no trace."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
