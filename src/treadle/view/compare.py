"""Several runs side by side: which differ in their seed only, and where configurations differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from treadle.core.config import as_override, describe
from treadle.core.errors import TreadleError
from treadle.orchestration.reporting.curve import RunMetrics, group_runs
from treadle.view.models import Json
from treadle.view.recorded_run import RecordedRun


def compare(runs: Sequence[RecordedRun]) -> Json:
    """Return the groups of the runs as `treadle plot` makes them, and all settings that are not the same in each.

    groups: label and run keys; runs whose configuration cannot be read have a group of their own each, and no values.
    differences: path and the value of each run; None if the run has no such setting, "" if its mapping lacks the key.
    """
    readable: list[tuple[str, RunMetrics]] = []
    groups, differences, problems = [], [], []
    for run in runs:
        try:
            readable.append((run.key, RunMetrics(run.config(), run.metrics()[1].rows)))
        except TreadleError as error:
            problems.append(str(error))
            groups.append({"label": run.key, "runs": [run.key]})
    key_of = {id(metrics): key for key, metrics in readable}
    for group in group_runs(metrics for _, metrics in readable):
        keys = [key_of[id(metrics)] for metrics in group.runs]
        groups.append({"label": group.label or group.runs[0].config.recipe, "runs": keys})
    settings = {key: {f.path: f.value for f in describe(metrics.config)} for key, metrics in readable}
    for path in dict.fromkeys(path for paths in settings.values() for path in paths):
        opened = {key: dict(_opened(path, paths[path])) for key, paths in settings.items() if path in paths}
        for name in dict.fromkeys(name for paths in opened.values() for name in paths):
            values = [opened[run.key].get(name, "") if run.key in opened else None for run in runs]
            if len({value for run, value in zip(runs, values, strict=True) if run.key in settings}) > 1:
                differences.append({"path": name, "values": values})
    return {"runs": [run.key for run in runs], "groups": groups, "differences": differences, "problems": problems}


def _opened(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield a setting; of a mapping such as `model.build`, each of its entries."""
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            yield from _opened(f"{path}.{key}", entry)
    else:
        yield path, as_override(value)
