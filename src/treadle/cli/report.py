"""`treadle report`, `treadle plot`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.progress

from treadle.cli.console import Console, Table, indented, make_table
from treadle.cli.show import shown_tokens
from treadle.core.config_diff import leaves
from treadle.core.errors import ConfigError, DamageError, RunError
from treadle.plan.config import config_of
from treadle.plan.inputs import is_of_python
from treadle.record.run_directory import RunDirectory
from treadle.report.metrics import shown, shown_passes
from treadle.report.progress import update_line

if TYPE_CHECKING:
    from treadle.report.curve import RunGroup, RunMetrics

Facts = dict[str, Any]
Columns = dict[str, list[str]]  # name -> cells
_WAYS = {"step": "step", "chain": "chain", "tree": "tree, within trajectories", "group_tree": "tree, within groups"}


def run_report(options: argparse.Namespace) -> int:
    console, directory = Console(), RunDirectory.open(options.run_directory)
    if options.failures:
        ledger = directory.ledger()
        ledger.prove()
        rows = ledger.failures()
        if options.json:
            console.json(rows)
            return 0
        for row in rows:
            console.line(_failure_line(row), style="red")
            if row["traceback"]:
                console.text(indented(row["traceback"]))
        if not rows:
            console.line("no attempt failed")
        return 0
    from treadle.record.record import Record  # pyarrow
    from treadle.report.report import report_of

    bar: dict[str, Any] = {"console": Console(stderr=True).rich, "transient": True, "disable": not sys.stderr.isatty()}
    facts = report_of(
        Record.open(options.run_directory), lambda rows: rich.progress.track(rows, "reading rollouts", **bar)
    )
    console.json(facts) if options.json else _print(console, facts)
    return 0


def _print(console: Console, facts: Facts) -> None:
    is_run = facts["state"] != "recorded"
    recipe, updates = f"{facts['recipe']}, seed {facts['seed']}", f"{facts['update']} of {facts['updates']} updates"
    what = f"{recipe}, {facts['state']}, {updates}" if is_run else "recorded trajectories"
    console.line(f"{facts['run']}: {what}", style="bold")
    latest = facts["latest_checkpoint"]
    if facts["state"] == "stopped" and latest is not None:
        command = shlex.join(["treadle", "train", facts["run"], "--resume"])
        how = (
            "treadle.train(..., resume=True) in Python"
            if is_of_python(config_of(RunDirectory(Path(facts["run"]))))
            else command
        )
        console.line(f"continue from {latest} with: {how}")
    console.line()
    _print_last_update(console, facts["last_update"], facts["updates"])
    names = ("groups", "trajectories", "steps", "prompt_tokens", "completion_tokens")
    table = make_table("split", "groups", "trajectories", "steps", "prompt tokens", "sampled", text=("split",))
    _print_figures(console, table, facts["splits"], "split", names)
    _print_breakdown(console, facts)
    _print_trouble(console, facts)
    _print_packing(console, facts["packing"])
    _print_relations(console, facts["relations"])
    _print_compactions(console, facts["compactions"])
    _print_optimizer_steps(console, facts["optimizer_steps"])
    problems = [
        f"{what}, not counted: {', '.join(facts[f'{what}_shards'])}"
        for what in ("missing", "damaged")
        if facts[f"{what}_shards"]
    ]
    for problem in filter(None, [*problems, facts["metrics_problem"]]):
        console.line(problem, style="red")
        console.line()
    _print_evaluations(console, facts["evaluations"], facts["table_by"])
    if not is_run:
        return
    checkpoints = ", ".join(f"{name} (latest)" if name == latest else name for name in facts["checkpoints"])
    console.line(
        f"checkpoints: {checkpoints}" if checkpoints else f"the run {RunDirectory(Path(facts['run'])).no_checkpoint}"
    )


def _print_figures(console: Console, table: Table, rows: Sequence[Facts], key: str, names: Sequence[str]) -> None:
    """Print a table with a row for each of `rows`: its `key`, then its counts of these names."""
    for row in rows:
        table.add_row(row[key], *(f"{row[name]:,}" for name in names))
    console.table(table)
    console.line()


def _print_breakdown(console: Console, facts: Facts) -> None:
    for row in facts["steps"]:
        row["what"] = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
    for split in [row["split"] for row in facts["splits"]]:
        for title, name, key in (
            ("steps", "steps", "what"),
            ("statuses", "statuses", "status"),
            ("stop reasons", "stop_reasons", "stop_reason"),
        ):
            parts = [f"{row[key]} {row['count']:,}" for row in facts[name] if row["split"] == split]
            console.line(f"{split:<9} {title:<13} {', '.join(parts)}")
    if (starts := facts["starts"])["attempts"]:
        console.line(
            f"{starts['attempts']:,} attempts of {starts['groups']:,} groups began in the middle of recorded ones "
            f"({starts['sources']:,}), after {starts['steps'] / starts['attempts']:.1f} steps in the mean"
        )
    console.line()


def _print_trouble(console: Console, facts: Facts) -> None:
    for row in facts["failures"]:
        console.line(_failure_line(row), style="red")
    if facts["failures"]:
        console.line(f"with tracebacks: {shlex.join(['treadle', 'report', facts['run'], '--failures'])}")
    for row in facts["warnings"]:
        console.line(f"warning {row['count']:,}x, as {row['trajectory_id']}: {row['message']}", style="yellow")
    if (blocked := facts["blocked"])["count"]:
        what = f"{blocked['count']:,} trajectories blocked the event loop for {blocked['seconds']:.0f} s in all"
        console.line(f"{what}, as {blocked['trajectory_id']}", style="yellow")
    for line in facts["stalls"].values():
        console.line(f"warning: {line}", style="yellow", wrap=True)
    if facts["failures"] or facts["warnings"] or facts["stalls"] or blocked["count"]:
        console.line()


def _failure_line(row: Facts) -> str:
    return f"failed {row['count']:,}x {row['cause']}, as {row['trajectory_id']}: {row['message']}"


def _print_packing(console: Console, packing: Facts) -> None:
    if not packing["step"]:
        return
    counts = f"trajectories {packing['trajectories']:,}, groups {packing['groups']:,}"
    console.line(f"tokens to compute in training ({counts})", style="bold")
    table = make_table("packing", "tokens", "times fewer", text=("packing",))
    for way, name in _WAYS.items():
        ratio = packing["ratios"].get(way)
        table.add_row(name, f"{packing[way]:,}", f"{ratio:.2f}" if ratio else "")
    console.table(table)
    console.line()


def _print_relations(console: Console, relations: Facts) -> None:
    if relations["no_tokenizer"]:
        console.line(f"breaks not counted, there is no tokenizer: {relations['no_tokenizer']}", style="red")
        console.line()
    if not relations["splits"]:
        return
    kinds = ("opens", "extends", "fork", "break")
    title = "steps and the earlier tokens of their trajectories"
    table = make_table("split", "steps", *kinds, "computed again", title=title, text=("split",))
    _print_figures(console, table, relations["splits"], "split", ("steps", *kinds, "extra_tokens"))
    if not (breaks := relations["breaks"]):
        return
    table = make_table("cause", "breaks", "computed again", title="breaks", text=("cause",))
    _print_figures(console, table, breaks, "cause", ("count", "extra_tokens"))
    text = ("trajectory", "cause", "was", "now")
    columns = ("trajectory", "step", "cause", "at token", "computed again", "was", "now")
    table = make_table(*columns, title="costliest breaks of each cause", text=text)
    for row in breaks:
        for example in row["examples"]:
            figures = (f"{example['shared']:,}", f"{example['extra_tokens']:,}")
            sides = (shown_tokens(example[side]) for side in ("was", "now"))
            table.add_row(example["trajectory_id"], str(example["step"]), row["cause"], *figures, *sides)
    console.table(table)
    console.line()


def _print_compactions(console: Console, rows: Sequence[Facts]) -> None:
    if not rows:
        return
    columns = ("split", "trajectories", "compactions", "read", "without", "computed", "without")
    title = "tokens of trajectories with compactions, and of the same calls without (estimated)"
    table = make_table(*columns, title=title, text=("split",))
    names = ("trajectories", "compactions", "read", "read_without", "computed", "computed_without")
    _print_figures(console, table, rows, "split", names)


def _print_optimizer_steps(console: Console, rows: Sequence[Facts]) -> None:
    if not rows:
        return
    names = ("steps", "datums", "tokens", "targets", "attributed")
    table = make_table("model", *names, title="trained by clients of --tinker", text=("model",))
    _print_figures(console, table, rows, "model", names)


def _print_last_update(console: Console, row: Facts | None, updates: int) -> None:
    if row is None:
        return
    passes = {name.removeprefix("pass_at_"): value for name, value in row.items() if name.startswith("pass_at_")}
    figures = shown_passes(passes, row.get("pass_tasks"))
    figures += [f"{name} {shown(value)}" for name, value in row.items() if name.startswith(("env/", "role/"))]
    console.line(update_line(row, updates, console.width))
    if figures:
        console.line("  ".join(figures), wrap=True)
    console.line()


def _print_evaluations(console: Console, rows: list[Facts], table_by: str | None) -> None:
    """Print a row per evaluation. Columns that do not fit go into a table below, with the same rows."""
    if not rows:
        return
    greedy = ["greedy" if row["temperature"] == 0 else f"{row['temperature']:g}" for row in rows]
    keys = {"update": [str(row["update"]) for row in rows], "T": greedy}
    figures = {
        "tasks": [str(row["tasks"]) for row in rows],
        "success": [shown(row["success"]) for row in rows],
        **_columns([{f"pass@{k}": value for k, value in row["pass_at"].items()} for row in rows]),
        **_columns(
            [{"pass@k tasks": row["pass_tasks"]} if row["pass_at"] and "pass_tasks" in row else {} for row in rows], 0
        ),
        "reward": [shown(row["reward_mean"]) for row in rows],
        "steps": [shown(row["steps_mean"], 2) for row in rows],
        "failed": [str(row["failed"]) for row in rows],
        **_columns([{f"{table_by or ''} {key}".strip(): value for key, value in row["by"].items()} for row in rows]),
        **_columns([row["metrics"] for row in rows]),
    }
    console.line("held-out tasks", style="bold")
    for columns in _fitting(keys, figures, console.width):
        table = make_table(*columns)
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*cells)
        console.table(table)
        console.line()


def _columns(rows: Sequence[Mapping[str, float | None]], digits: int = 3) -> Columns:
    """Return name -> the cells of all rows, for every name in any row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [shown(row.get(name), digits) for row in rows] for name in names}


