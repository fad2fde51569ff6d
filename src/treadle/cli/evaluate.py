"""`treadle eval`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from treadle.cli.console import Console, Table, make_table
from treadle.cli.live_progress import make_progress
from treadle.cli.options import Commands, add_command, add_json, add_overrides
from treadle.orchestration.evaluation import (
    Evaluation,
    Subject,
    check_dump,
    evaluate_model,
    find_subject,
    held_out_inputs,
)
from treadle.orchestration.reporting.metrics import shown

_EXAMPLES = """examples:
  treadle eval runs/demo                                      its latest checkpoint, as the run evaluates
  treadle eval runs/demo --checkpoint step-000030 data.held_out.options.count=64
  treadle eval runs/demo evaluation.attempts=8                eight attempts at each task: pass@2, 4, 8
  treadle eval runs/demo --dump played.jsonl                  also every trajectory, texts and token ids, a line each
  treadle eval demo --model models/warm                       any model directory, on a recipe's held-out tasks

Draws are keyed as in the run: evaluating its last checkpoint again gives the recorded figures. The run is only read.
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "eval", run, "play the held-out tasks with a run's checkpoint or a model", _EXAMPLES)
    parser.add_argument("subject", metavar="RUN_OR_RECIPE", help="a run directory; or, with --model, a recipe")
    add_overrides(parser)
    parser.add_argument("--checkpoint", metavar="NAME", help="of the run: step-000030, best or latest (the default)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model directory, or a name of model.path")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write all trajectories to it, as JSON lines")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Evaluate and print the result; returns 0, even if attempts failed."""
    if options.dump is not None:
        check_dump(options.dump)
    subject = find_subject(options.subject, options.overrides, options.checkpoint, options.model)
    inputs = held_out_inputs(subject)
    with make_progress(subject.config, stderr=True) as progress:
        evaluation = evaluate_model(subject, inputs, progress, options.dump)
    if options.json:
        Console().json({"model": str(subject.model), **asdict(evaluation)})
    else:
        _print(evaluation, subject)
    return 0


def _print(evaluation: Evaluation, subject: Subject) -> None:
    console = Console()
    console.table(evaluation_table(evaluation, subject.config.data.table_by))
    for message, count in evaluation.failures.items():
        console.line(f"failed {count}x: {message}", style="red")
    temperature = evaluation.result.temperature
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    section = subject.config.evaluation
    what = "a reward" if section.success_of is None else f"a component {section.success_of!r}"
    console.line(f"{how}, success is {what} >= {section.success_at:g}", style="dim")
    console.line(f"model {subject.model}, {evaluation.seconds:.1f} s", style="dim")


def evaluation_table(evaluation: Evaluation, table_by: str | None) -> Table:
    """Return a table with a row for each value of `table_by`, and one for all tasks."""
    first = table_by or "tasks of"
    several = [k for k in evaluation.result.pass_at if k != "1"]
    table = make_table(
        first, "tasks", "success", *(f"pass@{k}" for k in several), "reward", "steps", "failed", text=(first,)
    )
    for name, r in {**evaluation.parts, "all": evaluation.result}.items():
        passed = [shown(r.pass_at.get(k)) for k in several]
        figures = (shown(r.success), *passed, shown(r.reward_mean), shown(r.steps_mean, 2), str(r.failed))
        table.add_row(name, str(r.tasks), *figures, style="bold" if r is evaluation.result else "")
    return table
