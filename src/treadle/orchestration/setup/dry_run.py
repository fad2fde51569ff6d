"""A dry run: what a recipe needs is tried, each part by itself, and nothing is trained, written or downloaded.

    settings -> data -> callbacks -> tokenizer -> model, reference -> engine -> drivers -> prompt, demonstrations
    -> memory, disk

A part that is missing is named; parts that need it are left out, and all others are tried.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from treadle.algorithms.config import AlgorithmConfig
from treadle.core.errors import ConfigError, RunError, TreadleError
from treadle.core.registry import extra_of, how_to_install
from treadle.models.loading import load_reference, make_model
from treadle.models.model_files import base_directory, require_model, require_template, tokenizer_directory
from treadle.models.routing import Routers
from treadle.models.support import require_plain_attention, why_not_packable
from treadle.models.weights import trained
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.callbacks import load_callbacks
from treadle.orchestration.setup.chat_interface import ChatInterface, load_chat_interface
from treadle.orchestration.setup.inputs import FirstPrompt, Inputs, first_prompt, load_inputs
from treadle.orchestration.setup.memory import MemoryPart, checkpoint_size, estimate_memory, machine_memory
from treadle.orchestration.setup.validation import check_context, check_engine_config, check_settings
from treadle.orchestration.setup.warm_start import check_demonstrations
from treadle.rollout.attempt import Players, open_drivers
from treadle.rollout.drivers.driver import AttemptDriver
from treadle.rollout.isolation.event_loop import run as run_event_loop
from treadle.training.learner import check_reference

T = TypeVar("T")
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of trying one part: `Check("engine", "no vLLM: ...", is_missing=True)`."""

    name: str
    text: str
    is_missing: bool = False


@dataclass(slots=True)
class DryRun:
    """The result of a dry run. chat, prompt: None where they could not be made; agents make their own prompts."""

    checks: list[Check] = field(default_factory=list)
    memory: list[MemoryPart] = field(default_factory=list)
    chat: ChatInterface | None = None
    prompt: FirstPrompt | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether nothing is missing."""
        return not any(check.is_missing for check in self.checks)

    def attempt(self, name: str, work: Callable[[], tuple[T, str]]) -> T | None:
        """Do the work, which returns a part and the check's text; return the part, None if it is missing."""
        try:
            made, text = work()
        except TreadleError as error:
            self.checks.append(Check(name, str(error), is_missing=True))
        except ModuleNotFoundError as error:
            if error.name is None or extra_of(error.name) is None:
                raise
            how = f"{error.name} is not installed; {how_to_install(error.name)}"
            self.checks.append(Check(name, how, is_missing=True))
        else:
            self.checks.append(Check(name, text))
            return made
        return None


def dry_run(config: RunConfig, runs: Path, log: Log) -> DryRun:
    """Try all that a run of this configuration needs before its first rollout.

    runs: directory that would hold the run's. log: takes lines about environments that block the event loop.
    """
    result = DryRun()
    result.attempt("settings", lambda: _settings(config))
    inputs = result.attempt("data", lambda: _data(config))
    if config.callbacks:
        result.attempt("callbacks", lambda: _callbacks(config))
    result.chat = chat = result.attempt("tokenizer", lambda: _chat(config))
    model = result.attempt("model", lambda: _model(config, chat))
    reference = result.attempt("reference", lambda: _reference(config.algorithm, model)) if _kl_model(config) else None
    result.attempt("engine", lambda: _engine(config, model, log))
    if inputs is not None and inputs.players.drivers and chat is not None:
        result.attempt("driver", lambda: _drivers(inputs, chat, config, log))
    if inputs is not None and chat is not None:
        result.prompt = result.attempt("first prompt", lambda: _prompt(inputs, chat, config, log))
    if config.warm_start is not None and chat is not None:
        result.attempt("warm start", lambda: _demonstrations(config, chat))
    if model is not None and (reference is not None or not _kl_model(config)):
        result.memory = estimate_memory(config, model, reference)
        result.attempt("memory", lambda: _memory(result.memory))
        result.attempt("disk", lambda: _disk(config, checkpoint_size(config, model, reference), runs))
    return result


def _kl_model(config: RunConfig) -> str | None:
    return None if config.algorithm.kl is None else config.algorithm.kl.model


def _settings(config: RunConfig) -> tuple[object, str]:
    check_settings(config)
    return None, "they fit together"


def _data(config: RunConfig) -> tuple[Inputs, str]:
    """Load tasks and what plays them; the other inputs are checks of their own."""
    inputs = load_inputs(config.model_copy(update={"warm_start": None, "callbacks": ()}))
    players = inputs.players
    names = [*players.environments, *players.agents, *players.drivers]
    held_out = f", {len(inputs.held_out)} held out" if inputs.held_out else ""
    return inputs, f"{len(inputs.train)} tasks to train on{held_out}, played by {', '.join(names)}"


def _callbacks(config: RunConfig) -> tuple[object, str]:
    return None, ", ".join(load_callbacks(config.callbacks))


