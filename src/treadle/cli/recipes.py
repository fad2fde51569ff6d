"""`treadle recipes`, `treadle new`, `treadle data`, `treadle cluster check`."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import keyword
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

import rich.table
from pydantic import Field

from treadle.cli.console import Console, Part, Table, make_table
from treadle.core.config import (
    REQUIRED,
    Config,
    as_override,
    build,
    describe,
    describe_sections,
    dump_yaml,
    json_schema,
    overlap,
)
from treadle.core.errors import ConfigError, DataError, RunError
from treadle.core.types import Task
from treadle.data.config import DataConfig, sources_of
from treadle.data.load import LoadContext, Section, find_problems, load_tasks, named_sources, open_rows
from treadle.data.rows import parse_json
from treadle.data.tasks import check_disjoint
from treadle.integrations.harbor.tasks import unpack
from treadle.plan.config import RunConfig, load_recipe, recipe_names
from treadle.plan.inputs import is_in_memory, load_context

_SKELETON, _SKELETON_TOOLS = "treadle.recipes.skeleton", "treadle.recipes.skeleton_tools"
_SCHEMA = "recipe.schema.json"  # named in the skeleton's recipe
_MAX_PROBLEMS = 10
_TEXT = 300  # maximum characters shown of a value


def run_recipes(options: argparse.Namespace) -> int:
    table = Table(rich.table.Table.grid(padding=(0, 2)))
    for name in recipe_names():
        table.add_row((name, "bold"), load_recipe(name).about)
    console = Console()
    console.table(table)
    if console.is_terminal:
        console.line()
        console.line("treadle recipes show NAME   every value of one", style="dim")
        console.line("treadle train NAME          train it", style="dim")
    return 0


def run_show(options: argparse.Namespace) -> int:
    overrides = [word for word in options.overrides if "=" in word]
    within = [word for word in options.overrides if "=" not in word]
    config = load_recipe(options.recipe, overrides)
    for name in within:
        _check_shown(name, config)
    console = Console()
    if options.yaml:
        if within:
            raise ConfigError(f"--yaml prints a whole recipe; leave out {' '.join(within)}, or --yaml")
        console.verbatim(dump_yaml(config))
        return 0
    _print_listing(console, config, [override.partition("=")[0] for override in overrides], within or [""])
    return 0


def _check_shown(name: str, config: RunConfig) -> None:
    """Raise ConfigError for a name that is neither a section nor a key."""
    sections, keys = [*describe_sections(config)], [line.path for line in describe(config)]
    if name not in (*sections, *keys):
        near = [key for key in keys if key.endswith(f".{name}")] or difflib.get_close_matches(
            name, [*sections, *keys], 1
        )
        meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ConfigError(f"no section or key {name!r}; {meant}the sections: {', '.join(sections)}")


def run_schema(options: argparse.Namespace) -> int:
    Console().verbatim(recipe_schema())
    return 0


def recipe_schema() -> str:
    """Return the JSON schema of recipes, including those that extend another."""
    schema = json_schema(RunConfig)
    extends = {"type": "string", "description": "the recipe that this one differs from: a shipped name or a path"}
    schema["properties"]["extends"] = extends
    return json.dumps(schema, indent=1) + "\n"


def _print_listing(console: Console, config: RunConfig, overridden: Sequence[str], within: Sequence[str]) -> None:
    """Print each section's heading, then its values: mark, path, value, help, and the default if different.

    within: sections and keys to print; "" is everything.
    """
    grid = rich.table.Table.grid(padding=(0, 1))
    for style in ("", "", "", "dim"):
        grid.add_column(style=style, overflow="fold")
    table, lines = Table(grid), describe(config)

    def add_row(*cells: Part) -> None:
        if console.is_terminal:
            table.add_row(*cells)
        else:  # for a program: no columns
            mark, *texts = (cell if isinstance(cell, str) else cell[0] for cell in cells or ("",))
            console.line(f"{mark:<2}" + "  ".join(filter(None, texts)) if texts else "")

    def add_value(path: str, value: str, text: str, is_default: bool) -> None:
        style = "" if is_default else "bold"
        mark = "+" if any(overlap(path, other) for other in overridden) else "" if is_default else "*"
        add_row(mark, (path, style), (value, style), text)

    begun = False
    for section, meaning in {"": "", **describe_sections(config)}.items():
        shown = [line for line in lines if line.path.rpartition(".")[0] == section and _lies_in(line.path, within)]
        if section and (shown or _lies_in(section, within)):
            if begun:
                add_row()
            add_row("", (section, "bold underline"), "", meaning)
        begun = begun or bool(shown)
        for line in shown:
            nested = line.value if isinstance(line.value, dict) else {}  # such as model.build
            differs = not line.is_default and line.default is not REQUIRED
            text = f"{line.help} (default: {as_override(line.default)})" if differs else line.help
            add_value(line.path, "" if nested else as_override(line.value), text, line.is_default)
            for key, value in nested.items():
                add_value(f"{line.path}.{key}", as_override(value), "", line.is_default)
    if console.is_terminal:
        console.table(table)
    console.line()
    console.line("* set by the recipe, + on the command line; the others are defaults", style="dim", wrap=True)


def _lies_in(path: str, within: Sequence[str]) -> bool:
    return any(not name or f"{path}.".startswith(f"{name}.") for name in within)


def run_env(options: argparse.Namespace) -> int:
    console = Console()
    for path in make_environment(options.name, Path.cwd(), options.tools):
        console.line(str(path))
    console.line(f"train: treadle train {options.name}/recipe.yaml")
    console.line(f"test:  python -m pytest {options.name}")
    return 0


def make_environment(name: str, parent: Path, tools: bool = False) -> list[Path]:
    """Write the package `name` into a directory; return its files. Raises ConfigError, RunError if it exists.

    tools: whether its environment has tools.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a Python package name; use letters, digits and _, as in my_environment")
    directory = parent / name
    if directory.exists():
        raise RunError(f"{str(directory)!r} already exists, and was not changed; choose another name, or remove it")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name!r} would hide an installed module of that name; choose another name")
    directory.mkdir()
    written = []
    skeleton = _SKELETON_TOOLS if tools else _SKELETON
    for source in sorted(files(skeleton).iterdir(), key=lambda file: file.name):
        if source.is_file():
            text = source.read_text(encoding="utf-8").replace(skeleton.replace(".", "/"), name)
            text = text.replace(skeleton, name).replace(f"recipe: {skeleton.rpartition('.')[2]}", f"recipe: {name}")
            (directory / source.name).write_text(text, encoding="utf-8")
            written.append(Path(name) / source.name)
    (directory / _SCHEMA).write_text(recipe_schema(), encoding="utf-8")
    return [*written, Path(name) / _SCHEMA]


