"""The pages about a whole run: its settings and state, counts, metrics, and what packing and breaks cost."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from treadle.core.config import as_override, describe
from treadle.core.errors import RunError, TreadleError
from treadle.orchestration.reporting.metrics import DECLARED
from treadle.orchestration.reporting.report import count_tokens
from treadle.orchestration.store.checkpoint_retention import checkpoint_update
from treadle.orchestration.store.run_directory import MetricsLog
from treadle.view.fates import explain
from treadle.view.models import Json
from treadle.view.recorded_run import Number, RecordedRun, Run
from treadle.view.texts import clipped

_MAX_FAILURES = 20


def view_run(run: Run) -> Json:
    """Return the run's summary, settings, checkpoints and summary.json.

    metrics: name -> unit, help and view, of each declared metric. no_update: why there is nothing to draw.
    """
    page: Json = {
        **run.summary().model_dump(),
        "settings": [],
        "checkpoints": [],
        "metrics": {m.name: {"unit": m.unit, "help": m.help, "view": m.view} for m in DECLARED},
        "summary": None,
        "no_update": _no_update(run),
    }
    with suppress(TreadleError):  # one of the summary's problems
        page["settings"] = [
            {"path": f.path, "value": as_override(f.value), "is_default": f.is_default, "help": f.help}
            for f in describe(run.config())
        ]
    with suppress(FileNotFoundError):
        try:
            page["summary"] = json.loads(run.directory.summary_file.read_bytes())
        except ValueError as error:
            page["problems"].append(f"summary.json cannot be read: {error}")
    with suppress(RunError):  # as above
        names = run.ledger.checkpoint_names()
        page["checkpoints"] = [name for name in names if (run.directory.checkpoints / name).is_dir()]
    return page


def _no_update(run: RecordedRun) -> str:
    """Return why no update can be drawn; "" if one can."""
    if run.rows("update"):
        return ""
    if lines := run.metrics()[1].unreadable:
        return f"No line of metrics.jsonl that names an update can be read; damaged lines: {len(lines)}."
    with suppress(RunError):  # one of the summary's problems
        done = max(map(checkpoint_update, map(Path, run.ledger.checkpoint_names())), default=0)
        if done:
            return f"metrics.jsonl names no update, but there is a checkpoint of update {done}: restore the file."
    if run.state() == "in progress":
        return "No update yet; this page fills with the first one."
    return f"The run {'ended' if run.state() == 'finished' else 'was stopped'} before its first update."


def view_counts(run: Run) -> Json:
    """Return counts over the whole ledger, which take a second in a large run: splits, states, failures."""
    if not run.ledger.path.is_file():
        return {"splits": [], "states": [], "failures": []}

    def count() -> Json:
        failures = run.ledger.failures(_MAX_FAILURES)
        states = run.ledger.step_states()
        return {
            "splits": run.ledger.splits(),
            "states": [{**row, "text": explain(row["state"], row["reason"]).text} for row in states],
            "failures": [{**row, "message": clipped(row["message"]), "traceback": None} for row in failures],
        }

    return run.kept("counts", run.ledger.signature(), count)


def view_metrics(run: Run, generation: str = "", after: Number = 0) -> Json:
    """Return the rows of metrics.jsonl that a page does not have yet, from `start` on.

    generation, after: of the rows that it has; another generation means that the file was rewritten.
    """
    return _rows_after(*run.metrics(), generation, after)


def view_intervals(run: Run, generation: str = "", after: Number = 0) -> Json:
    """Return the rows of intervals.jsonl, as `view_metrics` does."""
    return _rows_after(*run.intervals(), generation, after)


def _rows_after(name: str, log: MetricsLog, generation: str, after: int) -> Json:
    start = min(after, len(log.rows)) if generation == name else 0
    return {"generation": name, "start": start, "rows": log.rows[start:]}


def view_breaks(run: Run) -> Json:
    """Return the run's tokens as `treadle report` counts them: packing, relations, and shards that cannot be read.

    updates: of each update, the tokens that training computes under each packing, and again for breaks.
    """

    def count() -> Json:
        texts, problem = run.texts()
        counts = count_tokens(run.directory.rollouts, run.ledger, None if problem else texts.decode, problem)
        updates = [{"update": run.update_of(row["version"]), **row} for row in counts.pop("by_version")]
        return {**counts, "updates": [row for row in updates if row["update"] is not None]}

    return run.kept("breaks", run.signature(), count)
