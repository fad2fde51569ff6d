"""Jinja as transformers sets it up for chat templates (`transformers.utils.chat_template_utils`).

A template comes with a model and is trusted as the model's directory is: the sandbox keeps it from Python's internals,
nothing bounds the time or memory of a rendering.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from treadle.rendering.roles import Role


@lru_cache(maxsize=1)
def sandbox() -> ImmutableSandboxedEnvironment:
    """Return the environment that all templates of this process share."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.extend(role=Role)  # for `template.ChatTemplate`
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)  # without `dict.update` and the like
    return environment


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


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