class _Source(Config):
    """A single source, with its keys in a recipe."""

    data: DataConfig = Field(description="tasks")


def run_data_head(options: argparse.Namespace) -> int:
    if options.n < 1:
        raise ConfigError(f"-n {options.n}: must be at least 1")
    sections, context = _sections(options)
    console = Console()
    for split, section in sections.items():
        for setting, source in named_sources(section, split):
            rows = open_rows(source, split, setting, context)
            for row in islice(rows, options.n):
                console.line((row.where, "bold"))
                value = parse_json(row.value, row.where) if isinstance(row.value, bytes) else row.value
                if not isinstance(value, Task):
                    for name, part in value.items() if isinstance(value, Mapping) else {"": value}.items():
                        _print_value(console, name, part)
                _print_task(console, context.task(row, source))
    return 0


def _print_task(console: Console, task: Task) -> None:
    kind, name = task.player
    console.line("task ", (task.task_id, "bold"), f", played by the {kind} {name!r}" if name else "")
    for message in task.prompt:
        _print_value(console, message["role"], message["content"])
    if task.ground_truth is not None:
        _print_value(console, "ground_truth", task.ground_truth)
    if task.extras:
        _print_value(console, "extras", dict(task.extras))


def run_data_check(options: argparse.Namespace) -> int:
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
        for line in _data_summary(tasks):
            console.line(f"  {line}")
    if len(splits) == 2:
        check_disjoint(*splits)
    return status


def run_data_prepare(options: argparse.Namespace) -> int:
    number = unpack(options.source, options.directory)
    Console().line(
        (f"{number} tasks", "bold"), f" in {options.directory}; train with data.train.options.path={options.directory}"
    )
    return 0


def _sections(options: argparse.Namespace) -> tuple[dict[str, Section], LoadContext]:
    """Return the sections by split, and the settings common to their sources."""
    if options.source in recipe_names() or options.source.endswith((".yaml", ".yml")):
        config = load_recipe(options.source, options.overrides)
        if is_in_memory(config.data.train):
            raise ConfigError(f"{options.source}: its tasks were made in Python, not read from a file")
        data, context = config.data, load_context(config)
    else:
        data = build(_Source, {"data": {"train": {"source": options.source}}}, options.source, options.overrides).data
        context = LoadContext(data.columns)
    sections = {"train": data.train, "held_out": data.held_out}
    return {split: section for split, section in sections.items() if section is not None}, context


def _print_value(console: Console, name: str, value: Any) -> None:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    short = text if len(text) <= _TEXT else f"{text[:_TEXT]}... ({len(text)} characters)"
    console.line(f"  {name:<14} ", short)


def _print_problems(section: Section, split: str, context: LoadContext, first: DataError) -> None:
    """List problems row by row; at least the error that ended loading."""
    errors = Console(stderr=True)
    sources = named_sources(section, split)
    problems = chain.from_iterable(find_problems(source, split, setting, context) for setting, source in sources)
    for problem in list(islice(problems, _MAX_PROBLEMS)) or [str(first)]:
        errors.line(f"error: {problem}")
    if more := sum(1 for _ in problems):
        errors.line(f"error: {more} more rows are not tasks")


def _data_summary(tasks: Sequence[Task]) -> Iterator[str]:
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


def run_cluster(options: argparse.Namespace) -> int:
    config = load_recipe(options.recipe, options.overrides)
    if config.placement.kind != "ray":
        raise ConfigError(f"placement.kind is {config.placement.kind!r}: no cluster is used; set placement.kind=ray")
    from treadle.placement.runtime import placed  # ray

    console = Console()
    with placed(config.runtime, options.runs.absolute(), Console(stderr=True).line) as placement:
        table = make_table("process", "node", "resources", text=("process", "node", "resources"))
        for bundle, place in zip(placement.reservation.bundles, placement.places, strict=True):
            resources = ", ".join(f"{amount:g} {name}" for name, amount in bundle.resources.items())
            table.add_row(str(bundle), place.node, resources)
        console.table(table)
        versions = ", ".join(f"{name} {version}" for name, version in placement.places[0].versions.items())
        console.line(f"{placement}, all with {versions}; {options.runs} is one directory for all")
    return 0
