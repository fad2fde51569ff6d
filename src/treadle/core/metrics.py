"""Typed metrics: each is declared once, and the declaration alone decides how values are aggregated.

    Metric --Tally.over(values of one level's units)--> Tally --Measures: a + b--> value

    STEPS = Metric("steps_mean", "trajectory", "mean", "steps", "LLM calls of a trajectory")
    here = measured("trajectory", {STEPS: [3, 1, 2]})
    (here + measured("trajectory", {STEPS: [6]}))["steps_mean"]  # 3.0: four trajectories, not two means

A mean is kept as sum and count, so that parts (micro-batches, updates, ranks) combine to exactly the mean of the whole.
Nothing is ever inferred from a metric's name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from treadle.core.errors import ConfigError

Level = Literal["token", "step", "trajectory", "task", "run"]
View = Literal["played", "trained", "dropped", "run"]
"""Scope of a metric: everything played, whatever happened to it afterwards; the part that was trained; the part that
was not, and why (`core.outcomes`); or the run itself."""
Aggregation = Literal["mean", "sum", "max", "min"]
Figure = float | None
"""None if nothing was counted: a mean over no trajectories is not 0."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of a metric.

    level: unit that each counted value belongs to. aggregation: how values become one. unit: unit of the value; `share`
    counts yes as 1 and no as 0. help: description in one line. view: see `View`. A `*` in the name stands for the key
    of a family: `ended_*`.

    Raises ConfigError for an empty name, and for an unknown level, aggregation or view.
    """

    name: str
    level: Level
    aggregation: Aggregation
    unit: str = ""
    help: str = ""
    view: View = "played"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a metric needs a name, got {self.name!r}")
        for what, value, kind in (
            ("level", self.level, Level),
            ("aggregation", self.aggregation, Aggregation),
            ("view", self.view, View),
        ):
            if value not in (allowed := get_args(kind)):
                raise ConfigError(f"metric {self.name!r}: {what} {value!r} must be one of {', '.join(allowed)}")

    def of(self, key: object) -> Metric:
        """Return the member of this family for one key: `ended_*` of `done` is `ended_done`."""
        return replace(self, name=self.name.replace("*", str(key)))


@dataclass(frozen=True, slots=True)
class Tally:
    """Count of a metric's values, and their sum, maximum or minimum."""

    metric: Metric
    total: float
    count: int

    @classmethod
    def over(cls, metric: Metric, values: Iterable[float]) -> Tally:
        """Return the tally of one value per unit of the metric's level; the caller leaves out units without a value."""
        counted = list(values)
        return cls(metric, _folded(metric, counted) if counted else 0, len(counted))

    def __add__(self, other: Tally) -> Tally:
        if self.metric != other.metric:
            raise ConfigError(
                f"metric {self.metric.name!r} is declared twice, as {self.metric} and as {other.metric}; rename one"
            )
        totals = [tally.total for tally in (self, other) if tally.count]
        return Tally(self.metric, _folded(self.metric, totals) if totals else 0, self.count + other.count)

    @property
    def value(self) -> Figure:
        """Return the aggregate; without values, 0 for a sum and None otherwise."""
        if self.metric.aggregation == "sum":
            return self.total
        if not self.count:
            return None
        return self.total / self.count if self.metric.aggregation == "mean" else self.total


def _folded(metric: Metric, values: list[float]) -> float:
    match metric.aggregation:
        case "max":
            return max(values)
        case "min":
            return min(values)
        case _:
            if all(isinstance(value, int) for value in values):
                return sum(values)
            try:
                return math.fsum(values)
            # A huge value must not end a run.
            except OverflowError:
                return math.copysign(sys.float_info.max, math.fsum(value / len(values) for value in values))


class Measures(Mapping[str, Any]):
    """Maps each metric's name to its `Tally.value`. Supports addition. Read-only."""

    def __init__(self, tallies: Iterable[Tally] = ()) -> None:
        self._tallies: dict[str, Tally] = {}
        for tally in tallies:
            earlier = self._tallies.get(tally.metric.name)
            self._tallies[tally.metric.name] = tally if earlier is None else earlier + tally

    def __add__(self, other: Measures) -> Measures:
        return Measures((*self.tallies, *other.tallies))

    def __getitem__(self, name: str) -> Any:
        return self._tallies[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tallies)

    def __len__(self) -> int:
        return len(self._tallies)

    def __repr__(self) -> str:
        return f"Measures({dict(self)})"

    @property
    def tallies(self) -> tuple[Tally, ...]:
        return tuple(self._tallies.values())

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Return name -> value, total, count and the declaration, as plain JSON data."""
        return {name: {"value": t.value, **asdict(t)} for name, t in self._tallies.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, Any]]) -> Measures:
        return cls(Tally(Metric(**each["metric"]), each["total"], each["count"]) for each in data.values())

    def under(self, prefix: str) -> Measures:
        """Return the same measures with `prefix` before each name."""
        return Measures(replace(t, metric=replace(t.metric, name=prefix + t.metric.name)) for t in self.tallies)


def measured(level: Level, values: Mapping[Metric, Iterable[float]]) -> Measures:
    """Return the measures of one level's units. values: one per unit, by metric.

    Raises ConfigError for a metric of another level: values counted per step are never reported per trajectory.
    """
    if wrong := [metric for metric in values if metric.level != level]:
        raise ConfigError(f"metric {wrong[0].name!r} is of level {wrong[0].level}, its values are of level {level}")
    return Measures(Tally.over(metric, counted) for metric, counted in values.items())


def shares(family: Metric, keys: Iterable[Any], observed: Iterable[Any]) -> dict[Metric, list[bool]]:
    """Return, per key of a family of shares, whether each observed value is that key; includes keys never observed."""
    values = list(observed)
    return {family.of(key): [value == key for value in values] for key in keys}


def declared(namespace: Mapping[str, object]) -> tuple[Metric, ...]:
    """Return the metrics declared in a module: `declared(vars(module))`."""
    return tuple(value for value in namespace.values() if isinstance(value, Metric))
