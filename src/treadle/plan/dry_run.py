"""A dry run tries each part of a recipe, without training, writing or downloading anything, and estimates memory.

    settings, files of models, engine, demonstrations (`checks`) -> data -> callbacks       in a second, without torch
    -> device -> tokenizer -> model, reference, teacher -> engine -> drivers, prompt, demonstrations (`START`)
    -> memory, disk

These are the steps that a run takes. A missing part is reported at once; parts that need it are skipped, and all others
are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treadle.plan.checks import Check, DryRun, Log
from treadle.plan.config import RunConfig
from treadle.plan.inputs import Inputs, load_data
from treadle.plan.validation import checks
from treadle.report.callbacks import load_callbacks


def _silent(made: object) -> str:
    """Say nothing yet: more of the part will be tried."""
    return ""


_TEXTS: dict[str, Callable[[object], str]] = {"settings": lambda made: "they fit together"}


def dry_run(config: RunConfig, runs: Path, log: Log, tell: Callable[[Check], object] = lambda check: None) -> DryRun:
    """Try everything that a run of this configuration needs before its first rollout.

    runs: parent of the run's directory. log: receives lines about environments that block the event loop. tell:
    receives each check when it is made.
    """
    result = DryRun(tell)
    for name, check in checks(config):
        result.attempt(name, check, _TEXTS.get(name, _silent))
    inputs = result.attempt("data", lambda: load_data(config), _describe_data)
    result.attempt("callbacks", lambda: load_callbacks(config.callbacks), ", ".join)
    from treadle.plan.dry_run_parts import try_parts  # torch and transformers

    try_parts(result, config, inputs, runs, log)
    return result


def _describe_data(inputs: Inputs) -> str:
    names = [name for _, name in inputs.players.by_task]
    held_out = f", {len(inputs.held_out)} held out" if inputs.held_out else ""
    return f"{len(inputs.train)} tasks to train on{held_out}, played by {', '.join(names)}"
