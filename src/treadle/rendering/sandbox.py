"""Jinja as Hugging Face sets it up for chat templates, with bounds on the time and memory of one rendering.

Chat templates are programs that come with a model. The sandbox keeps them from Python; the bounds keep
`{% for i in range(100000) %}` within itself, `indent(10**9)` or forty doublings of a text from halting the process:

    every loop and call       looks at the clock now and then               `_Rendering.check_time`
    what makes text longer    counts first how long it will be              `_Rendering.take`

They do not confine it: a template can still be slow, and one that is meant to do harm has no place on your machine.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from treadle.rendering.roles import Role

MOST_CHARACTERS = 2**28
"""Characters that one rendering may make, all its intermediate texts together."""
MOST_SECONDS = 10.0
"""CPU time of one rendering."""
_WIDEST = 100_000  # of a field, a fill or an indent; as many as `range` may have in the sandbox
_LEFT_OUT = ("lipsum",), ("random", "pprint")  # globals and filters that no chat template needs; two of them draw
_OFTEN = 64  # steps between two looks at the clock
_NUMBER = re.compile("[0-9]+")
_CONTAINERS = dict, list, tuple
_WIDTH = re.compile(r"[0-9]{6}|%[^a-zA-Z%]*\*|\{[^{}]*\{")  # in a format: a huge one, or one from the arguments


class TemplateLimitExceeded(TemplateError):
    """Is raised when a template goes beyond a bound."""


class _Rendering(threading.local):
    """What the rendering on this thread has used so far."""

    characters = steps = 0
    began = 0.0

    def take(self, characters: int) -> None:
        """Note that a text (or a list) of this length is about to be made. Raises TemplateLimitExceeded."""
        self.characters += characters
        if self.characters > MOST_CHARACTERS:
            raise TemplateLimitExceeded(f"it makes more than {MOST_CHARACTERS} characters of text")
        self.check_time()

    def check_time(self) -> None:
        """Note one more step. Raises TemplateLimitExceeded."""
        self.steps += 1
        if self.steps % _OFTEN == 0 and time.thread_time() - self.began > MOST_SECONDS:
            raise TemplateLimitExceeded(f"it takes more than {MOST_SECONDS:g} s")


_rendering = _Rendering()


@contextmanager
def bounded() -> Iterator[None]:
    """Begin one rendering on this thread: what it uses is counted, against the bounds, from here on."""
    _rendering.characters = _rendering.steps = 0
    _rendering.began = time.thread_time()
    yield


def length(value: Any) -> int:
    """Return how many characters, at least, a value would have as text; what it holds twice counts twice."""
    if isinstance(value, str):
        return len(value)
    return _length(value, {}) if isinstance(value, _CONTAINERS) else 1


def _length(container: Any, known: dict[int, int]) -> int:
    """known: lengths of containers by identity, so that `[x, x]` forty times over is forty steps."""
    if id(container) not in known:
        known[id(container)] = total = 2
        for item in (*container, *container.values()) if isinstance(container, dict) else container:
            if isinstance(item, str):
                total += len(item)
            else:
                total += _length(item, known) if isinstance(item, _CONTAINERS) else 1
        known[id(container)] = total
    return known[id(container)]


class _Code(CodeGenerator):
    """Generates `a ~ b` as a call, so that its length can be bounded, and constants that are roles as such."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        """Write the code of a constant, a role as such."""
        if isinstance(node.value, Role):
            self.write(f"environment.role({str.__repr__(node.value)})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Write the code of `a ~ b ~ c`."""
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates, within the bounds."""

    code_generator_class = _Code
    role = Role
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalized
        )
        for table, names in zip((self.globals, self.filters), _LEFT_OUT, strict=True):
            for name in names:
                del table[name]
        self.filters.update(tojson=_to_json, join=_join)
        for name, growth in _FILTERS.items():
            self.filters[name] = _grown(growth, self.filters[name])
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)  # its methods change what they are given

    def with_clock(self, template: nodes.Template) -> nodes.Template:
        """Return the template with each of its loops going through `clocked`."""
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.EnvironmentAttribute("clocked"), [loop.iter], [], None, None)
        return template

    def clocked(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items. Raises TemplateLimitExceeded once the template has taken too long."""
        for item in items:
            _rendering.check_time()
            yield item

    def concatenated(self, parts: tuple[Any, ...]) -> str:
        """Return the parts as one text. Raises TemplateLimitExceeded."""
        _rendering.take(sum(map(length, parts)))
        return "".join(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operator that can make things larger. Raises TemplateLimitExceeded."""
        if operator == "+":
            made = left + right
            _rendering.take(len(made) if isinstance(made, str | list | tuple) else 1)
            return made
        _rendering.take(_BINOPS[operator](left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call from a template. Raises TemplateLimitExceeded."""
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str | int) and (growth := _METHODS.get(method.__name__)):
            if method.__name__ == "join":
                args = (list(*args),)
            _rendering.take(growth(text, *args, **kwargs))
        _rendering.check_time()
        return super().call(context, function, *args, **kwargs)


