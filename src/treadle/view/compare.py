"""Several runs side by side: which differ in their seed only, and where configurations differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from treadle.core.config import as_override, describe
from treadle.core.errors import TreadleError
from treadle.orchestration.reporting.curve import RunMetrics, group_runs
from treadle.view.models import Comparison, Difference, RunGroup
from treadle.view.recorded_run import RecordedRun


def compare(runs: Sequence[RecordedRun]) -> Comparison:
    """Return the groups of the runs as `treadle plot` makes them, and all settings that are not the same in each.

    Runs whose configuration cannot be read have a group of their own each, and no values.
    """
    readable: list[tuple[RecordedRun, RunMetrics]] = []
    comparison = Comparison(runs=[run.key for run in runs], groups=[], differences=[])
    for run in runs:
        try:
            readable.append((run, RunMetrics(run.config(), run.metrics()[1].rows)))
        except TreadleError as error:
            comparison.problems.append(str(error))
            comparison.groups.append(RunGroup(label=run.key, runs=[run.key]))
    key_of = {id(metrics): run.key for run, metrics in readable}
    for group in group_runs(metrics for _, metrics in readable):
        keys = [key_of[id(metrics)] for metrics in group.runs]
        comparison.groups.append(RunGroup(label=group.label or group.runs[0].config.recipe, runs=keys))
    settings = {run.key: {f.path: f.value for f in describe(metrics.config)} for run, metrics in readable}
    for path in dict.fromkeys(path for paths in settings.values() for path in paths):
        opened = {key: dict(_opened(path, paths[path])) for key, paths in settings.items() if path in paths}
        for name in dict.fromkeys(name for paths in opened.values() for name in paths):
            values = [opened[run.key].get(name, "") if run.key in opened else None for run in runs]
            if len({values[i] for i, run in enumerate(runs) if run.key in settings}) > 1:
                comparison.differences.append(Difference(path=name, values=values))
    return comparison


def _opened(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield a setting; of a mapping such as `model.build`, each of its entries."""
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            yield from _opened(f"{path}.{key}", entry)
    else:
        yield path, as_override(value)
