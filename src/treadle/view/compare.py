"""Several runs side by side: which differ in their seed only, and where configurations differ."""

from __future__ import annotations

from collections.abc import Sequence

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
    found = Comparison(runs=[run.key for run in runs], groups=[], differences=[])
    for run in runs:
        try:
            readable.append((run, RunMetrics(run.config(), run.metrics()[1].rows)))
        except TreadleError as error:
            found.problems.append(str(error))
            found.groups.append(RunGroup(label=run.key, runs=[run.key]))
    key_of = {id(metrics): run.key for run, metrics in readable}
    for group in group_runs(metrics for _, metrics in readable):
        keys = [key_of[id(metrics)] for metrics in group.runs]
        found.groups.append(RunGroup(label=group.label or group.runs[0].config.recipe, runs=keys))
    leaves = {run.key: {f.path: as_override(f.value) for f in describe(metrics.config)} for run, metrics in readable}
    for path in dict.fromkeys(path for own in leaves.values() for path in own):
        values = [leaves.get(run.key, {}).get(path) for run in runs]
        if len({values[i] for i, run in enumerate(runs) if run.key in leaves}) > 1:
            found.differences.append(Difference(path=path, values=values))
    return found