@lru_cache(maxsize=1)
def sandbox() -> Sandbox:
    """Return the environment of this process."""
    return Sandbox()


class _Generation(Extension):
    """`{% generation %}` marks what a model writes, for training masks; in text it leaves no trace."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's, without attributes that lead into Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no {name!r}")
        super().__setitem__(name, value)


def _finalized(value: Any) -> Any:
    """What `{{ value }}` writes."""
    _rendering.take(len(value) if isinstance(value, str) else length(value))
    return value


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    _rendering.take(length(value) * (1 + (_width(indent) if indent is not None else 0)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    parts = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
    _rendering.take(_joined(str(d), parts))
    return str(d).join(map(str, parts))


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


# How many characters an operation makes, computed from its arguments

Growth = Callable[..., int]


def _grown(growth: Growth, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is refused before it runs if it would make too much."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        plain = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _rendering.take(growth(*plain, **kwargs))
        return function(*args, **kwargs)

    return call


def _width(width: Any) -> int:
    """A width, as a number or as the text that fills it."""
    wide = len(width) if isinstance(width, str) else width
    if isinstance(wide, int) and abs(wide) > _WIDEST:
        raise TemplateLimitExceeded(f"it asks for a width of more than {_WIDEST}")
    return wide if isinstance(wide, int) else 1


def _number(bits: int) -> int:
    if bits > _WIDEST:
        raise TemplateLimitExceeded(f"it computes a number of more than {_WIDEST} bits")
    return bits


def _padded(value: Any, width: Any = 80, *_: Any, **__: Any) -> int:
    return length(value) + _width(width)


def _indented(s: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return length(s) + (1 + str(s).count("\n")) * _width(width)


def _untabbed(text: str, tabsize: Any = 8) -> int:
    return len(text) + text.count("\t") * _width(tabsize)


def _replaced(s: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text = str(s)
    return len(text) + text.count(str(old)) * length(new)


def _wrapped(s: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = "\n", *_: Any, **__: Any) -> int:
    return length(s) * (1 + length(wrapstring or "\n"))


def _joined(text: str, parts: list[Any]) -> int:
    return sum(length(part) + len(text) for part in parts)


def _formatted(value: Any, *args: Any, **kwargs: Any) -> int:
    text = str(value)
    if _WIDTH.search(text):
        raise TemplateLimitExceeded(f"it formats with {text[:40]!r}, whose width can be huge")
    longest = max(map(length, (*args, *kwargs.values())), default=0)
    return len(text) + (text.count("%") + text.count("{")) * longest + sum(map(int, _NUMBER.findall(text)))


def _multiplied(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _number(left.bit_length() + right.bit_length())
    times, of = (left, right) if isinstance(left, int) else (right, left)
    return max(0, times) * len(of) if isinstance(times, int) and isinstance(of, str | list | tuple) else 1


def _powered(left: Any, right: Any) -> int:
    return _number(left.bit_length() * max(0, right)) if isinstance(left, int) and isinstance(right, int) else 1


def _taken_modulo(left: Any, right: Any) -> int:
    if not isinstance(left, str):
        return 1
    return _formatted(left, *(right if isinstance(right, tuple) else (right,)))


_BINOPS: dict[str, Growth] = {"*": _multiplied, "**": _powered, "%": _taken_modulo}
_FILTERS: dict[str, Growth] = {
    "center": _padded,
    "indent": _indented,
    "replace": _replaced,
    "wordwrap": _wrapped,
    "format": _formatted,
    "batch": _padded,
    "slice": _padded,
    "round": lambda value, precision=0, *_, **__: _width(precision),
    "string": length,
}
_METHODS: dict[str, Growth] = {
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "to_bytes": _padded,
    "expandtabs": _untabbed,
    "replace": _replaced,
    "join": _joined,
    "format": _formatted,
    "format_map": _formatted,
    "translate": lambda text, table: len(text) * max(map(length, table.values()), default=1),
}