def _chat(config: RunConfig) -> tuple[ChatInterface, str]:
    require_template(config.model.chat_template, "model.chat_template")
    directory = tokenizer_directory(config.model)
    chat = load_chat_interface(config.model)
    ends = [chat.decode([ident]) for ident in chat.stop_token_ids]
    verb = "ends" if len(ends) == 1 else "end"
    return chat, f"{chat.renderer.vocabulary:,} tokens, {' and '.join(ends)} {verb} a reply; {directory}"


def _model(config: RunConfig, chat: ChatInterface | None) -> tuple[PreTrainedModel, str]:
    if chat is None and "vocab_size" not in (config.model.build or {"vocab_size": 0}):
        raise ConfigError("model.build has no vocab_size, so that it needs the tokenizer, which is missing")
    vocabulary = 0 if chat is None else chat.renderer.vocabulary
    model = make_model(config.model, vocabulary, config.seed, weights=False, lora=config.training.lora)
    if config.training.routing_replay:
        Routers.of(model)
    text = model.config.get_text_config()
    check_context(config, int(text.max_position_embeddings))
    where = "built from the seed" if config.model.build else str(base_directory(config.model))
    reason = why_not_packable(model.config)
    packing = f"; trained with packing 'step': {reason}" if reason else ""
    size = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    if config.training.lora is not None:
        size += f", of which {sum(p.numel() for _, p in trained(model)):,} are trained"
    return model, f"{model.config.model_type}, {size}, context {text.max_position_embeddings:,}; {where}{packing}"


def _reference(algorithm: AlgorithmConfig, model: PreTrainedModel | None) -> tuple[PreTrainedModel, str]:
    assert algorithm.kl is not None and algorithm.kl.model is not None, "the caller asks"
    directory = str(require_model(algorithm.kl.model, "algorithm.kl.model"))
    if model is None:
        raise ConfigError("algorithm.kl.model cannot be compared with the model, which is missing")
    reference = load_reference(algorithm.kl.model, model, weights=False)
    check_reference(algorithm, reference, model)
    return reference, directory


def _engine(config: RunConfig, model: PreTrainedModel | None, log: Log) -> tuple[object, str]:
    check_engine_config(config.engine, config.training.routing_replay)
    if config.engine.kind == "vllm":
        from treadle.engines.vllm.engine import describe_servers  # httpx, which only this needs

        longest = config.rollout.max_input_tokens + config.rollout.max_completion_tokens
        return None, run_event_loop(describe_servers(config.engine, longest), log)
    if config.engine.kind == "torch" and model is not None:
        require_plain_attention(model)
    return None, f"{config.engine.kind}, {config.engine.dtype}, up to {config.engine.batch} sequences at once"


def _drivers(inputs: Inputs, chat: ChatInterface, config: RunConfig, log: Log) -> tuple[object, str]:
    """Open the attempt drivers, have each say what plays the first of its tasks, and close them again."""
    only = Players(drivers=inputs.players.drivers)

    async def opened() -> list[str]:
        async with open_drivers(chat.renderer, only, config.rollout) as drivers:
            return [await _described(name, drivers["driver", name], inputs) for name in only.drivers]

    return None, "; ".join(run_event_loop(opened(), log))


async def _described(name: str, driver: AttemptDriver[Any], inputs: Inputs) -> str:
    """Return what a driver says of the first task that it plays. Raises ConfigError."""
    played = next((task for task in chain(inputs.train, inputs.held_out) if task.player == ("driver", name)), None)
    describe = getattr(driver, "describe", None)  # a driver need not inherit
    return (played and describe and await describe(played)) or f"{name} can be started"


def _prompt(inputs: Inputs, chat: ChatInterface, config: RunConfig, log: Log) -> tuple[FirstPrompt | None, str]:
    prompt = first_prompt(inputs, chat.renderer, config, log)
    if prompt is None:
        return None, "not known before an agent program or driver makes it"
    limit = config.rollout.max_input_tokens
    return prompt, f"{len(prompt.ids)} tokens of at most {limit}, of task {prompt.task_id}"


def _demonstrations(config: RunConfig, chat: ChatInterface) -> tuple[object, str]:
    assert config.warm_start is not None, "the caller asks"
    check_demonstrations(config, chat.renderer)
    section = config.warm_start
    return None, f"{section.steps} steps of {section.batch_size} demonstrations of {section.demonstrations}"


def _memory(parts: list[MemoryPart]) -> tuple[object, str]:
    needed, available = sum(part.bytes for part in parts), machine_memory()
    text = f"about {_size(needed)} at the peak, of {_size(available)} here"
    if needed > available:
        largest = max(parts, key=lambda part: part.bytes)
        raise ConfigError(
            f"{text}; most for {largest.name} ({_size(largest.bytes)}): take a smaller model, or lower "
            "training.max_tokens_per_microbatch or engine.batch; training.gradient_checkpointing=true needs less, too"
        )
    return None, text


def _disk(config: RunConfig, checkpoint: int, runs: Path) -> tuple[object, str]:
    section = config.orchestration
    number = section.keep_last + (section.keep_best is not None) + 1
    folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.is_dir())
    free, needed = shutil.disk_usage(folder).free, number * checkpoint
    text = f"{number} checkpoints of {_size(checkpoint)} each, {_size(free)} free at {folder}"
    if free < needed:
        raise RunError(f"{text}; free some space, lower orchestration.keep_last or choose another --runs directory")
    return None, text


def _size(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
