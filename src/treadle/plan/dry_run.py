"""A dry run tries each part of a recipe, without training, writing or downloading anything, and estimates memory.

    settings -> data -> callbacks -> files of models, engine, demonstrations      in a second, without torch
    -> device -> tokenizer -> model, reference, teacher -> engine -> drivers -> prompt -> demonstrations -> memory, disk

A missing part is reported at once; parts that need it are skipped, and all others are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treadle.models.model_files import base_directory, require_model, require_template, tokenizer_directory
from treadle.plan.checks import Check, DryRun, Log
from treadle.plan.config import RunConfig
from treadle.plan.inputs import Inputs, check_demonstration, load_data
from treadle.plan.validation import check_engine_config, check_settings
from treadle.report.callbacks import load_callbacks


def dry_run(config: RunConfig, runs: Path, log: Log, tell: Callable[[Check], object] = lambda check: None) -> DryRun:
    """Try everything that a run of this configuration needs before its first rollout.

    runs: parent of the run's directory. log: receives lines about environments that block the event loop. tell:
    receives each check when it is made.
    """
    result = DryRun(tell)
    result.attempt("settings", lambda: _settings(config))
    inputs = result.attempt("data", lambda: _data(config))
    if config.callbacks:
        result.attempt("callbacks", lambda: (None, ", ".join(load_callbacks(config.callbacks))))
    _look_for_files(result, config)
    from treadle.plan.dry_run_parts import try_parts  # torch and transformers

    try_parts(result, config, inputs, runs, log)
    return result


def _settings(config: RunConfig) -> tuple[object, str]:
    check_settings(config)
    return None, "they fit together"


def _data(config: RunConfig) -> tuple[Inputs, str]:
    """Load tasks and players; the other inputs are checked separately."""
    inputs = load_data(config)
    players = inputs.players
    names = [*players.environments, *players.agents, *players.drivers]
    held_out = f", {len(inputs.held_out)} held out" if inputs.held_out else ""
    return inputs, f"{len(inputs.train)} tasks to train on{held_out}, played by {', '.join(names)}"


def _look_for_files(result: DryRun, config: RunConfig) -> None:
    """Look for files needed by later checks, before slow imports."""
    model, kl, distillation = config.model, config.algorithm.kl, config.algorithm.distillation
    result.look("tokenizer", lambda: require_template(model.chat_template, "model.chat_template"))
    result.look("tokenizer", lambda: tokenizer_directory(model))
    if model.build is None:
        result.look("model", lambda: base_directory(model))
    if kl is not None and (reference := kl.model) is not None:
        result.look("reference", lambda: require_model(reference, "algorithm.kl.model"))
    if distillation is not None and (teacher := distillation.teacher) is not None and not distillation.is_served:
        result.look("teacher", lambda: require_model(teacher, "algorithm.distillation.teacher"))
    result.look("engine", lambda: check_engine_config(config.engine, config.training.routing_replay))
    result.look("warm start", lambda: check_demonstration(config))
