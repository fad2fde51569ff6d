"""Checks of a configuration by itself, and of changes when a run is resumed. Needs no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial

from treadle.algorithms import estimators
from treadle.core.config import as_override
from treadle.core.config_diff import Change
from treadle.core.errors import ConfigError
from treadle.core.registry import check_name, how_to_install
from treadle.engines.config import EngineConfig, VLLMConfig
from treadle.engines.vllm.launch import LARGEST_TOP_K, check_reports_experts, find_python
from treadle.loop.starts import load_curriculum
from treadle.models.model_files import base_directory, require_model, require_template, tokenizer_directory
from treadle.plan.config import RunConfig
from treadle.plan.other_models import check_models, check_url
from treadle.rendering.replies import AUTO, reply_parser
from treadle.rollout.config import listen
from treadle.rollout.random_calls import RANDOM_CALLS
from treadle.rollout.rewards import load_group_reward, load_shaping
from treadle.training.config import check_algorithm
from treadle.training.demonstrations import load_demonstrations
from treadle.training.teacher_prompts import load_context, load_target


def check_config(config: RunConfig) -> None:
    """Raise ConfigError, DataError or DownloadError for a configuration that no run could start with."""
    check_settings(config)
    for _, check in checks(config):
        check()


def checks(config: RunConfig) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the checks of named files, models and programs, each with the part of the run that it is about."""
    model, warm_start = config.model, config.warm_start
    yield "engine", partial(check_engine_config, config.engine, config.training.routing_replay)
    if model.build is None:
        yield "model", partial(base_directory, model)
    yield "tokenizer", partial(tokenizer_directory, model)
    yield "tokenizer", partial(require_template, model.chat_template, "model.chat_template")
    for setting, name in config.scoring.items():
        part, scoring = "teacher" if setting.endswith("teacher") else "reference", config.models[name]
        if scoring.path is None:
            yield part, partial(check_url, name, scoring)
        else:
            yield part, partial(require_model, scoring.path, f"models.{name}.path")
    if isinstance(context := (model.build or {}).get("max_position_embeddings"), int):
        yield "model", partial(check_context, config, context)
    if warm_start is not None and warm_start.demonstrations != RANDOM_CALLS:
        load = partial(load_demonstrations, warm_start.demonstrations, warm_start.options, config.seed)
        yield "warm start", lambda: load()(0)


def check_settings(config: RunConfig) -> None:
    """Raise ConfigError for inconsistent settings, unknown names, or an address that is not free."""
    if config.placement.colocate:
        if staleness := config.orchestration.max_staleness:
            raise ConfigError(
                f"orchestration.max_staleness is {staleness}, and with placement.colocate nothing is sampled while the "
                "learner works; set it to 0, or give engines places of their own"
            )
        if config.engine.kind != "torch":
            raise ConfigError(
                f"engine.kind is {config.engine.kind!r}, and placement.colocate is for engines of kind torch; set one "
                "of them to another"
            )
    check_name("placements", config.placement.kind, "placement.kind")
    filters, top_k = config.rollout.filters, config.rollout.top_k
    if config.engine.kind == "vllm" and filters and not 0 < top_k <= LARGEST_TOP_K:
        raise ConfigError(
            f"rollout.top_k is {top_k}, and with a filter vLLM reports which tokens were left only for a top_k of 1 to "
            f"{LARGEST_TOP_K}; set rollout.top_k=20 beside top_p or min_p, leave the filters out, or use "
            "engine.kind=torch"
        )
    check_algorithm(config.algorithm, config.training, filters and config.engine.kind not in ("torch", "vllm"))
    check_centered(config)
    check_forks(config)
    section = config.algorithm.distillation
    if section is not None and section.context is not None:
        load_context(section.context)
    if section is not None and section.target is not None:
        load_target(section.target)
    if config.teacher is not None and config.teacher.url is not None:
        if config.rollout.temperature != 1:
            raise ConfigError(
                f"rollout.temperature is {config.rollout.temperature:g}, but a vLLM server scores prompts only at 1; "
                "set it to 1, or give the teacher as a path"
            )
        if config.rollout.filters:
            raise ConfigError(
                "rollout.top_k, top_p or min_p is set, but a vLLM server scores prompts over the whole vocabulary; "
                "leave the filter out, or give the teacher as a path"
            )
    if config.data.curriculum not in ("uniform", "informative"):
        load_curriculum(config.data.curriculum)
    if config.rewards.shaping is not None:
        load_shaping(config.rewards.shaping)
    check_rollout(config)


def check_centered(config: RunConfig) -> None:
    """Raise ConfigError if the sampler's probabilities that centered scores need would not be recorded."""
    centered = config.algorithm.centered_scores
    if centered == "support" and not config.rollout.filters:
        raise ConfigError(
            "algorithm.centered_scores is 'support', but no filter leaves tokens out; set rollout.top_p, top_k or "
            "min_p, or choose top_k or vocabulary"
        )
    if centered == "vocabulary" and config.engine.kind == "vllm":
        raise ConfigError(
            "algorithm.centered_scores is 'vocabulary', and vLLM's servers report the most probable tokens only; set "
            "engine.kind=torch, or algorithm.centered_scores=top_k"
        )


