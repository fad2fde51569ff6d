"""Structural strings that a template puts together from roles: `'<|' + message['role'] + '|>'` is `<|user|>`.

A role is a word that the template expects, and the only text of a message that may be part of structure. It is passed
to such templates as a `Role`, which is recognised where it was written; a structural string is the template's if it
consists of a role between two halves that are constants of the template:

    <|        user        |>         marked:  <|M  MuserM  M|>  -->  the private name of `<|user|>`
    a constant's end   a constant's beginning
"""

from __future__ import annotations

import re

from treadle.rendering.structure import Structure, any_of, secret_text

_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation")
_SECRET = secret_text()


class Role(str):
    """Marks a role, so that it is recognised where it was written; as a value it is just its word."""

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
    """Finds structural strings that a template puts together from a role and what it writes around it."""

    def __init__(self, structure: Structure) -> None:
        split = [(name, *usual.partition(role)) for usual, name in structure.names.items() for role in _ROLES]
        parts = [(name, before, role, after) for name, before, role, after in split if before and role and after]
        self._names = {f"{a}{_SECRET * 2}{role}{_SECRET * 2}{b}": name for name, a, role, b in parts}
        self._pattern = any_of(self._names)
        before, after = any_of({a for _, a, _, _ in parts}), any_of({b for *_, b in parts})
        self._halves = re.compile(rf"(?P<before>(?:{before.pattern})\Z)|(?P<after>\A(?:{after.pattern}))")

    def constant(self, text: str) -> str:
        """Make a Role of a template's constant, or mark where it can stand beside one."""
        if text in _ROLES:
            return Role(text)
        return self._halves.sub(lambda m: m[0] + _SECRET if m.lastgroup == "before" else _SECRET + m[0], text)

    def read(self, text: str) -> str:
        """Write rendered text with private names, without marks."""
        return self._pattern.sub(lambda match: self._names[match[0]], text).replace(_SECRET, "")
