"""`treadle models`, `treadle eval`, `treadle export`."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import rich.table

from treadle.api.evaluate import (
    Evaluation,
    check_dump,
    endpoint_inputs,
    endpoint_name,
    evaluate_endpoint,
    evaluate_model,
    find_config,
    find_subject,
    held_out_inputs,
    limited,
)
from treadle.api.export import export_checkpoint
from treadle.cli.console import Console, Table, make_progress, make_table
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.models.model_cache import PACKAGED, ModelSource, converted_models, is_convertible, list_converted
from treadle.models.model_files import is_adapter, is_hub_name
from treadle.plan.config import RunConfig
from treadle.report.metrics import shown
from treadle.rollout.other_models import OtherModelConfig


def run_models(options: argparse.Namespace) -> int:
    console = Console()
    table = Table(rich.table.Table.grid(padding=(0, 2)))
    for name, packaged in PACKAGED.items():
        if not packaged.directory.is_dir():
            table.add_row((name, "bold"), "not here", f"{packaged.about}; treadle models get {name}")
    for directory in list_converted():
        source = ModelSource.read(directory)
        size = sum(file.stat().st_size for file in directory.iterdir())
        table.add_row((source.name, "bold"), f"{size / 1e6:,.1f} MB", f"licence {source.licence}", str(directory))
    console.table(table)
    if console.is_terminal:
        console.line()
        console.line(f"in {converted_models()}; models of the Hugging Face hub are in its own cache", style="dim")
    return 0


def run_about(options: argparse.Namespace) -> int:
    from treadle.models.describe import describe_model

    table = Table(rich.table.Table.grid(padding=(0, 2)))
    for what, description in describe_model(options.name, "treadle models about"):
        table.add_row((what, "bold"), description)
    Console().table(table)
    return 0


def run_get(options: argparse.Namespace) -> int:
    name, console = options.name, Console()
    if is_convertible(name):
        from treadle.api.get_model import get_model

        directory = get_model(name, Console(stderr=True).line)
        console.line(f"licence: {ModelSource.read(directory).licence}")
    elif is_hub_name(name):
        from treadle.models.hub import download

        directory = download(name, "treadle models get")
    else:
        if name.endswith(".gguf"):
            raise ConfigError(f"no file {name!r}")
        raise ConfigError(f"unknown model {name!r}; there are {', '.join(PACKAGED)}, ORG/NAME of the hub, GGUF files")
    console.line(f"model directory: {directory}")
    console.line(f"train from it: treadle train RECIPE {shlex.quote(f'model.path={name}')} model.build=null")
    return 0


def run_eval(options: argparse.Namespace) -> int:
    if options.dump is not None:
        check_dump(options.dump)
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: it must be at least 1")
    if options.url is not None:
        return _eval_endpoint(options)
    subject = find_subject(options.subject, options.overrides, options.model)
    inputs = limited(held_out_inputs(subject), options.limit)
    with make_progress(subject.config, stderr=True) as progress:
        evaluation = evaluate_model(subject, inputs, progress, options.dump)
    if options.json:
        Console().json({"model": str(subject.model), **asdict(evaluation)})
    else:
        _print_evaluation(evaluation, subject.config, str(subject.model))
    return 0


def _eval_endpoint(options: argparse.Namespace) -> int:
    if options.model is None:
        raise ConfigError("--url needs --model, the model's name there")
    if options.concurrency < 1:
        raise ConfigError(f"--concurrency {options.concurrency}: it must be at least 1")
    try:
        request = json.loads(options.request)
    except ValueError as error:
        raise ConfigError(f"--request {options.request!r:.200} is not JSON: {error}") from error
    fields = {name: vars(options)[name] for name in ("url", "model", "api_key_env", "timeout")}
    model = build(OtherModelConfig, {**fields, "options": request}, "treadle eval --url")
    config = find_config(options.subject, options.overrides)
    inputs = limited(endpoint_inputs(config, model), options.limit)
    with make_progress(config, stderr=True) as progress:
        evaluation = evaluate_endpoint(config, inputs, model, progress, options.dump, options.concurrency)
    if options.json:
        Console().json({"model": endpoint_name(model), **asdict(evaluation)})
    else:
        _print_evaluation(evaluation, config, endpoint_name(model))
    return 0


def _print_evaluation(evaluation: Evaluation, config: RunConfig, model: str) -> None:
    console = Console()
    first = (evaluation.parts and config.data.table_by) or "tasks of"
    passes = evaluation.result.pass_at
    of_passes = (*(f"pass@{k}" for k in passes), "pass@k tasks") if passes else ()
    columns = ("tasks", "success", *of_passes, "reward", "steps", "failed")
    table = make_table(first, *columns, text=(first,))
    for name, r in {**evaluation.parts, "all": evaluation.result}.items():
        passed = [*(shown(r.pass_at[k]) for k in passes), str(r.pass_tasks)] if passes else []
        figures = (shown(r.success), *passed, shown(r.reward_mean), shown(r.steps_mean, 2), str(r.failed))
        table.add_row(name, str(r.tasks), *figures, style="bold" if r is evaluation.result else "")
    console.table(table)
    retries = ", retries included" if sum(evaluation.failures.values()) > evaluation.result.failed else ""
    for message, count in evaluation.failures.items():
        console.line(f"failed {count}x{retries}: {message}", style="red")
    temperature = evaluation.result.temperature
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    section = config.evaluation
    what = "a reward" if section.success_of is None else f"a component {section.success_of!r}"
    console.line(f"{how}, success is {what} >= {section.success_at:g}", style="dim")
    console.line(f"model {model}, {evaluation.seconds:.1f} s", style="dim")


def run_export(options: argparse.Namespace) -> int:
    if options.push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", options.push):
        raise ConfigError(f"--push {options.push!r} is not a repository name; give ORG/NAME")
    checkpoint = export_checkpoint(options.run_address, options.out, options.merge, options.dtype)
    console = Console()
    console.line(f"model of {checkpoint}: {options.out}")
    where = "model.adapter" if is_adapter(options.out) else "model.path"
    console.line(f"train from it: treadle train RECIPE {shlex.quote(f'{where}={options.out}')} model.build=null")
    if options.push:
        from treadle.models.hub import upload

        console.line(f"uploaded: {upload(options.out, options.push, '--push')}")
    return 0


def run_export_traces(options: argparse.Namespace) -> int:
    from treadle.record.record import Record  # pyarrow
    from treadle.record.selection import Selection
    from treadle.record.trajectory_files import FORMATS, write_trajectories

    run, selection, ending = options.run_directory, Selection.parse(options.select), FORMATS[options.format]
    out = options.out or Path(f"{run.resolve().name}{ending}")
    if options.format != "atif" and out.suffix != ending:
        raise ConfigError(f"{str(out)!r} does not end in {ending}; rename it, or choose another --format")
    if out.exists():
        raise ConfigError(f"{str(out)!r} exists already; choose another name")
    record = Record.open(run)
    trajectories = record.trajectories()
    chosen = selection.choose(list(trajectories)) if options.select else trajectories  # all, including failed ones
    count = write_trajectories(out, options.format, chosen, record.texts(), str(run.resolve()))
    Console().line(f"{count:,} trajectories: {out}")
    return 0
