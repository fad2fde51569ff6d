"""`treadle train`, `treadle sft`."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from treadle.api.train import dry_run, train_run
from treadle.cli.commands import INTERRUPTED
from treadle.cli.console import Console, Part, Table, make_progress, make_table
from treadle.cli.show import print_transcript
from treadle.core.errors import ConfigError, EngineError
from treadle.core.processes import environment
from treadle.plan.config import RunConfig, load_recipe, recipe_names, with_model_of_run
from treadle.plan.dry_run import Check, DryRun
from treadle.plan.inputs import has_held_out, is_of_python, load_inputs, resumable_config
from treadle.record.address import checkpoint_named, find_address
from treadle.record.run_directory import RunDirectory, find_run, make_directory, no_run
from treadle.report.metrics import shown


def run_train(options: argparse.Namespace) -> int:
    """Train; return 0 if the run is finished, 130 if it was asked to stop. With --dry-run: 0 if nothing is missing."""
    resume = options.resume or options.resume_from is not None
    if options.dry_run:
        if resume:
            raise ConfigError("--dry-run is for a new run; leave out --resume, or --dry-run")
        return print_dry_run(with_model_of_run(load_recipe(options.recipe, options.overrides)), options.runs)
    if resume:
        config, path = _to_resume(options)
    else:
        config = with_model_of_run(load_recipe(options.recipe, options.overrides))
        path = options.runs / (options.name or "")
        if options.name:
            # Fails early, before torch is loaded.
            RunDirectory(path).check_free()
    inputs = load_inputs(config)
    with nullcontext(path) if resume else _new_directory(options, config) as path:
        how = {"resume": resume, "checkpoint": options.resume_from, "resume_with": RunDirectory(path).resume_command}
        try:
            with make_progress(config) as progress:
                summary = train_run(config, inputs, path, progress, **how)
        except KeyboardInterrupt:  # its advice was shown
            return INTERRUPTED
        if summary["stopped_early"]:
            return INTERRUPTED
        print_result(summary, path, config)
        return 0


def _to_resume(options: argparse.Namespace) -> tuple[RunConfig, Path]:
    address = find_address(options.recipe)
    if address is None:
        if not options.name and {"/", "@"} & {*options.recipe} and Path(options.recipe).suffix not in (".yaml", ".yml"):
            raise no_run(options.recipe)
        by_name = options.runs / (options.name or "")
        path = by_name if options.name else find_run(options.runs, load_recipe(options.recipe).recipe)
    elif address.checkpoint == "latest":
        path = address.run
    else:
        back = f"treadle train {address.run} --resume-from {address.checkpoint}"
        raise ConfigError(
            f"{options.recipe}: a run continues from its latest checkpoint; to go back to this one: {back}"
        )
    if options.resume_from is not None:
        options.resume_from = checkpoint_named(options.resume_from)
    return resumable_config(path, options.overrides, options.resume_from), path


@contextmanager
def _new_directory(options: argparse.Namespace, config: RunConfig) -> Iterator[Path]:
    """Yield a new path for the run, removed if the run ends before it recorded anything to resume.

    It stays if an engine failed and left a log, because the error names the log.
    """
    path: Path = (
        options.runs / options.name if options.name else make_directory(options.runs, config.recipe, config.seed)
    )
    new = not path.exists() or not any(path.iterdir())
    log_named = False
    try:
        yield path
    except EngineError:
        log_named = any(path.glob("*.log"))
        raise
    finally:
        run = RunDirectory(path)
        # Not another process's of the same name.
        if new and run.is_stub and run.state() == "stopped" and not log_named:
            shutil.rmtree(path)
        elif not options.name:
            with suppress(OSError):  # unless it is not empty
                path.rmdir()


def print_dry_run(config: RunConfig, runs: Path) -> int:
    """Print a line per tried part, then the first prompt and memory; return 0 if nothing is missing."""
    console = Console()

    def tell(check: Check) -> None:
        state = ("missing  ", "bold red") if check.is_missing else ("ok       ", "green")
        console.line(f"{check.name:<13} ", state, one_line(check.text))

    # Read when the libraries are imported.
    with environment({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}):
        result = dry_run(config, runs, Console(stderr=True).line, tell)
    _print_prompt(console, result)
    if result.memory:
        table = make_table("memory", "MB", "how", text=("memory", "how"))
        for part in result.memory:
            table.add_row(part.name + ", GPU" * part.on_gpu, f"{part.bytes / 1e6:,.1f}", part.formula)
        console.line()
        console.table(table)
        console.text(
            "P weights, A of adapters, R the reference's, D the teacher's; T tokens of a micro-batch,\n"
            "L layers, h hidden, i intermediate size; q, k widths of all query and all key heads, V vocabulary",
            style="dim",
        )
    if result.missing:
        console.line()
        console.line("missing: ", (", ".join(result.missing), "bold red"))
    return 1 if result.missing else 0


def one_line(text: str) -> str:
    """Return the text in one line, for a row: an error may end in lines of code."""
    return " ".join(part.strip() for part in text.splitlines())


def _print_prompt(console: Console, result: DryRun) -> None:
    """Print the first prompt, with structural tokens, which only the template writes, in color."""
    if result.prompt is None or result.renderer is None:
        return
    structure = result.renderer.structure
    parts: list[Part] = [
        (structure.decode(ids), "bold cyan" if structural else "")
        for structural, ids in groupby(result.prompt.ids.tolist(), structure.is_structural)
    ]
    console.line()
    console.line(("first prompt", "bold"), f", task {result.prompt.task_id}, {len(result.prompt.ids)} tokens")
    console.text(*parts)


def print_result(summary: dict[str, Any], path: Path, config: RunConfig) -> None:
    console = Console()
    results = summary["evaluations"]
    if results:
        console.line()
        console.table(before_after_table(results, config))
        _print_transcripts(console, path, results, config)
    quoted = shlex.quote(str(path))
    console.line()
    for name, value in (
        ("run", str(path)),
        ("curve", str(path / "curve.png")),
        ("summary", str(path / "summary.json")),
        ("time", f"{summary['wall_seconds']:.0f} s, {summary['cpu_seconds']:.0f} CPU s"),
        ("weights", f"sha256 {summary['weights_sha256']}"),
        ("more", f"treadle report {quoted}   (and: show, eval)"),
    ):
        console.line((f"{name:<9}", "bold"), value)


def before_after_table(results: list[dict[str, Any]], config: RunConfig) -> Table:
    first = (results[0]["by"] and config.data.table_by) or "tasks"
    columns: dict[str, dict[str, Any]] = {}
    for temperature in dict.fromkeys(r["temperature"] for r in results):
        same = [r for r in results if r["temperature"] == temperature]
        how = "greedy" if temperature == 0 else f"T={temperature:g}"
        if same[0]["update"] == 0:
            columns[f"before, {how}"] = same[0]
        # Otherwise it was switched off, or changed, on a resume.
        if 0 < same[-1]["update"] == results[-1]["update"]:
            columns[f"after, {how}"] = same[-1]
    table = make_table(first, *columns, title=f"held-out success, {results[0]['tasks']} tasks", text=(first,))
    for key in results[0]["by"]:
        table.add_row(key, *(shown(c["by"].get(key)) for c in columns.values()))
    table.add_row("all", *(shown(c["success"]) for c in columns.values()), style="bold")
    if any(c["failed"] for c in columns.values()):
        table.add_row("failed", *(str(c["failed"]) for c in columns.values()), style="red")
    return table


def _print_transcripts(console: Console, path: Path, results: list[dict[str, Any]], config: RunConfig) -> None:
    """Print attempts at one held-out task before and after training, preferably from failure to success."""
    sampled = [r for r in results if r["temperature"] == results[0]["temperature"]]
    mark = "g" if results[0]["temperature"] == 0 else ""
    first, last = (f"e{result['update']:06d}{mark}" for result in (sampled[0], sampled[-1]))
    if first == last:
        return
    section = config.evaluation
    pair = RunDirectory(path).ledger().before_and_after(first, last, section.success_at, section.success_of)
    for when, trajectory in zip(("before", "after"), pair or (), strict=False):
        console.line()
        console.line((f"{when} training", "bold"), f"   treadle show {shlex.quote(str(path))} {trajectory}")
        print_transcript(console, path, trajectory)


def run_sft(options: argparse.Namespace) -> int:
    words = [*options.overrides, *(word for word in options.sources or () if _is_override(word))]
    starts, overrides = ([word for word in words if _is_override(word) is which] for which in (False, True))
    if len(starts) > 1 or not (starts or options.sources):
        raise ConfigError(f"name one recipe to learn, or --from a run (got {' and '.join(starts) or 'neither'})")
    if options.out.exists():
        raise ConfigError(f"--out {str(options.out)!r} exists already; choose another directory")
    if options.sources:
        return _learn_recorded(options, next(iter(starts), None), overrides)
    from treadle.api.sft import learn_demonstrations  # pyarrow

    recipe = starts[0]
    if options.select:
        raise ConfigError("--select chooses among recorded trajectories; add --from RUN")
    config = with_model_of_run(load_recipe(recipe, overrides))
    if config.warm_start is None:
        raise ConfigError(f"recipe {recipe!r} has no warm_start section, so there is nothing to learn; add one")
    with make_progress(config) as progress:
        report = learn_demonstrations(config, options.out, progress)
    how = "read from the cache" if report.cached else f"{report.steps} steps in {report.seconds:.0f} s"
    Console().line(f"loss {report.loss:.3f} nats a token ({how})")
    _print_next(options.out, config, recipe, recipe, overrides)
    return 0


def _is_override(word: str) -> bool:
    return re.match(r"[\w.]+=", word) is not None


def _learn_recorded(options: argparse.Namespace, start: str | None, overrides: Sequence[str]) -> int:
    from treadle.api.lesson import prepare  # pyarrow
    from treadle.api.sft import learn

    sources = [word for word in options.sources if not _is_override(word)]
    lesson = prepare(start, sources, options.select, overrides)
    with make_progress(lesson.config) as progress:
        report = learn(lesson, options.out, progress)
    console, exactly = Console(), "as recorded"
    if report.inexact:
        exactly = f"not exact: {report.inexact:,} trajectories are text that was tokenized now"
    console.line(
        f"learned {report.trajectories:,} of {lesson.recorded:,} trajectories: {report.calls:,} steps, "
        f"{report.tokens:,} tokens, {exactly}"
    )
    console.line(f"loss {report.loss:.3f} nats a token ({report.steps} steps in {report.seconds:.0f} s)")
    of_run = lesson.subject is None or find_address(lesson.subject) is not None
    recipe = lesson.config.recipe if of_run else lesson.subject
    is_known = not of_run or recipe in recipe_names()
    _print_next(options.out, lesson.config, lesson.subject, str(recipe) if is_known else "RECIPE", overrides)
    return 0


def _print_next(out: Path, config: RunConfig, subject: str | None, recipe: str, overrides: Sequence[str]) -> None:
    """Print the model's location, and commands for its use, with the overrides that still apply.

    subject: how it can be evaluated, if known.
    """
    console = Console()
    console.line(f"model directory: {out}")
    kept = [override for override in overrides if not override.startswith("warm_start")]
    if subject is not None and has_held_out(config):
        settings = [override for override in kept if not override.startswith("model.")]
        console.line(f"evaluate it: treadle {shlex.join(['eval', subject, *settings, '--model', str(out)])}")
    where = "adapter" if config.training.lora is not None else "path"
    if subject is not None and is_of_python(config):
        console.line(f"train from it: treadle.train(..., model={str(out)!r}) in Python")
        return
    settings = [override for override in kept if not override.startswith(("model.build", f"model.{where}="))]
    words = ["train", recipe, *settings, "model.build=null", f"model.{where}={out}", "warm_start=null"]
    console.line(f"train from it: treadle {shlex.join(words)}")
