"""The parts of a dry run that need torch: device, models, engine, the checks of a start, memory and disk."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from transformers import PreTrainedModel

from treadle.core.errors import ConfigError, TreadleError
from treadle.models.chat import load_chat
from treadle.models.loading import load_frozen, load_teacher, make_model
from treadle.models.model_files import base_directory, tokenizer_directory
from treadle.models.routing import Routers
from treadle.models.support import context_of, why_not_packable
from treadle.models.towers import tower_size
from treadle.models.weights import trained
from treadle.plan.config import RunConfig
from treadle.plan.device import check_device, describe_device, unused_gpus
from treadle.plan.dry_run import DryRun, Log
from treadle.plan.inputs import Inputs
from treadle.plan.memory import checkpoint_size, compare_memory, estimate_memory
from treadle.plan.plan import make
from treadle.plan.start import START, FirstPrompt
from treadle.plan.validation import check_context
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rollout.isolation.event_loop import run as run_event_loop
from treadle.training.config import WarmStartConfig
from treadle.training.frozen import make_reference
from treadle.training.make import reach_teacher

_LOOKED_AT = 1000  # tasks to search for the longest prompt


def try_parts(result: DryRun, config: RunConfig, inputs: Inputs | None, runs: Path, log: Log) -> None:
    """Try the parts after `try_settings`, with its inputs. runs: parent of the run's directory."""
    plan, attempt = make(config, inputs or Inputs([], [])), result.attempt
    config = plan.config
    distillation, ranks = config.algorithm.distillation, config.placement.learner.ranks
    other, taught_by = config.trainer.reference, None if config.teacher is None else config.teacher.path
    attempt("device", partial(_device, config))
    chat = attempt("tokenizer", partial(load_chat, config.model, None), partial(_describe_chat, config))
    result.renderer = renderer = None if chat is None else chat[1]
    model = attempt("model", partial(_model, config, renderer), partial(_describe_model, config))
    reference = teacher = None
    if other:
        reference = attempt("reference", partial(_reference, config, other, model), lambda made: str(made.name_or_path))
    if taught_by:
        load = partial(_teacher, config, taught_by, model)
        teacher = attempt("teacher", load, lambda made: f"{_size(made)} parameters; {made.name_or_path}")
    elif config.teacher is not None and distillation is not None:
        longest = config.rollout.longest_call
        reach = partial(reach_teacher, config.teacher, distillation, config.model, longest)
        attempt("teacher", reach, lambda server: f"{server.url}, up to {server.context} tokens")
    attempt("engine", partial(_engine, config, model, log))
    if inputs is not None and renderer is not None:
        for name, check in START.items():
            made = attempt(name, partial(check, inputs, renderer, config, log), partial(_describe_start, config, name))
            result.prompt = made if isinstance(made, FirstPrompt) else result.prompt
    if model is not None and (reference is not None or not other) and (teacher is not None or not taught_by):
        prompt = _longest_prompt(config, inputs, renderer)
        result.memory = estimate_memory(config, model, reference, teacher, prompt, tower_size(config.model))
        attempt("memory", partial(compare_memory, result.memory, ranks))
        folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.is_dir())
        attempt("disk", partial(plan.require_space, folder, checkpoint_size(config, model, reference)))


def _device(config: RunConfig) -> str:
    ranks = config.placement.learner.ranks
    if config.placement.kind != "embedded":
        return describe_device(config)
    check_device(config.device, ranks)
    return "; ".join(filter(None, (describe_device(config), unused_gpus(config.device, config.engine, ranks))))


def _longest_prompt(config: RunConfig, inputs: Inputs | None, renderer: ChatRenderer | None) -> int | None:
    """Return the length of the longest prompt of the first tasks, if attempts are single replies; None if unknown."""
    if config.player.kind != "reward" or inputs is None or renderer is None:
        return None
    tasks = islice(inputs.train, _LOOKED_AT)
    longest = max(tasks, key=lambda task: sum(len(message["content"]) for message in task.prompt))
    with suppress(TreadleError):  # reported with the first prompt
        return min(len(Conversation(renderer).render(longest.prompt).ids), config.rollout.max_input_tokens)
    return None


def _describe_chat(config: RunConfig, chat: tuple[object, ChatRenderer]) -> str:
    renderer = chat[1]
    ends = [renderer.decode([ident]) for ident in renderer.stop_ids]
    verb = "ends" if len(ends) == 1 else "end"
    return f"{renderer.vocabulary:,} tokens, {' and '.join(ends)} {verb} a reply; {tokenizer_directory(config.model)}"


def _model(config: RunConfig, renderer: ChatRenderer | None) -> PreTrainedModel:
    if renderer is None and "vocab_size" not in (config.model.build or {"vocab_size": 0}):
        raise ConfigError("model.build has no vocab_size, so that it needs the tokenizer, which is missing")
    vocabulary = 0 if renderer is None else renderer.vocabulary
    lora, whole = config.training.lora, config.training.trains_tower
    model = make_model(config.model, vocabulary, config.seed, weights=False, lora=lora, whole=whole)
    if config.training.routing_replay:
        Routers.of(model)
    check_context(config, context_of(model.config.get_text_config()))
    return model


def _describe_model(config: RunConfig, model: PreTrainedModel) -> str:
    where = "built from the seed" if config.model.build else str(base_directory(config.model))
    reason = why_not_packable(model.config)
    packing = f"; trained with packing 'step': {reason}" if reason else ""
    size = f"{_size(model)} parameters"
    if config.training.lora is not None:
        size += f", of which {sum(p.numel() for _, p in trained(model)):,} are trained"
    context = context_of(model.config.get_text_config())
    return f"{model.config.model_type}, {size}, context {context:,}; {where}{packing}"


def _size(model: PreTrainedModel) -> str:
    return f"{sum(p.numel() for p in model.parameters()):,}"


def _reference(config: RunConfig, path: str, model: PreTrainedModel | None) -> PreTrainedModel:
    if model is None:
        raise ConfigError("algorithm.kl.model cannot be compared with the model, which is missing")
    reference = load_frozen(path, "algorithm.kl.model", model, weights=False)
    make_reference(config.algorithm.kl, model, reference)  # checks it
    return reference


def _teacher(config: RunConfig, path: str, model: PreTrainedModel | None) -> PreTrainedModel:
    if model is None:
        raise ConfigError("algorithm.distillation.teacher cannot be compared with the model, which is missing")
    return load_teacher(path, config.model, model, weights=False)


def _engine(config: RunConfig, model: PreTrainedModel | None, log: Log) -> str:
    if config.engine.kind == "vllm":
        from treadle.engines.vllm.engine import describe_servers  # httpx, which only this needs

        return run_event_loop(describe_servers(config.engine, config.rollout.longest_call), log)
    reason = why_not_packable(model.config) if config.engine.kind == "torch" and model is not None else None
    slower = f"; call by call, which is slower: {reason}" if reason else ""
    return f"{config.engine.kind}, {config.engine.dtype_name}, up to {config.engine.batch} sequences at once{slower}"


def _describe_start(config: RunConfig, name: str, made: object) -> str:
    match made:
        case FirstPrompt(task_id, ids):
            return f"{len(ids)} tokens of at most {config.rollout.max_input_tokens}, of task {task_id}"
        case WarmStartConfig(steps=steps, batch_size=size, demonstrations=source):
            return f"{steps} steps of {size} demonstrations of {source}"
        case list():
            return "; ".join(made)
    unknown = "not known before an agent program, a driver or another role of the policy makes it"
    return unknown if name == "first prompt" else ""
