"""What environments measure: values of their declared metrics, out of the `info` of each step and of `finish`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.core.metrics import Measures, Metric, Tally
from treadle.core.rewards import is_finite
from treadle.envs.tasks import made_class

_LARGEST = 1e300  # so that no sum of such values is infinite


def check_metrics(environments: Mapping[str, object]) -> None:
    """Raise ConfigError if environments declare a metric that cannot be counted, or one name in two ways.

    environments: name -> class, or factory; a factory without an attribute `metrics` declares none yet.
    """
    known: dict[str, tuple[str, Metric]] = {}
    for name, environment in environments.items():
        where = f"environment {name!r}: metrics"
        for metric in _listed(getattr(made_class(environment), "metrics", ()), where):
            if metric.level not in ("step", "trajectory"):
                raise ConfigError(f"{where}: {metric.name!r} is of level {metric.level}; make it step or trajectory")
            if metric.view != "played":
                raise ConfigError(f"{where}: {metric.name!r} is of what is {metric.view}; leave view out")
            if not metric.name.isidentifier():
                raise ConfigError(f"{where}: {metric.name!r} must be a name of letters, digits and underscores")
            other, earlier = known.setdefault(metric.name, (name, metric))
            if metric != earlier:
                raise ConfigError(f"{where}: {metric.name!r} is declared otherwise by {other!r}; rename one")


def _listed(found: object, where: str) -> Iterable[Metric]:
    if not isinstance(found, tuple | list) or not all(isinstance(metric, Metric) for metric in found):
        raise ConfigError(f"{where} must be a tuple of treadle.Metric, got {found!r:.100}")
    return found


class EnvMetrics:
    """Counts one attempt's values of the metrics that its environment declares.

    Raises TrajectoryFailure (environment) for metrics that `check_metrics` refuses.
    """

    def __init__(self, name: str, environment: object) -> None:
        try:
            check_metrics({name: environment})
        except ConfigError as error:  # only now: a factory need not name them
            raise TrajectoryFailure(Cause.ENVIRONMENT, str(error)) from error
        self._values: dict[Metric, list[float]] = {metric: [] for metric in getattr(environment, "metrics", ())}

    def record(self, info: object, method: str) -> None:
        """Count the declared metrics in the `info` that a method gave.

        Raises TrajectoryFailure (environment) if `info` is no mapping, or a value no finite number.
        """
        if self._values and not isinstance(info, Mapping):
            raise TrajectoryFailure(Cause.ENVIRONMENT, f"{method} gave info {info!r:.100}; it must be a mapping")
        for metric, values in self._values.items():
            value = info.get(metric.name)  # type: ignore[attr-defined]  # a mapping, by now
            if value is None:
                continue
            if not is_finite(value) or abs(value) > _LARGEST:
                raise TrajectoryFailure(
                    Cause.ENVIRONMENT,
                    f"{method} gave info[{metric.name!r}] = {value!r:.100}; a declared metric must be a finite number, "
                    f"at most {_LARGEST:g} in size",
                )
            values.append(float(value))

    def measured(self) -> Measures:
        """Return the metrics that have a value: all values at level step, their sum at level trajectory."""
        found = {metric: values for metric, values in self._values.items() if values}
        return Measures(
            Tally.over(metric, values if metric.level == "step" else [math.fsum(values)])
            for metric, values in found.items()
        )