def check_forks(config: RunConfig) -> None:
    """Raise ConfigError if attempts that branch could not be compared, or never branch."""
    if (forks := config.rollout.forks) is None:
        return
    size, width, advantage = config.training.group_size, forks.width, config.algorithm.advantage
    if size % width or size < 2 * width:
        raise ConfigError(
            f"training.group_size is {size} and rollout.forks.width {width}: a group needs two first attempts or more, "
            f"with {width - 1} branching from each; set training.group_size to {max(2, -(-size // width)) * width}"
        )
    if not estimators.by_name(advantage).by_fork:
        raise ConfigError(
            f"algorithm.advantage is {advantage!r}, which takes all attempts of a group for independent, and those of "
            "rollout.forks are not: its gradient would be biased; set algorithm.advantage=forks"
        )
    if isinstance(forks.at, int) and forks.at >= config.rollout.max_steps:
        raise ConfigError(
            f"rollout.forks.at is {forks.at}, and the last step has number {config.rollout.max_steps - 1} "
            "(rollout.max_steps); lower it"
        )
    if config.rollout.starts is not None:
        raise ConfigError("rollout.starts and rollout.forks cannot be combined yet; leave one of them out")


def check_playing(config: RunConfig) -> None:
    """Raise ConfigError for unknown names, an engine that could not start, or an address that is not free."""
    check_rollout(config)
    check_engine_config(config.engine)


def check_rollout(config: RunConfig) -> None:
    """Raise ConfigError for unknown names, other models that cannot be called, or an address that is not free."""
    if config.rewards.group is not None:
        load_group_reward(config.rewards.group)
    if config.rollout.reply_parser != AUTO:
        reply_parser(config.rollout.reply_parser)
    listen(config.rollout.gateway).close()
    check_models(config)


def check_context(config: RunConfig, context: int) -> None:
    """Raise ConfigError if the longest prompt and completion together exceed the model's context, in tokens."""
    prompt = config.rollout.max_input_tokens
    completion = max(config.rollout.longest_call - prompt, config.evaluation.max_completion_tokens or 0)
    longest = prompt + completion
    if longest > context:
        share = min(completion, context // 4)
        fitting = {"rollout.max_input_tokens": context - share, "rollout.max_completion_tokens": share}
        if (config.evaluation.max_completion_tokens or 0) > share:
            fitting["evaluation.max_completion_tokens"] = share
        if config.rollout.compaction is not None and config.rollout.compaction.max_tokens > share:
            fitting["rollout.compaction.max_tokens"] = share
        raise ConfigError(
            f"rollout.max_input_tokens {prompt} + max_completion_tokens {completion} = {longest} exceeds the model's "
            f"context of {context}; set {' and '.join(f'{path}={tokens}' for path, tokens in fitting.items())}"
        )


def check_engine_config(config: EngineConfig, routing: bool = False) -> None:
    """Raise ConfigError for a configuration with which no engine could be started.

    routing: whether it must report chosen experts.
    """
    check_name("engines", config.kind, "engine.kind")
    if config.kind != "vllm":
        return
    if importlib.util.find_spec("httpx") is None:
        raise ConfigError(f"engine.kind=vllm needs httpx; {how_to_install('httpx')}")
    if not config.vllm.urls:
        python = find_python(config.vllm.python)
        if routing:
            check_reports_experts(python)


LEARNING_RATE = tuple(f"training.optimizer.{name}" for name in ("learning_rate", "warmup", "decay_from", "final_lr"))
"""Settings that, with `orchestration.updates`, determine the learning rate of each update."""

CHANGEABLE = (
    "orchestration.updates",
    "orchestration.traced_groups",
    "orchestration.checkpoint_every",
    "orchestration.ledger_directory",
    "orchestration.keep_last",
    "orchestration.keep_every",
    "orchestration.keep_best",
    "orchestration.max_concurrent_groups",
    "evaluation.*",
    "failures.*",
    "data.table_by",
    "engine.in_flight",
    *(f"engine.options.{name}" for name in VLLMConfig.model_fields),
    "engine.batch",
    "engine.kv_budget",
    "engine.own_process",
    "rollout.agent_timeout",
    "rollout.environment_timeout",
    "rollout.gateway.*",
    "rollout.trajectory_timeout",
    *(f"driver_options.{name}" for name in ("concurrency", "trials_per_second", "python", "worker")),
    *(f"driver_options.{name}" for name in ("trial_directories", "directory")),
    "callbacks",
    *(f"models.*.{name}" for name in ("url", "api_key_env", "timeout")),
    *LEARNING_RATE,
    "training.threads",
    "training.packing",
    "training.sharing",
    "training.max_tokens_per_microbatch",
    "training.gradient_checkpointing",
    "placement.*",
    "device",
)
"""Paths and whole sections that may change: pace, cost, storage and display; how fast is trained, never what."""

_REASONS = {
    "seed": "it keys every draw",
    "data": "the data cursor counts its tasks",
    "model": "the checkpoint belongs to that model",
    "algorithm": "a run has one objective",
    "training": "the optimizer's state belongs to it",
    "rewards": "recorded rewards would no longer compare",
}


def check_changes(changed: Sequence[Change], updates_done: int = 0) -> None:
    """Raise ConfigError, naming the first one, for changes that would make it another run.

    updates_done: number of updates in the checkpoint; 0 if unknown so far.
    """
    for path, old, new in changed:
        if not _may_change(path):
            reason = _REASONS.get(path.partition(".")[0], "sampling depends on it")
            raise ConfigError(
                f"{path} is {as_override(new)}, the run was started with {as_override(old)}: {reason}; start a new run "
                f"(model.path may be an export of this one). What may change: {', '.join(CHANGEABLE)}"
            )
        if path == "orchestration.updates" and new < updates_done:
            raise ConfigError(f"{path} is {new}, but the checkpoint has {updates_done} updates; give at least as many")


def _may_change(path: str) -> bool:
    return any(fnmatchcase(path, changeable) for changeable in CHANGEABLE)
