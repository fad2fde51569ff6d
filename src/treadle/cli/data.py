"""`treadle data`."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field

from treadle.cli.console import Console
from treadle.cli.options import Commands, add_command, add_overrides, positive
from treadle.core.config import Config, build
from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.data.config import DataConfig, sources_of
from treadle.data.load import LoadContext, Section, find_problems, load_tasks, named_sources, open_rows
from treadle.data.rows import Row, parse_json
from treadle.data.tasks import check_disjoint
from treadle.integrations.harbor.tasks import unpack
from treadle.orchestration.config import load_recipe, recipe_names
from treadle.orchestration.setup.inputs import IN_MEMORY, load_context

_EXAMPLES = """examples:
  treadle data head train.parquet -n 2                             its first rows as stored, and the tasks made of them
  treadle data check train.parquet data.columns.ground_truth=reward_model.ground_truth
  treadle data check openai/gsm8k data.train.options.name=main data.train.split=test data.columns.prompt=question
  treadle data check my_recipe.yaml                                everything a recipe trains on and evaluates with
  treadle data prepare harbor-tasks code_contests.parquet tasks    packed tasks of Harbor's, a directory each
"""
_MAX_PROBLEMS = 10
_TEXT = 300  # characters shown of a value


class _Source(Config):
    """A single source, with the keys that it has in a recipe."""

    data: DataConfig = Field(description="tasks")


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "data", run_check, "show and check data sets", _EXAMPLES)
    below = parser.add_subparsers(metavar="{head,check,prepare}", required=True)
    head = add_command(below, "head", run_head, "show the first rows, and the tasks made of them", _EXAMPLES)
    check = add_command(below, "check", run_check, "read every row, and list those that are not tasks", _EXAMPLES)
    for parser in (head, check):
        what = "a .jsonl or .parquet file, a directory of them, a Hugging Face data set, a generator; or a recipe"
        parser.add_argument("source", metavar="SOURCE", help=what)
        add_overrides(parser)
    head.add_argument("-n", type=positive, default=1, metavar="ROWS", help="how many (default: 1)")
    prepare = add_command(below, "prepare", run_prepare, "convert published data to what a recipe takes", _EXAMPLES)
    prepare.add_argument("kind", choices=["harbor-tasks"], help="Harbor's packed tasks -> a directory of tasks")
    prepare.add_argument("source", metavar="PARQUET", type=Path, help="a file with columns path and task_binary")
    prepare.add_argument("directory", metavar="DIR", type=Path, help="a new directory")


def run_head(options: argparse.Namespace) -> int:
    """Show the first rows of each source, as they are stored and as tasks."""
    sections, context = _sections(options)
    console = Console()
    for split, section in sections.items():
        for setting, source in named_sources(section, split):
            rows = open_rows(source, split, setting, context)
            for row in islice(rows, options.n):
                _print_row(console, row)
                _print_task(console, context.task(row, source))
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Read every row; return 0 if all are tasks, 2 if not."""
    sections, context = _sections(options)
    console, status, splits = Console(), 0, list[Sequence[Task]]()
    for split, section in sections.items():
        try:
            tasks = load_tasks(section, split, context)
        except DataError as error:
            _print_problems(section, split, context, error)
            status = 2
            continue
        splits.append(tasks)
        name = ", ".join(part.source for part in sources_of(section))
        console.line(f"{split}: ", (f"{len(tasks)} tasks", "bold"), f" of {name}")
        for line in _summary(tasks):
            console.line(f"  {line}")
    if len(splits) == 2:
        check_disjoint(*splits)
    return status


def run_prepare(options: argparse.Namespace) -> int:
    """Unpack tasks; return 0."""
    number = unpack(options.source, options.directory)
    Console().line(
        (f"{number} tasks", "bold"), f" in {options.directory}; train with data.train.options.path={options.directory}"
    )
    return 0


def _sections(options: argparse.Namespace) -> tuple[dict[str, Section], LoadContext]:
    """Return the sections by split, and what their sources have in common."""
    if options.source in recipe_names() or options.source.endswith((".yaml", ".yml")):
        config = load_recipe(options.source, options.overrides)
        if sources_of(config.data.train)[0].source == IN_MEMORY:
            raise ConfigError(f"{options.source}: its tasks were made in Python, not read from a file")
        data, context = config.data, load_context(config)
    else:
        data = build(_Source, {"data": {"train": {"source": options.source}}}, options.source, options.overrides).data
        context = LoadContext(data.columns)
    sections = {"train": data.train, "held_out": data.held_out}
    return {split: section for split, section in sections.items() if section is not None}, context


def _print_row(console: Console, row: Row) -> None:
    console.line((row.where, "bold"))
    if isinstance(row.value, Task):
        return
    value = parse_json(row.value, row.where) if isinstance(row.value, bytes) else row.value
    for name, part in value.items() if isinstance(value, Mapping) else {"": value}.items():
        _print_value(console, name, part)


def _print_task(console: Console, task: Task) -> None:
    kind, name = task.player
    console.line("task ", (task.task_id, "bold"), f", played by the {kind} {name!r}" if name else "")
    for message in task.prompt:
        _print_value(console, message["role"], message["content"])
    if task.ground_truth is not None:
        _print_value(console, "ground_truth", task.ground_truth)
    if task.extras:
        _print_value(console, "extras", dict(task.extras))


def _print_value(console: Console, name: str, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    short = text if len(text) <= _TEXT else f"{text[:_TEXT]}... ({len(text)} characters)"
    console.line(f"  {name:<14} ", short)


def _print_problems(section: Section, split: str, context: LoadContext, first: DataError) -> None:
    """List what is wrong, row by row; at least the error that loading ended with."""
    errors = Console(stderr=True)
    sources = named_sources(section, split)
    problems = chain.from_iterable(find_problems(source, split, setting, context) for setting, source in sources)
    for problem in list(islice(problems, _MAX_PROBLEMS)) or [str(first)]:
        errors.line(f"error: {problem}")
    if more := sum(1 for _ in problems):
        errors.line(f"error: {more} more rows are not tasks")


def _summary(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield lines on what the tasks hold."""
    lengths = [sum(len(message["content"]) for message in task.prompt) for task in tasks]
    kinds = Counter(" ".join(task.player) for task in tasks if task.player[1])
    extras = Counter(name for task in tasks for name in task.extras)
    prompts = Counter(hash(json.dumps(task.prompt)) for task in tasks)
    yield f"prompts of {min(lengths)} to {max(lengths)} characters, median {median(lengths):.0f}"
    if repeated := sum(count - 1 for count in prompts.values()):
        yield f"{repeated} prompts occur again"
    yield f"{sum(task.ground_truth is not None for task in tasks)} have a ground truth"
    if extras:
        yield "extras: " + ", ".join(f"{name} ({count})" for name, count in extras.most_common())
    if kinds:
        yield "played by: " + ", ".join(f"{name} ({count})" for name, count in kinds.most_common())