def _fitting(keys: Columns, columns: Columns, width: int) -> list[Columns]:
    """Split the columns into as few groups as fit the width, each after the keys, with at least one column."""

    def needed(group: Columns) -> int:
        return sum(max(map(len, (name, *cells))) + 2 for name, cells in group.items())

    groups: list[Columns] = []
    for name, cells in columns.items():
        if not groups or needed({**groups[-1], name: cells}) > width:
            groups.append(dict(keys))
        groups[-1][name] = cells
    return groups


def run_plot(options: argparse.Namespace) -> int:
    from treadle.report.curve import FORMATS, draw_runs

    output = options.output
    if output.suffix not in FORMATS:
        raise ConfigError(f"--output {str(output)!r} must end in one of {', '.join(FORMATS)}")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {str(output)!r}: no directory {str(output.parent)!r}; create it first")
    paths = list({path.resolve(): path for path in options.runs}.values())
    groups = draw_runs([read_run(path) for path in paths], output, options.labels)
    console = Console()
    for group in groups:
        console.line(_plot_line(group))
    console.line(("picture  ", "bold"), str(output))
    return 0


def read_run(path: Path) -> RunMetrics:
    """Return a run's data for plotting; damaged lines of its metrics are skipped, and named on standard error.

    Raises RunError if there is no run, or nothing to plot yet; DamageError if none of its metrics can be read.
    """
    from treadle.report.curve import RunMetrics

    directory = RunDirectory.open(path)
    log = directory.metrics_log()
    run = RunMetrics(leaves(config_of(directory)), log.rows)
    problem = log.problem(run.updates)
    if not run.updates:
        if problem:
            raise DamageError(f"run {str(path)!r}: {problem}; restore it, or leave the run out")
        raise RunError(f"run {str(path)!r} has no updates yet; plot it after its first update, or leave it out")
    if problem:
        Console(stderr=True).line(f"warning: run {str(path)!r}: {problem}; left out of the picture")
    return run


def _plot_line(group: RunGroup) -> str:
    """Return `training.packing=tree: seeds 0, 1, 2, 45 updates`."""
    seeds, updates = [run.settings["seed"] for run in group.runs], sorted({run.updates for run in group.runs})
    label = group.label or group.runs[0].settings["recipe"]
    ends = f"{updates[0]} updates"
    if len(updates) > 1:
        ends += f", where the shortest run ends (the longest has {updates[-1]})"
    return f"{label}: seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, {ends}"
