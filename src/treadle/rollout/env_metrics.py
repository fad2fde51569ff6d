"""Values of the metrics that environments declare, from the `info` of each step and of `finish`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.core.metrics import Measures, Metric, Tally
from treadle.core.rewards import is_finite
from treadle.envs.tasks import made_class

_LARGEST = 1e300  # so that no sum of such values is infinite


def check_metrics(environments: Mapping[str, object]) -> None:
    """Raise ConfigError if environments declare a metric that cannot be counted, or one name in two ways.

    environments: name -> class, or factory; a factory without an attribute `metrics` declares none yet.
    """
    declared: list[tuple[str, Metric]] = []
    for name, environment in environments.items():
        where = f"environment {name!r}: metrics"
        metrics = getattr(made_class(environment), "metrics", ())
        if not isinstance(metrics, tuple | list) or not all(isinstance(metric, Metric) for metric in metrics):
            raise ConfigError(f"{where} must be a tuple of treadle.Metric, got {metrics!r:.100}")
        for metric in metrics:
            if metric.level not in ("step", "trajectory"):
                raise ConfigError(f"{where}: {metric.name!r} is of level {metric.level}; make it step or trajectory")
            if metric.view != "played":
                raise ConfigError(f"{where}: {metric.name!r} is of what is {metric.view}; leave view out")
            if not metric.name.removesuffix("*").isidentifier():
                raise ConfigError(f"{where}: {metric.name!r} must be a name of letters, digits and underscores")
            for other, earlier in declared:
                if metric != earlier and _overlap(metric, earlier):
                    raise ConfigError(f"{where}: {metric.name!r} is declared otherwise by {other!r}; rename one")
            declared.append((name, metric))


def _overlap(metric: Metric, other: Metric) -> bool:
    """Whether a name may belong to both: they have the same, or one is a family (`skyrl_*`)."""
    return metric.name == other.name or any(
        _is_family(family) and member.name.startswith(family.name[:-1])
        for family, member in ((metric, other), (other, metric))
    )


class EnvMetrics:
    """Counts one attempt's values of the metrics that its environment declares.

    Raises TrajectoryFailure (environment) for metrics that `check_metrics` refuses.
    """

    def __init__(self, name: str, environment: object) -> None:
        try:
            check_metrics({name: environment})
        except ConfigError as error:  # only now: a factory need not name them
            raise TrajectoryFailure(Cause.ENVIRONMENT, str(error)) from error
        self._declared: Sequence[Metric] = getattr(environment, "metrics", ())
        self._values: dict[Metric, list[float]] = {metric: [] for metric in self._declared if not _is_family(metric)}

    def record(self, info: object, method: str) -> None:
        """Count the declared metrics in the `info` that a method gave.

        Raises TrajectoryFailure (environment) if `info` is no mapping, or a value no finite number.
        """
        if not self._declared:
            return
        if not isinstance(info, Mapping):
            raise TrajectoryFailure(Cause.ENVIRONMENT, f"{method} gave info {info!r:.100}; it must be a mapping")
        for metric in self._declared:
            for member in _members(metric, info):
                if (value := info.get(member.name)) is None:
                    continue
                if not is_finite(value) or abs(value) > _LARGEST:
                    raise TrajectoryFailure(
                        Cause.ENVIRONMENT,
                        f"{method} gave info[{member.name!r}] = {value!r:.100}; a declared metric must be a finite "
                        f"number, at most {_LARGEST:g} in size",
                    )
                self._values.setdefault(member, []).append(float(value))

    def measured(self) -> Measures:
        """Return the metrics that have a value: all values at level step, their sum at level trajectory."""
        return Measures(
            Tally.over(metric, values if metric.level == "step" else [math.fsum(values)])
            for metric, values in self._values.items()
            if values
        )


def _is_family(metric: Metric) -> bool:
    return metric.name.endswith("*")


def _members(metric: Metric, info: Mapping[Any, Any]) -> list[Metric]:
    """Return the metric; for a family, one for each of its names in `info`."""
    if not _is_family(metric):
        return [metric]
    prefix = metric.name[:-1]
    return [metric.of(name[len(prefix) :]) for name in info if isinstance(name, str) and name.startswith(prefix)]
