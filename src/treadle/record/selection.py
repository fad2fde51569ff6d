"""Selection of recorded trajectories to learn from: `reward >= 1, steps <= 8, best_of=2`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from treadle.core.errors import ConfigError
from treadle.core.types import Status

_EXAMPLE = 'write comparisons with commas between, such as "reward >= 1, steps <= 8, status == done, best_of=2"'
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_PART = re.compile(r"([^\s<>=!]+)\s*(>=|<=|==|!=|>|<|=)\s*([^\s<>=!]+)")


class Selectable(Protocol):
    """Fields used by a selection. reward: None for an attempt without one. steps: number of played ones."""

    @property
    def task_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def components(self) -> dict[str, float]: ...
    @property
    def status(self) -> str: ...
    @property
    def played_steps(self) -> int: ...


S = TypeVar("S", bound=Selectable)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One condition: `Comparison("reward", ">=", 1.0)`. name: reward, steps, status, or a component of the reward."""

    name: str
    operator: str
    value: float | str

    def holds(self, trajectory: Selectable) -> bool:
        """Return whether it holds; never for a missing reward. A component that was not given counts as 0."""
        if self.name == "status":
            found: float | str = trajectory.status
        elif self.name == "steps":
            found = trajectory.played_steps
        elif trajectory.reward is None:
            return False
        else:
            found = trajectory.reward if self.name == "reward" else trajectory.components.get(self.name, 0.0)
        return _COMPARE[self.operator](found, self.value)


@dataclass(frozen=True, slots=True)
class Selection:
    """All comparisons must hold; of each task, only the best attempts, if `best_of` sets their number."""

    comparisons: tuple[Comparison, ...] = ()
    best_of: int | None = None

    @classmethod
    def parse(cls, text: str, setting: str = "--select") -> Selection:
        """Parse `reward >= 1, best_of=2`; an empty text selects everything. Raises ConfigError, naming the part."""
        comparisons, best_of = list[Comparison](), None
        for part in text.split(",") if text.strip() else ():
            match = _PART.fullmatch(part.strip())
            if match is None:
                raise ConfigError(f"{setting}: cannot read {part.strip()!r}; {_EXAMPLE}")
            name, sign, value = match.groups()
            if name != "best_of":
                comparisons.append(_comparison(name, "==" if sign == "=" else sign, value, f"{setting}: {match[0]!r}"))
            elif best_of is not None or sign not in ("=", "==") or not value.isdecimal() or int(value) < 1:
                again = "is given twice" if best_of is not None else "needs one whole number of at least 1"
                raise ConfigError(f"{setting}: {match[0]!r}: best_of {again}; {_EXAMPLE}")
            else:
                best_of = int(value)
        return cls(tuple(comparisons), best_of)

    def choose(self, trajectories: Sequence[S]) -> list[S]:
        """Return the selected ones, in order; of equally good attempts at a task, those with smaller numbers.

        Failed and unrated attempts are only selected by a condition on `status`. Raises ConfigError for a component
        missing in all trajectories, naming the existing ones.
        """
        known = dict.fromkeys(["reward", "steps", "status", *(name for t in trajectories for name in t.components)])
        for comparison in self.comparisons:
            if comparison.name not in known and trajectories:
                raise ConfigError(
                    f"--select: no recorded reward has a component {comparison.name!r}; there are "
                    f"{', '.join(known)}; {_EXAMPLE}"
                )
        asks_status = any(comparison.name == "status" for comparison in self.comparisons)
        chosen = [
            (place, t)
            for place, t in enumerate(trajectories)
            if (asks_status or t.status not in (Status.FAILED, Status.UNRATED))
            and all(c.holds(t) for c in self.comparisons)
        ]
        if self.best_of is not None:
            best: dict[str, list[tuple[float, int, int]]] = {}
            for place, t in chosen:
                if t.reward is not None:
                    best.setdefault(t.task_id, []).append((-t.reward, t.attempt, place))
            kept = {place for ranked in best.values() for _, _, place in sorted(ranked)[: self.best_of]}
            chosen = [(place, t) for place, t in chosen if place in kept]
        return [t for _, t in chosen]


def _comparison(name: str, sign: str, value: str, where: str) -> Comparison:
    if name == "status":
        if value not in list(Status) or sign not in ("==", "!="):
            raise ConfigError(f"{where}: a status is == or != one of {', '.join(Status)}; {_EXAMPLE}")
        return Comparison(name, sign, value)
    with suppress(ValueError):
        if math.isfinite(number := float(value)):
            return Comparison(name, sign, number)
    raise ConfigError(f"{where}: {value!r} is not a number; {_EXAMPLE}")
