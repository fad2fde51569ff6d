"""Differences between two configurations, setting by setting."""

from __future__ import annotations

from typing import Any, NamedTuple

from treadle.core.config import Config, as_override, describe


class Change(NamedTuple):
    """One difference: `Change("orchestration.updates", 100, 200)`; None also stands for an absent section."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path} {as_override(self.old)} -> {as_override(self.new)}"


def changes(before: Config, after: Config) -> list[Change]:
    """Differences between two configurations, in order of declaration."""
    old, new = (leaves(config) for config in (before, after))
    return [Change(path, old.get(path), new.get(path)) for path in {**new, **old} if old.get(path) != new.get(path)]


def leaves(config: Config) -> dict[str, Any]:
    """Return path -> value; options of registered components (`driver_options`) are split up, too."""
    values: dict[str, Any] = {}
    for line in describe(config):
        if isinstance(line.value, dict) and line.path.endswith("options"):
            values |= {f"{line.path}.{name}": value for name, value in line.value.items()}
        elif line.path == "models":
            each = ((name, leaf) for name, model in line.value.items() for leaf in describe(model))
            values |= {f"models.{name}.{leaf.path}": leaf.value for name, leaf in each}
        else:
            values[line.path] = line.value
    return values
