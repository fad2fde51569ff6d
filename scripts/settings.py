"""Writes the last part of docs/settings.md, a table of every key: python scripts/settings.py"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from treadle.core.config import REQUIRED, Config, as_override, nested_config
from treadle.plan.config import RunConfig

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEADING = "## Every key\n"


def every_key() -> str:
    """Return the part of the page: a table of the keys outside sections, and one for each section."""
    return "\n".join((HEADING, _ABOUT, *(_table(*each) for each in _sections("", RunConfig, ""))))


_ABOUT = """`treadle recipes show RECIPE SECTION` prints them with a recipe's values. A resumed run takes other values
of some of them, and a refusal lists which. `key=null` is no value, where there can be none.
"""
_ABSENT: tuple[Any, ...] = (None, (), {})


def _sections(path: str, config: type[Config], meaning: str) -> Iterator[tuple[str, type[Config], str]]:
    """Yield path, class and meaning of a section and of those in it, also of those that are null by default."""
    yield path, config, meaning
    for name, field in config.model_fields.items():
        if section := nested_config(field.annotation):
            absent = field.get_default(call_default_factory=True)
            each = ".NAME" if absent == {} else "[N]" if absent == () else ""
            yield from _sections(f"{path}.{name}{each}".lstrip("."), section, field.description or "")


def _table(path: str, config: type[Config], meaning: str) -> str:
    title = f"### {path}\n\n{meaning[:1].upper()}{meaning[1:]}.\n\n" if path else ""
    rows = (_row(f"{path}.{name}".lstrip("."), name, config) for name in config.model_fields)
    return title + "| key | default | meaning |\n|---|---|---|\n" + "".join(rows)


def _choices(annotation: Any) -> list[object]:
    """Return what may be written, where only a few values may."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return list(annotation)
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return [choice for part in parts for choice in _choices(part)]


def _row(path: str, name: str, config: type[Config]) -> str:
    """Return a key's row; "" for a section that is always there."""
    field = config.model_fields[name]
    value = field.get_default(call_default_factory=True)
    if nested_config(field.annotation) is not None and value not in _ABSENT:
        return ""
    default = "required" if value is REQUIRED else f"`{as_override(value)}`"
    choices = [str(each) for each in _choices(field.annotation)]
    one_of = f" ({', '.join(f'`{each}`' for each in choices)})" if choices else ""
    cells = (f"`{path}`", default, f"{field.description or ''}{one_of}")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def written(page: str) -> str:
    """Return the page with this part rewritten."""
    return page.partition(HEADING)[0] + every_key()


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
